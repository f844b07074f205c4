"""Elementwise functions of a block that keep their inputs alone, and whose output is computed again where it is needed.

A function that takes such an output, and would keep it, can ask for it again in the backward pass (`remade`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Function = Callable[[torch.Tensor], torch.Tensor]


def remaking(x: torch.Tensor) -> Any:
    """The node of autograd's graph that can compute x again; None if x must be kept."""
    return x.grad_fn if getattr(x.grad_fn, "is_lean", False) else None


def remade(node: Any) -> torch.Tensor:
    """The output of a node that `remaking` found, without gradient. Before the node's own backward pass."""
    output: torch.Tensor = node.remake(node)
    return output


class Remade(torch.autograd.Function):
    """y = function(x), differentiable in x alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Function) -> torch.Tensor:
        ctx.is_lean, ctx.remake = True, lambda node: _once(node, function, *node.saved_tensors)[1].detach()
        ctx.function, ctx.again = function, None
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, y = _once(ctx, ctx.function, *ctx.saved_tensors)
        ctx.again = None
        return torch.autograd.grad(y, x, grads)[0], None


class Gated(torch.autograd.Function):
    """activation(gate) * up, of which gate and up are kept.

    Args:
        activation: must return a new tensor. is_lean: let the next function ask for the output, and not keep it.
    """

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: Function, is_lean: bool) -> torch.Tensor:
        ctx.is_lean, ctx.remake = is_lean, _gated_again
        ctx.activation, ctx.again = activation, None
        ctx.save_for_backward(gate, up)
        return _times(activation(gate), up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        gate, up = ctx.saved_tensors
        gate, activated = _once(ctx, ctx.activation, gate)
        ctx.again = None
        grad_gate = torch.autograd.grad(activated, gate, grad * up)[0]
        return grad_gate, _times(activated.detach(), grad), None, None  # now nobody needs what was activated


class Compiled(NamedTuple):
    """multiply: (gate, up) -> activation(gate) * up. gradients: (grad, gate, up) -> the gradients of gate and up."""

    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gradients: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class CompiledGated(torch.autograd.Function):
    """`Gated` by compiled functions."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, compiled: Compiled, is_lean: bool) -> torch.Tensor:
        ctx.is_lean, ctx.remake = is_lean, lambda node: compiled.multiply(*node.saved_tensors)
        ctx.compiled = compiled
        ctx.save_for_backward(gate, up)
        return compiled.multiply(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.compiled.gradients(*grads, *ctx.saved_tensors), None, None


def _gated_again(node: Any) -> torch.Tensor:
    gate, up = node.saved_tensors
    return _once(node, node.activation, gate)[1].detach() * up


def _once(node: Any, function: Function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x and function(x) with their graph, computed when they are asked for first."""
    if node.again is None:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            node.again = x, function(x)
    again: tuple[torch.Tensor, torch.Tensor] = node.again
    return again


def _times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a * b in a's memory."""
    return a.mul_(b) if a.dtype == b.dtype else a * b
