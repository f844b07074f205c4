"""Attention: torch's kernel on a GPU, chosen before a run, and attention within documents
concatenated to a row.

For documents a model calls functions that are registered with transformers by name, with what
`data.micro_batch.describe_documents` says; transformers' own function for flash-attn takes that
too. transformers makes masks only for the names that it has a mask function for, and so none here:
nothing of size T x T is made, and no value of a GPU tensor is asked for.

Shapes: query [1, H, T, D], key [1, G, T, D], value [1, G, T, V] as transformers has them, for H
heads of queries and G of keys and values; what a kernel here returns is [T, H, V].
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fsdp_qlora.distributed.context import ContextGroup
from fsdp_qlora.model.architecture.precision import autocast_kind
from fsdp_qlora.model.architecture.shapes import any_layer_has, block_shapes

# our name for SDPA with a head of keys and values for each head of queries
REPEATED = "sdpa_repeated"
FLASH = "flash_attention_2"
# transformers' name of an implementation -> the name of the one that does the same for documents.
SDPA, SDPA_REPEATED, VARLEN, EAGER = (
    f"documents_{name}" for name in ("sdpa", REPEATED, "varlen", "eager")
)
_SAME = {"sdpa": SDPA, REPEATED: SDPA_REPEATED, FLASH: FLASH, "eager": EAGER}
# numbers of a head that flash kernels take; gemma4 has 512 in each sixth block
_MOST_OF_FLASH = 256
_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # since torch 2.13


def choose_sdpa(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> str:
    """transformers' name of the SDPA variant that needs the least memory: `sdpa`, or REPEATED if
    that is better.

    Only the flash kernel (16 bits, Ampere and newer) supports grouped keys and values. Otherwise
    torch falls back to the math kernel, which stores T x T scores per head, unless keys and values
    are repeated.
    """
    if device.type != "cuda" or find_kernel(config, dtype, device, repeated=False) != "math":
        return "sdpa"
    if find_kernel(config, dtype, device, repeated=True) == "math":
        return "sdpa"
    AttentionInterface.register(REPEATED, _sdpa_of_repeated)
    AttentionMaskInterface.register(REPEATED, sdpa_mask)
    return REPEATED


def find_kernel(
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    repeated: bool,
    widest: int | None = None,
) -> str:
    """The kernel that torch chooses for causal rows without a mask: flash, memory-efficient or
    math.

    Of the kernels of all blocks (with heads of at most `widest` numbers) the one that needs most
    memory.
    """
    shapes = [shape for shape in block_shapes(config) if widest is None or shape.head_dim <= widest]
    sizes = {
        (shape.heads, shape.heads if repeated else shape.groups, shape.head_dim) for shape in shapes
    }
    found = {_kernel_of(*size, dtype, device) for size in sizes}
    return next((name for name in ("math", "memory-efficient", "flash") if name in found), "math")


def _kernel_of(
    heads: int, groups: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> str:
    query = torch.empty(1, heads, 128, head_dim, dtype=dtype, device=device, requires_grad=True)
    key = torch.empty(1, groups, 128, head_dim, dtype=dtype, device=device, requires_grad=True)
    params = SDPAParams(query, key, key, None, 0.0, True, groups != heads)
    if can_use_flash_attention(params):
        return "flash"
    return "memory-efficient" if can_use_efficient_attention(params) else "math"


def _sdpa_of_repeated(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA, of query [rows, heads, T, head_dim], key and value [rows, groups, T,
    head_dim].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    # Replaces the module, whose attributes would make transformers repeat the keys again.
    alone = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
        alone, query, key, value, *args, **kwargs
    )
    return result


# --- documents ---


def choose(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, *, requested: str
) -> str | None:
    """Name the implementation for documents; None if there is none for the model's own.

    Args:
        config: of a model that has been built. requested: the option attn_implementation; with
        `auto` a kernel for lengths that vary replaces SDPA.
    """
    own = config._attn_implementation
    name = _SAME.get(own)
    replaces = (
        requested == "auto" and device.type == "cuda" and name in (SDPA, SDPA_REPEATED, FLASH)
    )
    # Torch's kernel has neither.
    if replaces and not any_layer_has(config, "attn_logit_softcapping", "attention_dropout"):
        # SDPA pads heads for its flash kernel; the operator itself takes multiples of 8 only.
        takes_heads = all(shape.head_dim % 8 == 0 for shape in block_shapes(config))
        kernel = find_kernel(config, dtype, device, repeated=True, widest=_MOST_OF_FLASH)
        name = VARLEN if takes_heads and kernel == "flash" else name
    return name


def can_share(implementation: str | None) -> bool:
    """Whether tokens with which two documents begin can be computed once for both, all but their
    attention.
    """
    return implementation in _KERNELS


def packing_blocker(model: PreTrainedModel) -> str | None:
    """The reason why documents cannot lie in one row, by a model's structure; None if none is
    known.

    The rest is found by a probe (training/probes.py). Models that flash-attn can compute get
    everything that a mask would say, such as sliding windows, as arguments of the attention
    function.
    """
    parameters = inspect.signature(type(model).forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any or "position_ids" not in parameters:
        return "it takes no positions"
    # Hybrids leave out the flag of the first, which is about serving; their other layers are not
    # attention.
    replaceable = getattr(model, "_supports_attention_backend", False) or any(
        map(_looks_up, model.modules())
    )
    # A model for images may deny it for its masks of them alone, of which text has none.
    is_told = getattr(model.get_decoder(), "_supports_flash_attn", False)
    return None if replaceable and is_told else "its attention cannot be replaced"


def _looks_up(module: nn.Module) -> bool:
    """Whether a module takes its attention function by name from transformers' table."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


@contextlib.contextmanager
def attending(model: PreTrainedModel, implementation: str | None) -> Iterator[None]:
    """In this block the model computes attention by another implementation; None changes nothing.

    Outside of it a caller's padded rows and caches of keys and values have the model's own, which
    takes masks.
    """
    own = model.config._attn_implementation
    model.config._attn_implementation = implementation or own
    try:
        yield
    finally:
        model.config._attn_implementation = own


def describe_kernel(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, implementation: str | None
) -> str | None:
    """One line about the kernel on a GPU; None if the name of the model's attention says it.

    Args:
        implementation: from `choose`, None for padded rows.
    """
    own = config._attn_implementation
    if implementation in (VARLEN, FLASH):
        return (
            f"Attention: {'torch' if implementation == VARLEN else 'flash-attn'}'s flash kernel "
            "for rows of any lengths"
        )
    if device.type != "cuda" or own not in ("sdpa", REPEATED):
        return None
    kernel = find_kernel(config, dtype, device, repeated=own == REPEATED)
    repeated = ", keys and values repeated for each head" if own == REPEATED else ""
    return (
        f"Attention: torch's {kernel} "
        f"kernel{repeated}{', a row at a time' if implementation else ''}"
    )


class Call(NamedTuple):
    """Arguments of an attention function from the model, and from `describe_documents`.

    ends: int32 [documents + 1]. lengths: of the documents. window: tokens that a token sees, itself
    included, None for all before it. softcap: of the scores. sinks: a score for each head that
    takes attention from all tokens.
    """

    ends: torch.Tensor
    longest: int
    lengths: list[int]
    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Call], torch.Tensor]


def _attention(
    kernel: Kernel,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    **told: Any,
) -> tuple[torch.Tensor, None]:
    """A kernel as transformers calls it."""
    if "document_lengths" not in told:
        raise NotImplementedError("the model does not pass on where documents begin")
    longest = max(told["document_lengths"])
    window = told.get("sliding_window")
    places = told.get("places")
    sinks = told.get("s_aux")
    context: ContextGroup | None = told.get("context_group")
    if context:
        query, key, value = context.to_heads(query, key, value)
        sinks = None if sinks is None else sinks[context.own(len(sinks))]
    call = Call(
        ends=told["cu_seq_lens_q" if places is None else "document_ends"],
        longest=longest,
        lengths=told["document_lengths"],
        scaling=told.get("scaling"),
        dropout=told.get("dropout", 0.0),
        window=window if window and window < longest else None,
        softcap=told.get("softcap"),
        sinks=sinks,
    )
    if places is None:
        found = kernel(query, key, value, call)
    else:  # kernels know no trees, so here documents have the tokens that they share each
        query, key, value = (tensor.index_select(2, places) for tensor in (query, key, value))
        found = kernel(query, key, value, call).index_select(0, told["own_tokens"])
    return (context.to_tokens(found) if context else found)[None], None


# --- documents of any lengths ---


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> torch.Tensor:
    """torch's flash kernel; 16 bits, Ampere and newer. SDPA for the blocks whose heads are too wide
    for it.
    """
    if query.shape[-1] > _MOST_OF_FLASH and not query.is_meta:
        return _sdpa(query, key, value, call, repeat=True)
    kind = autocast_kind(query)
    missing = query.shape[-1] - value.shape[-1]
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    padded = F.pad(value, (0, missing)) if missing else value  # V is filled up to D
    # [T, H, D]
    query, key, padded = (
        tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in (query, key, padded)
    )
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not _TAKES_GROUPS:
        key, padded = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, padded))
    places = (call.ends, call.ends, call.longest, call.longest)
    # tokens to the left and right; -1 for all
    sides = (call.window - 1, 0) if call.window else (-1, 0)
    options: dict[str, Any] = {"enable_gqa": groups > 1} if _TAKES_GROUPS else {}
    result = varlen_attn(
        query, key, padded, *places, scale=call.scaling, window_size=sides, **options
    )
    assert isinstance(result, torch.Tensor)
    return result[..., : value.shape[-1]]


# --- one document, or several of equal length, at a time ---


def _each(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
) -> torch.Tensor:
    """Call attend(query, key, value) -> [N, H, L, V] for each run of N neighbours of L
    tokens each.
    """
    runs = [(len(list(group)), length) for length, group in itertools.groupby(call.lengths)]
    if len(runs) == 1:
        apart = (
            tensor.view(tensor.shape[1], *runs[0], tensor.shape[3])
            for tensor in (query, key, value)
        )
        return attend(*(tensor.transpose(0, 1) for tensor in apart)).transpose(1, 2).flatten(0, 1)
    sizes = [count * length for count, length in runs]
    # The gradient of `tensor[0]`, or of a part of it, would be copied into zeros as large as the
    # whole tensor.
    rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    split = [tensor.split(sizes) for tensor in rows]
    found = [
        attend(*(tensor.unflatten(0, run).transpose(1, 2) for tensor in tensors))
        .transpose(1, 2)
        .flatten(0, 1)
        for run, *tensors in zip(runs, *split, strict=True)
    ]
    return torch.cat(found)


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, *, repeat: bool = False
) -> torch.Tensor:
    """torch's SDPA. repeat: give each head of queries keys and values of its own, see
    `choose_sdpa`.
    """

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        length = query.shape[2]
        groups = query.shape[1] // key.shape[1]
        mask = (
            _visible(length, call.window, query.device)
            if call.window and call.window < length
            else None
        )
        # Kernels that take a mask take no groups of heads.
        repeats = groups > 1 and (repeat or mask is not None)
        if repeats:
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            call.dropout,
            is_causal=mask is None,
            scale=call.scaling,
            enable_gqa=groups > 1 and not repeats,
        )

    return _each(attend, query, key, value, call)


def _eager(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
    """Scores, soft cap, mask, and softmax in float32, as the eager functions of transformers'
    models.
    """

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        count, heads, length, size = query.shape
        key, value = (
            tensor.repeat_interleave(heads // key.shape[1], dim=1) for tensor in (key, value)
        )
        scores = query @ key.mT * (size**-0.5 if call.scaling is None else call.scaling)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        hidden = ~_visible(length, call.window, query.device)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        if call.sinks is not None:
            sinks = call.sinks.view(1, -1, 1, 1).expand(count, -1, length, 1)
            scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
        shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., :length]
        return F.dropout(shares, p=call.dropout, training=call.dropout > 0) @ value

    return _each(attend, query, key, value, call)


def _visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [length, length]: whether the token of a row sees that of a column."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return visible.triu(1 - window) if window else visible


_KERNELS: dict[str, Kernel] = {
    SDPA: _sdpa,
    SDPA_REPEATED: partial(_sdpa, repeat=True),
    VARLEN: _varlen,
    EAGER: _eager,
}
for _name, _kernel in _KERNELS.items():  # transformers looks them up by our names
    AttentionInterface.register(_name, partial(_attention, _kernel))
