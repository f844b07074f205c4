"""The clocks of a run, its heartbeat, and calls that end. No clock is the time of day, which people and NTP change."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux has it
# In their order within a step: the others wait for a rank in an earlier phase.
PHASES = ("rows", "compute", "exchange", "update", "evaluate", "save")
_SLICE_SECONDS = 0.5  # of a wait
_FAR = 10.0  # a duration so many times the second longest includes a pause


def elapsed() -> float:
    """Seconds, including those in which the machine was suspended: for deadlines, since rent is due for these too."""
    return time.clock_gettime(_SINCE_BOOT)


def awake() -> float:
    """Seconds in which the machine was awake: to measure work and to detect hangs."""
    return time.monotonic()


def begun(function: Callable[[], T]) -> Future[T]:
    """Call `function` in a daemon thread, for which the end of the process does not wait."""
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # a SystemExit too: wandb.teardown raises one
            result.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    threading.Thread(target=call, name="begun-call", daemon=True).start()
    return result


def within(seconds: float, function: Callable[[], T], *, counts: Callable[[], bool] = lambda: True) -> T:
    """Call `function` in a daemon thread and wait for its result at most `seconds`.

    In slices, those after which `counts` is true: while this process or machine stands still none goes by.

    Raises:
        TimeoutError: it is still running; its result is lost.
        Exception: raised by `function`.
    """
    result, left = begun(function), max(1, round(seconds / _SLICE_SECONDS))
    while left:
        if wait([result], _SLICE_SECONDS).done:
            return result.result()
        left -= counts()
    raise TimeoutError(f"no answer within {seconds:g} s")


class Longest:
    """The longest of many durations of the same work, ignoring one in which the process was paused.

    A paused virtual machine or a stopped process shows on every clock.
    """

    def __init__(self) -> None:
        self._two = [0.0, 0.0]

    def add(self, seconds: float) -> None:
        self._two = sorted([*self._two, seconds])[1:]

    @property
    def seconds(self) -> float:
        second, first = self._two
        return second if 0 < _FAR * second < first else first


class Heartbeat:
    """The step and phase that the training thread has reached, and when."""

    def __init__(self) -> None:
        self.step, self.phase, self.at = 0, PHASES[0], time.monotonic()

    def beat(self, step: int, phase: str) -> None:
        """Record that this rank has reached a phase (see PHASES) of a step. Cheap."""
        self.step, self.phase, self.at = step, phase, time.monotonic()
