"""HQQ groups decoded with their scales and zeros in one kernel, with torch's bits.

How codes lie in bytes: model/quantizers/hqq.py.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, ways_in_use
from fsdp_qlora.model.kernels.rounding import (
    computes_by_triton,
    jit,
    rounded_to,
    tl,
    triton,
)

# Bits of a code -> number of bits in each plane, from the lowest.
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}


def decode_groups(
    packed: torch.Tensor, scale_zero: torch.Tensor, n_bits: int, dtype: torch.dtype, step: int
) -> torch.Tensor:
    """Decode groups to weights [groups, group_size] in `dtype`: (code - zero) * scale.

    Args:
        packed: uint8 [groups, group_size * n_bits / 8].
        scale_zero: float16 [groups, 2].
        step: groups that torch's operators decode at a time.
    """
    way = ways_in_use().decoding
    if way != PLAIN and not _runs_by_triton(packed, n_bits, dtype):
        way = PLAIN
    return WAYS[way](packed, scale_zero, n_bits, dtype, step)


def _runs_by_triton(packed: torch.Tensor, n_bits: int, dtype: torch.dtype) -> bool:
    fits = fits_kernel(packed.shape[1] * 8 // n_bits)
    return fits and computes_by_triton(dtype, packed.device)


def fits_kernel(group_size: int) -> bool:
    """Whether the kernel takes groups of this size: a power of 2."""
    return group_size & (group_size - 1) == 0


def _chunk(row_bytes: int, n_bits: int) -> int:
    """The bytes of a group's smallest plane: as many weights have their codes at like places."""
    return row_bytes * min(PLANES[n_bits]) // n_bits


# --- by torch ---


def _by_torch(
    packed: torch.Tensor, scale_zero: torch.Tensor, n_bits: int, dtype: torch.dtype, step: int
) -> torch.Tensor:
    count = len(packed)
    group_size = packed.shape[1] * 8 // n_bits
    decoded = torch.empty(count, group_size, dtype=dtype, device=packed.device)
    for start in range(0, count, step):
        groups = slice(start, start + step)
        scale, zero = scale_zero[groups].float().split(1, dim=1)
        # In float32 until the product is written: q - zero in 16 bits would lose digits.
        centered = torch.sub(unpack(packed[groups], n_bits), zero)
        torch.mul(centered, scale, out=decoded[groups])
        # Before the next step's is made: plans count one (`HqqWeight.decoding_bytes`).
        del centered
    return decoded


def unpack(packed: torch.Tensor, n_bits: int) -> torch.Tensor:
    """The uint8 codes [groups, group_size] of bytes."""
    widths = [packed.shape[1] * bits // n_bits for bits in PLANES[n_bits]]
    planes = packed.split(widths, dim=1)
    codes = None
    shift = 0
    for bits, plane in zip(PLANES[n_bits], planes, strict=True):
        parts = [plane]  # a whole byte
        if bits < 8:
            # The first code of a byte has no bits above it, the last none below: one operator less.
            mask = 2**bits - 1
            offsets = range(8 - 2 * bits, 0, -bits)
            inner = [plane >> offset & mask for offset in offsets]
            parts = [plane >> 8 - bits, *inner, plane & mask]
        values = torch.cat(parts, dim=1) if len(parts) > 1 else plane
        codes = values if codes is None else codes | values << shift
        shift += bits
    assert codes is not None
    return codes


# --- by Triton ---

# Bytes that a program reads at a time: 16 by each thread, an access of 128 bits.
BYTES = 2048
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def settings(group_size: int, n_bits: int) -> dict[str, Any]:
    """How the kernel is launched for groups of this size."""
    first, second = (*PLANES[n_bits], 0)[:2]
    chunk = _chunk(group_size * n_bits // 8, n_bits)
    return {
        "FIRST": first,
        "SECOND": second,
        "GROUPS": max(1, BYTES // chunk),
        "SIZE": group_size,
        "CHUNK": chunk,
        **OPTIONS,
    }


def _by_triton(
    packed: torch.Tensor, scale_zero: torch.Tensor, n_bits: int, dtype: torch.dtype, step: int
) -> torch.Tensor:
    num_groups = len(packed)
    group_size = packed.shape[1] * 8 // n_bits
    weights = torch.empty(num_groups, group_size, dtype=dtype, device=packed.device)
    options = settings(group_size, n_bits)
    if num_groups:
        grid = (triton.cdiv(num_groups, options["GROUPS"]),)
        decode_kernel[grid](
            packed,
            scale_zero,
            weights,
            num_groups,
            packed.stride(0),
            **options,
        )
    return weights


@jit
def decode_kernel(
    packed,
    scale_zero,
    weights,
    num_groups,
    packed_row,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """GROUPS groups of SIZE weights, CHUNK of each at a time.

    FIRST, SECOND: bits of a code in the group's planes, 0 if there is one plane.
    """
    dtype: tl.constexpr = weights.dtype.element_ty
    groups = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = (groups < num_groups)[:, None]
    scale = tl.load(scale_zero + groups[:, None] * 2, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(scale_zero + groups[:, None] * 2 + 1, mask=inside, other=0.0).to(tl.float32)
    columns = tl.arange(0, CHUNK)[None, :]
    at = packed + groups[:, None] * packed_row + columns
    for chunk in tl.static_range(SIZE // CHUNK):
        code = _codes(at, chunk, inside, FIRST, SIZE, CHUNK)
        if SECOND:
            above = _codes(at + SIZE * FIRST // 8, chunk, inside, SECOND, SIZE, CHUNK)
            code = code | above << FIRST
        value = (code.to(tl.float32) - zero) * scale
        to = groups[:, None] * SIZE + chunk * CHUNK + columns
        tl.store(weights + to, rounded_to(value, dtype), mask=inside)


@jit
def _codes(
    at, chunk: tl.constexpr, inside, BITS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr
):
    """The bits of a chunk's codes in a plane."""
    width: tl.constexpr = SIZE * BITS // 8
    first: tl.constexpr = chunk * CHUNK % width
    shift: tl.constexpr = 8 - BITS - chunk * CHUNK // width * BITS
    byte = tl.load(at + first, mask=inside, other=0).to(tl.int32)
    return byte >> shift & ((1 << BITS) - 1)


WAYS = {PLAIN: _by_torch, TRITON: _by_triton}
