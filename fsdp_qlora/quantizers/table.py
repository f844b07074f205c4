"""The QUANTIZERS table, and the functions that replace a meta model's layers by quantized ones.

A quantizer is a module with one subclass of QuantizedWeight, the layers built on it, and one row of QUANTIZERS.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

from fsdp_qlora.quantizers.base import QuantizedExperts, QuantizedLinear
from fsdp_qlora.quantizers.bnb_4bit import Bnb4bitExperts, Bnb4bitLinear
from fsdp_qlora.quantizers.experts import is_transposed
from fsdp_qlora.quantizers.hqq import HqqExperts, HqqLinear
from fsdp_qlora.quantizers.int8 import Int8Linear


class Quantizer(NamedTuple):
    """Layer classes for the linear layers and for the experts of a model; None if experts cannot be quantized."""

    linear: Callable[..., QuantizedLinear]
    experts: Callable[..., QuantizedExperts] | None


QUANTIZERS: dict[str, Quantizer] = {
    "bnb_4bit": Quantizer(Bnb4bitLinear, Bnb4bitExperts),
    "hqq": Quantizer(HqqLinear, HqqExperts),
    "int8": Quantizer(Int8Linear, None),
}


def quantize_linears(model: nn.Module, names: Iterable[str], quantizer: str, **options: Any) -> None:
    """Replace the linear layers of a meta model by quantized ones; `options` are the quantizer's own."""
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), name
        model.set_submodule(name, QUANTIZERS[quantizer].linear(linear, **options))


def quantize_experts(model: nn.Module, names: Iterable[str], quantizer: str, **options: Any) -> list[str]:
    """Replace the 3-D expert parameters of a meta model, where the quantizer can; returns the replaced names."""
    layer_class = QUANTIZERS[quantizer].experts
    replaced: list[str] = []
    if layer_class is None:
        return replaced
    for name in names:
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        experts = layer_class(model.get_parameter(name), transposed=is_transposed(parent), **options)
        if experts.supports():
            delattr(parent, leaf)
            parent.add_module(leaf, experts)
            replaced.append(name)
    return replaced
