"""Linear layers with adapters that are given the same tensor, as one autograd function.

Shapes, as in lora.py, for layer i of a group:
    x: [.., in], of N tokens.
    A: [ranks, in], of all layers, below each other.
    u_i = s_i A_i x: [N, rank_i]; u of all beside each other: [N, ranks].
    y_i = b_i + B_i u_i + W_i x: [.., out_i].

The adapter's part of y is written first, and the frozen product is added to it in the memory where
it belongs, so that nothing is read to add the two. So are the gradients of x through all layers.
x and u are kept once for all layers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_qlora.model.adapters.lean import is_lean_now
from fsdp_qlora.model.adapters.lora import (
    KeptInput,
    LoraLinear,
    as_before,
    computing_weights,
)
from fsdp_qlora.model.architecture.output_again import output_source
from fsdp_qlora.model.quantizers.base import frozen_product
from fsdp_qlora.model.quantizers.products import FrozenProduct


class Member(NamedTuple):
    """A layer's frozen product, s and the rank of its adapter."""

    base: FrozenProduct
    scaling: float
    rank: int


class _LinearsProduct(torch.autograd.Function):
    """y of each layer, and the backward pass of all.

    weights: A of each layer, then B of each.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, members: Sequence[Member], source: Any, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        count = len(members)
        rows = x.flatten(0, -2)
        low = _low(rows, stacked(weights[:count], x.dtype), members)
        # Before the products run: activation checkpointing then stops before them (kept.py).
        ctx.kept = KeptInput.of(x, low, source)
        # As attributes, for the reason given in lora.py.
        ctx.weights = weights
        ctx.members = members
        ctx.set_materialize_grads(False)
        outputs: list[torch.Tensor] = []
        parts = _by_layer(low, members)
        for member, part, lora_B in zip(members, parts, weights[count:], strict=True):
            B_T = lora_B.to(x.dtype).T
            bias = member.base.bias
            y = part @ B_T if bias is None else torch.addmm(bias, part, B_T)
            member.base.add_product(y, rows)
            outputs.append(as_before(y, x))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        members: Sequence[Member] = ctx.members
        rows, low = ctx.kept.take()
        if all(grad is None for grad in grads):
            return (None,) * (3 + 2 * len(members))
        all_A = ctx.weights[: len(members)]
        all_B = ctx.weights[len(members) :]
        # of what no output depends on there is none
        grad_ys = [None if grad is None else grad.flatten(0, -2) for grad in grads]
        grad_low = torch.empty_like(low)
        grad_B: list[torch.Tensor | None] = []
        parts = zip(_by_layer(grad_low, members), _by_layer(low, members), strict=True)
        for index, (grad_part, part) in enumerate(parts):
            grad_y = grad_ys[index]
            if grad_y is None:
                grad_part.zero_()
                grad_B.append(None)
                continue
            lora_B = all_B[index]
            # of A x, and not of u
            torch.addmm(
                grad_part,
                grad_y,
                lora_B.to(low.dtype),
                beta=0,
                alpha=members[index].scaling,
                out=grad_part,
            )
            grad_B.append((grad_y.T @ part).to(lora_B.dtype))
        grad_A = _parts_of_A(grad_low.T @ rows, all_A, grad_ys)
        # x may have no other owner: then its gradient can have its memory.
        del rows, low
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_x(members, grad_ys, grad_low, stacked(all_A, grad_low.dtype))
            grad_x = as_before(grad_x, next(grad for grad in grads if grad is not None))
        return grad_x, None, None, *grad_A, *grad_B


def stacked(all_A: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A of several adapters, below each other: a view where they lie so in memory.

    The copies of weight_copies.py do.
    """
    first, *others = all_A
    memory = first.untyped_storage().data_ptr()
    end = first.storage_offset() + first.numel()
    for lora_A in others:
        is_next = lora_A.storage_offset() == end
        if not is_next or lora_A.untyped_storage().data_ptr() != memory:
            return torch.cat([*all_A]).to(dtype)
        end += lora_A.numel()
    num_rows = sum(map(len, all_A))
    return first.as_strided((num_rows, first.shape[1]), first.stride()).to(dtype)


def _low(rows: torch.Tensor, all_A: torch.Tensor, members: Sequence[Member]) -> torch.Tensor:
    """u of all layers for x [N, in]."""
    # With beta 0 it is not read, so it may be uninitialized.
    low = rows.new_empty(len(rows), len(all_A))
    scaling = members[0].scaling
    if all(member.scaling == scaling for member in members):
        return low.addmm_(rows, all_A.T, beta=0, alpha=scaling)
    # A product for each factor, which is then applied before the rounding.
    by_layer = zip(
        members,
        _by_layer(low, members),
        all_A.split([member.rank for member in members]),
        strict=True,
    )
    for member, part, lora_A in by_layer:
        torch.addmm(part, rows, lora_A.T, beta=0, alpha=member.scaling, out=part)
    return low


def _by_layer(low: torch.Tensor, members: Sequence[Member]) -> Sequence[torch.Tensor]:
    """The columns of u, or of its gradient, that belong to each layer."""
    return [low] if len(members) == 1 else low.split([each.rank for each in members], dim=1)


def _parts_of_A(
    grad: torch.Tensor, all_A: Sequence[torch.Tensor], grad_ys: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The gradient of each A, from the one of all below each other."""
    parts = grad.to(all_A[0].dtype).split([len(lora_A) for lora_A in all_A])
    # A layer that nothing depends on has none, as if it were alone.
    return [None if grad_y is None else part for part, grad_y in zip(parts, grad_ys, strict=True)]


def _grad_x(
    members: Sequence[Member],
    grad_ys: Sequence[torch.Tensor | None],
    grad_low: torch.Tensor,
    all_A: torch.Tensor,
) -> torch.Tensor:
    """The gradient of x [N, in] through all layers: all sums are in the memory of the first."""
    grad_x: torch.Tensor | None = None
    for member, grad_y in zip(members, grad_ys, strict=True):
        if grad_y is None:
            continue
        if grad_x is None:
            grad_x = member.base.multiply_grad(grad_y)
        else:
            member.base.add_grad(grad_x, grad_y)
    assert grad_x is not None
    return grad_x.addmm_(grad_low, all_A)


def multiply_group(layers: Sequence[LoraLinear], x: torch.Tensor) -> list[torch.Tensor] | None:
    """The output of each layer for x; None if the layers compute in different dtypes."""
    adapters = [layer.lora for layer in layers]
    bases = [frozen_product(layer.base_layer, x) for layer in layers]
    dtype = bases[0].dtype
    if any(base.dtype != dtype for base in bases):
        return None
    members = [
        Member(base, adapter.scaling, adapter.lora_A.out_features)
        for adapter, base in zip(adapters, bases, strict=True)
    ]
    all_A, all_B = zip(*map(computing_weights, adapters), strict=True)
    outputs = _LinearsProduct.apply(x.to(dtype), members, output_source(x), *all_A, *all_B)
    return [*outputs]


class LinearGroup:
    """Linear layers of one module that it gives the same tensor, or one layer alone.

    The first layer that is called with a tensor computes all of them. The outputs of the others
    wait until these are called with the same tensor, or until the module is done (`forget`).
    """

    def __init__(self, layers: Sequence[LoraLinear]) -> None:
        self.layers = tuple(layers)
        self._x: torch.Tensor | None = None
        self._version = 0  # of x, which may be changed in place
        self._waiting: dict[nn.Module, torch.Tensor] = {}

    def output(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """The layer's output for x; None if the layer has to compute it alone."""
        if x is self._x and x._version == self._version and layer in self._waiting:
            return self._take(layer)
        self.forget()
        if not is_lean_now(self.layers, x):
            return None
        outputs = multiply_group(self.layers, x)
        if outputs is None:
            return None
        self._x = x
        self._version = x._version
        self._waiting = dict(zip(self.layers, outputs, strict=True))
        return self._take(layer)

    def _take(self, layer: nn.Module) -> torch.Tensor:
        output = self._waiting.pop(layer)
        if not self._waiting:
            self._x = None
        return output

    def forget(self, *_: Any) -> None:
        """Drop what nobody has taken: layers that were not called, after an exception too."""
        self._x = None
        self._waiting = {}
