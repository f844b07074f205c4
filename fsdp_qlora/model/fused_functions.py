"""Elementwise functions of a block that keep their inputs alone, and whose output is computed again where it is needed.

A function that takes such an output, and would keep it, can ask for it again in the backward pass (`recompute_output`).
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import torch

Function = Callable[[torch.Tensor], torch.Tensor]
Gradients = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Elements of a gate, 128 MiB in 16 bits: what is temporary in the backward pass of more comes in pieces of that size.
# A long row's peak is there, and is smaller by half of the MLP's part.
PIECE = 2**26


def differentiated_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A function's `backward` whose gradients have no gradients themselves.

    Raises:
        RuntimeError: with create_graph. torch's `once_differentiable` asks later, and takes the host longer.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("A block's gradients cannot be differentiated again: create_graph is not supported.")
        return backward(ctx, *grads)

    return checked


def recompute_source(x: torch.Tensor) -> Any:
    """The node of autograd's graph that can compute x again; None if x must be kept."""
    return x.grad_fn if getattr(x.grad_fn, "recomputes", False) else None


def recompute_output(node: Any) -> torch.Tensor:
    """The output of a node that `recompute_source` found, without gradient. Before the node's own backward pass."""
    output: torch.Tensor = node.recompute(node)
    return output


class RecomputedFunction(torch.autograd.Function):
    """y = function(x), differentiable in x alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Function) -> torch.Tensor:
        ctx.recomputes, ctx.recompute = True, lambda node: _once(node, function, *node.saved_tensors)[1].detach()
        ctx.function, ctx.again = function, None
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, y = _once(ctx, ctx.function, *ctx.saved_tensors)
        ctx.again = None
        return torch.autograd.grad(y, x, grads)[0], None


class Gated(torch.autograd.Function):
    """activation(gate) * up, of which gate and up are kept.

    Args:
        activation: must return a new tensor. recomputes: let the next function ask for the output, and not keep it.
    """

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: Function, recomputes: bool) -> torch.Tensor:
        ctx.recomputes, ctx.recompute = recomputes, _gated_again
        ctx.activation, ctx.again = activation, None
        ctx.save_for_backward(gate, up)
        return _times(activation(gate), up)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        gate, up = ctx.saved_tensors
        if _is_large(gate):
            return *_in_their_place(grad, gate, up, partial(_gradients, ctx.activation)), None, None
        again = _once(ctx, ctx.activation, gate)
        ctx.again = None
        return *_pull_back(grad, *again, up), None, None


class Compiled(NamedTuple):
    """multiply: (gate, up) -> activation(gate) * up. gradients: (grad, gate, up) -> the gradients of gate and up."""

    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gradients: Gradients


class CompiledGated(torch.autograd.Function):
    """`Gated` by compiled functions."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, compiled: Compiled, recomputes: bool) -> torch.Tensor:
        ctx.recomputes, ctx.recompute = recomputes, lambda node: compiled.multiply(*node.saved_tensors)
        ctx.compiled = compiled
        ctx.save_for_backward(gate, up)
        return compiled.multiply(gate, up)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        gate, up = ctx.saved_tensors
        if _is_large(gate):
            return *_in_their_place(grad, gate, up, ctx.compiled.gradients), None, None
        return *ctx.compiled.gradients(grad, gate, up), None, None


def _gated_again(node: Any) -> torch.Tensor:
    gate, up = node.saved_tensors
    if _is_large(gate):
        return _times(node.activation(gate), up)
    return _once(node, node.activation, gate)[1].detach() * up


def _is_large(gate: torch.Tensor) -> bool:
    return gate.numel() > PIECE


def _in_their_place(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, gradients: Gradients
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up in the memory of both, which were made for their product alone."""
    gate, up = gate.detach(), up.detach()
    rows = max(1, PIECE // gate.shape[-1])
    pieces = (tensor.view(-1, gate.shape[-1]).split(rows) for tensor in (grad.contiguous(), gate, up))
    for of_product, of_gate, of_up in zip(*pieces, strict=True):
        _put_in_place(of_product, of_gate, of_up, gradients)
    return gate, up


def _put_in_place(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, gradients: Gradients) -> None:
    grad_gate, grad_up = gradients(grad, gate, up)
    gate.copy_(grad_gate)
    up.copy_(grad_up)


def _gradients(
    activation: Function, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _pull_back(grad, *_with_graph(activation, gate), up)


def _pull_back(
    grad: torch.Tensor, gate: torch.Tensor, activated: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up, the latter in the memory of what was activated: now nobody needs that."""
    grad_gate = torch.autograd.grad(activated, gate, grad * up)[0]
    return grad_gate, _times(activated.detach(), grad)


def _once(node: Any, function: Function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x and function(x) with their graph, computed when they are asked for first."""
    if node.again is None:
        node.again = _with_graph(function, x)
    again: tuple[torch.Tensor, torch.Tensor] = node.again
    return again


def _with_graph(function: Function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return x, function(x)


def _times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a * b in a's memory."""
    return a.mul_(b) if a.dtype == b.dtype else a * b
