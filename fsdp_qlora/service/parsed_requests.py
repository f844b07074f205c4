"""Messages of training requests between their arrival and their turn."""

import threading

from tinker.proto import tinker_public_pb2 as pb

# Bytes of their bodies: a message takes about as many.
_MAX_BYTES = 2**27


class ParsedRequests:
    """Keeps the messages of requests that wait, so that each body is parsed once.

    Those that come while too many wait are not kept: their bodies are read from the records and
    parsed when it is their turn. Its methods may be called in any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[str, pb.ForwardBackwardRequest] = {}
        self._sizes: dict[str, int] = {}

    def put(self, name: str, message: pb.ForwardBackwardRequest, size: int) -> None:
        """Keep a request's message. size: bytes of its body."""
        with self._lock:
            if sum(self._sizes.values()) + size <= _MAX_BYTES:
                self._messages[name] = message
                self._sizes[name] = size

    def take(self, name: str) -> pb.ForwardBackwardRequest | None:
        """Remove and return a request's message; None if it is not here."""
        with self._lock:
            self._sizes.pop(name, None)
            return self._messages.pop(name, None)
