"""The process beside an episode's: it ends all that the episode has started, and bounds its output.

A process of its own, because an environment may hang, and its children may leave its group.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys

import psutil

from fsdp_qlora.training.environments.channel import Channel
from fsdp_qlora.utils.redact import redact

MOST_OUTPUT = 64 * 2**10
"""Bytes of an episode's output that are shown."""
_CHUNK_BYTES = 2**16
# PR_SET_CHILD_SUBREAPER of prctl.h.
_ADOPT_ORPHANS = 36


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)


def keep(lifeline: socket.socket, output: int, pid: int, name: str) -> None:
    """Wait for the end of an episode's process, and report its status on the lifeline.

    Args:
        lifeline: when its other end is closed, the process and its descendants are killed.
        output: a pipe with all that the episode prints.
        pid: of the process, a child of this one and the leader of its session.
        name: for messages.
    """
    process = os.pidfd_open(pid)
    os.set_blocking(output, False)
    shown = _Shown(name)
    poll = select.poll()
    for descriptor in (process, output, lifeline.fileno()):
        poll.register(descriptor, select.POLLIN)
    is_running = True
    while is_running:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if output in ready and not shown.read(output):
            poll.unregister(output)
        is_running = not ready & {process, lifeline.fileno()}
    status = _end(pid)
    while shown.read(output):
        pass
    shown.finish()
    # The run may have gone.
    with contextlib.suppress(OSError):
        Channel(lifeline).send({"status": status})


def _end(pid: int) -> int:
    """Kill the process with its session and all that has left it. Returns its exit status."""
    # First the group, while the process has its number, even if it has ended.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    while _reap():
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
    return status


def _reap() -> bool:
    """Take note of children that have ended. Returns whether others are running."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


class _Shown:
    """The first lines of an episode's output, shown on stderr without secrets."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._line = b""

    def read(self, output: int) -> bool:
        """Take what is there. Returns whether the output may go on."""
        try:
            chunk = os.read(output, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        room = max(0, MOST_OUTPUT - self._count)
        self._count += len(chunk)
        # Whole lines, so that no secret is cut in two.
        lines, newline, rest = (self._line + chunk[:room]).rpartition(b"\n")
        self._line = rest
        self._show(lines + newline)
        return bool(chunk)

    def finish(self) -> None:
        """Show the last line, and say how much has been left out."""
        self._show(self._line)
        if self._count > MOST_OUTPUT:
            self._show(
                f"\n{self._name}: an episode has printed {self._count:,} bytes. The first "
                f"{MOST_OUTPUT:,} are shown.\n".encode()
            )

    def _show(self, text: bytes) -> None:
        if not text:
            return
        # Nobody may be reading any more.
        with contextlib.suppress(OSError):
            sys.stderr.write(redact(text.decode(errors="replace")))
            sys.stderr.flush()
