"""MXFP4 and NVFP4 groups decoded with their scales in one kernel, with torch's bits.

Formats: model/quantizers/e2m1.py.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, ways_in_use
from fsdp_qlora.model.kernels.rounding import (
    computes_by_triton,
    divided,
    jit,
    rounded_to,
    tl,
    triton,
)

# E2M1's magnitudes, by the lower three bits of a code
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MANTISSA = 23  # bits of a float32's


class GroupScales(NamedTuple):
    """The scales of consecutive groups.

    codes: float32 [groups], or uint8: E8M0 without global scales, otherwise E4M3. global_scale:
    float32 [parts], each of as many groups as `groups_of_part`. first: number of the first group in
    the weight. multiplies: whether global scales are factors, and not divisors.
    """

    codes: torch.Tensor
    global_scale: torch.Tensor | None = None
    first: int = 0
    groups_of_part: int = 1
    multiplies: bool = False


def decode_groups(
    codes: torch.Tensor, scales: GroupScales, dtype: torch.dtype, step: int
) -> torch.Tensor:
    """Decode bytes [groups, group_size / 2] to weights [groups, group_size] in `dtype`.

    Args:
        step: groups that torch's operators decode at a time.
    """
    way = ways_in_use().decoding
    if way != PLAIN and not computes_by_triton(dtype, codes.device):
        way = PLAIN
    return WAYS[way](codes, scales, dtype, step)


# --- by torch ---


def decode_scales(scales: GroupScales) -> torch.Tensor:
    """The float32 scales [groups]."""
    codes = scales.codes
    if codes.dtype == torch.float32:
        return codes
    if scales.global_scale is None:
        # E8M0 has the exponent's bias of float32, so a shift makes a float32 of it. Only 2**-127 is
        # below float32's normal numbers: it has exponent 0 and the first bit of the mantissa.
        bits = torch.where(codes == 0, 1 << MANTISSA - 1, codes.int() << MANTISSA)
        return bits.int().view(torch.float32)
    values = codes.view(torch.float8_e4m3fn).float()
    global_scales = scales.global_scale
    if len(global_scales) > 1:
        groups = torch.arange(scales.first, scales.first + len(codes), device=codes.device)
        global_scales = global_scales[groups // scales.groups_of_part]
    # Divided, and not multiplied by the reciprocal, which would round twice.
    return values.mul_(global_scales) if scales.multiplies else values.div_(global_scales)


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The two values of each byte, [256] integers with the bytes of both in `dtype`."""
    # A set sign bit adds 8 to a code.
    negative = [-value for value in VALUES]
    values = torch.tensor((*VALUES, *negative), dtype=dtype)
    low = torch.arange(256) % 16
    high = torch.arange(256) // 16
    pairs = torch.stack([values[low], values[high]], dim=1)
    # An integer of the size of both values: one look-up copies the pair.
    integer = torch.int32 if dtype.itemsize == 2 else torch.int64
    return pairs.view(integer).view(-1).to(device)


def _by_torch(
    codes: torch.Tensor, scales: GroupScales, dtype: torch.dtype, step: int
) -> torch.Tensor:
    factors = decode_scales(scales)
    # An entry is both values of a byte: half as many look-ups as for each code.
    table = _pairs(dtype, codes.device)
    group_size = 2 * codes.shape[1]
    decoded = torch.empty(len(codes), group_size, dtype=dtype, device=codes.device)
    for start in range(0, len(codes), step):
        groups = slice(start, start + step)
        values = (
            table.index_select(0, codes[groups].reshape(-1).int()).view(dtype).view(-1, group_size)
        )
        # Float32 scales times 16-bit values are rounded once, as they are written.
        torch.mul(values, factors[groups, None], out=decoded[groups])
    return decoded


# --- by Triton ---

# Weights of a program: a thread reads codes of 32, which are one access of 128 bits.
WEIGHTS = 4096
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def _by_triton(
    codes: torch.Tensor, scales: GroupScales, dtype: torch.dtype, step: int
) -> torch.Tensor:
    num_groups, num_bytes = codes.shape
    weights = torch.empty(num_groups, 2 * num_bytes, dtype=dtype, device=codes.device)
    groups = WEIGHTS // (2 * num_bytes)
    # The only part has all groups.
    parts = 0 if scales.global_scale is None else len(scales.global_scale)
    if num_groups:
        decode_kernel[(triton.cdiv(num_groups, groups),)](
            codes,
            scales.codes,
            scales.global_scale,
            weights,
            num_groups,
            scales.first if parts > 1 else 0,
            scales.groups_of_part if parts > 1 else num_groups,
            DIVIDES=parts > 0 and not scales.multiplies,
            MULTIPLIES=parts > 0 and scales.multiplies,
            GROUPS=groups,
            BYTES=num_bytes,
            **OPTIONS,
        )
    return weights


@jit
def decode_kernel(
    codes,
    scale_codes,
    global_scales,
    weights,
    num_groups,
    first,
    groups_of_part,
    DIVIDES: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    GROUPS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """GROUPS groups of 2 * BYTES weights."""
    dtype: tl.constexpr = weights.dtype.element_ty
    groups = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = groups < num_groups
    scale = tl.load(scale_codes + groups, mask=inside, other=0)
    if DIVIDES or MULTIPLIES:
        part = (first + groups) // groups_of_part
        factor = tl.load(global_scales + part, mask=inside, other=1.0)
        scale = e4m3(scale.to(tl.int32))
        scale = scale * factor if MULTIPLIES else divided(scale, factor)
    elif scale.dtype != tl.float32:
        code = scale.to(tl.int32)
        scale = tl.where(code == 0, 1 << 22, code << 23).to(tl.float32, bitcast=True)
    at = groups[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    packed = tl.load(codes + at, mask=inside[:, None], other=0).to(tl.int32)
    even = rounded_to(e2m1(packed & 15) * scale[:, None], dtype)
    odd = rounded_to(e2m1(packed >> 4) * scale[:, None], dtype)
    to = groups[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(weights + to, tl.interleave(even, odd), mask=inside[:, None])


@jit
def e2m1(code):
    """The values of codes, by integers: twice a magnitude is one."""
    low = code & 7
    doubled = tl.where(low < 4, low, (2 + (low & 1)) << ((low >> 1) - 1))
    return _signed(doubled.to(tl.float32) * 0.5, code >> 3)


@jit
def e4m3(code):
    """The values of bytes. Cards before 8.9 have no such type."""
    exponent = (code >> 3) & 15
    mantissa = code & 7
    normal = ((exponent + 120) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    value = tl.where((code & 127) == 127, float("nan"), value)
    return _signed(value, code >> 7)


@jit
def _signed(magnitude, sign):
    bits = magnitude.to(tl.int32, bitcast=True) | (sign << 31)
    return bits.to(tl.float32, bitcast=True)


WAYS = {PLAIN: _by_torch, TRITON: _by_triton}
