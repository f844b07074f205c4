"""The requests of clients that wait for the ranks.

A model's are in the order of its numbers, and models take turns.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fsdp_qlora.service.names import session_of
from fsdp_qlora.service.records import QueuedRequest
from fsdp_qlora.utils.errors import UserError

# Numbers that a model's request may be ahead of the one whose turn it is.
_MAX_AHEAD = 10_000
# Requests of a session that wait, and bytes of their bodies.
_MAX_WAITING = 20_000
_MAX_BYTES = 2**31
# Time for a request to come that others of its model wait for.
_HOLE_SECONDS = 600.0


class Busy(Exception):
    """Too much waits; the client should ask again later."""


class Late(NamedTuple):
    """A request that cannot be done any more, and the reason."""

    request: QueuedRequest
    reason: str


class RequestQueue:
    """The requests that wait. Its methods may be called in any thread; `take` in one.

    Samples have no order among themselves. Models, and the samplers of each session, take turns:
    one with a hundred requests does not keep the others waiting.

    Args:
        first_number: of a model, the number of the request whose turn it is after a start.
    """

    def __init__(
        self, waiting: Iterable[QueuedRequest], first_number: Callable[[str], int]
    ) -> None:
        self._first_number = first_number
        self._changed = threading.Condition()
        self._of_models: dict[str, dict[int, QueuedRequest]] = {}  # model -> number -> request
        # From turn to id to request, the oldest first.
        self._of_samplers: dict[str, dict[str, QueuedRequest]] = {}
        # Of those with requests; the next one is the first whose request can be done.
        self._turns = deque[str]()
        self._next: dict[str, int] = {}  # the number whose turn it is, of models with requests
        self._missing_since: dict[str, float] = {}  # models that wait for a number
        self._counts = Counter[str]()  # of each session's requests
        self._bytes = Counter[str]()  # of their bodies
        for request in waiting:
            self._add(request)

    def check(self, request: QueuedRequest) -> None:
        """Refuse a request that would wait for too many others.

        Raises:
            Busy: so much of its session waits that its client should ask again later.
            UserError: it is too far ahead.
        """
        session = session_of(request.target)
        with self._changed:
            is_full = (
                self._counts[session] >= _MAX_WAITING
                or self._bytes[session] + request.size > _MAX_BYTES
            )
        if is_full:
            raise Busy("Too many requests of this session wait. Ask again when some are done.")
        if request.kind == "asample":
            return
        with self._changed:
            ahead = request.seq - self._number_of(request.target)
        if ahead > _MAX_AHEAD:
            raise UserError(
                f"Request {request.seq} is {ahead:,} ahead of the model's turn; at most "
                f"{_MAX_AHEAD:,} are."
            )

    def add(self, request: QueuedRequest) -> bool:
        """Add a request to the queue; False if its turn has passed."""
        with self._changed:
            if request.kind != "asample" and request.seq < self._number_of(request.target):
                return False
            self._add(request)
            self._changed.notify()
        return True

    def _add(self, request: QueuedRequest) -> None:
        turn = _turn_of(request)
        session = session_of(request.target)
        self._counts[session] += 1
        self._bytes[session] += request.size
        if request.kind == "asample":
            self._of_samplers.setdefault(turn, {})[request.id] = request
        else:
            self._number_of(request.target)
            self._of_models.setdefault(turn, {})[request.seq] = request
        if turn not in self._turns:
            self._turns.append(turn)

    def number_of(self, model: str) -> int:
        """The number whose turn it is."""
        with self._changed:
            return self._number_of(model)

    def _number_of(self, model: str) -> int:
        if model not in self._next:
            self._next[model] = self._first_number(model)
        return self._next[model]

    def remove_sample(self, name: str) -> QueuedRequest | None:
        """Take a request for samples out of its turn; None if it does not wait here."""
        with self._changed:
            for turn, waiting in self._of_samplers.items():
                request = waiting.pop(name, None)
                if request:
                    self._close(turn)
                    return self._counted_out(request)
        return None

    def samples(self) -> list[QueuedRequest]:
        """All requests for samples."""
        with self._changed:
            return [
                request for waiting in self._of_samplers.values() for request in waiting.values()
            ]

    def take(self, seconds: float) -> QueuedRequest | None:
        """The next request; None if there is none within these seconds."""
        with self._changed:
            request = self._take()
            if request is None and self._changed.wait(seconds):
                request = self._take()
            return request

    def _take(self) -> QueuedRequest | None:
        for turn in self._turns:
            request = self._pop(turn)
            # To the end of the queue, so that the others come before its next request.
            if request is not None:
                self._turns.remove(turn)
                self._turns.append(turn)
                self._close(turn)
                return request
        return None

    def _pop(self, turn: str) -> QueuedRequest | None:
        """Take the request out whose turn it is, if it is there."""
        samples = self._of_samplers.get(turn)
        if samples:
            return self._counted_out(samples.pop(next(iter(samples))))
        waiting = self._of_models.get(turn, {})
        if self._next.get(turn) in waiting:
            return self._counted_out(waiting.pop(self._next[turn]))
        return None

    def _counted_out(self, request: QueuedRequest) -> QueuedRequest:
        """Count a request no longer among those that wait."""
        session = session_of(request.target)
        self._counts[session] -= 1
        self._bytes[session] -= request.size
        if not self._counts[session]:
            del self._counts[session], self._bytes[session]
        return request

    def _close(self, turn: str) -> None:
        """Drop a turn that has no requests left."""
        if self._of_models.get(turn) or self._of_samplers.get(turn):
            return
        self._turns.remove(turn)
        self._of_samplers.pop(turn, None)
        self._of_models.pop(turn, None)
        self._missing_since.pop(turn, None)

    def is_over(self, request: QueuedRequest) -> None:
        """Record that a request has its result, and advance to its model's next one."""
        if request.kind == "asample":
            return
        with self._changed:
            self._next[request.target] = max(request.seq + 1, self._next.get(request.target, 0))
            self._missing_since.pop(request.target, None)
            self._changed.notify()

    def forget_idle(self) -> None:
        """Drop the numbers of models without requests here: the records have them."""
        with self._changed:
            for model in self._next.keys() - self._of_models.keys():
                del self._next[model]

    def take_late(self) -> list[Late]:
        """Remove requests that will never have their turn.

        Numbers that are used, and those behind one that does not come.
        """
        late = list[Late]()
        with self._changed:
            # A copy, since `_close` deletes.
            for model, waiting in [*self._of_models.items()]:
                number = self._next[model]
                for seq in [seq for seq in waiting if seq < number]:
                    reason = f"The model's request {seq} has been passed over."
                    late.append(Late(self._counted_out(waiting.pop(seq)), reason))
                # One at a time: its number is then used, and the next one may be there.
                if self._is_overdue(model):
                    first = min(waiting)
                    reason = (
                        f"The model's request {number}, which comes before, has not come for some "
                        "minutes."
                    )
                    late.append(Late(self._counted_out(waiting.pop(first)), reason))
                self._close(model)
        return late

    def _is_overdue(self, model: str) -> bool:
        """Whether a model's requests have waited too long for one that is missing."""
        waiting = self._of_models[model]
        if not waiting or self._next[model] in waiting:
            self._missing_since.pop(model, None)
            return False
        since = self._missing_since.setdefault(model, time.monotonic())
        return time.monotonic() - since > _HOLE_SECONDS


def _turn_of(request: QueuedRequest) -> str:
    # A session may have any number of samplers, which share one turn.
    return f"{session_of(request.target)}:sample" if request.kind == "asample" else request.target
