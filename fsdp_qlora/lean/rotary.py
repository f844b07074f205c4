"""Rotary position embeddings (Su et al. 2021) of queries and keys as one function of three kernels each.

Attention modules call a function of their model's file, `(q, k, cos, sin)`, which takes five each, and more of them in
the backward pass. Shapes: q and k [batch, heads, tokens, width], cos and sin [batch, tokens, width].
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fsdp_qlora.lean.functions import differentiated_once

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_PARAMETERS = ["q", "k", "cos", "sin"]
_OURS = "calls_rotary"  # an attribute of such forward methods


class Rotary(torch.autograd.Function):
    """x cos + r(x) sin for queries and keys, where r(x) is x with its halves swapped, and the first then negated.

    Rounded less often than the models' own functions in 16 bits.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.angles = cos, *sin.chunk(2, -1)  # without gradient; of all blocks
        return _rotate(q, *ctx.angles, forward=True), _rotate(k, *ctx.angles, forward=True)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = zip(grads, ctx.needs_input_grad, strict=False)
        return *(_rotate(grad, *ctx.angles, forward=False) if needs else None for grad, needs in needed), None, None


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin_1: torch.Tensor, sin_2: torch.Tensor, *, forward: bool
) -> torch.Tensor:
    """x turned by the angles; backward what is multiplied with r's transpose, and the halves of sin before it."""
    y = x * cos
    (x_1, x_2), (y_1, y_2) = x.chunk(2, -1), y.chunk(2, -1)
    if forward:
        y_1.addcmul_(x_2, sin_1, value=-1)
        y_2.addcmul_(x_1, sin_2)
    else:
        y_1.addcmul_(x_2, sin_2)
        y_2.addcmul_(x_1, sin_1, value=-1)
    return y


def use_rotary(module: nn.Module) -> bool:
    """Let an attention module call `Rotary`, if it calls a function that computes the same.

    Its own forward method gets another name space; the class and its file stay as they are.
    """
    forward = type(module).forward
    if not isinstance(forward, FunctionType):
        return False
    names = [name for name in forward.__code__.co_names if _is_rotary(forward.__globals__.get(name))]
    if names:
        module.forward = MethodType(_with_globals(forward, tuple(names)), module)
    return bool(names)


def uses_rotary(module: nn.Module) -> bool:
    """Whether `use_rotary` has been successful."""
    return isinstance(own := vars(module).get("forward"), MethodType) and _OURS in own.__func__.__dict__


@functools.cache
def _with_globals(forward: FunctionType, names: tuple[str, ...]) -> FunctionType:
    """The same code, for which the functions `names` are ours."""
    ours = {name: _or(forward.__globals__[name]) for name in names}
    arguments = forward.__name__, forward.__defaults__, forward.__closure__
    copied = FunctionType(forward.__code__, {**forward.__globals__, **ours}, *arguments)
    copied.__kwdefaults__, copied.__qualname__ = forward.__kwdefaults__, forward.__qualname__
    copied.__annotations__ = forward.__annotations__
    setattr(copied, _OURS, True)
    return copied


def _or(theirs: Rotate) -> Rotate:
    """Our function where it fits, else theirs."""

    @functools.wraps(theirs)
    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fits = cos.dim() == 3 and cos.shape[-1] == q.shape[-1] == k.shape[-1] and q.dtype == k.dtype == cos.dtype
        if args or kwargs or not fits:
            return theirs(q, k, cos, sin, *args, **kwargs)
        rotated: tuple[torch.Tensor, torch.Tensor] = Rotary.apply(q, k, cos.unsqueeze(1), sin.unsqueeze(1))
        return rotated

    return rotate


def _is_rotary(value: object) -> bool:
    """Whether it is a function that computes what `Rotary` does."""
    if not isinstance(value, FunctionType) or [*inspect.signature(value).parameters][:4] != _PARAMETERS:
        return False
    return _agrees(value)


@functools.cache
def _agrees(function: FunctionType) -> bool:
    """Tried with random numbers."""
    random = torch.Generator("cpu").manual_seed(0)
    q, k, cos, sin = (torch.randn(2, *shape, generator=random) for shape in ((4, 3, 8), (2, 3, 8), (3, 8), (3, 8)))
    # cos and sin as random numbers: those of real angles could hide which half is which.
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        inputs = [each.to(dtype) for each in (q, k, cos, sin)]
        ours = Rotary.apply(*inputs[:2], *(angle.unsqueeze(1) for angle in inputs[2:]))
        try:
            theirs = function(*inputs)
        except (RuntimeError, TypeError, ValueError):
            return False
        if not isinstance(theirs, tuple) or len(theirs) != 2:
            return False
        for mine, other in zip(ours, theirs, strict=True):
            if mine.dtype != other.dtype or not torch.allclose(mine, other, rtol=tolerance, atol=tolerance):
                return False
    return True
