"""MXFP4 and NVFP4 weights rounded with a low-rank update in one kernel, with torch's bits.

Formats: model/quantizers/e2m1.py.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_qlora.model.kernels.float_decoding import GroupScales, e2m1, e4m3
from fsdp_qlora.model.kernels.low_rank import (
    Factors,
    divisor,
    e4m3_code,
    magnitude,
    spread,
    updated,
)
from fsdp_qlora.model.kernels.rounding import divided, jit, tl, triton

# Rows of a program, and bytes of codes in each.
ROWS = 64
PAIRS = 32
OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


def round_groups(
    codes: torch.Tensor, scales: GroupScales, factors: Factors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix of whole groups in each row to codes and scales like those given.

    Args:
        codes: bytes [groups, group_size / 2].
        scales: bytes [groups], with a global scale or none.
    """
    num_rows = factors.scaled_B.shape[1]
    row_bytes = factors.lora_A.shape[1] // 2
    num_bytes = codes.shape[1]
    new_codes = torch.empty_like(codes)
    new_scales = torch.empty_like(scales.codes)
    blocks = triton.cdiv(row_bytes, PAIRS)
    even, odd = factors.of_pairs()
    has_global = scales.global_scale is not None
    round_kernel[(triton.cdiv(num_rows, ROWS) * blocks,)](
        codes,
        scales.codes,
        scales.global_scale,
        even,
        odd,
        factors.scaled_B,
        new_codes,
        new_scales,
        num_rows,
        row_bytes,
        factors.rank,
        blocks,
        DIVIDES=has_global and not scales.multiplies,
        MULTIPLIES=has_global and scales.multiplies,
        ROWS=ROWS,
        GROUPS=PAIRS // num_bytes,
        BYTES=num_bytes,
        **OPTIONS,
    )
    return new_codes, new_scales


@jit
def round_kernel(
    codes,
    scale_codes,
    global_scale,
    even_A,
    odd_A,
    scaled_B,
    new_codes,
    new_scales,
    num_rows,
    row_bytes,
    rank,
    blocks,
    DIVIDES: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """GROUPS groups of 2 * BYTES weights in ROWS rows."""
    place = tl.program_id(0)
    rows = place // blocks * ROWS + tl.arange(0, ROWS)
    pairs = place % blocks * (GROUPS * BYTES) + tl.arange(0, GROUPS * BYTES)
    groups = place % blocks * GROUPS + tl.arange(0, GROUPS)
    of_row = row_bytes // BYTES
    is_group = (rows < num_rows)[:, None] & (groups < of_row)[None, :]
    is_pair = (rows < num_rows)[:, None] & (pairs < row_bytes)[None, :]
    at_groups = rows.to(tl.int64)[:, None] * of_row + groups[None, :]
    at_pairs = rows.to(tl.int64)[:, None] * row_bytes + pairs[None, :]

    stored = tl.load(scale_codes + at_groups, mask=is_group, other=0).to(tl.int32)
    factor = tl.load(global_scale) if DIVIDES or MULTIPLIES else 1.0
    scale = spread(_scale(stored, factor, DIVIDES, MULTIPLIES), ROWS, GROUPS, BYTES)
    packed = tl.load(codes + at_pairs, mask=is_pair, other=0).to(tl.int32)
    even = e2m1(packed & 15) * scale
    even = updated(even, even_A, scaled_B, rows, pairs, num_rows, row_bytes, rank)
    odd = e2m1(packed >> 4) * scale
    odd = updated(odd, odd_A, scaled_B, rows, pairs, num_rows, row_bytes, rank)

    bits = tl.maximum(magnitude(even), magnitude(odd))
    largest = tl.max(tl.reshape(bits, (ROWS, GROUPS, BYTES)), axis=2)
    # A group keeps its scale unless its values have grown beyond it; zeros keep any.
    scale_code = tl.maximum(_scale_code(largest, factor, DIVIDES, MULTIPLIES), stored)
    scale_code = tl.where(largest == 0, stored, scale_code)
    tl.store(new_scales + at_groups, scale_code.to(tl.uint8), mask=is_group)
    scale = spread(_scale(scale_code, factor, DIVIDES, MULTIPLIES), ROWS, GROUPS, BYTES)
    scale = divisor(scale)
    low = _code(divided(even, scale))
    high = _code(divided(odd, scale))
    tl.store(new_codes + at_pairs, (low | high << 4).to(tl.uint8), mask=is_pair)


@jit
def _scale(code, factor, DIVIDES: tl.constexpr, MULTIPLIES: tl.constexpr):
    """The scales of bytes: E4M3 beside a global scale, otherwise E8M0."""
    if MULTIPLIES:
        return e4m3(code) * factor
    if DIVIDES:
        return divided(e4m3(code), factor)
    return tl.where(code == 0, 1 << 22, code << 23).to(tl.float32, bitcast=True)


@jit
def _scale_code(largest, factor, DIVIDES: tl.constexpr, MULTIPLIES: tl.constexpr):
    """The bytes of scales for largest magnitudes, given as bits."""
    if DIVIDES or MULTIPLIES:
        value = divided(largest.to(tl.float32, bitcast=True), 6.0)
        value = divided(value, divisor(factor)) if MULTIPLIES else factor * value
        code = e4m3_code(value)
        # A group without a magnitude has the scale 0.125.
        return tl.where(code == 0, 32, code)
    # From 1.75 on a magnitude is taken for 2; 6 is 1.5 * 2**2.
    return tl.maximum((((largest >> 21) + 1) >> 2) - 2, 0)


@jit
def _code(x):
    """The codes nearest to float32 values, ties to even. Larger values have the largest."""
    size = magnitude(x).to(tl.float32, bitcast=True)
    code = 7 - (size <= 0.25).to(tl.int32) - (size < 0.75).to(tl.int32)
    code -= (size <= 1.25).to(tl.int32) + (size < 1.75).to(tl.int32)
    code -= (size <= 2.5).to(tl.int32) + (size < 3.5).to(tl.int32) + (size <= 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 31) & 8)
