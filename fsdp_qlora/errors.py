"""How a run may end before it is finished: what is raised, and train.py's exit status for each."""

from typing import NamedTuple


class UserError(ValueError):
    """Bad input. `train.py` prints the message on every rank and exits with status 2."""


class TrainingError(RuntimeError):
    """The run cannot go on, and would stop again if it were restarted. `train.py` exits with status 1."""


class NotFinite(TrainingError):
    """A loss or gradient was not, before anything was updated."""


class OutOfMemory(TrainingError):
    """One rank's memory is too small. The other ranks end without a message of their own."""


class LostRank(RuntimeError):
    """Another rank has ended or fallen silent. `train.py` exits with status 1; a restart goes on."""


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
