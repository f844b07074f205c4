"""Attention: torch's kernel on a GPU, and attention within documents concatenated to a row.

For documents a model calls functions that are registered with transformers by name. They get the
arguments of `data.batches.micro_batch.describe_documents`, which transformers' own function for
flash-attn takes, too. transformers makes masks only for names with a mask function, so none here:
nothing of size T x T is made, and no value of a GPU tensor is waited for.

Shapes: query [1, H, T, D], key [1, G, T, D], value [1, G, T, V] as transformers has them, for H
heads of queries and G heads of keys and values. The kernels are in attention_kernels.py.
"""

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fsdp_qlora.distributed.context import ContextGroup
from fsdp_qlora.model.architecture.attention_kernels import (
    CUDNN,
    MOST_OF_FLASH,
    Call,
    Kernel,
    eager,
    sdpa,
    takes_last_queries,
    varlen,
)
from fsdp_qlora.model.architecture.kept_attention import attending_to
from fsdp_qlora.model.architecture.shapes import any_layer_has, block_shapes
from fsdp_qlora.model.architecture.shared_tokens import copy_shared
from fsdp_qlora.model.kernels.in_use import ways_in_use

# our name for SDPA with a head of keys and values for each head of queries
REPEATED = "sdpa_repeated"
FLASH = "flash_attention_2"
# transformers' name of an implementation -> the name of the one that does the same for documents.
SDPA = "documents_sdpa"
SDPA_REPEATED = f"documents_{REPEATED}"
VARLEN = "documents_varlen"
EAGER = "documents_eager"
_SAME = {"sdpa": SDPA, REPEATED: SDPA_REPEATED, FLASH: FLASH, "eager": EAGER}


def choose_sdpa(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> str:
    """transformers' name of the SDPA variant that needs the least memory: `sdpa` or REPEATED.

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
    """The kernel that torch chooses for causal rows without a mask.

    It is flash, memory-efficient or math. If blocks have several kernels, it is the one that needs
    the most memory. Blocks with heads of more than `widest` numbers do not count.
    """
    kernels: set[str] = set()
    for shape in block_shapes(config):
        if widest is None or shape.head_dim <= widest:
            groups = shape.heads if repeated else shape.groups
            kernels.add(_kernel_of(shape.heads, groups, shape.head_dim, dtype, device))
    for name in ("math", "memory-efficient", "flash"):
        if name in kernels:
            return name
    return "math"


def _kernel_of(
    heads: int, groups: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> str:
    # torch's own conditions, which look at sizes, dtype and device, not at values. With gradients,
    # for which kernels take fewer sizes of heads.
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
    """transformers' SDPA, with each head of keys and values repeated for its heads of queries.

    Shapes: query [rows, heads, T, head_dim], key and value [rows, groups, T, head_dim].
    """
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, dim=1)
    value = value.repeat_interleave(repeats, dim=1)
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
        config: of a model that has been built.
        requested: the option attn_implementation; with `auto` a kernel for lengths that vary
            replaces SDPA.
    """
    name = _SAME.get(config._attn_implementation)
    can_replace = name in (SDPA, SDPA_REPEATED, FLASH)
    replaces = requested == "auto" and device.type == "cuda" and can_replace
    # torch's kernel for lengths that vary has neither a soft cap nor dropout.
    if replaces and not any_layer_has(config, "attn_logit_softcapping", "attention_dropout"):
        # SDPA pads heads for its flash kernel; the operator itself takes multiples of 8 only.
        takes_heads = all(shape.head_dim % 8 == 0 for shape in block_shapes(config))
        kernel = find_kernel(config, dtype, device, repeated=True, widest=MOST_OF_FLASH)
        name = VARLEN if takes_heads and kernel == "flash" else name
    return name


def reads_bounds(config: PretrainedConfig, implementation: str | None) -> bool:
    """Whether attention reads the bounds of documents from the device, and no lengths on the host.

    Args:
        implementation: from `choose`, None for padded rows.
    """
    if implementation not in (VARLEN, FLASH) or ways_in_use().attention == CUDNN:
        return False
    return all(shape.head_dim <= MOST_OF_FLASH for shape in block_shapes(config))


def can_share(implementation: str | None) -> bool:
    """Whether the first tokens that documents have in common can be computed once for all.

    Only attention is then computed for each document.
    """
    return implementation in _KERNELS


def packing_blocker(model: PreTrainedModel) -> str | None:
    """The reason in a model's structure why documents cannot share a row; None if unknown.

    A probe finds the rest (training/probes.py).
    """
    parameters = inspect.signature(type(model).forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any or "position_ids" not in parameters:
        return "it takes no positions"
    # Hybrids do not set transformers' flag, which is about serving, since their other layers are
    # not attention. So their modules are searched.
    is_replaceable = getattr(model, "_supports_attention_backend", False)
    is_replaceable = is_replaceable or any(map(_looks_up, model.modules()))
    # A model that flash-attn can compute passes everything that a mask would say, such as sliding
    # windows, as arguments of the attention function. The decoder is asked: a model for images may
    # deny it only for masks of images, which text does not have.
    passes_arguments = getattr(model.get_decoder(), "_supports_flash_attn", False)
    return None if is_replaceable and passes_arguments else "its attention cannot be replaced"


def sees_images_whole(model: PreTrainedModel) -> bool:
    """Whether a model declares masks that text alone does not need: tokens of an image see later
    ones of it.

    Not all releases of transformers declare them; a probe finds the rest (training/image_probe.py).
    """
    takes_text = getattr(model.get_decoder(), "_supports_flash_attn", False)
    return takes_text and not getattr(model, "_supports_flash_attn", False)


def _looks_up(module: nn.Module) -> bool:
    """Whether a module takes its attention function by name from transformers' table."""
    # `co_names` are the global names that a function's bytecode reads.
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


@contextlib.contextmanager
def attending(model: PreTrainedModel, implementation: str | None) -> Iterator[None]:
    """Compute the model's attention by another implementation for the duration of the block.

    None changes nothing. Outside of the block, padded rows and caches of keys and values use the
    model's own implementation, which takes masks.
    """
    # The modules read the name from the configuration in each forward pass.
    before = model.config._attn_implementation
    _set_attention(model.config, implementation or before)
    try:
        yield
    finally:
        _set_attention(model.config, before)


def _set_attention(config: PretrainedConfig, name: str) -> None:
    """Set the implementation of text. Towers, which compute whole images, keep theirs."""
    text = config.get_text_config()
    holders = []
    if text is not config:
        parts = [getattr(config, part, None) for part in config.sub_configs]
        holders = [part for part in parts if _holds(part, text)]
    if not holders:
        config._attn_implementation = name  # with all parts
        return
    config._attn_implementation = {"": name}  # without them
    for part in holders:
        _set_attention(part, name)


def _holds(config: PretrainedConfig | None, text: PretrainedConfig) -> bool:
    if config is None or config is text:
        return config is text
    return any(_holds(getattr(config, part, None), text) for part in config.sub_configs)


def describe_kernel(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, implementation: str | None
) -> str | None:
    """One line about the kernel on a GPU; None if the name of the model's attention says it.

    Args:
        implementation: from `choose`, None for padded rows.
    """
    if implementation in (VARLEN, FLASH):
        library = "torch" if implementation == VARLEN else "flash-attn"
        return f"Attention: {library}'s flash kernel for rows of any lengths"
    name = config._attn_implementation
    if device.type != "cuda" or name not in ("sdpa", REPEATED):
        return None
    kernel = find_kernel(config, dtype, device, repeated=name == REPEATED)
    text = f"Attention: torch's {kernel} kernel"
    if name == REPEATED:
        text += ", keys and values repeated for each head"
    if implementation:
        text += ", a row at a time"
    return text


def _attention(
    kernel: Kernel,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """A kernel as transformers calls it."""
    # Without them the kernel would compute the row as one document, and nobody would notice.
    if "document_lengths" not in arguments:
        raise NotImplementedError("the model does not pass on where documents begin")
    longest = max(arguments["document_lengths"])
    window = arguments.get("sliding_window")
    places = arguments.get("places")
    sinks = arguments.get("s_aux")
    context: ContextGroup | None = arguments.get("context_group")
    # With context parallelism a rank has some tokens of all heads before this, and all tokens of
    # some heads after it. All ranks of the group come here in each block, so in the same order.
    if context:
        query, key, value = context.to_heads(query, key, value)
        sinks = None if sinks is None else sinks[context.own(len(sinks))]
    call = Call(
        ends=arguments["cu_seq_lens_q" if places is None else "document_ends"],
        longest=longest,
        lengths=arguments["document_lengths"],
        scaling=arguments.get("scaling"),
        dropout=arguments.get("dropout", 0.0),
        # a window that hides nothing would need a mask
        window=window if window and window < longest else None,
        softcap=arguments.get("softcap"),
        sinks=sinks,
    )
    if places is not None:
        # Documents may share their first tokens, as the branches of a tree. Kernels take only
        # separate documents, so each document gets a copy of the shared tokens.
        key = copy_shared(key, arguments, dim=2)
        value = copy_shared(value, arguments, dim=2)
        if takes_last_queries(kernel, query, value, call):
            call = call._replace(query_ends=arguments["own_ends"])
        else:
            query = copy_shared(query, arguments, dim=2)
    with attending_to(call.lengths, call.window, call.dropout):
        output = kernel(query, key, value, call)
    if places is not None and call.query_ends is None:
        output = output.index_select(0, arguments["own_tokens"])
    if context:
        output = context.to_tokens(output)
    return output[None], None


_KERNELS: dict[str, Kernel] = {
    SDPA: sdpa,
    SDPA_REPEATED: partial(sdpa, repeat=True),
    VARLEN: varlen,
    EAGER: eager,
}
for _name, _kernel in _KERNELS.items():  # transformers looks them up by our names
    AttentionInterface.register(_name, partial(_attention, _kernel))
