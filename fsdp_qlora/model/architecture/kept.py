"""Keeps tensors for the backward pass of a function that comes after them."""

from typing import Any

import torch

# An input that requires a gradient, without which autograd would make no node: the tensors that are
# kept may not require any.
_ALWAYS = torch.empty(0, requires_grad=True)


class Kept:
    """Tensors (or None) that a function needs in its backward pass, saved before it runs.

    Activation checkpointing computes a block again until it has every tensor that the block saves,
    and tensors that a function saves itself are recorded when that function is done. So a block's
    last product would be computed again in vain.
    """

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        # The output holds the node that has the tensors: nothing else of autograd's graph refers to
        # it.
        self._output: torch.Tensor | None = _Keep.apply(_ALWAYS, *tensors)

    def take(self) -> tuple[Any, ...]:
        """The tensors, in a backward pass, once: their memory is then the caller's to free."""
        # `saved_tensors` of the node unpacks: under activation checkpointing this starts the
        # block's recomputation.
        assert self._output is not None and self._output.grad_fn is not None
        tensors: tuple[Any, ...] = self._output.grad_fn.saved_tensors  # type: ignore[attr-defined]
        self._output = None
        return tensors


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, always: torch.Tensor, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return always.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise AssertionError("no gradient reaches what is only kept")
