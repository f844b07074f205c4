"""Initial values of sharded adapters.

Shapes of a decomposition: weight [out, in] float32, A [rank, in], B [out, rank]; `scaling` is the
factor of B A in the adapted layer.
"""

import logging
import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp_qlora.distributed.ranks import derive_seed
from fsdp_qlora.distributed.shards import own_rows, store_rows
from fsdp_qlora.model.adapters.dora import DoraLinear
from fsdp_qlora.model.adapters.insert import adapter_parameters
from fsdp_qlora.model.adapters.lora import LoraLinear
from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.model.architecture.structure import canonical_name
from fsdp_qlora.model.module_state import whole_weights
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

Factors = tuple[torch.Tensor, torch.Tensor]  # A and B


def check_init(model: nn.Module, init: str, *, prequantized: bool) -> None:
    """Refuse initial values that need an unquantized model, or a larger rank than a weight has."""
    if init == "true":
        return
    if prequantized:
        raise UserError(
            f"init_lora_weights {init} is computed from the weights before they are quantized, and "
            "this model is quantized already. Give the model with 16- or 32-bit weights, or leave "
            "init_lora_weights at true."
        )
    for name, layer in adapted_weights(model).items():
        rank = layer.lora.lora_A.out_features
        most = min(layer.lora.lora_A.in_features, layer.lora.lora_B.out_features)
        if rank > most:
            raise UserError(
                f"init_lora_weights {init}: the rank for {name} is {rank}, and its shape allows at "
                f"most {most}. Lower --lora_rank."
            )


def adapted_weights(model: nn.Module) -> dict[str, LoraLinear]:
    """Name of a weight in the files -> the layer that adapts it, in the order of the model."""
    layers: dict[str, LoraLinear] = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            layers[f"{canonical_name(path)}.weight"] = module
    return layers


def first_adapter_value(name: str, shape: torch.Size, *, seed: int) -> torch.Tensor:
    """PEFT's initial A (Kaiming-uniform, a = sqrt(5)) or B (zero), float32 on the CPU.

    The value depends only on name, shape and seed, not on the number of ranks. With B = 0 the model
    starts as the base.
    """
    value = torch.zeros(shape)
    if name.endswith("lora_A.weight"):
        # A generator for each name, on the CPU: the same numbers on every device, whatever other
        # adapters the model has.
        generator = torch.Generator().manual_seed(derive_seed("lora", seed, name))
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


def initialize_adapters(model: nn.Module, mesh: DeviceMesh, *, seed: int) -> None:
    """Set every A and B of a sharded model to its initial value.

    `set_magnitudes` sets DoRA's magnitudes.
    """
    for name, parameter in adapter_parameters(model):
        if "magnitude" not in name:
            # Each rank draws the whole matrix and keeps its rows: no communication, and the same
            # values for any number of ranks.
            whole = first_adapter_value(name, parameter.shape, seed=seed)
            first, last = own_rows(parameter, mesh)
            store_rows(parameter, whole[first:last])


def set_magnitudes(model: nn.Module, mesh: DeviceMesh) -> None:
    """Initialize DoRA's magnitudes with the row norms of the quantized base.

    Then adapted and base layer are equal. A block is gathered as in a forward pass, and its weights
    are decoded one at a time. So this works for every quantizer, and a row's norm does not depend
    on how it is sharded.
    """
    for block in find_blocks(model):
        adapted = [module for module in block.modules() if isinstance(module, DoraLinear)]
        if not adapted:
            continue
        assert isinstance(block, FSDPModule)
        # Collective. Blocks and their layers are the same on all ranks.
        with whole_weights(block):
            for layer in adapted:
                magnitude = layer.lora.magnitude
                squares = layer.base_row_squares()
                first, last = own_rows(magnitude.weight, mesh)
                store_rows(magnitude.row_squares, squares[first:last])
                store_rows(magnitude.weight, squares[first:last].sqrt())


def principal_factors(weight: torch.Tensor, rank: int, scaling: float) -> Factors:
    """A and B whose scaled product is the nearest matrix of this rank to the weight.

    By Eckart and Young these are the largest singular values and their vectors.
    """
    # On a GPU torch's default is Jacobi's method (gesvdj), slow and inexact for matrices that
    # large.
    driver = "gesvd" if weight.is_cuda else None
    left, values, right = torch.linalg.svd(weight, full_matrices=False, driver=driver)
    # A and B each get the root of a singular value, as in LoftQ (Li et al. 2023).
    root = (values[:rank] / scaling).sqrt()
    return root[:, None] * right[:rank], left[:, :rank] * root
