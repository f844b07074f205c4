"""Sharded adapters of any shapes, for tests of optimizers: in one buffer, as in a run, or each in memory of its own."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.adapters.lora import LoraAdapter


class Adapter(LoraAdapter):
    def __init__(self, shape: tuple[int, ...]) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.empty(shape, device="meta"))


class Adapters(nn.Module):
    """Its parameters are named layer.NAME.weight."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({name: Adapter(shape) for name, shape in shapes.items()})

    def tie_weights(self) -> None:
        pass


def sharded_adapters(values: Mapping[str, torch.Tensor], mesh: DeviceMesh, *, side_by_side: bool) -> nn.Module:
    """A model of one adapter parameter for each of `values`, which it has on every rank."""
    from torch.distributed.fsdp import fully_shard

    from fsdp_qlora.distributed import own_rows, store_rows
    from fsdp_qlora.sharding.parallelize import materialize

    model = Adapters({name: tuple(value.shape) for name, value in values.items()})
    fully_shard(model, mesh=mesh)
    if side_by_side:
        materialize(model, torch.device("cpu"), cpu_offload=False)  # type: ignore[arg-type]
    else:
        model.to_empty(device="cpu")
    for path, parameter in model.named_parameters():
        store_rows(parameter, values[path.split(".")[1]][slice(*own_rows(parameter, mesh))])
    return model
