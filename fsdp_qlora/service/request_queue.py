"""The requests of clients that wait for the ranks.

A model's are in the order of its numbers, and models take turns.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fsdp_qlora.service.names import session_of
from fsdp_qlora.service.records import Piece
from fsdp_qlora.utils.errors import UserError

# Numbers that a model's request may be ahead of the one whose turn it is.
_MOST_AHEAD = 10_000
# Requests of a session that wait, and bytes of their bodies.
_MOST_WAITING = 20_000
_MOST_BYTES = 2**31
# Time for a request to come that others of its model wait for.
_HOLE_SECONDS = 600.0


class Busy(Exception):
    """Too much waits; the client should ask again later."""


class Late(NamedTuple):
    """A request that cannot be done any more, and why."""

    piece: Piece
    reason: str


class RequestQueue:
    """The requests that wait. Its methods may be called in any thread; `take` in one.

    Samples have no order among themselves. Models, and the samplers of each session, take turns:
    one with a hundred requests does not keep the others waiting.

    Args:
        first_number: of a model, the number of the request whose turn it is after a start.
    """

    def __init__(self, waiting: Iterable[Piece], first_number: Callable[[str], int]) -> None:
        self._first_number = first_number
        self._changed = threading.Condition()
        self._of_models: dict[str, dict[int, Piece]] = {}  # model -> number -> request
        # From turn to id to request, the oldest first.
        self._of_samplers: dict[str, dict[str, Piece]] = {}
        # Of those with requests; the next one is the first whose request can be done.
        self._turns = deque[str]()
        self._next: dict[str, int] = {}  # the number whose turn it is, of models with requests
        self._missing_since: dict[str, float] = {}  # models that wait for a number
        self._counts = Counter[str]()  # of each session's requests
        self._bytes = Counter[str]()  # of their bodies
        for piece in waiting:
            self._add(piece)

    def check(self, piece: Piece) -> None:
        """Refuse a request that would wait for too many others.

        Raises:
            Busy: so much of its session waits that its client should ask again later.
            UserError: it is too far ahead.
        """
        session = session_of(piece.target)
        with self._changed:
            is_full = (
                self._counts[session] >= _MOST_WAITING
                or self._bytes[session] + piece.size > _MOST_BYTES
            )
        if is_full:
            raise Busy("Too many requests of this session wait. Ask again when some are done.")
        if piece.kind == "asample":
            return
        with self._changed:
            ahead = piece.seq - self._number_of(piece.target)
        if ahead > _MOST_AHEAD:
            raise UserError(
                f"Request {piece.seq} is {ahead:,} ahead of the model's turn; at most "
                f"{_MOST_AHEAD:,} are."
            )

    def add(self, piece: Piece) -> bool:
        """Let a request wait; False if its turn has passed."""
        with self._changed:
            if piece.kind != "asample" and piece.seq < self._number_of(piece.target):
                return False
            self._add(piece)
            self._changed.notify()
        return True

    def _add(self, piece: Piece) -> None:
        turn = _turn_of(piece)
        session = session_of(piece.target)
        self._counts[session] += 1
        self._bytes[session] += piece.size
        if piece.kind == "asample":
            self._of_samplers.setdefault(turn, {})[piece.id] = piece
        else:
            self._number_of(piece.target)
            self._of_models.setdefault(turn, {})[piece.seq] = piece
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

    def remove_sample(self, name: str) -> Piece | None:
        """Take a request for samples out of its turn; None if it does not wait here."""
        with self._changed:
            for turn, waiting in self._of_samplers.items():
                piece = waiting.pop(name, None)
                if piece:
                    self._close(turn)
                    return self._counted_out(piece)
        return None

    def samples(self) -> list[Piece]:
        """All requests for samples."""
        with self._changed:
            return [piece for waiting in self._of_samplers.values() for piece in waiting.values()]

    def take(self, seconds: float) -> Piece | None:
        """The next request; None if there is none within these seconds."""
        with self._changed:
            piece = self._take()
            if piece is None and self._changed.wait(seconds):
                piece = self._take()
            return piece

    def _take(self) -> Piece | None:
        for turn in self._turns:
            piece = self._pop(turn)
            # To the end of the queue, so that the others come before its next request.
            if piece is not None:
                self._turns.remove(turn)
                self._turns.append(turn)
                self._close(turn)
                return piece
        return None

    def _pop(self, turn: str) -> Piece | None:
        """Take the request out whose turn it is, if it is there."""
        samples = self._of_samplers.get(turn)
        if samples:
            return self._counted_out(samples.pop(next(iter(samples))))
        waiting = self._of_models.get(turn, {})
        if self._next.get(turn) in waiting:
            return self._counted_out(waiting.pop(self._next[turn]))
        return None

    def _counted_out(self, piece: Piece) -> Piece:
        """Count a request no longer among those that wait."""
        session = session_of(piece.target)
        self._counts[session] -= 1
        self._bytes[session] -= piece.size
        if not self._counts[session]:
            del self._counts[session], self._bytes[session]
        return piece

    def _close(self, turn: str) -> None:
        """Drop a turn that has no requests left."""
        if self._of_models.get(turn) or self._of_samplers.get(turn):
            return
        self._turns.remove(turn)
        self._of_samplers.pop(turn, None)
        self._of_models.pop(turn, None)
        self._missing_since.pop(turn, None)

    def is_over(self, piece: Piece) -> None:
        """A request has its result: it is the turn of its model's next one."""
        if piece.kind == "asample":
            return
        with self._changed:
            self._next[piece.target] = max(piece.seq + 1, self._next.get(piece.target, 0))
            self._missing_since.pop(piece.target, None)
            self._changed.notify()

    def forget_idle(self) -> None:
        """Drop the numbers of models that have nothing here: the records know them."""
        with self._changed:
            for model in self._next.keys() - self._of_models.keys():
                del self._next[model]

    def take_late(self) -> list[Late]:
        """Take out what will never have its turn.

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


def _turn_of(piece: Piece) -> str:
    # A session may have any number of samplers, which share one turn.
    return f"{session_of(piece.target)}:sample" if piece.kind == "asample" else piece.target
