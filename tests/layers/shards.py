"""What ranks hold of quantized weights, for tests of layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_qlora.model.quantizers.base import QuantizedLinear
from tests.helpers.run import on_ranks

# Rows that ranks cannot share equally; weights that do not fill blocks of 64, nor the ranks with
# blocks; odd rows.
SHAPES = [(128, 64), (7, 64), (5, 52), (3, 33), (300, 130), (1, 16)]
Make = Callable[..., tuple[QuantizedLinear, torch.Tensor]]


def weight_of(shape: tuple[int, ...]) -> torch.Tensor:
    return 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference).norm() / reference.norm()).item()


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation takes or returns."""

    def __init__(self, namespace: str = "") -> None:
        """namespace: of the operations; empty for all."""
        super().__init__()
        self.namespace = namespace
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace.startswith(self.namespace):
            results = result if isinstance(result, list | tuple) else [result]
            tensors = [each for each in (*args, *results) if isinstance(each, torch.Tensor)]
            self.elements = max(self.elements, *(tensor.numel() for tensor in tensors), 0)
        return result


def _save_shards(make: Make, keys: list[Any], folder: Path) -> int:
    from torch.distributed.fsdp import fully_shard

    from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
    from fsdp_qlora.distributed.ranks import read_ranks
    from fsdp_qlora.distributed.shards import build_mesh

    ranks = read_ranks()
    start_process_group(ranks)
    mesh = build_mesh(ranks, sharding_strategy="full_shard")
    saved = {}
    for number, key in enumerate(keys):
        layer, weight = make(*key)
        fully_shard(layer, mesh=mesh)
        layer.to_empty(device="cpu")
        start, stop = layer.shard_range(mesh)
        layer.load_shard(weight.flatten()[start:stop], mesh)
        for name, parameter in layer.named_parameters():
            saved[f"{number} {name}"] = parameter.to_local().reshape(-1).view(torch.uint8).clone()
        saved |= {f"{number} {name}": buffer.clone() for name, buffer in layer.named_buffers()}
        layer.unshard()
        saved[f"{number} decoded"] = layer.dequantize().clone()
    save_file(saved, folder / f"{ranks.rank}.safetensors")
    stop_process_group()
    return 0


def shards(
    world_size: int, make: Make, keys: list[Any], folder: Path
) -> list[list[dict[str, torch.Tensor]]]:
    """Quantize over the ranks, as a run does.

    Args:
        make: gives for make(*key) a layer on the meta device and the weight that it is to hold.

    Returns:
        For each key what each rank has: the bytes of its parameters' shards, buffers, and
        "decoded", the weight.
    """
    statuses, output = on_ranks(world_size, _save_shards, (make, keys, folder), folder / "logs")
    assert statuses == [0] * world_size, output
    found: list[list[dict[str, torch.Tensor]]] = [[{} for _ in range(world_size)] for _ in keys]
    for rank in range(world_size):
        for name, value in load_file(folder / f"{rank}.safetensors").items():
            number, name = name.split(" ", 1)
            found[int(number)][rank][name] = value
    return found
