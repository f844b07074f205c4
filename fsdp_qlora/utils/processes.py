"""Processes that help another one."""

import contextlib
import ctypes
import signal

# PR_SET_PDEATHSIG of prctl.h.
_END_WITH_PARENT = 1


def end_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends, in whatever way."""
    # Only Linux has prctl.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
