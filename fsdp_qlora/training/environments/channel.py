"""Lines of JSON between the run and the processes of environments."""

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any

from fsdp_qlora.distributed.supervision.clock import awake

MOST_BYTES = 16 * 2**20
"""A longer line is no reply, but a process that writes without end."""
_SLICE_SECONDS = 0.5  # a wait is divided into slices, so that a pause takes one of them at most
_CHUNK_BYTES = 2**16


class Channel:
    """One end of a connection on which each line is a JSON object.

    Args:
        connection: a stream; closed with the channel.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def send(self, value: Mapping[str, Any], seconds: float | None = None) -> None:
        """Send an object. Values that JSON does not know become text.

        Raises:
            TimeoutError: the other end does not read.
            OSError: there is no other end.
            ValueError, TypeError, RecursionError: the value contains itself, or has keys of another
                kind.
        """
        # Lone surrogates cannot be encoded.
        text = json.dumps(value, default=str, ensure_ascii=False)
        line = text.encode("utf-8", "replace") + b"\n"
        self._connection.settimeout(seconds)
        self._connection.sendall(line)

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """Wait for an object.

        Raises:
            TimeoutError: none has come in time.
            OSError: the other end is closed.
            ValueError: the line is too long, or no object.
        """
        left = seconds
        while b"\n" not in self._received[-_CHUNK_BYTES:]:
            began = awake()
            chunk = self._read(left)
            self._received += chunk
            if left is not None:
                left -= min(awake() - began, _SLICE_SECONDS)
            if len(self._received) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received[:] = rest
        try:
            value = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            raise ValueError("it is no JSON") from error
        if not isinstance(value, dict):
            raise ValueError("it is no object of JSON")
        return value

    def _read(self, left: float | None) -> bytes:
        """Some bytes; none at the end of a slice of the wait."""
        if left is not None and left <= 0:
            raise TimeoutError
        self._connection.settimeout(None if left is None else min(left, _SLICE_SECONDS))
        try:
            chunk = self._connection.recv(_CHUNK_BYTES)
        except TimeoutError:
            return b""
        if not chunk:
            raise ConnectionResetError("the other end is closed")
        return chunk

    def end(self) -> None:
        """Tell the other end that nothing follows, also if forked processes hold this one."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
