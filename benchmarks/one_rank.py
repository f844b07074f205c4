"""One rank of several on one card: the other ranks are torch's fake process group, which sends
nothing.

What a rank gathers is then its own part once for every rank, and what it reduces its own part of
the sum; memory and computation are those of a real rank, the time of the links is missing.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_qlora.distributed.process_group import start_process_group
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.sharding.groups import fsdp_modules


def rank_0_of(world_size: int) -> Ranks:
    """Rank 0 of `world_size` ranks on this machine, on the first card."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return Ranks(
        rank=0, local_rank=0, world_size=world_size, local_world_size=world_size, device=device
    )


def start_alone(ranks: Ranks) -> None:
    """Start a process group in which nobody else is."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    start_process_group(ranks, dist.HashStore(), backend="fake")


def limit_memory(memory_gib: float) -> None:
    """Limit this process to the memory of a smaller card; 0 is all."""
    if memory_gib and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gib * 2**30 / total), 0)


class _OwnPart:
    """FSDP2's reduce-scatter without other ranks: the fake group would leave its output as it is,
    at random.
    """

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.view(-1)[: output_tensor.numel()].view_as(output_tensor))


def keep_own_part(model: nn.Module) -> None:
    """Reduce gradients without other ranks."""
    for module in fsdp_modules(model):
        assert isinstance(module, FSDPModule)
        module.set_custom_reduce_scatter(_OwnPart())  # type: ignore[arg-type]
