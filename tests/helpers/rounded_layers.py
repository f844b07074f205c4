"""Layers of quantizers with weights of given values, in all formats that are rounded again."""

from typing import Any

import torch
from torch import nn

from fsdp_qlora.model.quantizers.e2m1 import global_scale
from fsdp_qlora.model.quantizers.stored import write_bytes
from fsdp_qlora.model.quantizers.table import QUANTIZERS

# Name -> quantizer and the options of its layers.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 rows": ("fp8", {}),
    "fp8 blocks": ("fp8", {"block": (16, 16)}),
    "fp8 whole": ("fp8", {"num_parts": 1}),
    "nvfp4": ("nvfp4", {"num_parts": 1}),
    "mxfp4": ("mxfp4", {}),
    "nf4": ("bnb_4bit", {"quant_type": "nf4", "double_quant": True}),
    "nf4 single": ("bnb_4bit", {"quant_type": "nf4", "double_quant": False}),
}


def filled(form: str, values: torch.Tensor, **more: Any) -> Any:
    """A layer on the CPU whose weight [out, in] has these values, rounded. more: options."""
    kind, options = FORMS[form]
    linear = nn.Linear(*reversed(values.shape), bias=False, device="meta")
    layer: Any = QUANTIZERS[kind].linear(linear, compute_dtype=torch.bfloat16, **options, **more)
    layer.to_empty(device="cpu")
    if kind == "fp8":
        scale = torch.full_like(layer.scale, float(values.abs().max() / 448))
        write_bytes(layer.weight, (values / scale.max()).to(torch.float8_e4m3fn))
        write_bytes(layer.scale, scale)
        return layer
    if kind == "nvfp4":
        tensors = layer.quantize(values, global_scale(values.abs().max()))
    else:
        tensors = layer.quantize(values)
    if options.get("double_quant"):
        absmax, nested = layer.quantize_absmax(tensors.absmax)
        tensors = tensors._replace(absmax=absmax)
        write_bytes(layer.nested_absmax, nested)
    for name in ("weight", "scale", "absmax", "global_scale"):
        if getattr(tensors, name, None) is not None:
            write_bytes(getattr(layer, name), getattr(tensors, name))
    return layer
