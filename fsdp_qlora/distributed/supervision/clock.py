"""Clocks, the heartbeat, and calls with a time limit. No clock is the time of day, which people and NTP change."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux has it
# In the order of a step: ranks in a later phase wait for a rank in an earlier one.
PHASES = ("rows", "compute", "exchange", "update", "evaluate", "save")
_SLICE_SECONDS = 0.5  # a wait is divided into slices
_PAUSE_RATIO = 10.0  # a duration of so many times the second longest includes a pause


def elapsed() -> float:
    """Seconds, including time in which the machine was suspended: for deadlines and rented hours."""
    return time.clock_gettime(_SINCE_BOOT)


def awake() -> float:
    """Seconds in which the machine was awake: for measuring work and detecting hangs."""
    return time.monotonic()


def begun(function: Callable[[], T]) -> Future[T]:
    """Call `function` in a daemon thread, which does not delay the end of the process."""
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # wandb.teardown raises SystemExit
            result.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    threading.Thread(target=call, name="begun-call", daemon=True).start()
    return result


def within(seconds: float, function: Callable[[], T], *, counts: Callable[[], bool] = lambda: True) -> T:
    """Call `function` in a daemon thread and wait at most `seconds` for its result.

    The time is counted in slices of the wait: none passes while this process or machine is stopped. A slice counts if
    `counts()` is true at its end.

    Raises:
        TimeoutError: the function is still running; its result is lost.
        Exception: raised by `function`.
    """
    result, slices = begun(function), max(1, round(seconds / _SLICE_SECONDS))
    while slices:
        if wait([result], _SLICE_SECONDS).done:
            return result.result()
        slices -= counts()
    raise TimeoutError(f"no answer within {seconds:g} s")


class Longest:
    """The longest of many durations of the same work, without one in which the process was paused.

    No clock leaves out the time in which a virtual machine or a process was stopped.
    """

    def __init__(self) -> None:
        self._two = [0.0, 0.0]

    def add(self, seconds: float) -> None:
        self._two = sorted([*self._two, seconds])[1:]

    @property
    def seconds(self) -> float:
        second, first = self._two
        return second if 0 < _PAUSE_RATIO * second < first else first


class Heartbeat:
    """The step and phase that the training thread has reached, and when."""

    def __init__(self) -> None:
        self.step, self.phase, self.at = 0, PHASES[0], time.monotonic()

    def beat(self, step: int, phase: str) -> None:
        """Record that this rank has reached a phase (see PHASES) of a step. Costs no more than an assignment."""
        self.step, self.phase, self.at = step, phase, time.monotonic()
