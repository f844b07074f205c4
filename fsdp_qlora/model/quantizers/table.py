"""The QUANTIZERS table, and the replacement of a meta model's layers by quantized ones.

A quantizer is a module with one subclass of QuantizedWeight, the layers built on it, and one row of QUANTIZERS.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from fsdp_qlora.model.quantizers.base import QuantizedExperts, QuantizedLinear
from fsdp_qlora.model.quantizers.bnb_4bit import Bnb4bitExperts, Bnb4bitLinear
from fsdp_qlora.model.quantizers.e2m1 import Mxfp4Experts, Mxfp4Linear, Nvfp4Experts, Nvfp4Linear
from fsdp_qlora.model.quantizers.fp8 import Fp8Experts, Fp8Linear
from fsdp_qlora.model.quantizers.hqq import HqqExperts, HqqLinear
from fsdp_qlora.model.quantizers.int8 import Int8Linear
from fsdp_qlora.model.quantizers.routed import is_transposed


class Quantizer(NamedTuple):
    """The classes that replace linear layers and experts. experts: None if the quantizer does not support them."""

    linear: type[QuantizedLinear]
    experts: type[QuantizedExperts] | None


QUANTIZERS: dict[str, Quantizer] = {
    "bnb_4bit": Quantizer(Bnb4bitLinear, Bnb4bitExperts),
    "hqq": Quantizer(HqqLinear, HqqExperts),
    "int8": Quantizer(Int8Linear, None),
    "mxfp4": Quantizer(Mxfp4Linear, Mxfp4Experts),
    "nvfp4": Quantizer(Nvfp4Linear, Nvfp4Experts),
    "fp8": Quantizer(Fp8Linear, Fp8Experts),
}


def quantize_layers(
    model: nn.Module, linears: Iterable[str], experts: Iterable[str], quantizer: str, **options: Any
) -> bool:
    """Replace linear layers and 3-D expert parameters of a meta model by quantized ones with these `options`.

    Returns whether there were experts that the quantizer could replace.
    """
    classes, replaced = QUANTIZERS[quantizer], False
    for name in linears:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), name
        model.set_submodule(name, classes.linear(linear, **options))
    for name in experts if classes.experts else ():
        path, _, leaf = name.rpartition(".")
        parent, parameter = model.get_submodule(path), model.get_parameter(name)
        assert classes.experts is not None
        own = {"num_parts": 2} if "num_parts" in options and leaf.startswith("gate_up") else {}  # two in the files
        layer = classes.experts(parameter, transposed=is_transposed(parent), **{**options, **own})
        if layer.supports():
            delattr(parent, leaf)
            parent.add_module(leaf, layer)
            replaced = True
    return replaced
