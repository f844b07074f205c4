"""The product of a frozen layer with LoRA as one autograd function: y = x W^T + b + s B A x'.

x' is x with parts dropped. Shapes: x [.., in], of N tokens, W [out, in], A [rank, in], B [out, rank],
u = A x' [N, rank], y [.., out].

Kept for the backward pass are x and u alone, and not x either where it can be computed again. The weights are read
again then, W decoded again, and the dropped parts are found again from their seed.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fsdp_qlora.model.fused_functions import differentiated_once, recompute_output
from fsdp_qlora.quantizers.base import FrozenProduct


class Dropout(NamedTuple):
    """Which parts of x are dropped, and the others scaled up."""

    share: float
    seed: int

    @classmethod
    def draw(cls, share: float) -> "Dropout":
        """With a seed from the CPU's generator, which a recomputation finds in the same state."""
        return cls(share, int(torch.randint(2**62, ()).item()))

    def factors(self, like: torch.Tensor) -> torch.Tensor:
        """0 or 1 / (1 - share) for each element, always the same."""
        generator = torch.Generator(like.device).manual_seed(self.seed)
        kept = torch.empty_like(like).bernoulli_(1 - self.share, generator=generator)
        return kept.div_(1 - self.share)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.factors(x).mul_(x)


class Product(NamedTuple):
    """What the product depends on besides x, A and B.

    ends_block: it may be a block's last, which is computed in two functions; see LowRank.
    """

    base: FrozenProduct
    scaling: float
    dropout: Dropout | None
    ends_block: bool


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in `dtype`. Torch takes the host a microsecond to find that it already is."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def lora_product(
    x: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, product: Product, source: Any
) -> torch.Tensor:
    """x W^T + b + scaling * B A x' of x [.., in], as [.., out] in the base's dtype; differentiable in x, A and B.

    Args:
        source: what can compute x again (model/fused_functions.py), None if x must be kept.
    """
    x = in_dtype(x, product.base.dtype)
    low = LowRank.apply(x, lora_A, product.dropout, source) if product.ends_block else None
    y: torch.Tensor = _LoraProduct.apply(x, low, lora_A, lora_B, product, source)
    return y


# In a function, since outside of it autograd would have a node for each view.


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[.., n] -> [N, n]"""
    return x.flatten(0, -2)


def as_before(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[N, m] -> [.., m] for x [.., n]. Not a view: on what an adapter returns FSDP2's hooks would be lost with that."""
    result: torch.Tensor = torch.ops.aten._unsafe_view.default(rows, [*x.shape[:-1], rows.shape[-1]])
    return result


class LowRank(torch.autograd.Function):
    """u = A x', and the keeper of x and u for `_LoraProduct`.

    A checkpointed block's recomputation stops at the last tensor that the block keeps. What one function keeps is noted
    when it is done, so the last layer's base product would be computed again in vain if `_LoraProduct` kept it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lora_A: torch.Tensor, dropout: Dropout | None, source: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        low = _low_rank(as_rows(x), lora_A, dropout)
        _keep(ctx, x, low, source)
        return low

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None, None]:
        return None, None, None, None  # `_LoraProduct` has them all


def _low_rank(rows: torch.Tensor, lora_A: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
    """u of x [N, in]."""
    return F.linear(dropout(rows) if dropout else rows, in_dtype(lora_A, rows.dtype))


def _keep(ctx: Any, x: torch.Tensor, low: torch.Tensor, source: Any) -> None:
    """Make the node the keeper of x and u."""
    ctx.source, ctx.dtype = source, x.dtype
    ctx.save_for_backward(*(() if source else (x,)), low)


def kept(keeper: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """x, as [N, in], and u of the node that keeps them."""
    *x, low = keeper.saved_tensors
    return as_rows(x[0] if x else in_dtype(recompute_output(keeper.source), keeper.dtype)), low


class _LoraProduct(torch.autograd.Function):
    """The rest of the forward pass after `LowRank`, or without it all of it; and all of the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        low: torch.Tensor | None,
        lora_A: torch.Tensor,
        lora_B: torch.Tensor,
        product: Product,
        source: Any,
    ) -> torch.Tensor:
        # Weights as attributes: FSDP2 refills these same gathered tensors before the backward pass, and activation
        # checkpointing does not have to recompute them.
        ctx.weights, ctx.product = (lora_A, lora_B), product
        ctx.keeper = None if low is None else low.grad_fn
        rows = as_rows(x)
        if low is None:
            low = _low_rank(rows, lora_A, product.dropout)
            _keep(ctx, x, low, source)
        (y,) = product.base.multiply(rows)
        return as_before(y.addmm_(low, in_dtype(lora_B, x.dtype).T, alpha=product.scaling), x)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_y = as_rows(grads[0])
        x, low = kept(ctx.keeper or ctx)
        lora_A, (base, scaling, dropout, _) = ctx.weights[0], ctx.product
        ctx.keeper = None
        factors = dropout.factors(x) if dropout else None
        grad_low, grad_A, grad_B = low_rank_grads(grad_y, x if factors is None else x * factors, low, ctx)
        del x  # which may have been computed again: its gradient can have its memory
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = base.multiply_grad(grad_y)
            if factors is None:
                grad_x.addmm_(grad_low, in_dtype(lora_A, grad_y.dtype), alpha=scaling)
            else:
                grad_x.addcmul_(grad_low @ in_dtype(lora_A, grad_y.dtype), factors, value=scaling)
            grad_x = as_before(grad_x, grads[0])
        return grad_x, None, grad_A, grad_B, None, None


def low_rank_grads(
    grad_y: torch.Tensor, x: torch.Tensor, low: torch.Tensor, ctx: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of u / s, A and B, of x' and u; A and B are ctx.weights, and s is of ctx.product."""
    (lora_A, lora_B, *_), scaling = ctx.weights, ctx.product.scaling
    grad_low = grad_y @ in_dtype(lora_B, grad_y.dtype)
    grad_B = _scaled_product(grad_y.T, low, scaling)
    grad_A = _scaled_product(grad_low.T, x, scaling)
    return grad_low, in_dtype(grad_A, lora_A.dtype), in_dtype(grad_B, lora_B.dtype)


def _scaled_product(a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """scaling * a b in one kernel."""
    return torch.addmm(a.new_empty(a.shape[0], b.shape[1]), a, b, beta=0, alpha=scaling)
