"""Why and when a run stops or saves: signals, budgets and the clock, agreed on by all ranks once per step.

A signal may reach only one rank, and ranks are at different points when it does. So a rank only records it and sends
it to the others with the numbers exchanged in every step; all act on it after the same step.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch

from fsdp_qlora.control import clock
from fsdp_qlora.control.clock import Heartbeat
from fsdp_qlora.errors import ENDINGS, RunStopped, TrainingError


class Stop(NamedTuple):
    """state: a key of errors.ENDINGS."""

    state: str
    reason: str


# Ranks send each other the index; the highest one counts.
STOPS = (
    None,
    Stop("over_budget", "--max_hours is used up"),
    Stop("over_budget", "--max_cost_usd is used up"),
    Stop("preempted", "SIGUSR1"),
    Stop("preempted", "SIGHUP"),
    Stop("preempted", "SIGTERM"),
    Stop("interrupted", "SIGINT"),
)
_OF_SIGNAL = {signal.SIGUSR1: 3, signal.SIGHUP: 4, signal.SIGTERM: 5, signal.SIGINT: 6}
NUM_FLAGS = 4  # of Control.flags
_SAME_KEY_PRESS_SECONDS = 0.5


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle the signals that stop a run, in the main thread; others cannot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # a closed terminal must not stop the run
    numbers = [number for number in _OF_SIGNAL if number != signal.SIGHUP or not is_nohup]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@dataclass
class Budget:
    """How long a run may take.

    used_seconds: by earlier starts. reserve_seconds: the time that the last of them reserved for a step and a save.
    """

    max_hours: float | None = None
    max_cost_usd: float | None = None
    price_per_hour: float | None = None
    used_seconds: float = 0.0
    reserve_seconds: float = 0.0

    def check(self) -> None:
        """Raise RunStopped if earlier starts have used up the budget, before anything is loaded."""
        if index := self.exceeded(self.reserve_seconds):
            stop = STOPS[index]
            assert stop is not None
            raise RunStopped(
                stop.state, f"Not started: {stop.reason} by this run's earlier starts. Raise it to resume."
            )

    def exceeded(self, seconds: float) -> int:
        """The index in STOPS of the budget that `seconds` of this start use up with earlier starts; 0 for none."""
        hours = (self.used_seconds + seconds) / 3600
        if self.max_hours is not None and hours >= self.max_hours:
            return 1
        if self.max_cost_usd is not None and hours * (self.price_per_hour or 0.0) >= self.max_cost_usd:
            return 2
        return 0


class Control:
    """This rank's request to stop or save, and what all ranks have agreed on.

    Args:
        save_seconds: between checkpoints, 0 for none by the clock; started: clock.elapsed() of the run's start.
            Rank 0's clock and budget decide for all.
    Attributes:
        heartbeat: the position of the training thread, for the watchdog.
        stop: why all ranks stop after this step; None to continue.
        save: whether all ranks save after this step.
        is_writing: whether this rank writes a checkpoint in the background. is_written: whether no rank does.
    """

    def __init__(
        self,
        *,
        is_rank_0: bool = True,
        budget: Budget | None = None,
        save_seconds: float = 0.0,
        started: float | None = None,
    ) -> None:
        self.is_rank_0, self.budget, self.save_seconds = is_rank_0, budget or Budget(), save_seconds
        self.started = clock.elapsed() if started is None else started
        self.heartbeat = Heartbeat()
        self.stop: Stop | None = None
        self.save = False
        self.is_writing: Callable[[], bool] = lambda: False
        self.is_written = False
        self._wish = 0
        self._saved_at, self._agreed_at = clock.elapsed(), clock.awake()
        self._steps, self._saves = clock.Longest(), clock.Longest()
        self._interrupted_at: float | None = None

    # --- signals ---

    @contextlib.contextmanager
    def catching_signals(self) -> Iterator[None]:
        """Take the signals as requests to stop; a second SIGINT ends the process at once."""
        with _handling(self._on_signal):
            yield

    @contextlib.contextmanager
    def ended_by_signals(self) -> Iterator[None]:
        """End the block at once at a signal. Raises RunStopped there."""

        def end(number: int, frame: FrameType | None) -> None:
            stop = STOPS[_OF_SIGNAL[signal.Signals(number)]]
            assert stop is not None
            raise RunStopped(stop.state, f"Stopped ({stop.reason}) before training began; the same command resumes it.")

        with _handling(end):
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = clock.awake()
        if number == signal.SIGINT:
            # A terminal and torchrun may both forward the same Ctrl-C.
            if self._interrupted_at is not None and now - self._interrupted_at > _SAME_KEY_PRESS_SECONDS:
                os.write(2, b"Interrupted again: ending at once, without a checkpoint.\n")
                os._exit(ENDINGS["interrupted"].exit_code)
            self._interrupted_at = self._interrupted_at or now
        self._wish = max(self._wish, _OF_SIGNAL[signal.Signals(number)])

    # --- agreement ---

    def reserve_seconds(self) -> float:
        """Time for the rest of this step, another step and a save, with some margin."""
        return 2 * self._steps.seconds + 1.5 * self._saves.seconds

    def used_seconds(self) -> float:
        """The run's duration so far, including earlier starts."""
        return self.budget.used_seconds + clock.elapsed() - self.started

    def flags(self, step: int) -> list[float]:
        """This rank's flags for the others: its step, why to stop, whether to save, whether it still writes."""
        if not self.is_rank_0:
            return [step, self._wish, 0, self.is_writing()]
        now = clock.elapsed()
        over_budget = self.budget.exceeded(now - self.started + self.reserve_seconds())
        is_due = 0 < self.save_seconds <= now - self._saved_at
        return [step, max(self._wish, over_budget), is_due, self.is_writing()]

    def agree(self, flags: torch.Tensor) -> None:
        """Decide from the flags of all ranks, [ranks, NUM_FLAGS], as every other rank does.

        Raises:
            TrainingError: the ranks are not at the same step.
        """
        steps = flags[:, 0].int().tolist()
        if len(set(steps)) > 1:
            raise TrainingError(f"The ranks are at different steps, from rank 0 on: {', '.join(map(str, steps))}.")
        stop, save, writing = flags[:, 1:].max(dim=0).values.tolist()
        self.stop, self.save, self.is_written = STOPS[int(stop)], save > 0, not writing
        now = clock.awake()
        self._steps.add(now - self._agreed_at)
        self._agreed_at = now

    def saved(self, seconds: float) -> None:
        """Record the duration of a save that has just ended."""
        self._saved_at, self._agreed_at = clock.elapsed(), clock.awake()
        self._saves.add(seconds)
