"""The first values of adapters, in the shards where they stay."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp_qlora.adapters import adapter_parameters, first_adapter_value
from fsdp_qlora.distributed import own_rows, store_rows
from fsdp_qlora.dora import DoraLinear
from fsdp_qlora.models import find_blocks


def initialize_adapters(model: nn.Module, mesh: DeviceMesh, *, seed: int) -> None:
    """Give every adapter of a sharded and loaded model its first values. Every rank calls it."""
    for name, parameter in adapter_parameters(model):
        if "magnitude" not in name:
            whole = first_adapter_value(name, parameter.shape, seed=seed)
            first, last = own_rows(parameter, mesh)
            store_rows(parameter, whole[first:last])
    set_magnitudes(model, mesh)


def set_magnitudes(model: nn.Module, mesh: DeviceMesh) -> None:
    """DoRA starts from the lengths of the base's rows, as it was quantized: the adapted layer is the base layer.

    A block is gathered as in a forward pass, and one of its weights decoded at a time. So this holds for every
    quantizer, and a row's sum does not depend on which ranks hold its parts.
    """
    for block in find_blocks(model):
        adapted = [module for module in block.modules() if isinstance(module, DoraLinear)]
        if not adapted:
            continue
        assert isinstance(block, FSDPModule)
        block.unshard()
        for layer in adapted:
            magnitude = layer.lora.magnitude
            squares = layer.base_row_squares()
            first, last = own_rows(magnitude.weight, mesh)
            store_rows(magnitude.row_squares, squares[first:last])
            store_rows(magnitude.weight, squares[first:last].sqrt())
        block.reshard()
