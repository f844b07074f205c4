"""Decides on the GPU which blocks keep their activations in host memory instead of recomputing.

They do so where a link that was measured is expected to be fast enough, and a step that was tried
is faster.
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from fsdp_qlora.sharding.host_memory import split_arena
from fsdp_qlora.sharding.recompute import recomputed_blocks, set_recompute
from fsdp_qlora.utils.text import GIB

log = logging.getLogger("fsdp_qlora")

# Times as fast as recomputing, both expected and tried: what is worth the host's memory.
WORTH = 1.05
_TRIED_BYTES = 2**24
_ROUNDS = 8
# Bytes a second: an H200's host pinned a GiB in 0.7 s.
_PINNING = GIB
OF_FREE = 0.5  # share of the host's free memory that may be pinned


class HostLimits(NamedTuple):
    """The limits of the smallest rank.

    block_bytes: of a block's activations. link: bytes a second from and to the host, at once; 0 if
    none can be pinned. free: bytes of host memory. micro_batches: of the run.
    """

    block_bytes: int
    link: float
    free: float
    micro_batches: int


def link_or_zero(device: torch.device) -> float:
    """Measure as `measure_link` does; 0 with a line in the log if no host memory can be pinned.

    Other ranks wait for the answer, and an error would never give them one.
    """
    try:
        return measure_link(device)
    except MemoryError as error:
        log.info("Recompute: no activations go to host memory: %s", error)
        return 0.0


def measure_link(device: torch.device) -> float:
    """Bytes a second from a GPU to the host while as many come back.

    Raises:
        MemoryError: no host memory can be allocated or pinned.
    """
    host = split_arena([_TRIED_BYTES] * 2, pinned=True)
    here = [torch.empty(_TRIED_BYTES, dtype=torch.uint8, device=device) for _ in host]
    streams = [torch.cuda.Stream(device) for _ in host]
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        with torch.cuda.stream(streams[0]):
            host[0].copy_(here[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            here[1].copy_(host[1], non_blocking=True)
    torch.cuda.synchronize(device)
    return _ROUNDS * _TRIED_BYTES / (time.perf_counter() - started)


class Trials(NamedTuple):
    """The trials of a rank.

    timed_step: runs forward and backward. Returns seconds, and bytes left free beyond what a probe
    leaves; negative if it used some of that. reserve: allocates bytes of host memory; returns
    whether that succeeded. least: the smallest of the ranks' numbers.
    """

    timed_step: Callable[[], tuple[float, float]]
    reserve: Callable[[int], bool]
    least: Callable[[float], float]

    def step(self) -> tuple[float, float]:
        """The seconds of the slowest rank, and the bytes left free on the fullest."""
        # the first one warms up
        seconds, room = min(self.timed_step(), self.timed_step())
        return -self.least(-seconds), self.least(room)


def fit_on_host(model: nn.Module, recomputing: int, trials: Trials, limits: HostLimits) -> int:
    """Set and return how many of the recomputing blocks keep their activations on the host.

    Called on every rank.

    Args:
        recomputing: number of blocks that recompute, which are the first ones.
        limits: the same on every rank.
    """
    blocks = len(recomputed_blocks(model))
    # Activations of the last block are used again at once.
    leaving = min(recomputing, blocks - 1)
    if not (leaving and limits.link):
        return 0
    seconds, room = trials.step()
    # A backward pass takes as long as two forward passes.
    of_block = seconds / (3 * blocks + recomputing)
    number = _expected(leaving, of_block, limits)
    # The device has those of two blocks, where recomputation has those of one. If others keep
    # theirs, the peak is before that.
    if room < limits.block_bytes and blocks - recomputing < 2:
        number = 0
    if seconds <= WORTH * (seconds - number * of_block):
        _say_why_not(of_block, limits)
        return 0
    set_recompute(model, leaving, on_host=number)
    if _is_faster(number, seconds, trials, limits):
        return number
    set_recompute(model, recomputing)
    return 0


def _is_faster(number: int, seconds: float, trials: Trials, limits: HostLimits) -> bool:
    """Whether a step is faster with the activations of `number` blocks in host memory, and fits.

    seconds: of a step without.
    """
    if not trials.least(trials.reserve(number * limits.block_bytes)):
        log.info("Recompute: no activations go to host memory, which cannot be pinned.")
        return False
    tried, room = trials.step()
    is_faster = room >= 0 and seconds > WORTH * tried
    log.info(
        "Recompute: with the activations of %d blocks in host memory a micro-batch takes %.2f s, "
        "and without %.2f%s. They %s.",
        number,
        tried,
        seconds,
        "" if room >= 0 else "; the GPU's memory does not suffice",
        "go there" if is_faster else "do not go there",
    )
    return is_faster


def _expected(leaving: int, of_block: float, limits: HostLimits) -> int:
    """The number of blocks whose activations the link moves while others compute.

    It is 0 if the run is too short to make up for pinning the host's memory.

    Args:
        leaving: the maximum.
        of_block: seconds of a block's forward pass.
    """
    if of_block * limits.micro_batches < limits.block_bytes / _PINNING:
        return 0
    by_link = int(leaving * of_block * limits.link / limits.block_bytes)
    by_memory = int(OF_FREE * limits.free / limits.block_bytes)
    return min(leaving, by_link, by_memory)


def _say_why_not(of_block: float, limits: HostLimits) -> None:
    log.info(
        "Recompute: no activations go to host memory. A block takes %.1f ms forward, and its "
        "activations %.1f ms by a link of %.1f GB/s, in each of %d micro-batches; the host has "
        "%.1f GiB free for each rank, and a block takes %.2f there and on the GPU.",
        1e3 * of_block,
        1e3 * limits.block_bytes / limits.link,
        limits.link / 1e9,
        limits.micro_batches,
        limits.free / GIB,
        limits.block_bytes / GIB,
    )
