"""Functions whose output is computed again where it is needed, so that nobody keeps it.

The elementwise functions keep their inputs alone. A function that takes their output, and would
keep it, can ask for it again in the backward pass (`output_again`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Function = Callable[[torch.Tensor], torch.Tensor]


def output_source(x: torch.Tensor) -> Any:
    """The node of autograd's graph that can compute x again; None if x must be kept."""
    return x.grad_fn if getattr(x.grad_fn, "gives_output", False) else None


def output_again(node: Any) -> torch.Tensor:
    """The output of a node that `output_source` found, without gradient.

    Call it before the node's own backward pass, which frees what the output is computed from.
    """
    output: torch.Tensor = node.output_again(node)
    return output


class InputsOnlyFunction(torch.autograd.Function):
    """y = function(x), differentiable in x alone.

    However often y is asked for again, it is computed once.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Function) -> torch.Tensor:
        ctx.gives_output = True
        # The node is an argument: if the function referred to ctx, the two would hold each other.
        ctx.output_again = lambda node: _once(node)[1].detach()
        ctx.function = function
        ctx.again = None
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, y = _once(ctx)
        # Autograd frees saved tensors after this, but not attributes.
        ctx.again = None
        return torch.autograd.grad(y, x, grads)[0], None


def _once(node: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """x and function(x) with their graph."""
    if node.again is None:
        node.again = with_graph(node.function, *node.saved_tensors)
    x, y = node.again
    return x, y


def with_graph(function: Function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return x, function(x)
