"""FSDP2 groups of which each rank gives a multiple of 16 bytes to a gather.

NCCL copies 16 bytes at a time if the parts of all ranks begin at a multiple of that, else a single byte, which was
measured to be 3.5 times slower. FSDP2 does not pad: remove this when it does (pytorch#195450).
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_qlora.ranks.shards import shard_bounds, shard_size

_ALIGNMENT = 16  # bytes


def shard_aligned(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    ignored: Collection[nn.Parameter] = frozenset(),
    **options: Any,
) -> None:
    """`fully_shard` modules as one group, with a frozen parameter more where that is not aligned.

    FSDP2 keeps it where it was found, and `with_fillers` finds it. Everything else that walks the model, such as
    loading, saving and the byte account, finds the model's own parameters only.
    """
    owners = {
        parameter: owner
        for module in modules
        for owner in module.modules()
        for parameter in owner.parameters(recurse=False)
        if parameter not in ignored and not isinstance(parameter, DTensor)  # that of a group inside
    }
    size, dtypes = shard_size(mesh), [policy.param_dtype or parameter.dtype for parameter in owners]
    shapes = [(shard_bounds(len(each), rank=0, size=size)[1], *each.shape[1:]) for each in owners]
    part = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    owner, filler = next(iter(owners.values()), modules[0]), nn.Module()
    if size > 1 and (missing := -part % _ALIGNMENT):
        # A dtype that the group has, so that it is gathered as before; the smallest, which fills any gap.
        dtype = min(dtypes, key=lambda dtype: dtype.itemsize)
        device = next(iter(owners)).device  # meta, but where a model has its weights already
        filling = torch.zeros(size, missing // dtype.itemsize, dtype=dtype, device=device)
        filler.weight = nn.Parameter(filling, requires_grad=False)
    owner.gather_filler = filler
    fully_shard([*modules], mesh=mesh, mp_policy=policy, ignored_params={*ignored}, **options)
    del owner.gather_filler
    owner.gather_fillers = [*with_fillers(owner)[1:], filler]  # type: ignore[assignment]  # in a list: no submodule


def with_fillers(module: nn.Module) -> list[nn.Module]:
    """A module, and what fills the groups whose first parameter it has."""
    return [module, *getattr(module, "gather_fillers", [])]
