"""Lets the ranks of a run wait for answers that only rank 0 gets.

A collective that waits for rank 0 would hide for minutes whether a rank lives, and could not be
stopped: instead all ranks exchange signs of life, twice a second.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from fsdp_qlora.distributed.process_group import (
    all_gather_strings,
    gather_numbers,
    raise_on_all_ranks,
)
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.clock import begun
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.utils.errors import RolloutError, RunStopped

# Ranks may wait for minutes, in which NCCL's kernels would keep GPU and core busy.
BY_GLOO = torch.device("cpu")
# Between two signs of life of a rank.
_PULSE_SECONDS = 0.5


def check_stop(control: Control, ranks: Ranks, step: int, *, is_done: bool = False) -> bool:
    """Show that this rank lives, and stop all ranks if one is asked to.

    Called on every rank. Returns whether rank 0 `is_done`.

    Raises:
        RunStopped: on every rank.
    """
    numbers = gather_numbers([is_done, *control.flags(step)], BY_GLOO)
    control.heartbeat.beat(step, "rows")
    control.agree(numbers[:, 1:])
    if control.stop:
        state, reason = control.stop
        raise RunStopped(state, f"Stopped while step {step + 1} waited for answers ({reason}).")
    return bool(numbers[0, 0])


def run_on_rank_0(work: Callable[[], str], control: Control, ranks: Ranks, step: int) -> str:
    """Run `work` in a thread of rank 0, and return its text on every rank.

    Called on every rank. Meanwhile all ranks `check_stop`.

    Raises:
        RunStopped: on every rank.
        RolloutError: of `work`; the same on every rank.
    """
    return result_of_rank_0(begun(work) if ranks.is_rank_0 else None, control, ranks, step)


def result_of_rank_0(task: Future[str] | None, control: Control, ranks: Ranks, step: int) -> str:
    """Wait for a thread of rank 0, and return its text on every rank.

    As `run_on_rank_0`, for work that has begun before. task: None on other ranks.
    """
    text = ""
    # All ranks make the same number of calls: rank 0's flag, which all of them get, ends the loop.
    while not check_stop(control, ranks, step, is_done=task is not None and task.done()):
        # Without a task this returns at once, and the other ranks wait for rank 0 in check_stop.
        wait([task] if task else [], _PULSE_SECONDS)
    # An error of rank 0 alone would leave the others waiting for its text.
    with raise_on_all_ranks(RolloutError, BY_GLOO):
        if task:
            text = task.result()
    return all_gather_strings(text, BY_GLOO)[0]
