"""The ways in which a run may end: exceptions, and the exit status of training for each."""

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fsdp_qlora.utils.text import cut, printable


class UserError(ValueError):
    """Bad input. The message is printed, and the exit status is 2."""


class RankError(UserError):
    """Bad input that one rank alone has met: it tells the others, which end without a message of their own."""


class TrainingError(RuntimeError):
    """The run cannot continue, and a restart would fail again. The exit status is 1."""


class NotFinite(TrainingError):
    """A loss or gradient was not finite; raised before any weight is updated."""


class RolloutError(TrainingError):
    """A step's prompts were not answered, or a reward function has failed; raised before any weight is updated."""


class OutOfMemory(TrainingError):
    """A rank has run out of memory in training. A restart resumes the run, with more recompute if that is left open."""


class LostRank(RuntimeError):
    """Another rank has ended or does not answer. The exit status is 1; a restart resumes the run."""


class Crashed(RuntimeError):
    """An unexpected error, already printed. The exit status is 1; a restart resumes the run."""


class Ending(NamedTuple):
    """A way in which a run ends. is_final: a restart by torchrun would be pointless or unwanted."""

    state: str
    exit_code: int
    is_final: bool


# By name, as in status.json. 75 is EX_TEMPFAIL of sysexits.h: try again later.
ENDINGS = {
    ending.state: ending
    for ending in (
        Ending("finished", 0, is_final=True),
        Ending("failed", 1, is_final=False),
        Ending("out_of_memory", 1, is_final=False),
        Ending("bad_input", 2, is_final=True),
        Ending("over_budget", 3, is_final=True),
        Ending("no_progress", 4, is_final=True),
        Ending("hung", 5, is_final=False),
        Ending("preempted", 75, is_final=False),
        Ending("unreadable", 75, is_final=False),
        Ending("interrupted", 130, is_final=True),
    )
}


class RunStopped(Exception):
    """The run was asked to stop, and all ranks have stopped after the same step; or it cannot start now.

    Args:
        state: a key of ENDINGS.
    """

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.ending = ENDINGS[state]


def how_it_ends(error: Exception) -> Ending:
    """The ending for an error, which decides the exit status and whether torchrun may restart the run."""
    if isinstance(error, RunStopped):
        return error.ending
    if isinstance(error, UserError):
        return ENDINGS["bad_input"]
    if isinstance(error, OutOfMemory):
        return ENDINGS["out_of_memory"]
    return ENDINGS["failed"]._replace(is_final=True)  # it would fail again


@contextlib.contextmanager
def paths_refused() -> Iterator[None]:
    """Take the system's refusal of a name that no file can have for bad input, wherever the name is used first."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            raise UserError(f"{error.filename}: the name is longer than that of any file.") from error
        if "embedded null" in str(error):
            raise UserError("A path has a null character, which is in no file's name.") from error
        raise


def print_error(error: Exception) -> None:
    """Print an error's message, with the rank if there are several, and record it for torchrun's own report.

    A stop is the same for all ranks, so only the first rank of a machine prints it.
    """
    if getattr(error, "is_printed", False):
        return
    error.is_printed = True  # type: ignore[attr-defined]
    note_reason(message := cut(str(error)))
    rank = f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    if not isinstance(error, RunStopped):
        write_line(f"{rank}error: {message}")
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        write_line(f"{rank}{message}")


def write_line(text: str) -> None:
    """Write to stderr on a new line: on a terminal, some process may be showing a progress bar."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}{printable(text)}", file=sys.stderr, flush=True)


def note_reason(message: str) -> None:
    """Leave the reason of this process's end to torchrun, in the form of its `record`, which would import torch."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"py_callstack": message, "timestamp": str(int(time.time()))}  # torchrun shows it for the traceback
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": about}}))
