"""The QUANTIZERS table, and the replacement of a meta model's layers by quantized ones.

A quantizer is a module with one subclass of QuantizedWeight, and one row of QUANTIZERS.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from fsdp_qlora.model.quantizers.base import QuantizedExperts, QuantizedLinear
from fsdp_qlora.model.quantizers.bnb_4bit import Bnb4bitWeight
from fsdp_qlora.model.quantizers.e2m1 import Mxfp4Weight, Nvfp4Weight
from fsdp_qlora.model.quantizers.fp8 import Fp8Weight
from fsdp_qlora.model.quantizers.hqq import HqqWeight
from fsdp_qlora.model.quantizers.int8 import Int8Weight
from fsdp_qlora.model.quantizers.routed import is_transposed


class Quantizer(NamedTuple):
    """The classes that replace linear layers and experts.

    experts: None if the quantizer does not support them.
    """

    linear: type[QuantizedLinear]
    experts: type[QuantizedExperts] | None


# QuantizedLinear and QuantizedExperts are the first base: their __init__ passes the shape of what
# they replace on to the class of the weight.


class Bnb4bitLinear(QuantizedLinear, Bnb4bitWeight):
    """A linear layer in NF4 or FP4 as bitsandbytes packs it."""


class Bnb4bitExperts(QuantizedExperts, Bnb4bitWeight):
    """Experts in NF4 or FP4 as bitsandbytes packs it."""


class HqqLinear(QuantizedLinear, HqqWeight):
    """A linear layer in HQQ's codes of 8, 4, 3 or 2 bits."""


class HqqExperts(QuantizedExperts, HqqWeight):
    """Experts in HQQ's codes of 8, 4, 3 or 2 bits."""


class Int8Linear(QuantizedLinear, Int8Weight):
    """A linear layer in LLM.int8."""


class Mxfp4Linear(QuantizedLinear, Mxfp4Weight):
    """A linear layer in MXFP4."""


class Mxfp4Experts(QuantizedExperts, Mxfp4Weight):
    """Experts in MXFP4."""


class Nvfp4Linear(QuantizedLinear, Nvfp4Weight):
    """A linear layer in NVFP4."""


class Nvfp4Experts(QuantizedExperts, Nvfp4Weight):
    """Experts in NVFP4."""


class Fp8Linear(QuantizedLinear, Fp8Weight):
    """A linear layer in FP8."""


class Fp8Experts(QuantizedExperts, Fp8Weight):
    """Experts in FP8."""


QUANTIZERS: dict[str, Quantizer] = {
    "bnb_4bit": Quantizer(Bnb4bitLinear, Bnb4bitExperts),
    "hqq": Quantizer(HqqLinear, HqqExperts),
    # bitsandbytes' int8 product takes one matrix.
    "int8": Quantizer(Int8Linear, experts=None),
    "mxfp4": Quantizer(Mxfp4Linear, Mxfp4Experts),
    "nvfp4": Quantizer(Nvfp4Linear, Nvfp4Experts),
    "fp8": Quantizer(Fp8Linear, Fp8Experts),
}


def quantize_layers(
    model: nn.Module, linears: Iterable[str], experts: Iterable[str], quantizer: str, **options: Any
) -> bool:
    """Replace linear layers and 3-D expert parameters of a meta model by quantized ones.

    options: of the layers.

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
        layer_options = dict(options)
        # Files have gate and up as two tensors, so that each expert's matrix has two global scales.
        if "num_parts" in options and leaf.startswith("gate_up"):
            layer_options["num_parts"] = 2
        layer = classes.experts(parameter, transposed=is_transposed(parent), **layer_options)
        if layer.supports():
            delattr(parent, leaf)
            parent.add_module(leaf, layer)
            replaced = True
    return replaced
