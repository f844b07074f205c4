"""The clocks of a run, and its heartbeat. No clock is the time of day, which people and NTP change."""

import time

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux has it
# In their order within a step: the others wait for a rank in an earlier phase.
PHASES = ("rows", "compute", "exchange", "update", "evaluate", "save")
_FAR = 10.0  # a duration so many times the second longest includes a pause


def elapsed() -> float:
    """Seconds, including those in which the machine was suspended: for deadlines, since rent is due for these too."""
    return time.clock_gettime(_SINCE_BOOT)


def awake() -> float:
    """Seconds in which the machine was awake: to measure work and to detect hangs."""
    return time.monotonic()


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
