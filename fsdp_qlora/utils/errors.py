"""The endings of a run: exceptions, and the exit status of training for each."""

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
    """Bad input that only one rank has found.

    This rank tells the others, which end without a message of their own.
    """


class TrainingError(RuntimeError):
    """The run cannot continue, and a restart would fail again. The exit status is 1."""


class NotFinite(TrainingError):
    """A loss or gradient was not finite; raised before any weight is updated."""


class RolloutError(TrainingError):
    """A step's prompts got no completions, or a reward function has failed.

    Raised before any weight is updated.
    """


class OutOfMemory(TrainingError):
    """A rank has run out of memory in training.

    A restart resumes the run, with more recomputation if that is auto.
    """


class LostRank(RuntimeError):
    """Another rank has ended or does not answer.

    The exit status is 1; a restart resumes the run.
    """


class Crashed(RuntimeError):
    """An unexpected error, already printed. The exit status is 1; a restart resumes the run."""


class Ending(NamedTuple):
    """How a run ends. is_final: torchrun should not restart it."""

    state: str
    exit_code: int
    is_final: bool


# The names are those in status.json. 75 is EX_TEMPFAIL of sysexits.h: try again later.
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
    """The run was asked to stop, or it cannot start at present.

    If it was asked to, all ranks have stopped after the same step: their checkpoint is whole.

    Args:
        state: a key of ENDINGS.
    """

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.ending = ENDINGS[state]


def how_it_ends(error: Exception) -> Ending:
    """The ending for an error: the exit status, and whether torchrun may restart the run."""
    if isinstance(error, RunStopped):
        return error.ending
    if isinstance(error, UserError):
        return ENDINGS["bad_input"]
    if isinstance(error, OutOfMemory):
        return ENDINGS["out_of_memory"]
    return ENDINGS["failed"]._replace(is_final=True)  # it would fail again


@contextlib.contextmanager
def paths_refused() -> Iterator[None]:
    """Raise UserError if the block uses a path that no file can have."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            raise UserError(
                f"{error.filename}: the name is too long for a file. Give a shorter one."
            ) from error
        if "embedded null" in str(error):
            raise UserError("A path has a null character, which no file name can have.") from error
        raise


# Environment variable: a caller in Python raises the error with which the run ends.
RAISED = "FSDP_QLORA_RAISED"


def print_error(error: Exception) -> None:
    """Print an error's message, with the rank if there are several, and record it for torchrun."""
    # An error passes several handlers on its way out of the program.
    if getattr(error, "is_printed", False):
        return
    error.is_printed = True  # type: ignore[attr-defined]
    message = cut(str(error))
    note_reason(message)
    # The caller in Python gets it as an exception.
    if RAISED in os.environ and _is_raised_again(error):
        return
    rank = f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    if not isinstance(error, RunStopped):
        write_line(f"{rank}error: {message}")
    # A stop is the same for all ranks, so the first of each machine prints it.
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        write_line(f"{rank}{message}")


def _is_raised_again(error: Exception) -> bool:
    """Whether `fsdp_qlora.train` raises an error of its run. The end of the budget is a result."""
    if isinstance(error, RunStopped):
        return error.ending != ENDINGS["over_budget"]
    return isinstance(error, (UserError, TrainingError))


def write_line(text: str) -> None:
    """Write a line to stderr."""
    # On a terminal another process may be showing a progress bar in this line.
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}{printable(text)}", file=sys.stderr, flush=True)


def note_reason(message: str) -> None:
    """Record the reason of this process's end for torchrun."""
    # The format of torch.distributed.elastic's `record`, which would import torch.
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # torchrun prints this text as the traceback.
        about = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": about}}))
