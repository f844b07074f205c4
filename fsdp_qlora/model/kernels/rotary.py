"""Rotary embeddings of queries and keys (Su et al. 2021) in one kernel, with torch's bits.

A head of D numbers turns in pairs of one number of its first half and one of its second:
x cos + rotate_half(x) sin, where each product is rounded, and then the sum.
"""

from __future__ import annotations

import functools

import torch

from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, ways_in_use
from fsdp_qlora.model.kernels.rounding import (
    jit,
    rounded,
    rounded_to,
    runs_by_triton,
    tl,
    triton,
)

Pair = tuple[torch.Tensor, torch.Tensor]


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, backward: bool
) -> Pair:
    """Turn queries and keys, or their gradients back.

    Args:
        q: [B, H, T, D]. k: [B, G, T, D]. Each head lies in one piece, with any strides.
        cos, sin: [B or 1, T, D], in the same dtype.

    Returns:
        New tensors of these shapes that lie as [B, T, H, D] and [B, T, G, D] in memory.
    """
    way = ways_in_use().rotary if rotary_fits(q, k, cos, sin) else PLAIN
    return WAYS[way](q, k, cos, sin, backward)


def rotary_fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether a run has chosen another way than torch's, which can turn these."""
    if ways_in_use().rotary == PLAIN or not runs_by_triton(q, k, cos, sin):
        return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    batch, _, tokens, size = q.shape
    fits = (k.shape[0], *k.shape[2:]) == (batch, tokens, size) and size % 2 == 0
    # Tables for a part of a head leave its other numbers as they are.
    fits = fits and cos.shape[1:] == (tokens, size) and cos.shape[0] in (1, batch)
    return fits and all(each.stride(-1) == 1 for each in (q, k, cos, sin))


# --- by torch ---


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool
) -> Pair:
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    turn = _turned_back if backward else _turned
    return _by_token(turn(q, cos, sin)), _by_token(turn(k, cos, sin))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)


def _turned_back(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = (grad * sin).chunk(2, dim=-1)
    return (grad * cos) + torch.cat((second, -first), dim=-1)


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """x with the numbers of a token in one piece."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# --- by Triton ---

# Numbers of each half of the heads that a program turns: 8 for each of 64 threads, which are one
# access of 128 bits in 16 bits.
_AT_ONCE = 512


def _rotate_by_triton(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool
) -> Pair:
    batch, heads, tokens, size = q.shape
    groups = k.shape[1]
    new_q = q.new_empty(batch, tokens, heads, size)
    new_k = k.new_empty(batch, tokens, groups, size)
    if batch * tokens:
        settings = launch_settings(heads, groups, size, backward)
        programs = sum(triton.cdiv(number, settings["HEADS"]) for number in (heads, groups))
        if cos.stride() != sin.stride():
            cos = cos.contiguous()
            sin = sin.contiguous()
        # One table may serve all rows.
        strides = (*q.stride()[:3], *k.stride()[:3], _row_stride(cos), cos.stride(1))
        tensors = (q, k, cos, sin, new_q, new_k)
        rotary_kernel[(batch * tokens, programs)](*tensors, *strides, tokens, **settings)
    return new_q.transpose(1, 2), new_k.transpose(1, 2)


def _row_stride(table: torch.Tensor) -> int:
    return table.stride(0) if len(table) > 1 else 0


@functools.cache
def launch_settings(heads: int, groups: int, size: int, backward: bool) -> dict[str, int]:
    """The kernel's constants and options."""
    block = triton.next_power_of_2(size // 2)
    return {
        "NUM_HEADS": heads,
        "NUM_GROUPS": groups,
        "HALF": size // 2,
        "BLOCK": block,
        "BACKWARD": backward,
        "HEADS": max(1, _AT_ONCE // block),
        "num_warps": 2,
        "enable_fp_fusion": False,
    }


@jit(do_not_specialize=["tokens"])
def rotary_kernel(
    q,
    k,
    cos,
    sin,
    new_q,
    new_k,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    table_row,
    table_token,
    tokens,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """HEADS heads of queries or of keys of one token.

    Arguments such as q_row are strides in elements.
    """
    at = tl.program_id(0).to(tl.int64)
    row = at // tokens
    token = at % tokens
    first = tl.program_id(1) * HEADS
    table = row * table_row + token * table_token
    cos += table
    sin += table
    Q_PROGRAMS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    if tl.program_id(1) < Q_PROGRAMS:
        q += row * q_row + token * q_token
        new_q += at * (NUM_HEADS * HALF * 2)
        _turn(q, q_head, new_q, first, cos, sin, NUM_HEADS, HALF, BLOCK, BACKWARD, HEADS)
    else:
        first -= Q_PROGRAMS * HEADS
        k += row * k_row + token * k_token
        new_k += at * (NUM_GROUPS * HALF * 2)
        _turn(k, k_head, new_k, first, cos, sin, NUM_GROUPS, HALF, BLOCK, BACKWARD, HEADS)


@jit
def _turn(
    x,
    x_head,
    y,
    first_head,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    # A head of a long row may begin after 2**31 elements.
    heads = first_head + tl.arange(0, HEADS).to(tl.int64)
    inside = (heads < NUM_HEADS)[:, None] & (columns < HALF)[None, :]
    at = heads[:, None] * x_head + columns[None, :]
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos += columns
    sin += columns
    cos_a = tl.load(cos, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + HALF, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + HALF, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        first = rounded(a * cos_a, dtype) + rounded(b * sin_b, dtype)
        second = rounded(b * cos_b, dtype) - rounded(a * sin_a, dtype)
    else:
        first = rounded(a * cos_a, dtype) - rounded(b * sin_a, dtype)
        second = rounded(b * cos_b, dtype) + rounded(a * sin_b, dtype)
    to = heads[:, None] * (HALF * 2) + columns[None, :]
    tl.store(y + to, rounded_to(first, dtype), mask=inside)
    tl.store(y + to + HALF, rounded_to(second, dtype), mask=inside)


WAYS = {PLAIN: _rotate, TRITON: _rotate_by_triton}
