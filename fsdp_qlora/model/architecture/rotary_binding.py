"""Binds a rotation of queries and keys that may be computed by a kernel to attention modules.

A module gets a copy of its class's forward method, in which the name of the model's own function
stands for ours. Classes and modules of libraries stay as they are. Ours replaces a function that
has the same bits on random numbers, and calls it for all that the kernel does not take.
"""

import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_qlora.model.kernels.in_use import PLAIN
from fsdp_qlora.model.kernels.rotary import WAYS, Pair, rotary_fits, rotate

Function = Callable[..., Any]


class _Rotated(torch.autograd.Function):
    """Queries and keys, turned: only the tables are kept."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> Pair:
        ctx.save_for_backward(cos, sin)
        return rotate(q, k, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_q, grad_k = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        return *rotate(grad_q, grad_k, *ctx.saved_tensors, backward=True), None, None


def bind_rotary(model: nn.Module) -> None:
    """Bind our rotation to the attention modules of a model."""
    for module in model.modules():
        # A forward method of its own is not the class's.
        if "forward" not in vars(module):
            kind: Any = type(module)
            forward, _ = _forward_of(kind)
            if forward is not None:
                module.forward = types.MethodType(forward, module)


def describe_rotary(model: nn.Module) -> str:
    """Describe for the log how attention modules turn queries and keys."""
    bound = 0
    others: Counter[str] = Counter()
    for module in model.modules():
        kind: Any = type(module)
        forward, names = _forward_of(kind)
        is_bound = getattr(vars(module).get("forward"), "__func__", None) is forward
        if forward is not None and is_bound:
            bound += 1
        elif names:
            others[f"{type(module).__name__} ({', '.join(names)})"] += 1
    kept = ", ".join(f"{count} {name}" for name, count in others.items())
    return f"{bound} attention modules may turn queries and keys in one kernel; others: " + (
        kept or "none"
    )


@functools.cache
def _forward_of(module_class: Any) -> tuple[Function | None, tuple[str, ...]]:
    """A copy of the class's forward method with our rotation, None where it has no such function.

    With it the names of functions for rotary embeddings that the method calls.
    """
    own = module_class.forward
    forward = inspect.unwrap(own)
    code = getattr(forward, "__code__", None)
    if code is None:
        return None, ()
    functions = {name: forward.__globals__.get(name) for name in code.co_names}
    rotations = {name: each for name, each in functions.items() if _is_half_rotation(each)}
    if rotations:
        ours = {name: _ours(each) for name, each in rotations.items()}
        return _copied(own, forward.__globals__ | ours), tuple(rotations)
    named = [name for name, each in functions.items() if callable(each) and "rotary" in name]
    return None, tuple(named)


def _copied(function: Function, names: dict[str, Any]) -> Function | None:
    """A copy of a function with other global names, within copies of the decorators around it.

    None if a decorator does not hold the function that it calls.
    """
    inner = getattr(function, "__wrapped__", None)
    closure = function.__closure__
    if inner is not None:
        copied = _copied(inner, names)
        held = [cell.cell_contents is inner for cell in closure or ()]
        if copied is None or not any(held):
            return None
        cells = zip(closure or (), held, strict=True)
        closure = tuple(types.CellType(copied) if is_inner else cell for cell, is_inner in cells)
        names = function.__globals__
    result = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, closure
    )
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def _ours(own: Function) -> Function:
    """A function that turns by the kernel what it takes, and calls the model's own for the rest."""

    @functools.wraps(own)
    def rotation(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        is_other = args or kwargs or cos.requires_grad or sin.requires_grad
        if is_other or not rotary_fits(q, k, cos, sin):
            return own(q, k, cos, sin, *args, **kwargs)
        return _Rotated.apply(q, k, cos, sin)

    return rotation


@torch.no_grad()
def _is_half_rotation(function: Any) -> bool:
    """Whether it is a function (q, k, cos, sin) that turns both, with its bits."""
    if not inspect.isroutine(function):
        return False
    try:
        parameters = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return False
    if parameters[:4] != ["q", "k", "cos", "sin"]:
        return False
    random = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device="cpu").bfloat16()

    inputs = (drawn(2, 4, 5, 8), drawn(2, 3, 5, 8), drawn(2, 5, 8), drawn(2, 5, 8))
    try:
        found = function(*inputs)
        return all(map(torch.equal, found, WAYS[PLAIN](*inputs, False)))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return False
