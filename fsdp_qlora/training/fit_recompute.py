"""Finds by trial how many blocks can keep their activations instead of recomputing them, and takes some back later."""

import logging
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from fsdp_qlora.output.text import GIB
from fsdp_qlora.sharding.recompute import recomputed_blocks, set_recompute

log = logging.getLogger("fsdp_qlora")

_MARGIN_SHARE, _MIN_MARGIN = 0.04, GIB  # of the GPU's memory, left free by the trial
_MARGIN_IN_STEPS = 0.5  # of that margin; once less is free, more blocks recompute
_MORE_BLOCKS = 0.05  # of all, then


class Meter(Protocol):
    """Reads a rank's device memory, in bytes."""

    def start(self) -> None:
        """Begin a trial: peaks count from here."""

    def room(self) -> int:
        """What the trial has left free, beyond the margin; negative if it used the margin."""


class GpuMeter:
    """Memory of this rank's GPU, as torch's allocator reserves it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.margin = max(_MIN_MARGIN, int(_MARGIN_SHARE * torch.cuda.mem_get_info(device)[1]))

    def start(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def most(self) -> int:
        """What this process could reserve: it already has some of it."""
        return int(torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device))

    def room(self) -> int:
        return self.most() - int(torch.cuda.max_memory_reserved(self.device)) - self.margin

    def most_in_steps(self) -> float:
        """GiB that may be reserved in later steps, whose rows are others."""
        return (self.most() - _MARGIN_IN_STEPS * self.margin) / GIB


def fit_recompute(
    model: nn.Module,
    try_step: Callable[[], int],
    meter: Meter,
    least: Callable[[float], float],
    *,
    block_bytes: int,
    too_few: int | None = None,
) -> int:
    """Set and return the smallest number of blocks with recompute that fits on every rank. Called on every rank.

    The peak with recompute of every block, and what one more block keeps, are measured; their sum is an upper bound,
    so another trial with what fits by it may find more room.

    Args:
        try_step: runs forward and backward, and returns the bytes allocated between them.
        least: the smallest of the ranks' numbers.
        block_bytes: about what a block keeps without recompute, for the first trial of one.
        too_few: blocks that recomputed when an earlier start ran out of memory; now at least half of the rest joins
            them, so that a few restarts come to all blocks.
    """
    blocks = len(recomputed_blocks(model))
    may_keep = blocks if too_few is None else (blocks - too_few) // 2

    def attempt(number: int) -> tuple[int, int]:
        set_recompute(model, blocks - number)
        meter.start()
        return try_step(), meter.room()

    without, room = attempt(0)
    keeping = int(least(room >= 2 * block_bytes and may_keep > 0))
    for is_last in (False, False, True) if keeping else ():
        held, room = attempt(keeping)
        each = max((held - without) / keeping, 1.0)
        more = int(least(min(room // each, may_keep - keeping)))
        keeping = max(0, keeping + (min(more, 0) if is_last else more))
        if more <= 0:
            break
    set_recompute(model, blocks - keeping)
    return blocks - keeping


class MemoryWatch:
    """Adds blocks with recompute when a step has come near the end of the memory."""

    def __init__(self, model: nn.Module, number: int, *, most: float) -> None:
        """
        Args:
            number: of blocks with recompute now. most: GiB that a rank may reserve; the same on every rank.
        """
        self.model, self.number, self.most = model, number, most
        self.blocks = len(recomputed_blocks(model))
        self.few = max(1, math.ceil(_MORE_BLOCKS * self.blocks))

    def stepped(self, reserved: float) -> None:
        """
        Args:
            reserved: GiB, the most that a rank has reserved so far; the same on every rank.
        """
        if reserved <= self.most or self.number == self.blocks:
            return
        self.number = min(self.blocks, self.number + self.few)
        set_recompute(self.model, self.number)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        log.warning(
            "A rank has reserved %.1f GiB of GPU memory, so more blocks recompute their activations: %d of %d.",
            reserved, self.number, self.blocks,
        )  # fmt: skip
