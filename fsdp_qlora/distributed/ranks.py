"""This process's rank and device, rank 0's log, and seeds."""

import hashlib
import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

import torch

from fsdp_qlora.distributed.device import choose_device
from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.utils.text import LineHandler

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True)
class Ranks:
    """This process's ranks and device."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_rank_0(self) -> bool:
        return self.rank == 0

    def layout(self, sharding_strategy: str, world_size: int = 0, context_size: int = 1) -> Layout:
        """The layout of this run, or of a run with another number of ranks on one node."""
        per_node = self.local_world_size if world_size in (0, self.world_size) else world_size
        return Layout(world_size or self.world_size, per_node, sharding_strategy, context_size)


def read_ranks(device: str = "auto") -> Ranks:
    """Read torchrun's environment variables. A process started without torchrun is rank 0 of 1.

    Args:
        device: the option `device`.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = choose_device(device, local_rank)
    # Libraries that ask for "the GPU" get this one: otherwise all ranks would use GPU 0.
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return Ranks(
        rank=int(os.environ.get("RANK", 0)),
        local_rank=local_rank,
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        device=chosen,
    )


def set_up_logging(ranks: Ranks, *, verbose: bool, stream: TextIO | None = None) -> None:
    """Give rank 0's logger a handler. Other ranks log nothing, so no line appears twice.

    Args:
        stream: stdout if None.
    """
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    log.propagate = False  # the root logger's handlers, such as a notebook's, would print it twice
    log.handlers.clear()
    log.addHandler(LineHandler(stream or sys.stdout) if ranks.is_rank_0 else logging.NullHandler())


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends only on `parts`, equal on every machine."""
    # Not Python's hash, which differs between processes for texts.
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def derive_seed_of_list(items: Iterable[object]) -> int:
    """The same as `derive_seed` of a list of these items, of which one at a time is in memory."""
    digest = hashlib.sha256(b"([")
    separator = b""
    for item in items:
        digest.update(separator + repr(item).encode())
        separator = b", "
    digest.update(b"],)")
    return int.from_bytes(digest.digest()[:8], "big") >> 1
