"""Copies of tokens that several documents of a row begin with, and that are computed once."""

from collections.abc import Mapping
from typing import Any

import torch


def copy_shared(x: torch.Tensor, documents: Mapping[str, Any], dim: int) -> torch.Tensor:
    """Give each document a copy of the tokens that it shares with others.

    Args:
        x: has the N computed tokens in `dim`.
        documents: from `data.batches.micro_batch.describe_documents`.
    Returns:
        The same with all T tokens in `dim`. The gradient of a token is the sum over its copies, in
        one order; `index_select` would add them in another one each time on a GPU.
    """
    names = ("places", "own_tokens", "shared_tokens", "copies")
    result: torch.Tensor = _CopyShared.apply(x, dim, *(documents[name] for name in names))
    return result


class _CopyShared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dim: int,
        places: torch.Tensor,
        own_tokens: torch.Tensor,
        shared_tokens: torch.Tensor,
        copies: torch.Tensor,
    ) -> torch.Tensor:
        ctx.dim = dim
        ctx.save_for_backward(own_tokens, shared_tokens, copies)
        return x.index_select(dim, places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own_tokens, shared_tokens, copies = ctx.saved_tensors
        dim = ctx.dim
        of_own = grad.index_select(dim, own_tokens)
        of_copies = grad.index_select(dim, copies.flatten()).unflatten(dim, copies.shape)
        # Each token once: no two threads add to the same place.
        of_own.index_add_(dim, shared_tokens, of_copies.sum(dim + 1))
        return of_own, None, None, None, None, None
