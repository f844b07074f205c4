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
_WORTH = 1.05
_TRIED_BYTES = 2**24
_ROUNDS = 8
# Bytes a second: an H200's host pinned a GiB in 0.7 s.
_PINNING = GIB
_OF_FREE = 0.5  # share of the host's free memory that may be pinned


class HostLimits(NamedTuple):
    """What the smallest of the ranks has.

    block_bytes: of a block's activations. link: bytes a second from and to the host, at once. free:
    bytes of host memory. micro_batches: of the run.
    """

    block_bytes: int
    link: float
    free: float
    micro_batches: int


def measure_link(device: torch.device) -> float:
    """Bytes a second from a GPU to the host while as many come back."""
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


def fit_on_host(
    model: nn.Module,
    recomputing: int,
    timed_step: Callable[[], tuple[float, float]],
    least: Callable[[float], float],
    limits: HostLimits,
) -> int:
    """Set and return how many of the recomputing blocks keep their activations on the host.

    Called on every rank.

    Args:
        recomputing: number of blocks that recompute, which are the first ones.
        timed_step: runs forward and backward. Returns seconds, and bytes left free beyond what a
            probe leaves; negative if it used some of that.
        least: the smallest of the ranks' numbers.
        limits: the same on every rank.
    """
    blocks = len(recomputed_blocks(model))
    # Activations of the last block are used again at once.
    leaving = min(recomputing, blocks - 1)
    if not leaving:
        return 0
    seconds = -least(-timed_step()[0])
    # A backward pass takes as long as two forward passes.
    of_block = seconds / (3 * blocks + recomputing)
    of_copies = limits.block_bytes / limits.link
    by_link = int(leaving * of_block / of_copies)
    by_memory = int(_OF_FREE * limits.free / limits.block_bytes)
    number = min(leaving, by_link, by_memory)
    saved = number * of_block
    pinning = number * limits.block_bytes / _PINNING
    is_worth_it = seconds > _WORTH * (seconds - saved)
    if not is_worth_it or saved * limits.micro_batches < pinning:
        log.info(
            "Recompute: no activations go to host memory. A block takes %.1f ms forward, its "
            "activations %.1f ms by a link of %.1f GB/s, and there is room for those of %d blocks.",
            1e3 * of_block,
            1e3 * of_copies,
            limits.link / 1e9,
            by_memory,
        )
        return 0
    set_recompute(model, leaving, on_host=number)
    timed_step()  # which allocates host memory
    tried, room = timed_step()
    tried = -least(-tried)
    fits = least(room) >= 0
    if fits and seconds > _WORTH * tried:
        log.info(
            "Recompute: %d of %d blocks keep their activations in host memory, and %d recompute: a "
            "micro-batch takes %.2f s instead of %.2f.",
            number,
            blocks,
            leaving - number,
            tried,
            seconds,
        )
        return number
    log.info(
        "Recompute: no activations go to host memory. With those of %d blocks a micro-batch takes "
        "%.2f s, without %.2f%s.",
        number,
        tried,
        seconds,
        "" if fits else ", and the GPU's memory does not suffice",
    )
    set_recompute(model, recomputing)
    return 0
