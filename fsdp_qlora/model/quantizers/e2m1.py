"""Weights as floats of 4 bits (E2M1) in groups that share a scale of 8 bits: MXFP4 and NVFP4.

A group is `group_size` consecutive weights of the row-major flattened weight.

Bits: a code is a sign, two bits of exponent and one of mantissa, s ee m (OCP Microscaling Formats
1.0, table 7). Its lower three bits count up through the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. A
byte has the code of an even element in its low four bits and of the odd element after it in its
high four.
    MXFP4: groups of 32; a scale is E8M0, the exponent of 2**(byte - 127), of which 255 is NaN.
    NVFP4: groups of 16; a scale is E4M3, and a float32 scale of the whole weight is beyond it.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.distributed.shards import gather_rows, own_rows, shard_size
from fsdp_qlora.model.kernels.float_decoding import (
    MANTISSA,
    VALUES,
    GroupScales,
    decode_groups,
    decode_scales,
)
from fsdp_qlora.model.kernels.float_rounding import round_groups
from fsdp_qlora.model.kernels.limits import limits_below
from fsdp_qlora.model.quantizers.base import NOT_FINITE, TOO_LARGE, Matrix, groups_at_a_time
from fsdp_qlora.model.quantizers.fp8 import has_nan
from fsdp_qlora.model.quantizers.rounded_weight import RoundedWeight, Update
from fsdp_qlora.model.quantizers.stored import write_bytes
from fsdp_qlora.utils.safetensors_files import TensorForm

_LARGEST = VALUES[-1]  # magnitude of a code
_SCALES_PER_ROW = 4  # of one byte each: together they are viewed as a float32 (see QuantizedWeight)
# MXFP4's scales
_LARGEST_EXPONENT = 2  # of E2M1: 6 is 1.5 * 2**2
_NOT_A_NUMBER = 255  # OCP Microscaling Formats 1.0, E8M0
_MOST_EXPONENT = 127 + 125  # 6 * 2**125 is the largest weight that a float32 holds
# NVFP4's scales
_LARGEST_SCALE = torch.finfo(torch.float8_e4m3fn).max
_SCALE_OF_ZEROS = 0.125  # compressed-tensors' for a group without a magnitude


class E2m1Tensors(NamedTuple):
    """A weight's codes and scales, four groups a row, and for NVFP4 its global scales.

    Global scales are beyond those of groups: of the whole weight, or of equal parts of it.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None


class E2m1Weight(RoundedWeight):
    """Weights as E2M1 codes with a scale of one byte for each group.

    Parameters (frozen):
        weight: the codes of four groups per row, [rows, 2 * group_size bytes] viewed as the compute
            dtype.
        scale: the groups' scales, four per row, [rows, 1] viewed as float32.
    """

    selects_rows = True
    statistics: tuple[str, ...] = ("scale",)
    rounding_bytes = 120.0
    # Of `decoding_bytes` 10.5 are for codes, which are looked up two at a time, and for scaling the
    # values; 4 of these are an index of 32 bits. The rest is for scales.
    label: str
    group_size: int

    def __init__(self, shape: tuple[int, ...], *, compute_dtype: torch.dtype) -> None:
        super().__init__(
            shape, compute_dtype=compute_dtype, row_weights=_SCALES_PER_ROW * self.group_size
        )
        rows = -(-math.prod(shape) // self.row_weights)
        self.weight = self._storage(rows, self.row_weights // 2)
        self.scale = self._storage(rows, _SCALES_PER_ROW, torch.float32)

    def group_scales(
        self, codes: torch.Tensor, first: int, global_scale: torch.Tensor | None
    ) -> GroupScales:
        """The scales that bytes [groups] stand for.

        first: number of the first group in the weight. global_scale: see `E2m1Tensors`.
        """
        return GroupScales(codes)

    def scale_codes(
        self,
        largest: torch.Tensor,
        global_scale: torch.Tensor | None,
        *,
        is_exact: bool = False,
    ) -> torch.Tensor:
        """The bytes of the scales for groups with these largest magnitudes, float32 [groups].

        is_exact: whether every device must have the same bytes.
        """
        raise NotImplementedError

    def decode_tensors(
        self, part: Matrix, dtype: torch.dtype, tensors: E2m1Tensors
    ) -> torch.Tensor:
        num_weights = math.prod(part.shape)
        (first, count) = part.spans(self.group_size)
        # Both parameters have four groups a row, so their bytes are groups in order.
        groups = slice(first, first + count)
        codes = tensors.weight.view(torch.uint8).view(-1, self.group_size // 2)[groups]
        scale_codes = tensors.scale.view(torch.uint8).view(-1)[groups]
        scales = self.group_scales(scale_codes, first, tensors.global_scale)
        if part.among is not None:
            # Of matrices with others between them scales are chosen after they are decoded.
            codes = part.choose(codes)
            scales = GroupScales(part.choose(decode_scales(scales)))
        step = groups_at_a_time(codes.device, self.group_size)
        values = decode_groups(codes, scales, dtype, step)
        return values.view(-1)[:num_weights].view(part.shape)

    def tensors(self) -> E2m1Tensors:
        return E2m1Tensors(self.weight, self.scale)

    def quantize(
        self,
        values: torch.Tensor,
        global_scale: torch.Tensor | None = None,
        least: torch.Tensor | None = None,
    ) -> E2m1Tensors:
        """Quantize whole groups (the last may be short).

        Returns bytes of codes [groups, group_size / 2] and scales [groups].

        global_scale: one value, for the whole weight. least: bytes of scales [groups], than which
        none becomes smaller; groups of zeros have just these.
        """
        # Zeros do not change a group's largest magnitude.
        rest = -values.numel() % self.group_size
        if rest:
            values = F.pad(values.flatten(), (0, rest))
        groups = values.view(-1, self.group_size)
        codes = []
        scales = []
        done = 0
        for piece in groups.split(groups_at_a_time(values.device, self.group_size)):
            largest = piece.abs().amax(1).float()
            scale = self.scale_codes(largest, global_scale, is_exact=least is not None)
            if least is not None:
                stored = least[done : done + len(piece)]
                # Bytes of scales without a sign are in the order of what they stand for.
                scale = torch.where(largest == 0, stored, torch.maximum(scale, stored))
            done += len(piece)
            scales.append(scale)
            # Divided by the scale as it is stored, not as it was before rounding: a code is nearest
            # to its weight with the scale that decodes it.
            divisors = decode_scales(self.group_scales(scales[-1], 0, global_scale))
            # Scales of zero have codes of zero.
            divisors = torch.where(divisors == 0, torch.inf, divisors)
            codes.append(_pack(piece.float() / divisors[:, None]))
        return E2m1Tensors(torch.cat(codes), torch.cat(scales), global_scale)

    @property
    def rounded_together(self) -> int:
        return self.group_size

    def round_part(self, values: torch.Tensor, part: Matrix, tensors: E2m1Tensors) -> E2m1Tensors:
        first, count = part.spans(self.group_size)
        stored = tensors.scale.view(torch.uint8).view(-1)[first : first + count]
        # A group keeps its scale unless its values have grown beyond it. So weights without an
        # update keep their values, also where a scale was chosen by another rule than here.
        return self.quantize(values, self.global_scale_of(part, tensors), stored)

    def global_scale_of(self, part: Matrix, tensors: E2m1Tensors) -> torch.Tensor | None:
        """The global scale of a part of the weight that has one, [1]."""
        return tensors.global_scale

    def join_parts(self, parts: Sequence[E2m1Tensors], tensors: E2m1Tensors) -> E2m1Tensors:
        codes = torch.cat([part.weight for part in parts])
        scales = torch.cat([part.scale for part in parts])
        return E2m1Tensors(codes, scales, tensors.global_scale)

    @property
    def fits_kernel(self) -> bool:
        return self.shape[-1] % self.group_size == 0

    def round_by_kernel(self, matrix: Matrix, update: Update, tensors: E2m1Tensors) -> E2m1Tensors:
        (first, count) = matrix.spans(self.group_size)
        groups = slice(first, first + count)
        codes = tensors.weight.view(torch.uint8).view(-1, self.group_size // 2)[groups]
        scale_codes = tensors.scale.view(torch.uint8).view(-1)[groups]
        scales = self.group_scales(scale_codes, first, tensors.global_scale)
        return E2m1Tensors(*round_groups(codes, scales, update.factors()))

    def stored_forms(self) -> dict[str, TensorForm]:
        groups = -(-math.prod(self.shape) // self.group_size)
        return {
            "": TensorForm(torch.uint8, (groups, self.group_size // 2)),
            ".scale": TensorForm(torch.uint8, (groups,)),
        }

    def code_settings(self) -> dict[str, Any]:
        return {"format": self.label}


class Mxfp4Weight(E2m1Weight):
    """Weights in MXFP4.

    A scale's byte is the exponent of a float32, so that it is 2**(byte - 127).
    """

    label = "MXFP4"
    decoding_bytes = 11.4
    group_size = 32

    def unusable(self, suffix: str, values: torch.Tensor) -> str:
        if suffix != ".scale":
            return ""
        if (values == _NOT_A_NUMBER).any():
            return NOT_FINITE
        return TOO_LARGE if (values > _MOST_EXPONENT).any() else ""

    def scale_codes(
        self,
        largest: torch.Tensor,
        global_scale: torch.Tensor | None,
        *,
        is_exact: bool = False,
    ) -> torch.Tensor:
        # The exponent, from the float32's bits and so exact. A magnitude has the sign bit 0, so the
        # shift leaves nothing else. A quarter of the mantissa's range is added, which carries over:
        # from 1.75 on a magnitude is taken for 2, as by compressed-tensors. It is added after a
        # shift, since a GPU's NaN has all bits.
        exponent = (largest.view(torch.int32) >> MANTISSA - 2) + 1 >> 2
        return (exponent - _LARGEST_EXPONENT).clamp(min=0).to(torch.uint8)


class Nvfp4Weight(E2m1Weight):
    """Weights in NVFP4: code * scale / global_scale.

    Parameters beside those of `E2m1Weight`:
        global_scale: float32 [parts, 1], each of an equal part of the flattened weight; one if it
            was quantized here.
    Args:
        num_parts: equal parts of each matrix that have a global scale of their own; 0 if one is for
            all matrices.
        multiplies: whether global scales are factors (modelopt) and not divisors
            (compressed-tensors).
    """

    label = "NVFP4"
    decoding_bytes = 11.6
    group_size = 16
    statistics = ("scale", "global_scale")

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        compute_dtype: torch.dtype,
        num_parts: int = 0,
        multiplies: bool = False,
    ) -> None:
        super().__init__(shape, compute_dtype=compute_dtype)
        self.multiplies = multiplies
        # num_parts is of each matrix, and experts are a matrix each.
        self.num_scales = num_parts * math.prod(shape[:-2]) or 1
        self.global_scale = self._storage(self.num_scales, 4, torch.float32)

    @property
    def fits_kernel(self) -> bool:
        return super().fits_kernel and len(self.global_scale) == 1

    def unusable(self, suffix: str, values: torch.Tensor) -> str:
        if suffix == ".scale":
            return NOT_FINITE if has_nan(values, torch.float8_e4m3fn) else ""
        if suffix == ".global_scale":
            scales = values.view(torch.float32)
            factors = scales if self.multiplies else 1 / scales
            largest = _LARGEST * _LARGEST_SCALE * factors
            not_finite = super().unusable(suffix, values)
            if not_finite:
                return not_finite
            # A divisor of zero, too, has weights that are not finite.
            return "" if largest.isfinite().all() else TOO_LARGE
        return ""

    def tensors(self) -> E2m1Tensors:
        return E2m1Tensors(self.weight, self.scale, self.global_scale)

    def group_scales(
        self, codes: torch.Tensor, first: int, global_scale: torch.Tensor | None
    ) -> GroupScales:
        assert global_scale is not None
        # One for each part of the weight; a scalar where the whole weight has one.
        by_part = global_scale.view(-1)
        # Parts are equal, and no group is in two of them.
        groups_of_part = math.prod(self.shape) // self.group_size // len(by_part)
        return GroupScales(codes, by_part, first, groups_of_part, self.multiplies)

    def scale_codes(
        self,
        largest: torch.Tensor,
        global_scale: torch.Tensor | None,
        *,
        is_exact: bool = False,
    ) -> torch.Tensor:
        assert global_scale is not None
        # CUDA divides by a tensor. For a number it multiplies by the reciprocal, and rounds twice:
        # caches hold bytes of that.
        scales = largest / (torch.full_like(largest, _LARGEST) if is_exact else _LARGEST)
        whole_scale = global_scale.view(())
        if self.multiplies:
            # A factor of zero makes a weight of zeros, whatever the scales are.
            scales = scales / torch.where(whole_scale == 0, torch.inf, whole_scale)
        else:
            scales = whole_scale * scales
        # E4M3 has no infinity: what is beyond its largest value would be NaN.
        scales = scales.clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)
        # In float32, in which all values of E4M3 are exact.
        rounded = scales.float()
        rounded = torch.where(rounded == 0, _SCALE_OF_ZEROS, rounded)
        return rounded.to(scales.dtype).view(torch.uint8)

    @property
    def part_weights(self) -> int:
        return math.prod(self.shape) // self.num_scales

    def global_scale_of(self, part: Matrix, tensors: E2m1Tensors) -> torch.Tensor | None:
        assert tensors.global_scale is not None
        index = part.first // self.part_weights
        return tensors.global_scale.view(-1)[index : index + 1]

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        return self.quantize(values, self.global_scale).weight

    def quantize_whole(self, weight: torch.Tensor) -> torch.Tensor:
        whole_scale = global_scale(weight.abs().max().float())
        tensors = self.quantize(weight, whole_scale)
        return self.decode_tensors(self.whole, self.compute_dtype, tensors)

    @torch.no_grad()
    def load_shard(self, values: torch.Tensor, mesh: DeviceMesh) -> None:
        # A rank without values takes part in the collective, too.
        if values.numel():
            largest = values.abs().max().float()
        else:
            largest = torch.zeros((), device=values.device)
        size = shard_size(mesh)
        if size > 1:
            # A maximum does not depend on the split, so every rank has the same scale.
            largest = gather_rows(largest.view(1), size, mesh).max()
        whole_scale = global_scale(largest).view(1)
        quantized = self.quantize(values, whole_scale)
        write_bytes(self.weight, quantized.weight)
        write_bytes(self.scale, quantized.scale)
        # One row, which one rank keeps: `own_rows` is empty on the others.
        write_bytes(self.global_scale, whole_scale[slice(*own_rows(self.global_scale, mesh))])

    def stored_forms(self) -> dict[str, TensorForm]:
        form = TensorForm(torch.float32, (len(self.global_scale),))
        return super().stored_forms() | {".global_scale": form}


def global_scale(largest: torch.Tensor) -> torch.Tensor:
    """The global scale, a divisor, of a weight with this largest magnitude (float32 scalars)."""
    # Scales of groups then use E4M3's whole range. A weight of zeros has the scale 1: the quotient
    # with the smallest normal number is infinite.
    smallest = torch.finfo(torch.float32).tiny
    scale = _LARGEST_SCALE * _LARGEST / largest.clamp(min=smallest)
    return torch.nan_to_num(scale, posinf=1.0)


@functools.cache
def _limits(device: torch.device) -> torch.Tensor:
    """The magnitudes above which a value is rounded up, [7] float32.

    They are halfway between values, where ties go to the even code.
    """
    neighbours = itertools.pairwise(VALUES)
    halfway = torch.tensor([(low + high) / 2 for low, high in neighbours])
    # A value at a limit is not above it, which is right above an even code. Above an
    # odd code a tie goes up, so the limit is the float32 before it.
    above_odd = halfway[1::2]
    halfway[1::2] = torch.nextafter(above_odd, torch.zeros(3))
    return halfway.to(device)


def _pack(values: torch.Tensor) -> torch.Tensor:
    """Round float32 values [groups, group_size] to bytes [groups, group_size / 2].

    Larger values become the largest.
    """
    codes = limits_below(values.abs(), _limits(values.device))
    # The sign is the code's fourth bit.
    codes |= (values.view(torch.int32) >> 31).to(torch.uint8) & 8
    # Even elements are in the low half of a byte, and in the low byte of a pair.
    pairs = codes.view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)
