"""Notes of which files have been verified, so that one process of a machine does it per start."""

import contextlib
import json
import platform
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from fsdp_qlora.utils.files import read_json, staged_file


def is_of_this_start(moment: float) -> bool:
    """Whether a moment, in seconds as of `time.time`, is later than the start of this process."""
    return moment >= psutil.Process().create_time()


class Stamp:
    """A file beside others that tells that a process has verified them as they are now.

    It counts for processes of the same machine that had begun before: for the other ranks of a
    start, and for no later start.

    Args:
        path: of the stamp.
        files: that it is of.
    """

    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        self._path = path
        # Before they are read: a file that is replaced meanwhile is another one.
        self._states = {file.name: _state(file) for file in files}

    @property
    def is_valid(self) -> bool:
        """Whether the files have been verified since this process has begun."""
        noted = read_json(self._path)
        moment = noted.get("time")
        return (
            noted.get("files") == self._states
            and noted.get("machine") == platform.node()
            and isinstance(moment, float)
            and is_of_this_start(moment)
            and moment <= time.time()  # a clock that was wrong
        )

    def write(self) -> None:
        """Note that the files are verified; in a folder that may only be read nothing is noted."""
        noted = {"files": self._states, "machine": platform.node(), "time": time.time()}
        with contextlib.suppress(OSError), staged_file(self._path) as partial:
            partial.write_text(json.dumps(noted))


def _state(file: Path) -> list[int]:
    """The facts that change when a file is written or replaced; empty if there is none."""
    try:
        status = file.stat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns, status.st_ino]
