"""FP8 weights rounded with a low-rank update in one kernel, with torch's bits.

Formats: model/quantizers/fp8.py.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_qlora.model.kernels.float_decoding import e4m3
from fsdp_qlora.model.kernels.fp8_decoding import e5m2
from fsdp_qlora.model.kernels.low_rank import (
    Factors,
    divisor,
    e4m3_code,
    e5m2_code,
    magnitude,
    updated,
)
from fsdp_qlora.model.kernels.rounding import divided, jit, tl, triton

# Rows and columns of a program. The columns have one scale in each row.
ROWS = 32
COLUMNS = 128
OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


class Fp8Rounding:
    """A matrix in FP8 that is rounded with an update, first with the scales that it has.

    Args:
        codes: bytes [rows, columns]; a row may be a part of one in memory.
        scale: float32 [row blocks, column blocks].
        block: rows and columns that share a scale, as wide as the kernel's columns or wider.

    Attributes:
        codes: bytes [rows, columns] of the rounded matrix.
        largest: float32 [rows, columns / COLUMNS, rounded up], the largest magnitudes of its rows.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        block: tuple[int, int],
        code_dtype: torch.dtype,
        factors: Factors,
    ) -> None:
        rows, columns = codes.shape
        self._before = codes
        self._scale = scale.contiguous()
        self._block = block
        self._code_dtype = code_dtype
        self._factors = factors
        self.codes = torch.empty(rows, columns, dtype=torch.uint8, device=codes.device)
        parts = triton.cdiv(columns, COLUMNS)
        self.largest = torch.empty(rows, parts, dtype=torch.float32, device=codes.device)
        self._launch(self._scale, repeats=False)

    def change(self, scale: torch.Tensor) -> None:
        """Round what has got another scale again."""
        self._launch(scale.contiguous(), repeats=True)

    def _launch(self, new_scale: torch.Tensor, repeats: bool) -> None:
        rows, columns = self.codes.shape
        height, width = self._block
        parts = self.largest.shape[1]
        round_kernel[(triton.cdiv(rows, ROWS) * parts,)](
            self._before,
            self._scale,
            new_scale,
            self._factors.lora_A,
            self._factors.scaled_B,
            self.codes,
            self.largest,
            self._before.stride(0),
            rows,
            columns,
            height,
            width,
            self._scale.shape[1],
            self._factors.rank,
            parts,
            IS_E5M2=self._code_dtype == torch.float8_e5m2,
            REPEATS=repeats,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            **OPTIONS,
        )


@jit
def round_kernel(
    codes,
    scales,
    new_scales,
    lora_A,
    scaled_B,
    new_codes,
    largest,
    code_row,
    num_rows,
    num_columns,
    height,
    width,
    scale_row,
    rank,
    parts,
    IS_E5M2: tl.constexpr,
    REPEATS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS weights of ROWS rows; those alone whose scale has changed, if it repeats."""
    place = tl.program_id(0)
    rows = place // parts * ROWS + tl.arange(0, ROWS)
    part = place % parts
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = rows < num_rows
    block = rows // height * scale_row + part * COLUMNS // width
    scale = tl.load(scales + block, mask=in_rows, other=1.0)
    new_scale = tl.load(new_scales + block, mask=in_rows, other=1.0)
    is_needed = True
    if REPEATS:
        is_needed = tl.max((scale != new_scale).to(tl.int32), axis=0) > 0
    if is_needed:
        inside = in_rows[:, None] & (columns < num_columns)[None, :]
        long_rows = rows.to(tl.int64)
        at = long_rows[:, None] * code_row + columns[None, :]
        code = tl.load(codes + at, mask=inside, other=0)
        value = e5m2(code) if IS_E5M2 else e4m3(code.to(tl.int32))
        value = value * scale[:, None]
        value = updated(value, lora_A, scaled_B, rows, columns, num_rows, num_columns, rank)
        if not REPEATS:
            bits = tl.max(magnitude(value), axis=1)
            at_part = largest + long_rows * parts + part
            tl.store(at_part, bits.to(tl.float32, bitcast=True), mask=in_rows)
        value = divided(value, divisor(new_scale)[:, None])
        new_code = e5m2_code(value) if IS_E5M2 else e4m3_code(value)
        new_code = new_code | ((value.to(tl.int32, bitcast=True) >> 31) & 128)
        to = long_rows[:, None] * num_columns + columns[None, :]
        tl.store(new_codes + to, new_code.to(tl.uint8), mask=inside)
