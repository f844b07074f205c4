"""Weights as floats of 8 bits, with float32 scales for rows, blocks of a matrix, or whole matrices.

Bits (OCP 8-bit Floating Point Specification 1.0): E4M3 is a sign, four bits of exponent and three
of mantissa, with values up to 448, no infinity, and one NaN of each sign (all other bits set); E5M2
is a sign, five bits of exponent and two of mantissa, with IEEE's infinities and NaNs.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fsdp_qlora.model.kernels.fp8_decoding import COLUMNS, BlockScales, decode_rows, fits_kernel
from fsdp_qlora.model.kernels.fp8_rounding import Fp8Rounding
from fsdp_qlora.model.quantizers.base import NOT_FINITE, TOO_LARGE, Matrix
from fsdp_qlora.model.quantizers.rounded_weight import RoundedWeight, Update
from fsdp_qlora.model.quantizers.stored import row_bytes
from fsdp_qlora.utils.safetensors_files import TensorForm

# Up to here above the largest code a value is rounded to it: half the distance of two codes is
# 1 / 28 of E4M3's largest one.
_ROUNDED_DOWN = 1 + 2**-5
# compressed-tensors' for a row without a magnitude
_SCALE_OF_ZEROS = torch.finfo(torch.float32).eps
_PIECE = 2**20  # bytes that are searched at a time


class Fp8Tensors(NamedTuple):
    """A weight's codes, a row of a matrix per row, and the scales of its blocks."""

    weight: torch.Tensor
    scale: torch.Tensor


class Fp8Weight(RoundedWeight):
    """Matrices [.., out, in] in FP8: code * scale.

    Parameters (frozen):
        weight: a row of a matrix per row, [.. * out, in bytes] viewed as the compute dtype; padded
            to whole elements.
        scale: float32 [.. * out / rows of a block, in / columns of a block], each rounded up.
    Args:
        block: rows and columns that share a scale; by default a row.
        num_parts: else, if not 0, equal parts of each matrix that have one scale.
        code_dtype: of the codes.
    """

    selects_rows = True
    statistics = ("scale",)
    decoding_bytes = 7.0  # a byte becomes two, which are read and written again to be scaled

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        compute_dtype: torch.dtype,
        block: tuple[int, int] | None = None,
        num_parts: int = 0,
        code_dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> None:
        *matrices, rows, columns = shape
        super().__init__(shape, compute_dtype=compute_dtype, row_weights=columns)
        if block:
            self.block = block
        elif num_parts:
            self.block = (rows // num_parts, columns)
        else:
            self.block = (1, columns)
        self.code_dtype = code_dtype
        # Layers that a server fuses share the scale of a matrix.
        self.keeps_scale = bool(num_parts)
        height, width = self.block
        # Of a matrix; the last row and column of blocks may be short.
        self.scale_shape = (-(-rows // height), -(-columns // width))
        num_matrices = math.prod(matrices)
        self.weight = self._storage(num_matrices * rows, columns)
        scale_rows, scale_columns = self.scale_shape
        self.scale = self._storage(num_matrices * scale_rows, 4 * scale_columns, torch.float32)

    def decode_tensors(self, part: Matrix, dtype: torch.dtype, tensors: Fp8Tensors) -> torch.Tensor:
        *_, rows, columns = self.shape
        first, span = part.spans(columns)
        # As bytes, since not every operator has a kernel for FP8. Without the padding of rows.
        spanned = tensors.weight.view(torch.uint8)[first : first + span, :columns]
        codes = part.choose(spanned)
        # A part begins at the first row of a block (see `QuantizedWeight._parts`).
        matrix, row = divmod(first, rows)
        scale = tensors.scale[matrix * self.scale_shape[0] + row // self.block[0] :]
        if part.among is not None:
            scale = part.choose(scale[: part.among[1] * self.scale_shape[0]])
        scales = BlockScales(scale, self.block, rows)
        return decode_rows(codes, scales, self.code_dtype, dtype).view(part.shape)

    def tensors(self) -> Fp8Tensors:
        return Fp8Tensors(self.weight, self.scale)

    def quantize(self, values: torch.Tensor) -> Fp8Tensors:
        codes, scale = quantize_blocks(values.reshape(-1, self.row_weights))
        return Fp8Tensors(self._filled_up(codes), scale)

    @property
    def rounded_together(self) -> int:
        # A part of a matrix may begin anywhere if its rows have one scale.
        return self.row_weights if self.keeps_scale else self.block[0] * self.row_weights

    @property
    def part_weights(self) -> int:
        return self.block[0] * self.row_weights if self.keeps_scale else super().part_weights

    def round_part(self, values: torch.Tensor, part: Matrix, tensors: Fp8Tensors) -> Fp8Tensors:
        height, _ = self.block
        matrix, row = divmod(part.first // self.row_weights, self.shape[-2])
        first = matrix * self.scale_shape[0] + row // height
        scale = tensors.scale[first : first - (-len(values) // height)]
        if not self.keeps_scale:
            scale = grown_scales(values, scale, self.block, self.code_dtype)
        codes, scale = quantize_blocks(values, self.block, self.code_dtype, scale)
        return Fp8Tensors(codes.view(torch.uint8), scale)

    def join_parts(self, parts: Sequence[Fp8Tensors], tensors: Fp8Tensors) -> Fp8Tensors:
        codes = self._filled_up(torch.cat([part.weight for part in parts]))
        if self.keeps_scale:
            return Fp8Tensors(codes, tensors.scale)
        return Fp8Tensors(codes, torch.cat([part.scale for part in parts]))

    @property
    def fits_kernel(self) -> bool:
        return fits_kernel(self.block[1], self.shape[-1])

    def round_by_kernel(self, matrix: Matrix, update: Update, tensors: Fp8Tensors) -> Fp8Tensors:
        height, width = self.block
        rows, columns = matrix.shape
        start = matrix.first // columns
        codes = tensors.weight.view(torch.uint8)[start : start + rows, :columns]
        first = start // self.shape[-2] * self.scale_shape[0] + start % self.shape[-2] // height
        scale = tensors.scale[first : first - (-rows // height)]
        rounding = Fp8Rounding(codes, scale, self.block, self.code_dtype, update.factors())
        if not self.keeps_scale:
            parts = -(-width // COLUMNS)
            scale = grown_scales(rounding.largest, scale, (height, parts), self.code_dtype)
            rounding.change(scale)
        return Fp8Tensors(rounding.codes, scale)

    def stored_forms(self) -> dict[str, TensorForm]:
        weight_shape = (len(self.weight), row_bytes(self.weight))
        return {
            "": TensorForm(torch.uint8, weight_shape),
            ".scale": TensorForm(torch.float32, tuple(self.scale.shape)),
        }

    def unusable(self, suffix: str, values: torch.Tensor) -> str:
        if not suffix:
            return NOT_FINITE if has_nan(values, self.code_dtype) else ""
        largest = torch.finfo(torch.float32).max / torch.finfo(self.code_dtype).max
        not_finite = super().unusable(suffix, values)
        if not_finite:
            return not_finite
        return TOO_LARGE if _exceeds(values.view(torch.float32), largest) else ""

    def code_settings(self) -> dict[str, Any]:
        return {"format": "fp8"}


def has_nan(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes of FP8 have a NaN, or an infinity of E5M2."""
    # All exponent bits of E5M2, and all bits but the sign of E4M3.
    mask = 0x7C if dtype == torch.float8_e5m2 else 0x7F
    pieces = values.flatten().split(_PIECE)
    return any(bool(((piece & mask) == mask).any()) for piece in pieces)


def _exceeds(values: torch.Tensor, most: float) -> bool:
    return bool((values.abs() > most).any())


def block_scales(
    rows: torch.Tensor, block: tuple[int, int], code_dtype: torch.dtype
) -> torch.Tensor:
    """The scales, float32 [row blocks, column blocks], of float32 rows [rows, columns]."""
    scale = _largest(rows, block) / torch.finfo(code_dtype).max
    return torch.where(scale == 0, _SCALE_OF_ZEROS, scale)


def grown_scales(
    rows: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], code_dtype: torch.dtype
) -> torch.Tensor:
    """The scales of blocks, those multiplied by a power of two whose values have grown too large.

    rows: float32 [rows, columns]. scale: float32 [row blocks, column blocks]. A power of two fits
    every type of scales in files, and leaves the values that have not changed what they are.
    """
    largest = _largest(rows, block)
    # Files may have zero for a block of zeros. It stays while they do, and could not grow.
    positive = torch.where((scale == 0) & (largest > 0), _SCALE_OF_ZEROS, scale)
    excess = largest / (positive * torch.finfo(code_dtype).max)
    # 2**exponent is above the excess.
    _, exponent = torch.frexp(excess)
    return torch.where(excess > _ROUNDED_DOWN, torch.ldexp(positive, exponent), positive)


def _largest(rows: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block, [row blocks, column blocks]."""
    (count, columns) = rows.shape
    (height, width) = block
    # Zeros do not change a block's largest magnitude.
    padding = (0, -columns % width, 0, -count % height)
    padded = F.pad(rows.abs(), padding)
    # [row blocks, rows of a block, column blocks, columns of a block]
    groups = padded.view(-(-count // height), height, padded.shape[1] // width, width)
    # A rank has no rows if there are fewer rows than ranks.
    if not count:
        return rows.new_empty(0, groups.shape[2])
    return groups.amax((1, 3))


def quantize_blocks(
    rows: torch.Tensor,
    block: tuple[int, int] | None = None,
    code_dtype: torch.dtype = torch.float8_e4m3fn,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [rows, columns] to codes and scales [row blocks, column blocks].

    block: rows and columns that share a scale; by default a row. scale: use these; [1, 1] for all.
    """
    rows = rows.float()
    block = block or (1, rows.shape[1])
    if scale is None:
        scale = block_scales(rows, block, code_dtype)
    # Clamped, since a value that is rounded up beyond the largest one would be NaN in E4M3: a given
    # scale may be too small.
    largest = torch.finfo(code_dtype).max
    # Scales of zero have codes of zero.
    divisors = torch.where(scale == 0, torch.inf, scale)
    scaled = (rows / spread_scales(divisors, block, rows.shape)).clamp(-largest, largest)
    return scaled.to(code_dtype), scale


def spread_scales(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """The float32 scales of blocks as a tensor that broadcasts to rows [rows, columns]."""
    if scale.numel() > 1:
        scale = scale.repeat_interleave(block[0], 0)[: shape[0]]
    if block[1] < shape[1]:
        scale = scale.repeat_interleave(block[1], 1)[:, : shape[1]]
    return scale.float()
