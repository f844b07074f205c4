"""Locks of files that several processes would write.

The system frees a lock when its holder dies, however it does.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger("fsdp_qlora")


@contextlib.contextmanager
def locked(path: Path, waiting: str) -> Iterator[bool]:
    """Hold the lock of a file, after another holder.

    Where no lock can be had, as in a folder that may only be read, each process works for itself.
    Gives whether the lock is held.

    Args:
        waiting: what is logged if another process has it.
    """
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.debug("%s", waiting)
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        log.debug("No lock on %s: %s", path, error)
    try:
        yield lock.is_locked
    finally:
        lock.release()


def try_lock(path: Path) -> FileLock | None:
    """Lock a file or folder. Returns None if another process has the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock
