"""NF4 and FP4 blocks decoded with both of their statistics in one kernel, with bitsandbytes' bits.

A block is 64 weights of one absmax, and 256 of these are encoded with one nested absmax (formats:
model/quantizers/bnb_4bit.py).
"""

from __future__ import annotations

import functools
from typing import Any

import bitsandbytes.functional as bnb
import torch

from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, ways_in_use
from fsdp_qlora.model.kernels.rounding import jit, rounded_to, runs_by_triton, tl, triton

# weights that share one absmax: QLoRA (Dettmers et al. 2023), bitsandbytes' default
BLOCKSIZE = 64
# absmax values that share one nested absmax: double quantization
NESTED_BLOCKSIZE = 256
# weights quantized or decoded at a time on a GPU: bitsandbytes' kernels count in int32
GPU_PIECE = 2**30


def decode_blocks(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    nested: torch.Tensor | None,
    offset: torch.Tensor | None,
    quant_type: str,
    dtype: torch.dtype,
    skipped: int = 0,
) -> torch.Tensor:
    """Decode whole blocks to weights [blocks, 64] in `dtype`.

    Args:
        codes: uint8 [32 * blocks].
        absmax: float32 [blocks]; with nested ones uint8 [skipped + blocks].
        nested: float32, one for each 256 absmax, from the first one on.
        offset: float32 scalar, which is added to each absmax that has a nested one.
        quant_type: nf4 or fp4.
        skipped: number of absmax before the first block's, fewer than 256.
    """
    way = ways_in_use().decoding
    if way != PLAIN and not runs_by_triton(absmax if nested is None else nested):
        way = PLAIN
    return WAYS[way](codes, absmax, nested, offset, quant_type, dtype, skipped)


# --- by bitsandbytes ---


def decode_absmax(absmax: torch.Tensor, nested: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """The float32 absmax that the uint8 codes stand for."""
    decoded: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise.default(
        absmax, nested, nested_values(absmax.device), NESTED_BLOCKSIZE, torch.float32
    )
    return decoded.add_(offset)


def _by_bitsandbytes(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    nested: torch.Tensor | None,
    offset: torch.Tensor | None,
    quant_type: str,
    dtype: torch.dtype,
    skipped: int,
) -> torch.Tensor:
    if nested is not None:
        assert offset is not None
        absmax = decode_absmax(absmax, nested, offset)
        if skipped:
            absmax = absmax[skipped:]
    # One block per row: bitsandbytes 0.50's CPU kernel uses a wrong absmax if a row ends in half a
    # block.
    decode = torch.ops.bitsandbytes.dequantize_4bit.default
    if len(absmax) <= GPU_PIECE // BLOCKSIZE:
        return decode(codes, absmax, BLOCKSIZE, quant_type, (len(absmax), BLOCKSIZE), dtype)
    code_pieces = codes.split(GPU_PIECE // 2)
    absmax_pieces = absmax.split(GPU_PIECE // BLOCKSIZE)
    return torch.cat(
        [
            decode(piece, scales, BLOCKSIZE, quant_type, (len(scales), BLOCKSIZE), dtype)
            for piece, scales in zip(code_pieces, absmax_pieces, strict=True)
        ]
    )


# --- by Triton ---

# Blocks of a program: a thread reads codes of 32 weights, which are one access of 128 bits.
BLOCKS = 64
# Each product is rounded before the offset is added, as by bitsandbytes.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def _by_triton(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    nested: torch.Tensor | None,
    offset: torch.Tensor | None,
    quant_type: str,
    dtype: torch.dtype,
    skipped: int,
) -> torch.Tensor:
    num_blocks = codes.numel() * 2 // BLOCKSIZE
    weights = torch.empty(num_blocks, BLOCKSIZE, dtype=dtype, device=codes.device)
    if num_blocks:
        decode_kernel[(triton.cdiv(num_blocks, BLOCKS),)](
            codes,
            absmax,
            nested,
            offset,
            code_values(quant_type, codes.device),
            nested_values(codes.device),
            weights,
            num_blocks,
            skipped,
            NESTED=nested is not None,
            BLOCKS=BLOCKS,
            BYTES=BLOCKSIZE // 2,
            **OPTIONS,
        )
    return weights


@functools.cache
def code_values(quant_type: str, device: torch.device) -> torch.Tensor:
    """The 16 float32 values of a weight's codes."""
    return bnb.get_4bit_type(quant_type, device="cpu").to(device)


@functools.cache
def nested_values(device: torch.device) -> torch.Tensor:
    """The 256 float32 values of bitsandbytes' dynamic 8-bit map, which encode the absmax."""
    return bnb.create_dynamic_map().to(device)


@jit
def decode_kernel(
    codes,
    absmax,
    nested,
    offset,
    values,
    nested_values,
    weights,
    num_blocks,
    skipped,
    NESTED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """BLOCKS blocks of 2 * BYTES weights: value * (nested value * nested + offset)."""
    dtype: tl.constexpr = weights.dtype.element_ty
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    if NESTED:
        places = blocks + skipped
        code = tl.load(absmax + places, mask=inside, other=0).to(tl.int32)
        scale = tl.load(nested_values + code) * tl.load(
            nested + places // 256, mask=inside, other=0.0
        )
        scale = scale + tl.load(offset)
    else:
        scale = tl.load(absmax + blocks, mask=inside, other=0.0)
    at = blocks[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    packed = tl.load(codes + at, mask=inside[:, None], other=0).to(tl.int32)
    flat = tl.reshape(packed, (BLOCKS * BYTES,))
    table = tl.load(values + tl.arange(0, 16))
    high = tl.reshape(tl.gather(table, flat >> 4, 0), (BLOCKS, BYTES))
    low = tl.reshape(tl.gather(table, flat & 15, 0), (BLOCKS, BYTES))
    pair = tl.interleave(
        rounded_to(high * scale[:, None], dtype), rounded_to(low * scale[:, None], dtype)
    )
    to = blocks[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(weights + to, pair, mask=inside[:, None])


WAYS = {PLAIN: _by_bitsandbytes, TRITON: _by_triton}
