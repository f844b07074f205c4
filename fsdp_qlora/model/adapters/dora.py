"""DoRA (Liu et al. 2024, arXiv 2402.09353): LoRA with a trainable magnitude for each weight row.

W' = m * (W + s B A) / ||W + s B A||, with a norm per output row that is constant in the backward
pass (section 4.3); y = x W^T + b + x' (W' - W)^T, where x' is x after dropout.

Shapes:
    x: [.., in], of N tokens.
    W: [out, in].
    lora_A: [rank, in].
    lora_B: [out, rank].
    m: [out].
    u = A x': [N, rank].
    y: [.., out].

The backward pass needs x and u, as in lora.py, x' (W + s B A)^T and the norm.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_qlora.model.adapters.lora import (
    LoraAdapter,
    LoraLinear,
    Product,
    as_before,
    computing_weights,
    low_rank_grads,
)
from fsdp_qlora.model.architecture.chunking import piece_number
from fsdp_qlora.model.architecture.precision import autocast_kind
from fsdp_qlora.model.quantizers.base import QuantizedWeight, frozen_product

# fp16 elements that are multiplied at a time in float32, since products of fp16 may overflow
_PIECE = 2**22


class _DoraProduct(torch.autograd.Function):
    """Computes y from x and u = A x'.

    frozen: the product without the bias; ||W||^2 of the rows, float32 [out]; the bias in the
    product's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        low: torch.Tensor,
        lora_A: torch.Tensor,
        lora_B: torch.Tensor,
        magnitude: torch.Tensor,
        frozen: tuple[Product, torch.Tensor, torch.Tensor | None],
    ) -> torch.Tensor:
        product, row_squares, bias = frozen
        # Weights are attributes for the reason given in lora.py.
        ctx.weights = (lora_A, lora_B, magnitude)
        ctx.product = product
        rows = x.flatten(0, -2)
        inputs = [rows]
        if product.dropout is not None:
            inputs.append(product.dropout(rows))
        # All products with W in one call, so that a quantized W is decoded once: x W^T, x' W^T
        # [N, out] and A W^T [rank, out].
        *products, A_times_W = product.base.multiply(*inputs, lora_A.to(x.dtype))
        norm = row_norms(A_times_W, lora_A, lora_B, row_squares, product.scaling)
        # x W^T - x' W^T, what dropout has taken from the frozen product
        rest = products[0].sub_(products[1]) if product.dropout else None
        # x' (W + s B A)^T
        adapted = products[-1].addmm_(low, lora_B.to(x.dtype).T, alpha=product.scaling)
        ctx.save_for_backward(adapted, norm)
        # `out` keeps the dtype: 16 bits times float32 would become float32.
        y = torch.mul(adapted, magnitude / norm, out=torch.empty_like(adapted))
        for term in (rest, bias):
            if term is not None:
                y.add_(term)
        return as_before(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_y = grads[0].flatten(0, -2)
        product: Product = ctx.product
        x, low = product.kept.take()
        adapted, norm = ctx.saved_tensors
        lora_A, _, magnitude = ctx.weights
        base = product.base
        scaling = product.scaling
        # The norm counts as constant (section 4.3), so y is linear in m. This overwrites `adapted`,
        # whose memory then holds the scaled gradient.
        grad_magnitude = _sum_of_products(adapted, grad_y) / norm
        scaled = torch.mul(grad_y, magnitude / norm, out=adapted)
        factors = product.dropout.factors(x) if product.dropout else None
        dropped = x if factors is None else x * factors
        grad_low, grad_A, grad_B = low_rank_grads(scaled, dropped, low, ctx)
        # x may have been computed again: then its gradient can have its memory.
        del x, dropped
        grad_x = None
        if ctx.needs_input_grad[0]:
            if factors is None:
                grad_x = base.multiply_grad(scaled)
                grad_x.addmm_(grad_low, lora_A.to(scaled.dtype), alpha=scaling)
            else:
                # x reaches y by W, and by x' through W' - W: only the latter has dropout's factors.
                through_A = grad_low @ lora_A.to(scaled.dtype)
                change = base.multiply_grad(scaled.sub_(grad_y)).add_(through_A, alpha=scaling)
                grad_x = base.multiply_grad(grad_y).addcmul_(change, factors)
            grad_x = as_before(grad_x, grads[0])
        return grad_x, None, grad_A, grad_B, grad_magnitude, None


def row_norms(
    product: torch.Tensor,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    row_squares: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """The norms of the rows of W + s B A, float32 [out].

    ||W + s B A||^2 = ||W||^2 + 2 s (W A^T . B) + s^2 (B A A^T . B), summed over each row. W is
    needed only for its product with the few rows of A.

    Args:
        product: A W^T, [rank, out].
        row_squares: ||W||^2, float32 [out].
    """
    # autocast would run these float32 products in 16 bits
    with torch.autocast(autocast_kind(product), enabled=False):
        lora_A = lora_A.float()
        lora_B = lora_B.float()
        # 2 s W A^T + s^2 B A A^T, [out, rank]
        with_update = torch.addmm(
            product.T.float(),
            lora_B,
            torch.mm(lora_A, lora_A.T),
            beta=2 * scaling,
            alpha=scaling**2,
        )
        squares = row_squares + (with_update * lora_B).sum(dim=1)
    # A row may be zero, and rounding may make the sum of an almost zero row negative.
    return squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt()


def _sum_of_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sum of a * b over the rows, float32 [columns]. Overwrites a."""
    if a.dtype != torch.float16:
        return a.mul_(b).sum(dim=0, dtype=torch.float32)
    total = torch.zeros(a.shape[-1], dtype=torch.float32, device=a.device)
    rows = max(1, _PIECE // a.shape[-1])
    for piece_a, piece_b in zip(a.split(rows), b.split(rows), strict=True):
        total += (piece_a.float() * piece_b).sum(dim=0)
    return total


class Magnitude(nn.Module):
    """A trainable magnitude per output row.

    It is fp32 in every precision: bf16 cannot represent changes below 0.4%.

    Parameters:
        weight: m, trainable, float32 [out].
        row_squares: ||W||^2 of the base's rows, frozen, float32 [out].
    """

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, device="meta", dtype=torch.float32))
        self.row_squares = nn.Parameter(torch.empty_like(self.weight), requires_grad=False)

    def forward(self, _: None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return m and ||W||^2, which FSDP2 gathers for this call.

        The argument is unused: FSDP2 of torch 2.11 requires one.
        """
        return self.weight, self.row_squares


class DoraAdapter(LoraAdapter):
    """LoRA's two matrices and the magnitude, applied to a base layer."""

    def __init__(
        self, in_features: int, out_features: int, *, rank: int, scaling: float, dropout: float
    ) -> None:
        super().__init__(in_features, out_features, rank=rank, scaling=scaling, dropout=dropout)
        self.magnitude = Magnitude(out_features)

    def forward(self, x: torch.Tensor, base_layer: nn.Module, source: Any = None) -> torch.Tensor:
        """Compute x W'^T + b, [.., out].

        With dropout, as in PEFT: x W^T + b + x' (W' - W)^T with x' after dropout.
        """
        # The bias is not scaled by m / norm, so it is added at the end.
        base = frozen_product(base_layer, x, with_bias=False)
        base_bias = base_layer.bias
        bias = base_bias.to(base.dtype) if isinstance(base_bias, torch.Tensor) else None
        x, low, product = self._low_rank(x, base, source)
        # FSDP2 gathers at `__call__`, and expects one call per pass, not one per piece.
        if piece_number.get() == 0:
            magnitude, row_squares = self.magnitude(None)
        else:
            magnitude, row_squares = self.magnitude.forward(None)
        lora_A, lora_B = computing_weights(self)
        frozen = (product, row_squares, bias)
        y: torch.Tensor = _DoraProduct.apply(x, low, lora_A, lora_B, magnitude, frozen)
        return y


class DoraLinear(LoraLinear):
    """A base layer with DoRA on its weight."""

    adapter = DoraAdapter
    lora: DoraAdapter

    @torch.no_grad()
    def base_row_squares(self) -> torch.Tensor:
        """||W||^2 of each row of the base, float32 [out].

        The base's parameters must be gathered.
        """
        base = self.base_layer
        weight = base.dequantize() if isinstance(base, QuantizedWeight) else base.weight
        return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
