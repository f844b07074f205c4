"""Signals, budgets and the clock: when a run stops or saves, agreed on by all ranks once per step.

A signal may reach only one rank, at any point. So in training a rank only records it and sends it
to the others with the numbers that are exchanged in every step; all act on it after the same step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from fsdp_qlora.distributed.supervision import clock
from fsdp_qlora.distributed.supervision.clock import Heartbeat
from fsdp_qlora.utils.errors import ENDINGS, RunStopped, TrainingError

if TYPE_CHECKING:  # signals must be handled before torch is imported, which takes seconds
    import torch


class Stop(NamedTuple):
    """A request to stop. state: a key of errors.ENDINGS."""

    state: str
    reason: str


# Ranks exchange the index; the highest one counts. Ctrl-C is the last: the person at the terminal
# wins over a budget or a scheduler.
STOPS = (
    None,
    Stop("over_budget", "--max_hours is used up"),
    Stop("preempted", "SIGUSR1"),
    Stop("preempted", "SIGHUP"),
    Stop("preempted", "SIGTERM"),
    Stop("interrupted", "SIGINT"),
)
_STOP_OF_SIGNAL: dict[int, int] = {
    signal.SIGUSR1: 2,
    signal.SIGHUP: 3,
    signal.SIGTERM: 4,
    signal.SIGINT: 5,
}
NUM_FLAGS = 4  # the length of Control.flags
_SAME_KEY_PRESS_SECONDS = 0.5
# From a signal during a start to the end: threads, such as a download's, may take longer.
_END_SECONDS = 10.0
# A child's signals must not wake this process: it inherits the descriptor of `_ended_in_time`.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class Signals:
    """The signals that stop a run, from its start to its end.

    Args:
        ends_process: whether the process ends soon after the run. If so, repeated signals have no
            effect after the run.
    Attributes:
        requested: the index in STOPS of the most urgent signal received, 0 for none.
        is_starting: False from the first step on. Until then a signal ends the start at once; later
            it requests a stop.
    """

    def __init__(self, *, ends_process: bool = False) -> None:
        self.requested = 0
        self.is_starting = True
        self._ends_process = ends_process
        self._process = os.getpid()
        self._interrupted_at: float | None = None

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals in the block. Only the main thread can; blocks may be nested.

        Raises:
            RunStopped: a signal was received before training began. It replaces any exception that
                leaves the block, such as an error of torch in whose dispatch it came, or of a
                connection that another rank has closed.
        """
        is_main = threading.current_thread() is threading.main_thread()
        # Under nohup a closed terminal must not stop the run.
        is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        handled = [
            signum
            for signum in _STOP_OF_SIGNAL
            if is_main and not (is_nohup and signum == signal.SIGHUP)
        ]
        before = {signum: signal.signal(signum, self._on_signal) for signum in handled}
        try:
            with self._ended_in_time() if is_main else contextlib.nullcontext():
                yield
        except BaseException as error:
            stop = STOPS[self.requested]
            if stop is None or not self.is_starting or isinstance(error, RunStopped):
                raise
            message = f"Stopped ({stop.reason}) before training began; the same command resumes it."
            raise RunStopped(stop.state, message) from error
        finally:
            # A second Ctrl-C while the process ends would print a traceback over the message.
            if not (self.requested and self._ends_process):
                for signum, handler in before.items():
                    signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        # Python runs a handler between two instructions of the main thread, which may hold a lock,
        # such as those of logging and of stdout. So it takes none: it notes the request, and writes
        # with os.write alone.
        if os.getpid() != self._process and not self.is_starting and signum == signal.SIGTERM:
            # A child process that a reward function has forked and ends: it has inherited the
            # handler, and ends as it would without it.
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        now = clock.awake()
        if signum == signal.SIGINT:
            # A terminal and torchrun may both forward the same Ctrl-C.
            if (
                self._interrupted_at is not None
                and now - self._interrupted_at > _SAME_KEY_PRESS_SECONDS
            ):
                os.write(2, b"Interrupted again: ending at once, without a checkpoint.\n")
                os._exit(ENDINGS["interrupted"].exit_code)
            self._interrupted_at = self._interrupted_at or now
        is_first = not self.requested
        self.requested = max(self.requested, _STOP_OF_SIGNAL[signum])
        if is_first and self.is_starting:
            # No Exception: libraries catch these, and take them for their own. `handled` turns it
            # into a RunStopped. In training nothing is raised: a step must end on all ranks.
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _ended_in_time(self) -> Iterator[None]:
        """After a signal before training begins, end the process after _END_SECONDS at the latest.

        A thread reads the signal from Python's wakeup descriptor: while the main thread is in C++,
        such as in torch's rendezvous, it runs no signal handler.
        """
        reader, writer = socket.socketpair()
        # Python writes to it in the C handler of a signal, and requires that this cannot block.
        writer.setblocking(False)
        has_ended = threading.Event()

        def end_in_time() -> None:
            with reader:
                # One byte a signal, its number; none at the end, when the writer is closed.
                while received := reader.recv(1):
                    stop = STOPS[_STOP_OF_SIGNAL.get(received[0], 0)]
                    if stop is None or not self.is_starting or has_ended.wait(_END_SECONDS):
                        continue
                    # Training may have begun meanwhile, and stops by itself after its step.
                    if self.is_starting:
                        os._exit(ENDINGS[stop.state].exit_code)

        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=end_in_time, name="signals", daemon=True).start()
        try:
            yield
        finally:
            has_ended.set()
            signal.set_wakeup_fd(before)
            writer.close()


@dataclass
class Budget:
    """The time limit of a run.

    used_seconds: duration of earlier starts. reserve_seconds: the last start's estimate for a step
    and a save.
    """

    max_hours: float | None = None
    used_seconds: float = 0.0
    reserve_seconds: float = 0.0

    def check(self) -> None:
        """Raise RunStopped if earlier starts have used up the budget, before anything is loaded."""
        if self.is_used_up(self.reserve_seconds):
            message = (
                "Not started: --max_hours is used up by this run's earlier starts. Raise it to "
                "resume."
            )
            raise RunStopped("over_budget", message)

    def is_used_up(self, seconds: float) -> bool:
        """Whether `seconds` of this start use up the budget with earlier starts."""
        return self.max_hours is not None and (self.used_seconds + seconds) / 3600 >= self.max_hours


class Control:
    """This rank's request to stop or save, and the decision of all ranks.

    Rank 0's clock and budget decide for all, since no two clocks agree.

    Args:
        save_seconds: time between checkpoints, 0 for none by the clock.
        started: `clock.elapsed()` at the run's start.
        signals: this process's signals; None for none.
    Attributes:
        heartbeat: the position of the training thread, for the watchdog.
        stop: the reason for which all ranks stop after this step; None to continue.
        save: whether all ranks save after this step.
        is_writing: tells whether this rank writes a checkpoint in the background.
        is_written: whether no rank does.
    """

    def __init__(
        self,
        *,
        is_rank_0: bool = True,
        budget: Budget | None = None,
        save_seconds: float = 0.0,
        started: float | None = None,
        signals: Signals | None = None,
    ) -> None:
        self.is_rank_0 = is_rank_0
        self.budget = budget or Budget()
        self.save_seconds = save_seconds
        self.started = clock.elapsed() if started is None else started
        self.signals = signals or Signals()
        self.heartbeat = Heartbeat()
        self.stop: Stop | None = None
        self.save = False
        self.is_writing: Callable[[], bool] = lambda: False
        self.is_written = False
        self._saved_at = clock.elapsed()
        self._agreed_at = clock.awake()
        self._steps = clock.Longest()
        self._saves = clock.Longest()

    def reserve_seconds(self) -> float:
        """The estimated time of the rest of this step, another step and a save, with a margin."""
        return 2 * self._steps.seconds + 1.5 * self._saves.seconds

    def used_seconds(self) -> float:
        """The run's duration so far, including earlier starts."""
        return self.budget.used_seconds + clock.elapsed() - self.started

    def flags(self, step: int) -> list[float]:
        """This rank's flags: its step, its stop request, whether to save, whether it still writes.

        They go with the numbers that every step exchanges, and cost no collective of their own.
        """
        if not self.is_rank_0:
            return [step, self.signals.requested, 0, self.is_writing()]
        now = clock.elapsed()
        over_budget = self.budget.is_used_up(now - self.started + self.reserve_seconds())
        is_due = 0 < self.save_seconds <= now - self._saved_at
        return [step, max(self.signals.requested, over_budget), is_due, self.is_writing()]

    def agree(self, flags: torch.Tensor) -> None:
        """Decide from the flags of all ranks, [ranks, NUM_FLAGS]; every rank decides the same.

        Raises:
            TrainingError: the ranks are not at the same step.
        """
        steps = flags[:, 0].int().tolist()
        if len(set(steps)) > 1:
            raise TrainingError(
                f"The ranks are at different steps (ranks 0, 1, ...: {', '.join(map(str, steps))})."
            )
        # The maximum of gathered flags is the same on every rank, so all stop after the same step.
        stop, save, writing = flags[:, 1:].max(dim=0).values.tolist()
        self.stop = STOPS[int(stop)]
        self.save = save > 0
        self.is_written = not writing
        now = clock.awake()
        self._steps.add(now - self._agreed_at)
        self._agreed_at = now

    def saved(self, seconds: float) -> None:
        """Record the duration of a save that has just ended."""
        self._saved_at = clock.elapsed()
        # The save is no part of a step's duration.
        self._agreed_at = clock.awake()
        self._saves.add(seconds)
