"""NVFP4: E2M1 codes in groups of 16 weights with a scale in FP8 (E4M3), and a float32 scale for the whole weight."""

import math

import torch

from fsdp_qlora.model.quantizers.base import QuantizedExperts, QuantizedLinear, StoredParameter
from fsdp_qlora.model.quantizers.e2m1 import LARGEST, E2m1Weight
from fsdp_qlora.utils.safetensors_files import TensorForm

_LARGEST_SCALE = torch.finfo(torch.float8_e4m3fn).max
_SCALE_OF_ZEROS = 0.125  # compressed-tensors' for a group without a magnitude


class Nvfp4Weight(E2m1Weight):
    """Weights in NVFP4: code * scale / global_scale.

    Parameters beside those of `E2m1Weight`:
        global_scale: float32 [parts, 1], each of an equal part of the flattened weight; one if it was quantized here.
    Args:
        num_parts: equal parts of each matrix that have a global scale of their own; 0 if one is for all matrices.
        multiplies: whether global scales are factors (modelopt) and not divisors (compressed-tensors).
    """

    label = "NVFP4"
    decoding_bytes = 11.6
    group_size = 16
    statistics = ("scale", "global_scale")

    def __init__(
        self, shape: tuple[int, ...], *, compute_dtype: torch.dtype, num_parts: int = 0, multiplies: bool = False
    ) -> None:
        super().__init__(shape, compute_dtype=compute_dtype)
        self.multiplies = multiplies
        parts = num_parts * math.prod(shape[:-2]) or 1
        self.global_scale = self._storage(parts, 4, torch.float32)

    def scale_values(self, codes: torch.Tensor, first: int, *others: torch.Tensor) -> torch.Tensor:
        (of_part,) = others
        values, of_part = codes.view(torch.float8_e4m3fn).float(), of_part.view(-1)
        if len(of_part) > 1:
            groups_of_part = math.prod(self.shape) // self.group_size // len(of_part)
            of_part = of_part[torch.arange(first, first + len(codes), device=codes.device) // groups_of_part]
        return values.mul_(of_part) if self.multiplies else values.div_(of_part)

    def scale_codes(self, largest: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        scales, of_all = largest / LARGEST, others[0].view(())
        scales = scales / of_all if self.multiplies else of_all * scales
        scales = scales.clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)
        return torch.where(scales.float() == 0, _SCALE_OF_ZEROS, scales.float()).to(scales.dtype).view(torch.uint8)

    def others_of(self, largest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (global_scale(largest).view(1, 1),)

    def stored_parameters(self) -> dict[str, StoredParameter]:
        form = TensorForm(torch.float32, (len(self.global_scale),))
        return {**super().stored_parameters(), ".global_scale": StoredParameter("global_scale", form)}


class Nvfp4Linear(QuantizedLinear, Nvfp4Weight):
    """A linear layer with its weight in NVFP4."""


class Nvfp4Experts(QuantizedExperts, Nvfp4Weight):
    """The experts of a layer in NVFP4."""


def global_scale(largest: torch.Tensor) -> torch.Tensor:
    """The global scale, a divisor, of a weight with this largest magnitude: both are float32 scalars."""
    smallest = torch.finfo(torch.float32).tiny
    return torch.nan_to_num(_LARGEST_SCALE * LARGEST / largest.clamp(min=smallest), posinf=1.0)
