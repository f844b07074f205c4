"""The ways to compute attention on a card, for a run that chooses among them at its start.

All are ways of torch's kernel for documents of any lengths (attention_kernels.py). Another order of
sums gives other bits, so each is compared with attention in float64.
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import (
    SDPBackend,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from fsdp_qlora.model.architecture.attention_kernels import (
    CUDNN,
    FLASH4,
    MOST_OF_FLASH,
    TAKES_GROUPS,
    Call,
    cudnn_takes,
    varlen,
    visible,
)
from fsdp_qlora.model.architecture.shapes import BlockShape
from fsdp_qlora.model.kernels.in_use import PLAIN, using_ways, ways_in_use


class AttentionInputs(NamedTuple):
    """A block's queries, keys and values, and the gradient of the output.

    Shapes: query [1, H, T, D], key and value [1, G, T, D], grad [T, H, D]; T tokens of all
    documents.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad: torch.Tensor
    call: Call


Way = Callable[[AttentionInputs], list[torch.Tensor]]


class AttentionWays(NamedTuple):
    """The ways that are there, and why others are not.

    ways: by name, the plain one first. Each returns the output [T, H, D] and the gradients of
    query, key and value. missing: the reason of each other way in a few words.
    """

    ways: dict[str, Way]
    missing: dict[str, str]


def attention_inputs(
    blocks: Iterable[BlockShape],
    lengths: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> list[AttentionInputs]:
    """Random inputs for each kind of block of a model, the same at each call.

    Args:
        blocks: the sizes of all blocks; heads that are too wide for flash kernels are left out.
        lengths: of the documents of a micro-batch, in tokens.
    """
    generator = torch.Generator(device).manual_seed(0)
    tokens = sum(lengths)
    longest = max(lengths)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    found: list[AttentionInputs] = []
    shapes = {
        (shape.heads, shape.groups, shape.head_dim, shape.window)
        for shape in blocks
        if shape.head_dim <= MOST_OF_FLASH
    }
    for heads, groups, head_dim, window in sorted(shapes, key=str):
        rows = [
            torch.empty(tokens, count, head_dim, dtype=dtype, device=device).normal_(
                generator=generator
            )
            for count in (heads, groups, groups, heads)
        ]
        # as projections leave them in memory: a token's heads beside each other
        query, key, value = (each.transpose(0, 1)[None] for each in rows[:3])
        hides = window is not None and window < longest
        call = Call(
            ends=ends,
            longest=longest,
            lengths=list(lengths),
            scaling=None,
            dropout=0.0,
            window=window if hides else None,
            softcap=None,
            sinks=None,
        )
        found.append(AttentionInputs(query, key, value, rows[3], call))
    return found


def attention_ways(inputs: Sequence[AttentionInputs], device: torch.device) -> AttentionWays:
    """The ways on this card for a model whose documents torch's kernel for any lengths computes.

    Args:
        inputs: of `attention_inputs`, for the run's longest micro-batch.
    """
    reasons = {CUDNN: _why_not_cudnn(inputs, device), FLASH4: _why_not_flash4(device)}
    names = [PLAIN, *(name for name, reason in reasons.items() if not reason)]
    missing = {name: reason for name, reason in reasons.items() if reason}
    return AttentionWays({name: partial(attend_and_back, name) for name in names}, missing)


def _why_not_cudnn(inputs: Sequence[AttentionInputs], device: torch.device) -> str:
    """Why cuDNN computes none of these, empty if it computes some."""
    if device.type != "cuda":
        return "not on a CPU"
    if torch.are_deterministic_algorithms_enabled():
        return "not deterministic"
    taken = [each for each in inputs if cudnn_takes(each.query, each.value, each.call)]
    if not taken:
        return "lengths or heads that it is not asked for"
    # torch's own conditions, of sizes and versions; with gradients, for which they are stricter
    for query, key, value, _, call in taken:
        documents = [
            tensor.detach().view(tensor.shape[1], -1, call.longest, tensor.shape[3]).transpose(0, 1)
            for tensor in (query, key, value)
        ]
        q, k, v = (each.requires_grad_() for each in documents)
        is_grouped = query.shape[1] != key.shape[1]
        # as for the call: a process has it off (`configure_kernels`)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            is_taken = can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, is_grouped))
        if not is_taken:
            return "torch does not take it here"
    return ""


def _why_not_flash4(device: torch.device) -> str:
    if device.type != "cuda":
        return "not on a CPU"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in (9, 10):
        return "capability {}.{}".format(*capability)
    # Older versions pass a window of -1 on, which their check of gradients refuses. 2.13 fails with
    # packages newer than 4.0.0b18, which its trial finds out.
    if not TAKES_GROUPS:
        return f"torch {torch.__version__.partition('+')[0]}"
    try:
        is_there = importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        is_there = False
    return "" if is_there else "not installed"


def attend_and_back(way: str, inputs: AttentionInputs) -> list[torch.Tensor]:
    """The output [T, H, D] and the gradients of query, key and value by a way."""
    leaves = [each.detach().requires_grad_() for each in inputs[:3]]
    before = current_flash_attention_impl()
    try:
        with using_ways(ways_in_use()._replace(attention=way)), torch.enable_grad():
            output = varlen(leaves[0], leaves[1], leaves[2], inputs.call)
            gradients = torch.autograd.grad(output, leaves, inputs.grad)
    finally:
        if before is None and current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
    return [output.detach(), *gradients]


def exact_attention(inputs: AttentionInputs) -> list[torch.Tensor]:
    """The output and the gradients of query, key and value in float64, a head at a time.

    Takes 32 bytes for each pair of tokens of the longest document.
    """
    query, key, value = (each[0].double() for each in inputs[:3])
    grad = inputs.grad.transpose(0, 1).double()
    scaling = inputs.call.scaling or query.shape[-1] ** -0.5
    results = [torch.zeros_like(each) for each in (query, query, key, value)]
    ends = itertools.accumulate(inputs.call.lengths)
    for end, length in zip(ends, inputs.call.lengths, strict=True):
        own = slice(end - length, end)
        hidden = ~visible(length, inputs.call.window, query.device)
        for head in range(len(query)):
            group = head * len(key) // len(query)
            parts = (query[head, own], key[group, own], value[group, own], grad[head, own])
            found = _exact_head(*parts, hidden, scaling)
            for result, index, each in zip(results, (head, head, group, group), found, strict=True):
                result[index, own] += each
    return [results[0].transpose(0, 1), *(each[None] for each in results[1:])]


def _exact_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor,
    hidden: torch.Tensor,
    scaling: float,
) -> list[torch.Tensor]:
    scores = (query @ key.mT * scaling).masked_fill_(hidden, float("-inf"))
    shares = torch.softmax(scores, dim=-1)
    of_shares = grad @ value.mT
    mean = (of_shares * shares).sum(-1, keepdim=True)
    of_scores = shares * (of_shares - mean) * scaling
    return [shares @ value, of_scores @ key, of_scores.mT @ query, shares.mT @ grad]
