"""Clients that wait for the result of a request."""

import asyncio
import contextlib

from fsdp_qlora.service.records import WAITING
from fsdp_qlora.service.results import Results

# Time for which a question for a result is held; the client waits for 45 s.
_HELD_SECONDS = 25.0


class WaitingClients:
    """Holds questions for results until they are there.

    `wait_for` runs in the event loop of the web server; `wake` may be called in any thread.
    """

    def __init__(self, results: Results) -> None:
        self._results = results
        # Of the requests whose results clients wait for at this moment.
        self._events: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self, name: str) -> None:
        """Wake the clients that wait for this request."""
        # asyncio's events belong to the thread of their loop.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._set, name)

    def _set(self, name: str) -> None:
        event = self._events.get(name)
        if event:
            event.set()

    async def wait_for(self, name: str) -> tuple[str, bytes] | None:
        """The state and result of a request, when it has a result or the client has waited for
        long.
        """
        self._loop = asyncio.get_running_loop()
        event = self._events.setdefault(name, asyncio.Event())
        try:
            # It may have come before the event was there.
            found = self._results.get(name)
            if found is not None and found[0] == WAITING:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), _HELD_SECONDS)
                found = self._results.get(name)
            return found
        finally:
            # Also where the client has gone or the records cannot be read: a client that never
            # comes back must not leave an event behind.
            if self._events.get(name) is event:
                del self._events[name]
                # Others that wait for the same ask once more.
                event.set()
