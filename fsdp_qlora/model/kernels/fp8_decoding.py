"""FP8 weights decoded with the scales of their blocks in one kernel, with torch's bits.

Formats: model/quantizers/fp8.py.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from fsdp_qlora.model.kernels.float_decoding import e4m3
from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, ways_in_use
from fsdp_qlora.model.kernels.rounding import (
    computes_by_triton,
    jit,
    rounded_to,
    tl,
    triton,
)


class BlockScales(NamedTuple):
    """The scales of consecutive rows, of which the first begins a block.

    values: float32 [row blocks, column blocks] of whole matrices, or of a part of one. block: rows
    and columns that share a scale; the last of a matrix may be short. rows: of a matrix.
    """

    values: torch.Tensor
    block: tuple[int, int]
    rows: int

    @property
    def rows_of_matrix(self) -> int:
        """The rows of scales of each matrix."""
        return -(-self.rows // self.block[0])


def decode_rows(
    codes: torch.Tensor, scales: BlockScales, code_dtype: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """Decode bytes [rows, columns] to weights in `dtype`: code * scale.

    Args:
        codes: uint8; a row may be a part of one in memory.
        code_dtype: float8_e4m3fn or float8_e5m2.
    """
    way = ways_in_use().decoding
    if way != PLAIN and not _runs_by_triton(codes, scales, dtype):
        way = PLAIN
    return WAYS[way](codes, scales, code_dtype, dtype)


def _runs_by_triton(codes: torch.Tensor, scales: BlockScales, dtype: torch.dtype) -> bool:
    width = scales.block[1]
    fits = fits_kernel(width, codes.shape[1])
    return fits and computes_by_triton(dtype, codes.device)


def fits_kernel(width: int, columns: int) -> bool:
    """Whether the kernel takes blocks of `width` columns, in rows with `columns`."""
    return width % COLUMNS == 0 or width >= columns


# --- by torch ---


def _by_torch(
    codes: torch.Tensor, scales: BlockScales, code_dtype: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    count = len(codes)
    decoded = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    # Rows in which blocks follow each other without a break: a matrix, or all matrices if the
    # last block of each is complete.
    in_one = count if scales.rows % scales.block[0] == 0 else scales.rows
    for start in range(0, count, in_one):
        rows = slice(start, min(start + in_one, count))
        blocks = scales.values[start // scales.rows * scales.rows_of_matrix :]
        values = _values(codes[rows], code_dtype, dtype)
        _scale(values, blocks, scales.block, out=decoded[rows])
    return decoded


def _values(codes: torch.Tensor, code_dtype: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    if codes.device.type != "cpu" or dtype != torch.float32:
        return codes.view(code_dtype).to(dtype)
    # A CPU, which computes in float32, converts one code after another.
    table = _table(code_dtype, dtype)
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    step = max(1, _LOOKED_UP // codes.shape[1])
    for piece, part in zip(codes.split(step), values.split(step), strict=True):
        torch.index_select(table, 0, piece.flatten().int(), out=part.view(-1))
    return values


# Codes at a time: an index into the table takes four bytes.
_LOOKED_UP = 2**18


@functools.cache
def _table(code_dtype: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """The values of all codes, [256]."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(code_dtype).to(dtype)


def _scale(
    values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], out: torch.Tensor
) -> None:
    """Scale rows of a matrix, of which the first begins a block.

    scale: of its blocks, and further ones.
    """
    height, width = block
    # `whole` blocks are complete, and broadcast their scale; the last one may be short.
    whole = len(values) // height
    scale = scale[: -(-len(values) // height)]
    if width < values.shape[1]:
        scale = scale.repeat_interleave(width, dim=1)[:, : values.shape[1]]
    torch.mul(
        values[: whole * height].unflatten(0, (whole, height)),
        scale[:whole, None],
        out=out[: whole * height].unflatten(0, (whole, height)),
    )
    rest = slice(whole * height, None)
    if len(values) > whole * height:
        torch.mul(values[rest], scale[whole:], out=out[rest])


# --- by Triton ---

# Rows and columns of a program: a thread reads 16 codes of a row at a time, an access of 128 bits.
# The columns have one scale in each row, for a block is as wide or wider.
ROWS = 32
COLUMNS = 128
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def _by_triton(
    codes: torch.Tensor, scales: BlockScales, code_dtype: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    num_rows, num_columns = codes.shape
    decoded = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    height, width = scales.block
    values = scales.values.contiguous()
    if num_rows:
        # One dimension has enough places for all programs, and the others have 65,535.
        column_blocks = triton.cdiv(num_columns, COLUMNS)
        decode_kernel[(triton.cdiv(num_rows, ROWS) * column_blocks,)](
            codes,
            values,
            decoded,
            codes.stride(0),
            num_rows,
            num_columns,
            scales.rows,
            scales.rows_of_matrix,
            height,
            width,
            values.shape[1],
            column_blocks,
            IS_E5M2=code_dtype == torch.float8_e5m2,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            **OPTIONS,
        )
    return decoded


@jit
def decode_kernel(
    codes,
    scales,
    weights,
    code_row,
    num_rows,
    num_columns,
    matrix_rows,
    matrix_scales,
    height,
    width,
    scale_row,
    column_blocks,
    IS_E5M2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS weights of ROWS rows."""
    dtype: tl.constexpr = weights.dtype.element_ty
    place = tl.program_id(0)
    rows = place // column_blocks * ROWS + tl.arange(0, ROWS)
    first = place % column_blocks * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    block = rows // matrix_rows * matrix_scales + rows % matrix_rows // height
    scale = tl.load(scales + block * scale_row + first // width, mask=rows < num_rows, other=0.0)
    rows = rows.to(tl.int64)  # a weight may have more elements than 2**31
    code = tl.load(codes + rows[:, None] * code_row + columns[None, :], mask=inside, other=0)
    value = e5m2(code) if IS_E5M2 else e4m3(code.to(tl.int32))
    to = rows[:, None] * num_columns + columns[None, :]
    tl.store(weights + to, rounded_to(value * scale[:, None], dtype), mask=inside)


@jit
def e5m2(code):
    """The values of bytes, each the upper half of a number in fp16."""
    return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


WAYS = {PLAIN: _by_torch, TRITON: _by_triton}
