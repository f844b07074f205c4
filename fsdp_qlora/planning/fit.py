"""Decides how a run fits into memory.

Chooses which ranks share the model, what is on the host, and how many blocks recompute.

`first_that_fits` takes the fastest settings that fit. Options that are given are kept; the
open ones are decided
1. before weights are read, by the estimated memory: the placement (`placement.place`), and with
   `--auto` the micro-batch and the rest as well (`search.Planner`);
2. on a GPU before the first step, by the memory that a step of the longest rows is measured to
   take: how many blocks recompute, whatever was estimated (`fit_recompute`);
3. after a step that came near the end of the memory: a few more blocks recompute from then on
   (`MemoryWatch`).
"""

import bisect
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.longest_rows import LongestRows
from fsdp_qlora.distributed.device import free_gpu_memory
from fsdp_qlora.distributed.process_group import gather_numbers, release_cached_memory
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.model_parts import Offload
from fsdp_qlora.planning.fit_host import HostLimits, Trials, fit_on_host, link_or_zero
from fsdp_qlora.sharding.recompute import (
    keeps_attention,
    recomputed_blocks,
    reserve_host_memory,
    set_keeps_attention,
    set_recompute,
)
from fsdp_qlora.training.trainer import Trainer
from fsdp_qlora.utils.machine import host_memory_free
from fsdp_qlora.utils.text import GIB

log = logging.getLogger("fsdp_qlora")

# Added to the estimate. Of 55 configurations in benchmarks/standin_memory.py the worst is planned
# 3.5% too low or too high; NCCL's buffers take 0.1 to 0.3 GiB on PCIe, and 0.8 to 2.3 on NVLink,
# where GPUs are so large that the share covers them. The CUDA context is in use before free memory
# is read.
_MARGIN_SHARE = 0.05
_MARGIN = GIB // 2
# Share of all blocks that recompute in addition when a step comes near the end of the memory. With
# recompute a block computes 4 passes instead of 3 (backward counts for 2), so a step computes at
# most 1.7% more.
_MORE_BLOCKS = 0.05

# A probe leaves this share of the GPU's memory free, and at least this.
_FREE_SHARE = 0.04
_LEAST_FREE = GIB
# Later steps, which have other rows, may use half of that before more blocks recompute.
_FREE_IN_STEPS = 0.5

T = TypeVar("T")


def first_that_fits(
    settings: Sequence[T], memory: Callable[[T], float], free: float, *, falls: bool = False
) -> T:
    """The first setting that fits, the fastest first; the last if none does.

    Args:
        memory: bytes that a setting needs.
        free: bytes that may be used.
        falls: no setting needs more than the one before it, so that a bisection finds it.
    """
    if falls:
        # Each probe may plan a whole run: 80 blocks take 7 instead of 80. Without the last setting,
        # so that it is the answer if none fits.
        index = bisect.bisect_left(
            settings, True, hi=len(settings) - 1, key=lambda setting: memory(setting) <= free
        )
        return settings[index]
    return next((setting for setting in settings if memory(setting) <= free), settings[-1])


def with_margin(estimate: int) -> int:
    """Bytes that must be free on a GPU for a step that is estimated to need `estimate`."""
    return int(estimate * (1 + _MARGIN_SHARE)) + _MARGIN


def without_margin(free: int) -> int:
    """The largest estimate for which `free` bytes of a GPU are enough."""
    return int((free - _MARGIN) / (1 + _MARGIN_SHARE))


# --- by the estimate ---


class Placement(NamedTuple):
    """How the ranks hold a model and reduce its gradients."""

    sharding_strategy: str
    """One of SHARDING_STRATEGIES."""
    offload: Offload = Offload()
    """The weights in host memory."""
    accumulates: bool = True
    """Gradients of a step's micro-batches add up unsharded on each rank and are reduced with the
    last one's; otherwise they are reduced in each, which is slower."""

    @property
    def options(self) -> dict[str, Any]:
        """The options that ask for it."""
        use_cpu_offload = self.offload.embeddings or self.offload.blocks or False
        return {"sharding_strategy": self.sharding_strategy, "use_cpu_offload": use_cpu_offload}

    def describe(self) -> str:
        """In words."""
        if self.offload.blocks:
            return f"{self.sharding_strategy} with the base in host memory"
        return self.sharding_strategy


def choose(needs: Mapping[Placement, int], free: int | None) -> Placement:
    """The first placement that fits in `free` bytes; the last if none does.

    Args:
        needs: bytes that each placement takes of a rank's device, with a margin; the fastest first.
        free: on the GPU that has least; None if none is known.
    """
    if free is None:
        # A model that is shared, and offloaded only if that is asked for.
        offload = next(iter(needs)).offload
        return [placement for placement in _fastest(needs) if placement.offload == offload][-1]
    return first_that_fits([*needs], needs.__getitem__, free)


def describe_choice(needs: Mapping[Placement, int], free: int | None) -> str | None:
    """One line: the chosen placement with the sizes of all; None if the options leave no choice.

    If no GPU is known, the line says how much free memory each placement needs.
    """
    sizes = [(placement.describe(), _gib(needs[placement])) for placement in _fastest(needs)]
    if len(sizes) == 1:
        return None
    if free is None:
        faster = ", ".join(f"{name} needs {size} free" for name, size in sizes[:-1])
        slowest, size = sizes[-1]
        return f"Each GPU: {faster}; otherwise {slowest} ({size})."
    chosen = choose(needs, free)
    all_sizes = ", ".join(f"{name} needs {size}" for name, size in sizes)
    line = (
        f"Placement: {chosen.describe()}. On each GPU, with a margin, {all_sizes}; {_gib(free)} "
        "are free."
    )
    if chosen.sharding_strategy == "ddp" and not chosen.offload.blocks:
        line += " The base is not sharded, since it fits: --sharding_strategy full_shard shards it."
    return line


def describe_reduction(needs: Mapping[Placement, int], free: int | None) -> str | None:
    """One line if gradients are reduced in each micro-batch for want of memory."""
    chosen = choose(needs, free)
    more = needs.get(chosen._replace(accumulates=True))
    if free is None or chosen.accumulates or more is None:
        return None
    return (
        "Gradients are reduced in each micro-batch: accumulating them on each GPU needs "
        f"{_gib(more)} with a margin, and {_gib(free)} are free."
    )


def _fastest(needs: Mapping[Placement, int]) -> list[Placement]:
    """The placements without their slower way of reducing gradients, which comes second."""
    accumulates = next(iter(needs)).accumulates
    return [placement for placement in needs if placement.accumulates == accumulates]


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def memory_settings(config: TrainConfig, placement: Placement, ranks: Ranks) -> str:
    """In words, the settings with which the run would need less memory."""
    config = dataclasses.replace(config, **placement.options)
    settings = []
    # A resumed run keeps the settings that --auto chose, so others are obeyed without it.
    if config.auto:
        settings.append("--auto false")
    if config.batch_size > 1:
        settings.append(
            "a smaller --batch_size (with --gradient_accumulation_steps raised by the same factor, "
            "the run is the same)"
        )
    if ranks.local_world_size % (2 * config.context_size) == 0 and config.batching != "padded":
        settings.append(f"--context_parallel_size {2 * config.context_size}")
    settings.append("a smaller --context_length")
    # On a CPU nothing is probed, so auto is all.
    is_all = config.recompute == "auto" and ranks.device.type == "cpu"
    if config.recompute not in ("all", "offload") and not is_all:
        settings.append("--recompute all")
    if config.sharding_strategy == "ddp":
        settings.append("--sharding_strategy full_shard")
    if config.recompute != "offload":
        settings.append("--recompute offload")
    if config.use_cpu_offload is not True:
        settings.append("--use_cpu_offload true")
    return f"{', '.join(settings)}, or more GPUs"


# --- by what is measured ---


def fit_recompute(
    model: nn.Module,
    try_step: Callable[[], tuple[int, int]],
    least: Callable[[float], float],
    *,
    block_bytes: int,
    too_few: int | None = None,
) -> int:
    """Set and return the smallest number of blocks with recompute that fits on every rank.

    Called on every rank. The peak with recompute of every block, and what one more block keeps, are
    measured; their sum is an upper bound, so another probe with what fits by it may find more room.
    If all do not fit with attention's output kept, it is computed again, too.

    Args:
        try_step: runs forward and backward. Returns the bytes allocated between them, and those
            left free beyond what a probe leaves; negative if it used some of that.
        least: the smallest of the ranks' numbers.
        block_bytes: about what a block keeps without recompute, for the first probe of one.
        too_few: blocks that recomputed when an earlier start ran out of memory. Now at least half
            of the others joins them, so that a few restarts come to all blocks.
    """
    blocks = len(recomputed_blocks(model))
    # The most that keep their activations first: they are the fastest.
    may_keep = range(blocks if too_few is None else (blocks - too_few) // 2, -1, -1)

    def attempt(count: int) -> tuple[int, int]:
        set_recompute(model, blocks - count)
        return try_step()

    # The collectives of a pass, and those of `least`, are the same on all ranks only if all try the
    # same number of blocks: each decision is made by the least of all ranks.
    without, room = attempt(0)
    fits = least(room) >= 0
    if keeps_attention(model) and not fits:
        set_keeps_attention(model, False)
        without, room = attempt(0)
    keeping = int(least(min(may_keep[0], room >= 2 * block_bytes)))
    for is_last in (False, False, True) if keeping else ():
        kept_bytes, room = attempt(keeping)
        per_block = max((kept_bytes - without) / keeping, 1.0)
        # more than in this attempt
        memory = {count: (count - keeping) * per_block for count in may_keep}
        before = keeping
        keeping = int(least(first_that_fits(may_keep, memory.__getitem__, room, falls=True)))
        if keeping <= before:
            break
        # What the third attempt finds is not tried any more, so it is not taken.
        keeping = before if is_last else keeping
    set_recompute(model, blocks - keeping)
    return blocks - keeping


class MemoryWatch:
    """Adds blocks with recompute when a step has come near the end of the memory.

    Args:
        recomputing: blocks that do not keep their activations on the GPU now.
        most: GiB that a rank may reserve; the same on every rank.
        on_host: of these blocks, the number that keeps them in host memory.
    """

    def __init__(
        self, model: nn.Module, recomputing: int, *, most: float, on_host: int = 0
    ) -> None:
        self.model = model
        self.recomputing = recomputing
        self.on_host = on_host
        self.most = most
        self.blocks = len(recomputed_blocks(model))

    def stepped(self, reserved: float) -> int:
        """The number of blocks with recompute from now on.

        reserved: GiB, the maximum that a rank has reserved so far; the same on every rank.
        """
        if reserved <= self.most:
            return self.recomputing
        if self.recomputing == self.blocks:
            self._attend_again(reserved)
            return self.recomputing
        self.recomputing = min(
            self.blocks, self.recomputing + math.ceil(_MORE_BLOCKS * self.blocks)
        )
        set_recompute(self.model, self.recomputing, on_host=self.on_host)
        _forget_peak()
        log.warning(
            "A rank has reserved %.1f GiB of GPU memory, so more blocks recompute their "
            "activations: %d of %d.",
            reserved,
            self.recomputing,
            self.blocks,
        )
        return self.recomputing

    def _attend_again(self, reserved: float) -> None:
        """Compute attention's output again if blocks have kept it."""
        if not keeps_attention(self.model):
            return
        set_keeps_attention(self.model, False)
        _forget_peak()
        log.warning(
            "A rank has reserved %.1f GiB of GPU memory, so attention's output is computed again.",
            reserved,
        )


def _forget_peak() -> None:
    # What is reserved never falls by itself: without this each later step would add blocks.
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _reserve(model: nn.Module, device: torch.device, size: int) -> bool:
    """Allocate host memory for activations; whether that succeeded."""
    try:
        reserve_host_memory(model, size, device)
    except MemoryError:
        return False
    return True


def fit_on_gpu(
    trainer: Trainer,
    longest: LongestRows,
    *,
    block_bytes: int,
    moved_bytes: int = 0,
    too_few: int | None = None,
) -> None:
    """Recompute as few blocks as fit on every rank's GPU, and more after a step near its limit.

    Of these, as many keep their activations in host memory as makes a step faster.

    Called on every rank. Other arguments as for `fit_recompute` and `Trainer.try_longest`.

    Args:
        moved_bytes: of a block's activations in host memory; 0 to keep none there.
    """
    device = trainer.ranks.device
    left_free = max(_LEAST_FREE, int(_FREE_SHARE * free_gpu_memory(device)[1]))

    def reservable() -> int:
        """Bytes that this process could reserve, with those that it has reserved."""
        return int(free_gpu_memory(device)[0] + torch.cuda.memory_reserved(device))

    def try_step() -> tuple[int, int]:
        # Otherwise blocks of memory that an earlier probe reserved would count for this one.
        release_cached_memory(device)  # peaks count from here
        held = trainer.try_micro_batch(longest)
        return held, reservable() - torch.cuda.max_memory_reserved(device) - left_free

    def timed_step() -> tuple[float, float]:
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        _, room = try_step()
        torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / min(2, longest.num_rounds), room

    def least(value: float) -> float:
        return gather_numbers([value], device).min().item()

    model = trainer.model
    recomputing = fit_recompute(model, try_step, least, block_bytes=block_bytes, too_few=too_few)
    most = least((reservable() - _FREE_IN_STEPS * left_free) / GIB)
    on_host = 0
    # After a lack of memory the safest setting comes before the fastest.
    if recomputing and moved_bytes and too_few is None:
        trials = Trials(timed_step, partial(_reserve, model, device), least)
        limits = HostLimits(
            block_bytes=moved_bytes,
            link=least(link_or_zero(device)),
            free=least(host_memory_free(trainer.ranks.local_world_size)),
            micro_batches=longest.num_rounds * trainer.options.total_steps,
        )
        on_host = fit_on_host(model, recomputing, trials, limits)
    if on_host:  # then the last block keeps its activations
        recomputing = min(recomputing, len(recomputed_blocks(model)) - 1)
    watch = MemoryWatch(model, recomputing, most=most, on_host=on_host)
    trainer.watch_memory = watch.stepped
    log.debug("Recompute: %d of %d blocks, found by probing.", recomputing, watch.blocks)
