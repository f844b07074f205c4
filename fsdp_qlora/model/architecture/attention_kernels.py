"""Kernels of attention within the documents of a row.

torch's kernel for documents of any lengths has three ways (kernels/in_use.py): "plain" is the flash
kernel that comes with torch; "cudnn" takes cuDNN's where all documents of a micro-batch have one
length; "fa4" puts FlashAttention 4 in the place of torch's own, for all micro-batches.

Shapes: query [1, H, T, D], key [1, G, T, D], value [1, G, T, V] as transformers has them, for H
heads of queries and G heads of keys and values. A kernel returns [T, H, V].
"""

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn

from fsdp_qlora.model.architecture.precision import autocast_kind
from fsdp_qlora.model.kernels.in_use import ways_in_use

CUDNN = "cudnn"
FLASH4 = "fa4"

# The largest head_dim that flash kernels take; gemma4 has 512 in each sixth block.
MOST_OF_FLASH = 256
# The largest head_dim of cuDNN's kernels on all cards, and what lengths must be multiples of. For
# each new shape cuDNN builds a graph, which takes about 42 ms: texts as they are have hundreds of
# lengths, rows that are cut to the context's length have one.
MOST_OF_CUDNN = 128
_MULTIPLE_OF_CUDNN = 128
TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # since torch 2.13


class Call(NamedTuple):
    """Arguments of an attention function from the model, and from `describe_documents`.

    ends: int32 [documents + 1], the first is 0. lengths: of the documents, on the host. window:
    tokens that a token sees, itself included, None for all before it. softcap: of the scores.
    sinks: a score for each head that takes attention from all tokens (gpt_oss). query_ends: as
    `ends`, of the queries, if there are none of the first tokens of some documents.
    """

    ends: torch.Tensor
    longest: int
    lengths: list[int]
    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    query_ends: torch.Tensor | None = None


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Call], torch.Tensor]


# --- documents of any lengths ---


def varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
    """torch's flash kernel (16 bits, Ampere and newer), or SDPA for heads that are too wide."""
    if not query.is_meta:
        if query.shape[-1] > MOST_OF_FLASH:
            return sdpa(query, key, value, call, repeat=True)
        way = ways_in_use().attention
        if way == CUDNN and cudnn_takes(query, value, call):
            return _each(partial(_cudnn, scaling=call.scaling), query, key, value, call)
        if way == FLASH4:
            _use_flash4()
    # autocast does not know this operator, and the kernel takes one 16-bit dtype: cast here.
    kind = autocast_kind(query)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    # The kernel wants values as wide as queries: zeros fill V up to D (deepseek).
    missing = query.shape[-1] - value.shape[-1]
    padded = F.pad(value, (0, missing)) if missing else value
    # [1, H, T, D] -> [T, H, D]
    query, key, padded = (
        tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in (query, key, padded)
    )
    repeats = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {}
    if TAKES_GROUPS:
        options["enable_gqa"] = repeats > 1
    elif repeats > 1:
        key = key.repeat_interleave(repeats, dim=1)
        padded = padded.repeat_interleave(repeats, dim=1)
    # Numbers of tokens to the left and to the right of a token that it sees; -1 for all.
    sides = (call.window - 1, 0) if call.window else (-1, 0)
    result = varlen_attn(
        query,
        key,
        padded,
        # bounds and longest length of the queries' documents, then of the keys'
        call.ends if call.query_ends is None else call.query_ends,
        call.ends,
        call.longest,
        call.longest,
        scale=call.scaling,
        window_size=sides,
        **options,
    )
    assert isinstance(result, torch.Tensor)
    return result[..., : value.shape[-1]]


def takes_last_queries(
    kernel: Kernel, query: torch.Tensor, value: torch.Tensor, call: Call
) -> bool:
    """Whether a kernel takes queries of the last tokens of documents alone (`Call.query_ends`).

    The last query of a document sees all of its keys.
    """
    if kernel is not varlen or query.shape[-1] > MOST_OF_FLASH:
        return False
    way = ways_in_use().attention
    if way == CUDNN:
        return not cudnn_takes(query, value, call)
    # Trials of FlashAttention 4 have as many queries as keys.
    return way != FLASH4


def cudnn_takes(query: torch.Tensor, value: torch.Tensor, call: Call) -> bool:
    """Whether the way "cudnn" computes these documents by cuDNN's kernel."""
    size = query.shape[-1]
    if size > MOST_OF_CUDNN or size % 8 or value.shape[-1] != size:
        return False
    if call.dropout or call.window or call.softcap is not None or call.sinks is not None:
        return False
    return min(call.lengths) == call.longest and call.longest % _MULTIPLE_OF_CUDNN == 0


def _cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float | None
) -> torch.Tensor:
    """SDPA of documents [N, H, L, D] by cuDNN alone: it raises where torch would take another."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def _use_flash4() -> None:
    """Put FlashAttention 4 in the place of torch's flash kernel, for good.

    Raises:
        ImportError, RuntimeError: the package flash-attn-4 or what it needs is not there.
    """
    if current_flash_attention_impl() != "FA4":
        activate_flash_attention_impl("FA4")


# --- one document, or several of equal length, at a time ---


def _each(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
) -> torch.Tensor:
    """Call attend(query, key, value) -> [N, H, L, V] for each run of N neighbours of equal length.

    L is that length.
    """
    # (number of documents, their length) of each run
    runs = [(len(list(group)), length) for length, group in itertools.groupby(call.lengths)]
    if len(runs) == 1:
        # [1, H, T, D] -> [H, N, L, D] -> [N, H, L, D]: views, so nothing is copied
        views = [
            tensor.view(tensor.shape[1], *runs[0], tensor.shape[3]).transpose(0, 1)
            for tensor in (query, key, value)
        ]
        return attend(*views).transpose(1, 2).flatten(0, 1)
    sizes = [count * length for count, length in runs]
    # One split of all: the gradient of `tensor[0]`, or of a part of it, would be copied into zeros
    # as large as the whole tensor.
    rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    parts = [tensor.split(sizes) for tensor in rows]
    outputs: list[torch.Tensor] = []
    for run, *tensors in zip(runs, *parts, strict=True):
        # [N * L, H, D] -> [N, H, L, D], and back
        views = [tensor.unflatten(0, run).transpose(1, 2) for tensor in tensors]
        outputs.append(attend(*views).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, *, repeat: bool = False
) -> torch.Tensor:
    """torch's SDPA.

    repeat: give each head of queries keys and values of its own, see `choose_sdpa`.
    """

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        length = query.shape[2]
        repeats = query.shape[1] // key.shape[1]
        mask = None
        # A document within the window needs no mask, which the flash kernel does not take.
        if call.window and call.window < length:
            mask = visible(length, call.window, query.device)
        # Kernels that take a mask take no groups of heads.
        must_repeat = repeats > 1 and (repeat or mask is not None)
        if must_repeat:
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            call.dropout,
            is_causal=mask is None,
            scale=call.scaling,
            enable_gqa=repeats > 1 and not must_repeat,
        )

    return _each(attend, query, key, value, call)


def eager(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
    """Scores, soft cap, mask, and softmax in float32, as transformers' eager functions."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        count, heads, length, size = query.shape
        repeats = heads // key.shape[1]
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
        scaling = size**-0.5 if call.scaling is None else call.scaling
        # [N, H, L, L]
        scores = query @ key.mT * scaling
        # before the mask, whose values it would change
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        hidden = ~visible(length, call.window, query.device)
        # The smallest number, as in transformers: softmax of a row of -inf would be NaN.
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        # A sink is one more column, which takes its share of the softmax and has no value.
        if call.sinks is not None:
            sinks = call.sinks.view(1, -1, 1, 1).expand(count, -1, length, 1)
            scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
        shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., :length]
        return F.dropout(shares, p=call.dropout, training=call.dropout > 0) @ value

    return _each(attend, query, key, value, call)


def visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [length, length]: whether the row's token sees the column's token."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return visible.triu(1 - window) if window else visible
