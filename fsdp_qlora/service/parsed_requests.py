"""Messages of training requests between their arrival and their turn."""

import threading

from tinker.proto import tinker_public_pb2 as pb

# Bytes of the messages that are kept.
_MAX_BYTES = 2**27
# Bytes of a message for each of its parts, which may be empty in the body: an object takes 56 to
# 200.
_PART_BYTES = 256


class ParsedRequests:
    """Keeps the messages of requests that wait, so that each body is parsed once.

    Those that come while too many wait are not kept: their bodies are read from the records and
    parsed when it is their turn. Its methods may be called in any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A request's name -> its message and the bytes that it takes.
        self._kept: dict[str, tuple[pb.ForwardBackwardRequest, int]] = {}
        self._bytes = 0

    def put(self, name: str, message: pb.ForwardBackwardRequest, size: int) -> None:
        """Keep a request's message. size: bytes of its body."""
        size += _PART_BYTES * _num_parts(message)
        with self._lock:
            if self._bytes + size <= _MAX_BYTES:
                self._kept[name] = message, size
                self._bytes += size

    def take(self, name: str) -> pb.ForwardBackwardRequest | None:
        """Remove and return a request's message; None if it is not here."""
        with self._lock:
            message, size = self._kept.pop(name, (None, 0))
            self._bytes -= size
            return message


def _num_parts(message: pb.ForwardBackwardRequest) -> int:
    """Datums, and the chunks and tensors of each."""
    parts = [len(datum.model_input) + len(datum.loss_fn_inputs) for datum in message.data]
    return len(parts) + sum(parts)
