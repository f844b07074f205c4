"""Connections to the web server, with limits.

Connections without an allowed request do not keep others out.
"""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from fsdp_qlora.service.access import ClientAddress

HEAD_SECONDS = 10.0  # for the head of a request to come
_MAX_FILES = 65_536  # open at a time, if the system allows so many
_MAX_STRANGERS = 512  # connections without an allowed request


class Connections:
    """The open connections without an allowed request, the oldest first.

    One too many closes the oldest. Connections of clients with the key are not counted.
    """

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MAX_FILES
        # RLIM_INFINITY is -1.
        if hard != resource.RLIM_INFINITY:
            wanted = min(hard, wanted)
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        # A quarter of the files at most: the others are for clients, and for what a service reads.
        self.most = min(_MAX_STRANGERS, max(soft, wanted) // 4)
        self._strangers: dict[ClientAddress, Connection] = {}

    def add(self, connection: "Connection") -> None:
        self._strangers[connection.client] = connection
        if len(self._strangers) > self.most:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).abort()

    def trust(self, client: ClientAddress) -> None:
        """A connection has sent an allowed request. client: its address."""
        self._strangers.pop(client, None)

    def remove(self, connection: "Connection") -> None:
        # The address may be that of a newer connection already.
        if self._strangers.get(connection.client) is connection:
            del self._strangers[connection.client]

    def protocol(self) -> type["Connection"]:
        """The class that uvicorn makes of each new connection (its option `http`)."""
        # uvicorn makes the connections itself, and passes nothing of ours to them.
        return type("ServiceConnection", (Connection,), {"watched": self})


class Connection(H11Protocol):
    """uvicorn's protocol with a limit of time for the head of each request.

    The application has one for the body.
    """

    watched: Connections

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limit: asyncio.TimerHandle | None = None
        # The request whose head was the last to come.
        self._answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.watched.add(self)
        self._start_limit()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # uvicorn makes a new cycle when the head of a request is complete.
        if self.cycle is not self._answered:
            self._answered = self.cycle
            self._stop_limit()
        # The next one on this connection begins.
        elif self._limit is None and self.cycle.response_complete:
            self._start_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_limit()
        self.watched.remove(self)
        super().connection_lost(exc)

    def abort(self) -> None:
        self.transport.abort()

    def _start_limit(self) -> None:
        self._limit = self.loop.call_later(HEAD_SECONDS, self.abort)

    def _stop_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
