"""Bytes by category, of a model on the meta device or sharded: for the plan and for the proof."""

from dataclasses import dataclass

from torch import nn

from fsdp_qlora.distributed import shard_bounds
from fsdp_qlora.quantizers.base import QuantizedWeight


@dataclass(frozen=True)
class Tensors:
    """Bytes of one category. largest_shard: what the fullest rank (the first) keeps of it."""

    total: int
    largest_shard: int


def _category(module: nn.Module, name: str, parameter: nn.Parameter) -> str:
    if parameter.requires_grad:
        return "trainable"
    if isinstance(module, QuantizedWeight):
        return "statistics" if name in module.statistics else "codes" if name == "weight" else "frozen"
    return "frozen"


def each_parameter(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(category, parameter), tied ones once."""
    seen: set[int] = set()
    found = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((_category(module, name, parameter), parameter))
    return found


def count_bytes(model: nn.Module, num_shards: int) -> dict[str, Tensors]:
    """Bytes by category of a model, sharded or on the meta device, over `num_shards` ranks.

    Categories: codes (quantized weights), statistics, frozen (other frozen weights), trainable.
    """
    counts: dict[str, Tensors] = {}
    for category, parameter in each_parameter(model):
        row_bytes = parameter.numel() // max(parameter.shape[0], 1) * parameter.element_size()
        _, rows = shard_bounds(parameter.shape[0], rank=0, size=num_shards)
        so_far = counts.get(category, Tensors(0, 0))
        counts[category] = Tensors(
            so_far.total + parameter.shape[0] * row_bytes, so_far.largest_shard + rows * row_bytes
        )
    return counts
