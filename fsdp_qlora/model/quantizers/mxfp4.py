"""MXFP4: E2M1 codes in groups of 32 weights, whose scale is a power of two (E8M0; OCP Microscaling Formats 1.0)."""

import torch

from fsdp_qlora.model.quantizers.base import QuantizedExperts, QuantizedLinear
from fsdp_qlora.model.quantizers.e2m1 import E2m1Weight

_MANTISSA = 23  # bits of a float32's
_ROUND_UP = 1 << _MANTISSA - 2  # from 1.75 on a group's largest magnitude is taken for 2, as by compressed-tensors
_LARGEST_EXPONENT = 2  # of E2M1: 6 is 1.5 * 2**2


class Mxfp4Weight(E2m1Weight):
    """Weights in MXFP4. A scale's byte is the exponent of a float32, so that it is 2**(byte - 127)."""

    label = "MXFP4"
    decoding_bytes = 11.4
    group_size = 32

    def scale_values(self, codes: torch.Tensor, first: int, *others: torch.Tensor) -> torch.Tensor:
        # 2**-127 is below float32's normal numbers: it has the first bit of the mantissa.
        bits = torch.where(codes == 0, 1 << _MANTISSA - 1, codes.int() << _MANTISSA)
        return bits.int().view(torch.float32)

    def scale_codes(self, largest: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        exponent = largest.view(torch.int32) + _ROUND_UP >> _MANTISSA
        return (exponent - _LARGEST_EXPONENT).clamp(min=0).to(torch.uint8)


class Mxfp4Linear(QuantizedLinear, Mxfp4Weight):
    """A linear layer with its weight in MXFP4."""


class Mxfp4Experts(QuantizedExperts, Mxfp4Weight):
    """The experts of a layer in MXFP4."""
