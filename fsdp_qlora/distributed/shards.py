"""The device mesh, and the rows of a parameter that each rank keeps."""

import datetime

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_qlora.distributed.ranks import Ranks

# Renamed in torch 2.13; 2.11 has only the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def build_mesh(ranks: Ranks, *, sharding_strategy: str) -> DeviceMesh:
    """Arrange the ranks as [replicate, shard], or as [shard] if there is one copy of the model."""
    layout = ranks.layout(sharding_strategy)
    if layout.num_replicas == 1:
        return init_device_mesh(ranks.device.type, (layout.num_shards,), mesh_dim_names=("shard",))
    sizes = (layout.num_replicas, layout.num_shards)
    mesh = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=("replicate", "shard"))
    # init_device_mesh has no option for it.
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(timeout_of_world(), group)
    return mesh


def timeout_of_world() -> datetime.timedelta:
    """The timeout of the group of all ranks.

    torch gives 30 minutes to other groups, whatever the one of all ranks has.
    """
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
    # torch's fake group has none
    return options._timeout if options else dist.distributed_c10d.default_pg_timeout


def shard_size(mesh: DeviceMesh) -> int:
    """Number of ranks that share one copy of the model."""
    return mesh["shard"].size()


def shard_rank(mesh: DeviceMesh) -> int:
    return mesh["shard"].get_local_rank()


def shard_bounds(num_rows: int, *, rank: int, size: int) -> tuple[int, int]:
    """The rows [start, stop) of dim 0 that FSDP2 gives to `rank` of `size`, as in `torch.chunk`."""
    # Ranks at the end may get fewer rows, or none.
    chunk = -(-num_rows // size)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


def own_rows(parameter: torch.Tensor, mesh: DeviceMesh) -> tuple[int, int]:
    """The rows [start, stop) of a parameter that this rank keeps."""
    return shard_bounds(parameter.shape[0], rank=shard_rank(mesh), size=shard_size(mesh))


def padded_rows(parameter: torch.Tensor) -> int:
    """Number of rows that FSDP2 gathers from every rank: as many as the first has, with padding."""
    assert isinstance(parameter, DTensor)
    return shard_bounds(parameter.shape[0], rank=0, size=shard_size(parameter.device_mesh))[1]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def store_rows(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` into this rank's rows of a parameter (all rows if it is not sharded)."""
    # In place: FSDP2 and the optimizer have views of this memory. It also casts and moves.
    local = local_part(parameter)
    local.copy_(values.view(local.shape))


def gather_rows(local: torch.Tensor, num_rows: int, mesh: DeviceMesh) -> torch.Tensor:
    """All-gather a tensor that `shard_bounds` has split along dim 0.

    Returns [num_rows, ...] on every rank. Collective.
    """
    size = shard_size(mesh)
    chunk = -(-num_rows // size)
    dims = local.shape[1:]
    padded = local.contiguous()
    # An all-gather needs the same size from every rank. Only the last ranks have fewer rows, so the
    # padding is behind `num_rows`.
    if len(local) < chunk:
        padded = torch.cat([local, local.new_zeros((chunk - len(local), *dims))])
    whole = local.new_empty((chunk * size, *dims))
    all_gather(whole, padded, group=mesh["shard"].get_group())
    return whole[:num_rows]
