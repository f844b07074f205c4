"""Clocks, the heartbeat, calls with a time limit, and processes that can always be ended.

No clock is the time of day, which people and NTP change.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Linux alone has a clock that goes on while the machine is suspended.
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# In the order of a step: ranks in a later phase wait for a rank in an earlier one.
PHASES = ("rows", "compute", "exchange", "update", "evaluate", "save")
_ROOT = str(Path(__file__).resolve().parents[3])
# Not -m, and without "" on the path: both would import modules of the current folder.
_WORK = "import sys; sys.path[:] = [{!r}, *filter(None, sys.path)]; from {} import work; work()"
_SLICE_SECONDS = 0.5  # a wait is divided into slices, so that a pause takes one of them at most
_PAUSE_RATIO = 10.0  # a duration of so many times the second longest includes a pause


def elapsed() -> float:
    """Seconds, also while the machine was suspended: for deadlines and rented hours."""
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
            result.set_exception(
                error if isinstance(error, Exception) else RuntimeError(repr(error))
            )

    # A thread of its own and no pool's: Python waits for a pool's threads at its end.
    threading.Thread(target=call, name="begun-call", daemon=True).start()
    return result


def within(
    seconds: float, function: Callable[[], T], *, counts: Callable[[], bool] = lambda: True
) -> T:
    """Call `function` in a daemon thread and wait at most `seconds` for its result.

    The time is counted in slices of the wait: none passes while this process or machine is stopped.
    A slice counts if `counts()` is true at its end.

    Raises:
        TimeoutError: the function is still running; its result is lost.
        Exception: raised by `function`.
    """
    result = begun(function)
    slices = max(1, round(seconds / _SLICE_SECONDS))
    while slices:
        if wait([result], _SLICE_SECONDS).done:
            return result.result()
        slices -= counts()
    raise TimeoutError(f"no answer within {seconds:g} s")


def work_command(module: str) -> list[str]:
    """The command of a process that calls `work` of a module."""
    return [sys.executable, "-c", _WORK.format(_ROOT, module)]


class Worker:
    """A process that answers lines, for the code of others.

    It starts with the first line, and again when it has ended. It is no `ProcessPoolExecutor`: that
    one imports the main module again (a script without a guard would train in each worker) and
    modules of the current folder, and does not end a call that takes too long.

    Args:
        module: its function `work` answers each line of stdin with one on stdout.
        seconds: for an answer, at most.
    """

    def __init__(self, module: str, seconds: float) -> None:
        self._module = module
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def _exchange(self, line: str, seconds: float | None = None) -> tuple[str, int]:
        """The process's answer to a line; "" and its exit status if there is none in time.

        In the latter case it has ended.
        """
        if self._process is None or self._process.poll() is not None:
            command = work_command(self._module)
            pipe = subprocess.PIPE
            # A session of its own: a Ctrl-C is for this process, and `close` ends the group.
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
            )
        process = self._process

        def send_and_receive() -> str:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline()

        with contextlib.suppress(BrokenPipeError, TimeoutError):
            reply = within(seconds or self._seconds, send_and_receive)
            # A line without its end is what a process has left that ended while it wrote.
            if reply.endswith("\n"):
                return reply, 0
        return "", self.close()

    def close(self) -> int:
        """End the process, and those that it has started. Returns its exit status."""
        process = self._process
        self._process = None
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def limit_memory(num_bytes: int) -> None:
    """Limit how much this process may grow.

    Not by RLIMIT_AS: CUDA reserves far more addresses than it uses.
    """
    with contextlib.suppress(OSError, ValueError):  # not Linux, or less is allowed already
        # The sixth number: pages of data and stack, which RLIMIT_DATA counts (man 5 proc).
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes, resource.RLIM_INFINITY))


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
        self.step = 0
        self.phase = PHASES[0]
        self.at = time.monotonic()

    def beat(self, step: int, phase: str) -> None:
        """Record that this rank has reached a phase (see PHASES) of a step.

        Without a lock, so that it costs no more than assignments: the watchdog may see a step with
        the phase before, which only a message shows.
        """
        self.step = step
        self.phase = phase
        self.at = time.monotonic()
