"""The QUANTIZERS table, and the replacement of a meta model's layers by quantized ones.

A quantizer is a module with one subclass of QuantizedWeight, and one row of QUANTIZERS.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from fsdp_qlora.model.quantizers.base import QuantizedExperts, QuantizedLinear, QuantizedWeight
from fsdp_qlora.model.quantizers.bnb_4bit import Bnb4bitWeight
from fsdp_qlora.model.quantizers.e2m1 import Mxfp4Weight, Nvfp4Weight
from fsdp_qlora.model.quantizers.fp8 import Fp8Weight
from fsdp_qlora.model.quantizers.hqq import HqqWeight
from fsdp_qlora.model.quantizers.int8 import Int8Weight
from fsdp_qlora.model.quantizers.routed import is_transposed


class Quantizer(NamedTuple):
    """The classes that replace linear layers and experts. experts: None if the quantizer does not
    support them.
    """

    linear: type[QuantizedLinear]
    experts: type[QuantizedExperts] | None


def _layers_of(weight: type[QuantizedWeight], *, has_experts: bool = True) -> Quantizer:
    """The layers that keep such weights, named as their class: Fp8Linear and Fp8Experts of
    Fp8Weight.
    """
    name = weight.__name__.removesuffix("Weight")
    linear: Any = type(f"{name}Linear", (QuantizedLinear, weight), {})
    experts: Any = type(f"{name}Experts", (QuantizedExperts, weight), {}) if has_experts else None
    return Quantizer(linear, experts)


QUANTIZERS: dict[str, Quantizer] = {
    "bnb_4bit": _layers_of(Bnb4bitWeight),
    "hqq": _layers_of(HqqWeight),
    "int8": _layers_of(Int8Weight, has_experts=False),
    "mxfp4": _layers_of(Mxfp4Weight),
    "nvfp4": _layers_of(Nvfp4Weight),
    "fp8": _layers_of(Fp8Weight),
}


def quantize_layers(
    model: nn.Module, linears: Iterable[str], experts: Iterable[str], quantizer: str, **options: Any
) -> bool:
    """Replace linear layers and 3-D expert parameters of a meta model by quantized ones with these
    `options`.

    Returns whether there were experts that the quantizer could replace.
    """
    classes = QUANTIZERS[quantizer]
    replaced = False
    for name in linears:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), name
        model.set_submodule(name, classes.linear(linear, **options))
    for name in experts if classes.experts else ():
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        parameter = model.get_parameter(name)
        assert classes.experts is not None
        # two in the files
        own = {"num_parts": 2} if "num_parts" in options and leaf.startswith("gate_up") else {}
        layer = classes.experts(parameter, transposed=is_transposed(parent), **(options | own))
        if layer.supports():
            delattr(parent, leaf)
            parent.add_module(leaf, layer)
            replaced = True
    return replaced
