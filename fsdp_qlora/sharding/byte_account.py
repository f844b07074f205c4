"""Counts a model's parameters and their bytes by category, for the plan and for the proof of sharding."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from fsdp_qlora.adapters.insert import adapter_modules
from fsdp_qlora.model.models import find_blocks
from fsdp_qlora.quantizers.base import QuantizedWeight
from fsdp_qlora.ranks.distributed import shard_bounds


@dataclass(frozen=True)
class CategoryBytes:
    """Bytes of one category. largest_shard: bytes on the fullest rank (the first)."""

    total: int
    largest_shard: int


class Counted(NamedTuple):
    """A parameter and its category.

    category: codes (quantized weights), statistics (of these), frozen (other frozen weights) or trainable.
    num_weights: number of the model's weights in it: a quantized layer's for its codes, none for statistics.
    """

    parameter: nn.Parameter
    category: str
    num_weights: int
    in_adapter: bool


def each_parameter(model: nn.Module) -> list[Counted]:
    """Every parameter of a model, sharded or on the meta device; tied parameters once."""
    adapters = {id(parameter) for adapter in adapter_modules(model) for parameter in adapter.parameters()}
    found: dict[int, Counted] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in found:
                category, num_weights = _classify(module, name, parameter)
                found[id(parameter)] = Counted(parameter, category, num_weights, id(parameter) in adapters)
    return list(found.values())


def _classify(module: nn.Module, name: str, parameter: nn.Parameter) -> tuple[str, int]:
    if parameter.requires_grad:
        return "trainable", parameter.numel()
    if isinstance(module, QuantizedWeight) and name in module.statistics:
        return "statistics", 0
    if isinstance(module, QuantizedWeight) and name == "weight":
        return "codes", math.prod(module.shape)
    return "frozen", parameter.numel()


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Number of parameters: total (the base model's), in_blocks (those frozen there), quantized, trainable."""
    blocks = {id(parameter) for parameter in find_blocks(model).parameters()}
    parameters = each_parameter(model)
    base = [counted for counted in parameters if not counted.in_adapter]
    frozen = [counted for counted in base if counted.category != "trainable"]
    return {
        "total": sum(counted.num_weights for counted in base),
        "in_blocks": sum(counted.num_weights for counted in frozen if id(counted.parameter) in blocks),
        "quantized": sum(counted.num_weights for counted in base if counted.category == "codes"),
        "trainable": sum(counted.num_weights for counted in parameters if counted.category == "trainable"),
    }


def count_bytes(model: nn.Module, num_shards: int) -> dict[str, CategoryBytes]:
    """Bytes by category of a model, sharded or on the meta device, over `num_shards` ranks."""
    counts: dict[str, CategoryBytes] = {}
    for parameter, category, *_ in each_parameter(model):
        row_bytes = parameter.numel() // max(parameter.shape[0], 1) * parameter.element_size()
        _, rows = shard_bounds(parameter.shape[0], rank=0, size=num_shards)
        so_far = counts.get(category, CategoryBytes(0, 0))
        counts[category] = CategoryBytes(
            so_far.total + parameter.shape[0] * row_bytes, so_far.largest_shard + rows * row_bytes
        )
    return counts
