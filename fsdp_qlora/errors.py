"""How a run may end before it is finished: what is raised, and train.py's exit status for each."""

import os
import sys
from typing import NamedTuple

from fsdp_qlora.messages import shown


class UserError(ValueError):
    """Bad input. `train.py` prints the message on every rank and exits with status 2."""


class TrainingError(RuntimeError):
    """The run cannot go on, and would stop again if it were restarted. `train.py` exits with status 1."""


class NotFinite(TrainingError):
    """A loss or gradient was not finite; raised before any weight is updated."""


class OutOfMemory(TrainingError):
    """One rank's memory is too small. The other ranks end without a message of their own."""


class LostRank(RuntimeError):
    """Another rank has ended or fallen silent. `train.py` exits with status 1; a restart continues the run."""


class Crashed(RuntimeError):
    """An error that nobody foresaw, printed where it happened. `train.py` exits with status 1; a restart continues."""


class Ending(NamedTuple):
    """A way to end. is_final: whether a restart by torchrun would be pointless, or against the user's wish."""

    state: str
    exit_code: int
    is_final: bool


# By name, as in status.json. 75 is EX_TEMPFAIL of sysexits.h: try again later.
ENDINGS = {
    ending.state: ending
    for ending in (
        Ending("finished", 0, is_final=True),
        Ending("failed", 1, is_final=False),
        Ending("bad_input", 2, is_final=True),
        Ending("over_budget", 3, is_final=True),
        Ending("no_progress", 4, is_final=True),
        Ending("hung", 5, is_final=False),
        Ending("preempted", 75, is_final=False),
        Ending("interrupted", 130, is_final=True),
    )
}


class RunStopped(Exception):
    """The run was asked to stop, and all ranks have done so after the same step.

    Args:
        state: a key of ENDINGS.
    """

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.ending = ENDINGS[state]


def how_it_ends(error: Exception) -> Ending:
    """The ending that an error leads to, for the exit status and for torchrun's restarts."""
    if isinstance(error, RunStopped):
        return error.ending
    if isinstance(error, UserError):
        return ENDINGS["bad_input"]
    return ENDINGS["failed"]._replace(is_final=True)  # it would fail again


def print_error(error: Exception) -> None:
    """Print an error's message with the rank, once. Every rank does: one that ends first must not hide the reason."""
    if not getattr(error, "is_printed", False):
        rank = f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
        print(f"{rank}error: {shown(str(error))}", file=sys.stderr, flush=True)
        error.is_printed = True  # type: ignore[attr-defined]
