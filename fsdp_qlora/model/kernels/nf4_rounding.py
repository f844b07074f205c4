"""Values rounded to NF4 and FP4 blocks, and weights with a low-rank update in one kernel.

On a CPU torch's operators have the bits of bitsandbytes' operator for codes. Its kernels for GPUs
divide by an approximation (`--use_fast_math`), and take a neighbouring code for a few of 10 million
values; its rounding of absmax differs between CPUs and GPUs. What is trained on a GPU and merged on
a CPU needs one rounding. Formats: model/quantizers/bnb_4bit.py.
"""

from __future__ import annotations

import functools
from typing import Any

import bitsandbytes.functional as bnb
import torch
import torch.nn.functional as F

from fsdp_qlora.model.kernels.limits import limits_below
from fsdp_qlora.model.kernels.low_rank import Factors, magnitude, updated
from fsdp_qlora.model.kernels.nf4 import BLOCKSIZE, NESTED_BLOCKSIZE, code_values, nested_values
from fsdp_qlora.model.kernels.rounding import divided, jit, tl, triton

# Of an absmax, so that zeros are not divided by zero.
LEAST_ABSMAX = 1e-38


def _halfway(values: torch.Tensor) -> torch.Tensor:
    return (values[:-1] + values[1:]) / 2


# Made here, on the CPU: where a plan is made, new tensors have no values.
_ABSMAX_LIMITS = _halfway(bnb.create_dynamic_map())

# --- by torch ---


def round_blocks(values: torch.Tensor, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 values to codes, two in a byte [32 * blocks], and float32 absmax [blocks].

    The last block may be short: it is filled up with zeros.
    """
    blocks = _blocks_of(values, BLOCKSIZE)
    absmax = _largest(blocks)
    limits, order = _code_tables(quant_type, values.device)
    codes = _codes(blocks, absmax, limits)
    if quant_type != "nf4":
        codes = order[codes.int()]
    # Even elements are in the high half of a byte, and in the low byte of a pair.
    pairs = codes.view(-1).view(torch.int16)
    return (pairs << 4 | pairs >> 8).to(torch.uint8), absmax


def round_absmax(absmax: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 absmax [blocks] without their mean to bytes, and float32 nested absmax."""
    blocks = _blocks_of(absmax - offset, NESTED_BLOCKSIZE)
    nested = _largest(blocks)
    codes = _codes(blocks, nested, _absmax_limits(absmax.device))
    return codes.view(-1)[: len(absmax)], nested


@functools.cache
def _code_tables(quant_type: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The float32 limits [15] between codes in ascending order, and these codes, uint8 [16]."""
    values = bnb.get_4bit_type(quant_type, device="cpu")
    order = values.argsort()
    return _halfway(values[order]).to(device), order.to(device, torch.uint8)


@functools.cache
def _absmax_limits(device: torch.device) -> torch.Tensor:
    return _ABSMAX_LIMITS.to(device)


def _blocks_of(values: torch.Tensor, size: int) -> torch.Tensor:
    values = values.flatten()
    rest = -values.numel() % size
    if rest:
        # Zeros do not change a block's largest magnitude.
        values = F.pad(values, (0, rest))
    return values.view(-1, size)


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.abs().amax(1)


def _codes(blocks: torch.Tensor, absmax: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    factors = absmax.clamp(min=LEAST_ABSMAX).reciprocal()
    return limits_below(blocks * factors[:, None], limits)


# --- by Triton ---

# Rows of a program, which has one block of each.
ROWS = 64
OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


def round_updated_blocks(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    nested: torch.Tensor | None,
    offset: torch.Tensor | None,
    quant_type: str,
    factors: Factors,
    skipped: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix with its update to codes and float32 absmax [blocks].

    Its rows are whole blocks. Arguments but `factors`: as for `nf4.decode_blocks`.
    """
    num_rows = factors.scaled_B.shape[1]
    blocks = factors.lora_A.shape[1] // BLOCKSIZE
    new_codes = torch.empty_like(codes)
    new_absmax = torch.empty(num_rows * blocks, dtype=torch.float32, device=codes.device)
    limits, order = _code_tables(quant_type, codes.device)
    even, odd = factors.of_pairs()
    round_kernel[(triton.cdiv(num_rows, ROWS) * blocks,)](
        codes,
        absmax,
        nested,
        offset,
        code_values(quant_type, codes.device),
        nested_values(codes.device),
        limits,
        order,
        even,
        odd,
        factors.scaled_B,
        new_codes,
        new_absmax,
        num_rows,
        factors.rank,
        blocks,
        skipped,
        NESTED=nested is not None,
        LEAST=LEAST_ABSMAX,
        ROWS=ROWS,
        BYTES=BLOCKSIZE // 2,
        **OPTIONS,
    )
    return new_codes, new_absmax


@jit
def round_kernel(
    codes,
    absmax,
    nested,
    offset,
    values,
    nested_values,
    limits,
    order,
    even_A,
    odd_A,
    scaled_B,
    new_codes,
    new_absmax,
    num_rows,
    rank,
    blocks,
    skipped,
    NESTED: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """A block of 2 * BYTES weights in ROWS rows."""
    place = tl.program_id(0)
    rows = place // blocks * ROWS + tl.arange(0, ROWS)
    block = place % blocks
    pairs = block * BYTES + tl.arange(0, BYTES)
    inside = rows < num_rows
    at_blocks = rows.to(tl.int64) * blocks + block
    at_pairs = at_blocks[:, None] * BYTES + tl.arange(0, BYTES)[None, :]

    if NESTED:
        places = at_blocks + skipped
        code = tl.load(absmax + places, mask=inside, other=0).to(tl.int32)
        factor = tl.load(nested + places // 256, mask=inside, other=0.0)
        scale = tl.load(nested_values + code) * factor + tl.load(offset)
    else:
        scale = tl.load(absmax + at_blocks, mask=inside, other=0.0)
    packed = tl.load(codes + at_pairs, mask=inside[:, None], other=0).to(tl.int32)
    row_bytes = blocks * BYTES
    even = tl.load(values + (packed >> 4)) * scale[:, None]
    even = updated(even, even_A, scaled_B, rows, pairs, num_rows, row_bytes, rank)
    odd = tl.load(values + (packed & 15)) * scale[:, None]
    odd = updated(odd, odd_A, scaled_B, rows, pairs, num_rows, row_bytes, rank)

    largest = tl.max(tl.maximum(magnitude(even), magnitude(odd)), axis=1)
    largest = largest.to(tl.float32, bitcast=True)
    tl.store(new_absmax + at_blocks, largest, mask=inside)
    factor = divided(1.0, tl.where(largest < LEAST, LEAST, largest))[:, None]
    high = _code(even * factor, limits, order)
    low = _code(odd * factor, limits, order)
    tl.store(new_codes + at_pairs, (high << 4 | low).to(tl.uint8), mask=inside[:, None])


@jit
def _code(x, limits, order):
    """The codes whose values are nearest; of the largest value for NaN."""
    place = tl.full(x.shape, 15, tl.int32)
    for index in tl.static_range(15):
        place -= (x <= tl.load(limits + index)).to(tl.int32)
    return tl.load(order + place).to(tl.int32)
