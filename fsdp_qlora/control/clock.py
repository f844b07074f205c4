"""The clocks of a run. None of them is the time of day, which people and NTP set."""

import time

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux has it
_FAR = 10.0  # times the second longest: of no work, but of a pause


def elapsed() -> float:
    """Seconds, those included in which the machine was suspended: for deadlines, since a rented machine costs then."""
    return time.clock_gettime(_SINCE_BOOT)


def awake() -> float:
    """Seconds in which the machine was awake: for how long a piece of work takes, and whether one hangs."""
    return time.monotonic()


class Longest:
    """The longest of many durations of the same work, without a single one in which a process was stopped.

    A virtual machine that stands still, or a stopped process, shows on every clock.
    """

    def __init__(self) -> None:
        self._two = [0.0, 0.0]

    def add(self, seconds: float) -> None:
        self._two = sorted([*self._two, seconds])[1:]

    @property
    def seconds(self) -> float:
        second, first = self._two
        return second if 0 < _FAR * second < first else first
