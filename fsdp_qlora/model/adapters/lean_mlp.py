"""A gated MLP whose three layers have LoRA, forward and backward as one autograd function.

Shapes:
    x: [.., hidden], of N tokens.
    A: [rank, hidden] of gate and up, [rank, inner] of down. Ranks may differ.
    B: [inner, rank] of gate and up, [hidden, rank] of down.
    u: x A^T, [N, rank]; of gate and up beside each other, [N, both ranks].
    gate, up, h = activation(gate) * up: [N, inner].
    y: [.., hidden].

Three layers on their own (lora.py) read x for each u and give gradients of x that autograd adds up.
Here one product gives both u, and products add to one gradient of x. The gradients of gate and up
take their memory.

The backward pass needs x, u, gate and up, and computes h again. For a long row it needs x alone: it
computes gate and up again for a piece of tokens at a time, as chunking.py does, and each matrix is
decoded once for all pieces if there is room for that.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from fsdp_qlora.model.adapters.grouped import stacked
from fsdp_qlora.model.adapters.lean import is_lean_now
from fsdp_qlora.model.adapters.lora import as_before, computing_weights
from fsdp_qlora.model.architecture import chunking
from fsdp_qlora.model.architecture.gated_mlp import GatedMlp, gated, gated_gradients_
from fsdp_qlora.model.architecture.kept import Kept
from fsdp_qlora.model.architecture.output_again import Function, output_again, output_source
from fsdp_qlora.model.quantizers.base import frozen_product
from fsdp_qlora.model.quantizers.products import FrozenProduct, plain_product

Weights = Sequence[torch.Tensor]  # A and B of gate, of up and of down


class _Call(NamedTuple):
    """Inputs of both passes besides the adapters' weights.

    piece: tokens of a piece; None for all at once. decodes_once: for all pieces. kept: x, unless
    `source` can compute it again (`output_source`), and at once also u, gate and up; nothing
    without gradients.
    """

    bases: Sequence[FrozenProduct]
    scalings: Sequence[float]
    activation: Function
    piece: int | None
    decodes_once: bool
    source: Any
    keeps: bool
    kept: Kept | None = None


class _Layer(NamedTuple):
    """A layer in one pass, with its adapter in the dtype of the computation."""

    base: FrozenProduct
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    scaling: float

    def output(self, x: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """The layer's output [N, out] for x and u = low."""
        # May be fused with decoding.
        (y,) = self.base.multiply(x)
        return y.addmm_(low, self.lora_B.T, alpha=self.scaling)

    def write_output(self, x: torch.Tensor, low: torch.Tensor, y: torch.Tensor) -> None:
        """Write the layer's output to y [N, out]."""
        if self.base.bias is None:
            # With beta 0 y is not read, so it may be uninitialized.
            y.addmm_(low, self.lora_B.T, beta=0, alpha=self.scaling)
        else:
            torch.addmm(self.base.bias, low, self.lora_B.T, alpha=self.scaling, out=y)
        self.base.add_product(y, x)

    def write_grad_low(self, grad_y: torch.Tensor, grad_low: torch.Tensor) -> None:
        """Write the gradient of u to grad_low [N, rank]."""
        grad_low.addmm_(grad_y, self.lora_B, beta=0, alpha=self.scaling)

    def grad_B(self, grad_y: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """The gradient of B for u = low."""
        empty = torch.empty_like(self.lora_B)
        return empty.addmm_(grad_y.T, low, beta=0, alpha=self.scaling)


class _Pass:
    """The three layers in a forward or a backward pass."""

    def __init__(self, call: _Call, weights: Weights) -> None:
        dtype = call.bases[0].dtype
        layers = []
        for index, base in enumerate(call.bases):
            if call.decodes_once:
                base = plain_product(base.decode(), base.bias, dtype)
            lora_A, lora_B = (weight.to(dtype) for weight in weights[2 * index : 2 * index + 2])
            layers.append(_Layer(base, lora_A, lora_B, call.scalings[index]))
        self.gate, self.up, self.down = layers
        self.both_A = stacked([self.gate.lora_A, self.up.lora_A], dtype)
        self.ranks = [len(self.gate.lora_A), len(self.up.lora_A)]
        self.activation = call.activation

    def gate_and_up(self, x: torch.Tensor) -> list[torch.Tensor]:
        """u, gate and up for x [N, hidden]."""
        low = x @ self.both_A.T
        low_gate, low_up = low.split(self.ranks, dim=1)
        return [low, self.gate.output(x, low_gate), self.up.output(x, low_up)]

    def h(self, inner: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """h and u of down. Takes gate and up out of the list, since others may not need them."""
        up = inner.pop()
        # as a layer casts its input: an activation may compute in float32
        h = gated(self.activation, inner.pop(), up).to(self.down.lora_A.dtype)
        return h, h @ self.down.lora_A.T

    def down_gradients(
        self, grad_y: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> list[torch.Tensor]:
        """The gradients of A and B of down; gate and up become their gradients."""
        down = self.down
        h = down.base.multiply_grad(grad_y)
        grad_low = grad_y.new_empty(len(grad_y), len(down.lora_A))
        down.write_grad_low(grad_y, grad_low)
        h.addmm_(grad_low, down.lora_A)
        # So far it was the gradient of h.
        gated_gradients_(self.activation, h, gate, up)
        return [grad_low.T @ h, down.grad_B(grad_y, h @ down.lora_A.T)]

    def pair_gradients(
        self, x: torch.Tensor, low: torch.Tensor, grad_gate: torch.Tensor, grad_up: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The gradients of u, and of A and B of gate and up."""
        low_gate, low_up = low.split(self.ranks, dim=1)
        grad_low = torch.empty_like(low)
        grad_low_gate, grad_low_up = grad_low.split(self.ranks, dim=1)
        self.gate.write_grad_low(grad_gate, grad_low_gate)
        self.up.write_grad_low(grad_up, grad_low_up)
        A_gate, A_up = (grad_low.T @ x).split(self.ranks)
        B_gate = self.gate.grad_B(grad_gate, low_gate)
        B_up = self.up.grad_B(grad_up, low_up)
        return grad_low, [A_gate, B_gate, A_up, B_up]

    def write_grad_x(
        self,
        grad_low: torch.Tensor,
        grad_gate: torch.Tensor,
        grad_up: torch.Tensor,
        grad_x: torch.Tensor,
    ) -> None:
        """Write the gradient of x to grad_x [N, hidden]."""
        torch.mm(grad_low, self.both_A, out=grad_x)
        self.gate.base.add_grad(grad_x, grad_gate)
        self.up.base.add_grad(grad_x, grad_up)


# --- forward ---


def lean_mlp(mlp: GatedMlp, x: torch.Tensor) -> torch.Tensor | None:
    """The MLP's output for x [.., hidden]; None where its layers are to be called one by one."""
    layers: list[Any] = [mlp._modules[name] for name in mlp.roles]
    if not is_lean_now(layers, x):
        return None
    bases = [frozen_product(layer.base_layer, x) for layer in layers]
    dtype = bases[0].dtype
    if any(base.dtype != dtype for base in bases):
        return None
    weights: list[torch.Tensor] = []
    for layer in layers:
        weights += computing_weights(layer.lora)
    scalings = [layer.lora.scaling for layer in layers]
    piece, decodes_once = _pieces(mlp, x)
    source = output_source(x)
    keeps = torch.is_grad_enabled()
    call = _Call(bases, scalings, mlp.activation, piece, decodes_once, source, keeps)
    x = x.to(dtype)
    forward = _forward_at_once if piece is None else _forward_in_pieces
    with torch.no_grad():
        y, kept = forward(call, x, weights)
    result: torch.Tensor = _LoraMlp.apply(x, y, call._replace(kept=kept), *weights)
    return result


def _pieces(mlp: GatedMlp, x: torch.Tensor) -> tuple[int | None, bool]:
    """The tokens of a piece, None for all at once, and whether matrices are decoded once for all.

    Pieces are shorter than chunking's, so that no more memory is needed.
    """
    hidden = x.shape[-1]
    num_tokens = x.numel() // hidden
    num_pieces = chunking.count_pieces(num_tokens, hidden=hidden, inner=mlp.inner)
    if mlp.inputs_only or num_pieces == 1:
        return None, False
    longest = chunking.PIECE_TOKENS
    # A decoded matrix takes as much as so many tokens of gate, up or h: one for each of them.
    piece = longest - hidden
    # Products with few tokens are slower.
    decodes_once = 4 * piece >= longest
    if not decodes_once:
        # y and the gradient of x have memory for all pieces from the start.
        piece = longest - longest // 8
    num_pieces = -(-num_tokens // piece)
    return -(-num_tokens // num_pieces), decodes_once


# What is kept is so before the last product: activation checkpointing stops before that (kept.py).


def _forward_at_once(
    call: _Call, x: torch.Tensor, weights: Weights
) -> tuple[torch.Tensor, Kept | None]:
    """y [N, hidden], and what the backward pass needs."""
    layers = _Pass(call, weights)
    low, *inner = layers.gate_and_up(x.flatten(0, -2))
    kept = _keep(call, x, low, *inner)
    del low
    return layers.down.output(*layers.h(inner)), kept


def _forward_in_pieces(
    call: _Call, x: torch.Tensor, weights: Weights
) -> tuple[torch.Tensor, Kept | None]:
    """y [N, hidden], and what the backward pass needs."""
    assert call.piece is not None
    kept = _keep(call, x)
    layers = _Pass(call, weights)
    rows = x.flatten(0, -2)
    y = rows.new_empty(len(rows), len(layers.down.lora_B))
    for x_piece, y_piece in zip(rows.split(call.piece), y.split(call.piece), strict=True):
        _, *inner = layers.gate_and_up(x_piece)
        layers.down.write_output(*layers.h(inner), y_piece)
    return y, kept


def _keep(call: _Call, x: torch.Tensor, *others: torch.Tensor) -> Kept | None:
    if not call.keeps:
        return None
    return Kept(*others) if call.source is not None else Kept(x, *others)


# --- backward ---


class _LoraMlp(torch.autograd.Function):
    """The node of a y that has been computed, for its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, y: torch.Tensor, call: _Call, *weights: torch.Tensor
    ) -> torch.Tensor:
        # Attributes and not saved tensors, as in `_LoraProduct` (lora.py).
        ctx.call = call
        ctx.weights = weights
        return as_before(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_x = ctx.needs_input_grad[0]
        call: _Call = ctx.call
        grad_y = grads[0].flatten(0, -2)
        layers = _Pass(call, ctx.weights)
        backward = _backward_at_once if call.piece is None else _backward_in_pieces
        grad_x, of_weights = backward(layers, call, grad_y, needs_x)
        if grad_x is not None:
            grad_x = as_before(grad_x, grads[0])
        as_weights = [
            grad.to(weight.dtype) for grad, weight in zip(of_weights, ctx.weights, strict=True)
        ]
        return grad_x, None, None, *as_weights


Gradients = tuple[torch.Tensor | None, list[torch.Tensor]]  # of x and of the weights


def _backward_at_once(layers: _Pass, call: _Call, grad_y: torch.Tensor, needs_x: bool) -> Gradients:
    assert call.kept is not None
    *kept_x, low, gate, up = call.kept.take()
    of_down = layers.down_gradients(grad_y, gate, up)
    x = _rows_of_x(call, kept_x)
    grad_low, of_pair = layers.pair_gradients(x, low, gate, up)
    size = x.shape
    # x may have no other owner: then its gradient can have its memory.
    del x, kept_x
    grad_x = None
    if needs_x:
        grad_x = low.new_empty(size)
        layers.write_grad_x(grad_low, gate, up, grad_x)
    return grad_x, [*of_pair, *of_down]


def _backward_in_pieces(
    layers: _Pass, call: _Call, grad_y: torch.Tensor, needs_x: bool
) -> Gradients:
    assert call.kept is not None and call.piece is not None
    x = _rows_of_x(call, call.kept.take())
    grad_x = torch.empty_like(x) if needs_x else None
    places = None if grad_x is None else grad_x.split(call.piece)
    sums: list[torch.Tensor] = []
    pieces = zip(x.split(call.piece), grad_y.split(call.piece), strict=True)
    for index, (x_piece, grad_piece) in enumerate(pieces):
        low, gate, up = layers.gate_and_up(x_piece)
        of_down = layers.down_gradients(grad_piece, gate, up)
        grad_low, of_pair = layers.pair_gradients(x_piece, low, gate, up)
        if places is not None:
            layers.write_grad_x(grad_low, gate, up, places[index])
        # Before the next piece's are made, which would be there at the same time.
        del low, gate, up
        of_weights = [*of_pair, *of_down]
        if not sums:
            sums = [grad.float() for grad in of_weights]
            continue
        for total, grad in zip(sums, of_weights, strict=True):
            total.add_(grad)
    return grad_x, sums


def _rows_of_x(call: _Call, kept: Sequence[torch.Tensor]) -> torch.Tensor:
    """x [N, hidden]: what is kept, or computed again."""
    x = kept[0] if kept else output_again(call.source).to(call.bases[0].dtype)
    return x.flatten(0, -2)
