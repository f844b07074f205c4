"""Initial values of sharded adapters, and the product that some of them subtract from the base.

Shapes of a decomposition: weight [out, in] float32, A [rank, in], B [out, rank]; `scaling` is the factor of B A in the
adapted layer.
"""

import functools
import logging
import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_qlora.distributed.ranks import derive_seed
from fsdp_qlora.distributed.shards import gather_rows, own_rows, store_rows, whole_weights
from fsdp_qlora.model.adapters.dora import DoraLinear
from fsdp_qlora.model.adapters.insert import adapter_parameters, full_parameters
from fsdp_qlora.model.adapters.lora import KeptShard, LoraLinear
from fsdp_qlora.model.architecture.models import canonical_name, find_blocks
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

Factors = tuple[torch.Tensor, torch.Tensor]  # A and B

_PIECE = 2**22  # weights from which the product is subtracted at a time


def check_init(model: nn.Module, init: str, *, prequantized: bool) -> None:
    """Refuse initial values that need a model that is not quantized yet, or a larger rank than a weight has."""
    if init == "true":
        return
    if prequantized:
        raise UserError(
            f"init_lora_weights {init} is computed from the weights before they are quantized, and this model is "
            "quantized already. Give the model with 16- or 32-bit weights, or leave init_lora_weights at true."
        )
    for name, layer in adapted_weights(model).items():
        rank, most = layer.lora.lora_A.out_features, min(layer.lora.lora_A.in_features, layer.lora.lora_B.out_features)
        if rank > most:
            raise UserError(
                f"init_lora_weights {init}: the rank for {name} is {rank}, and its shape allows at most {most}. "
                "Lower --lora_rank."
            )


def adapted_weights(model: nn.Module) -> dict[str, LoraLinear]:
    """Name of a weight in the files -> the layer that adapts it, in the order of the model."""
    layers = ((path, module) for path, module in model.named_modules() if isinstance(module, LoraLinear))
    return {f"{canonical_name(path)}.weight": layer for path, layer in layers}


def first_adapter_value(name: str, shape: torch.Size, *, seed: int) -> torch.Tensor:
    """PEFT's initial A (Kaiming-uniform, a = sqrt(5)) or B (zero), float32 on the CPU.

    The value depends only on name, shape and seed, not on the number of ranks. With B = 0 the model starts as the base.
    """
    value = torch.zeros(shape)
    if name.endswith("lora_A.weight"):
        generator = torch.Generator().manual_seed(derive_seed("lora", seed, name))
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


def initialize_adapters(model: nn.Module, mesh: DeviceMesh, *, seed: int) -> None:
    """Set every A and B of a sharded model to its initial value. `set_magnitudes` sets DoRA's magnitudes."""
    for name, parameter in adapter_parameters(model):
        if "magnitude" not in name:
            first, last = own_rows(parameter, mesh)
            store_rows(parameter, first_adapter_value(name, parameter.shape, seed=seed)[first:last])


class Values(Protocol):
    """The trained values to save, from a model in training or from a checkpoint."""

    @property
    def keeps(self) -> bool:
        """Whether this rank keeps and writes the values. Other ranks only take part in gathering."""

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole value of a parameter or buffer of the model. Collective."""

    def start(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The A or B whose product was subtracted from the base on loading, None if there is none."""


class LiveValues:
    """The values of a model in training, gathered from its shards."""

    def __init__(self, model: nn.Module, *, keeps: bool) -> None:
        self.keeps, self._model = keeps, model

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return tensor
        return gather_rows(tensor.to_local(), tensor.shape[0], tensor.device_mesh)

    def start(self, parameter: torch.Tensor) -> torch.Tensor | None:
        shard = self._subtracted.get(parameter)
        return shard.whole() if shard else None

    @functools.cached_property  # at first use, not in __init__: during a forward pass the model has other parameters
    def _subtracted(self) -> dict[torch.Tensor, KeptShard]:
        return {parameter: shard for _, parameter, shard in _subtracted(self._model)}


def start_values(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Name of a parameter A or B -> the value whose product was subtracted from the base, exact in bf16, on the CPU.

    Collective. Empty without `keep`.
    """
    wholes = ((name, shard.whole()) for name, _, shard in _subtracted(model))  # one at a time on the device
    return {name: whole.to("cpu", torch.bfloat16) for name, whole in wholes if keep}


def _subtracted(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, KeptShard]]:
    """(name, parameter, subtracted value) of every A and B whose product was subtracted from the base."""
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLinear) and layer.subtracted:
            for key, shard in zip(("lora_A", "lora_B"), layer.subtracted, strict=True):
                yield f"{canonical_name(path)}.lora.{key}.weight", layer.lora.get_parameter(f"{key}.weight"), shard


@torch.no_grad()
def saved_parameters(model: nn.Module, values: Values) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in PEFT's file, whole value) of the adapter for the original base. Collective.

    If training used the base W - s B0 A0, the saved update is s (B A - B0 A0), with twice the rank: [A; A0], [B, -B0].
    """
    for name, parameter in adapter_parameters(model):
        whole, start = values.whole(parameter), values.start(parameter)
        if start is not None and name.endswith("lora_A.weight"):
            whole = torch.cat([whole, start.to(whole)], dim=0)
        elif start is not None:
            whole = torch.cat([whole, -start.to(whole)], dim=1)
        yield name, whole
    for name, parameter in full_parameters(model):
        yield name, values.whole(parameter)


def subtract(layer: LoraLinear, values: torch.Tensor, start: int) -> torch.Tensor:
    """`subtract_product` with the layer's initial A and B. Collective."""
    assert layer.subtracted is not None
    lora_A, lora_B = (factor.whole().to(values.device) for factor in layer.subtracted)
    return subtract_product(values, start, lora_A, lora_B, layer.lora.scaling)


@torch.no_grad()
def subtract_product(
    values: torch.Tensor, start: int, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Compute W - s B A for `values`, the elements of the flattened W from `start` on, in float64. Returns float32."""
    lora_A, lora_B, columns = lora_A.double(), lora_B.double(), lora_A.shape[1]
    stop, rows = start + values.numel(), max(1, _PIECE // columns)
    rest = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    for row in range(start // columns, -(-stop // columns), rows):
        update = (torch.mm(lora_B[row : row + rows], lora_A) * scaling).flatten()
        begin = row * columns
        first, last = max(start, begin), min(stop, begin + update.numel())
        rest[first - start : last - start] = values[first - start : last - start] - update[first - begin : last - begin]
    return rest


def set_magnitudes(model: nn.Module, mesh: DeviceMesh) -> None:
    """Initialize DoRA's magnitudes with the row norms of the quantized base, so adapted layer and base layer are equal.

    A block is gathered as in a forward pass, and its weights are decoded one at a time. So this works for every
    quantizer, and a row's norm does not depend on how it is sharded.
    """
    for block in find_blocks(model):
        adapted = [module for module in block.modules() if isinstance(module, DoraLinear)]
        if not adapted:
            continue
        assert isinstance(block, FSDPModule)
        with whole_weights(block):
            for layer in adapted:
                magnitude = layer.lora.magnitude
                squares = layer.base_row_squares()
                first, last = own_rows(magnitude.weight, mesh)
                store_rows(magnitude.row_squares, squares[first:last])
                store_rows(magnitude.weight, squares[first:last].sqrt())


# --- A and B from the weight ---


def pissa(weight: torch.Tensor, rank: int, scaling: float) -> Factors:
    """The weight's `rank` largest singular values and vectors (Meng et al. 2024)."""
    # On a GPU torch's default is Jacobi's method (gesvdj), slow and inexact for matrices that large.
    driver = "gesvd" if weight.is_cuda else None
    left, values, right = torch.linalg.svd(weight, full_matrices=False, driver=driver)
    return _split_factors(left[:, :rank], values[:rank], right[:rank], scaling)


def pissa_niter(weight: torch.Tensor, rank: int, scaling: float, *, iterations: int, seed: int) -> Factors:
    """PiSSA by randomized SVD (Halko et al. 2009): much faster, slightly less accurate."""
    devices = [weight.device] if weight.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        left, values, right = torch.svd_lowrank(weight, q=rank, niter=iterations)
    return _split_factors(left, values, right.T, scaling)


def olora(weight: torch.Tensor, rank: int) -> Factors:
    """The first `rank` columns of Q and rows of R of the weight's QR decomposition (Büyükakyüz 2024)."""
    orthogonal, triangular = torch.linalg.qr(weight)
    return triangular[:rank], orthogonal[:, :rank]


def _split_factors(left: torch.Tensor, values: torch.Tensor, right: torch.Tensor, scaling: float) -> Factors:
    root = (values / scaling).sqrt()
    return root[:, None] * right, left * root
