"""RMS norms and the gradients of their inputs, each in one kernel.

They round where the models round. The sums are in another order than torch's, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, ways_in_use
from fsdp_qlora.model.kernels.rounding import (
    has_rows,
    jit,
    rounded,
    rounded_to,
    runs_by_triton,
    tl,
    triton,
)

Form = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of each row, and the factor that made it.

    Args:
        x: [N, width], with each row in one piece. weight: [width]. form: a name in FORMS.

    Returns:
        The norm [N, width] in the dtype of x, and 1 / sqrt(mean of squares + eps) [N], float32.
    """
    return WAYS[_way(x, weight, form)].norm(x, weight, eps, form)


def rms_norm_gradient(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, form: str
) -> torch.Tensor:
    """The gradient of x [N, width].

    Args:
        grad: of the norm, in the dtype of x. rstd: the factors that `rms_norm` returned.
    """
    way = _way(x, weight, form) if has_rows(grad) else PLAIN
    return WAYS[way].gradient(grad, x, weight, rstd, form)


def norm_fits(x: torch.Tensor, weight: torch.Tensor, form: str) -> bool:
    """Whether a run has chosen another way than torch's, which can compute this norm.

    x: [.., width].
    """
    if ways_in_use().norm == PLAIN or not has_rows(x):
        return False
    # A weight of another dtype makes the product's.
    same = weight.dtype == x.dtype or form == ONE_PLUS
    return same and runs_by_triton(x) and x.shape[-1] <= WIDEST


def _way(x: torch.Tensor, weight: torch.Tensor, form: str) -> str:
    return ways_in_use().norm if norm_fits(x, weight, form) else PLAIN


# --- by torch ---


class _MetaRmsNorm(torch.autograd.Function):
    """Stands for a GPU's kernel on the meta device, with its memory, for the plan.

    There torch would compute the norm in several operators, with copies in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        # The kernel saves its input and a factor per token, in float32.
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def _normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    y: torch.Tensor = _MetaRmsNorm.apply(x) if x.is_meta else F.rms_norm(x, x.shape[-1:], None, eps)
    return y.to(x.dtype)


def _rounded_then_weighted(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * _normalized(x, eps)


def _weighted_then_rounded(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.is_meta:
        return _normalized(x, eps) * weight
    return F.rms_norm(x, x.shape[-1:], weight, eps).to(x.dtype)


def _weighted_by_one_plus(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (_normalized(x.float(), eps) * (1 + weight.float())).to(x.dtype)


ROUNDED_FIRST = "rounded, then weighted"
ROUNDED_LAST = "weighted, then rounded"
ONE_PLUS = "weighted by 1 + weight"
# Where models round to 16 bits, and how their weight counts: llama rounds before it multiplies by
# the weight, gemma adds 1 to the weight and rounds at the end.
FORMS: dict[str, Form] = {
    ROUNDED_FIRST: _rounded_then_weighted,
    ROUNDED_LAST: _weighted_then_rounded,
    ONE_PLUS: _weighted_by_one_plus,
}


def _norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    squares = x.float().square()
    return FORMS[form](x, weight, eps), (squares.mean(-1) + eps).rsqrt()


def _gradient(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, form: str
) -> torch.Tensor:
    if form == ROUNDED_FIRST:
        weighted = (grad * weight).float()
    else:
        weighted = grad.float() * (weight.float() + (form == ONE_PLUS))
    normed = x.float() * rstd[:, None]
    along = (weighted * normed).mean(-1, keepdim=True)
    return (rstd[:, None] * (weighted - normed * along)).to(x.dtype)


# --- by Triton ---

WIDEST = 16384  # elements of a row, which a program holds at once
_AT_ONCE = 2048  # elements of a program, if rows are short


def _norm_by_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if x.numel():
        settings = launch_settings(x.shape[-1], form)
        grid = (triton.cdiv(len(x), settings["ROWS"]),)
        norm_kernel[grid](x, weight, y, rstd, x.stride(0), len(x), eps, **settings)
    return y, rstd


def _gradient_by_triton(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, form: str
) -> torch.Tensor:
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        settings = launch_settings(x.shape[-1], form)
        grid = (triton.cdiv(len(x), settings["ROWS"]),)
        strides = (grad.stride(0), x.stride(0))
        gradient_kernel[grid](grad, x, weight, rstd, grad_x, *strides, len(x), **settings)
    return grad_x


@functools.cache
def launch_settings(width: int, form: str) -> dict[str, Any]:
    """The constants and options of both kernels."""
    block = triton.next_power_of_2(width)
    rows = max(1, _AT_ONCE // block)
    return {
        "WIDTH": width,
        "ROUNDED_FIRST": form == ROUNDED_FIRST,
        "ONE_PLUS": form == ONE_PLUS,
        "ROWS": rows,
        "BLOCK": block,
        "num_warps": max(4, rows * block // 512),
        "enable_fp_fusion": True,
    }


@jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x,
    weight,
    y,
    rstd,
    x_row,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    ROUNDED_FIRST: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows; x_row is the stride of those of x, in elements."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    at = rows[:, None] * x_row + columns[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(v * v, 1) / WIDTH + eps)
    normed = v * r[:, None]
    if ROUNDED_FIRST:
        normed = rounded(normed, dtype)
    w = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if ONE_PLUS:
        w = 1.0 + w
    to = rows[:, None] * WIDTH + columns[None, :]
    tl.store(y + to, rounded_to(normed * w[None, :], dtype), mask=inside)
    tl.store(rstd + rows, r, mask=rows < num_rows)


@jit(do_not_specialize=["num_rows"])
def gradient_kernel(
    grad,
    x,
    weight,
    rstd,
    grad_x,
    grad_row,
    x_row,
    num_rows,
    WIDTH: tl.constexpr,
    ROUNDED_FIRST: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    at = rows[:, None] * x_row + columns[None, :]
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    at = rows[:, None] * grad_row + columns[None, :]
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if ONE_PLUS:
        w = 1.0 + w
    d = d * w[None, :]
    if ROUNDED_FIRST:
        d = rounded(d, dtype)
    r = tl.load(rstd + rows, mask=rows < num_rows, other=0.0)[:, None]
    normed = v * r
    along = tl.sum(d * normed, 1)[:, None] / WIDTH
    to = rows[:, None] * WIDTH + columns[None, :]
    tl.store(grad_x + to, rounded_to(r * (d - normed * along), dtype), mask=inside)


class NormWay(NamedTuple):
    """The two functions of a way."""

    norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gradient: Callable[..., torch.Tensor]


WAYS = {
    PLAIN: NormWay(_norm, _gradient),
    TRITON: NormWay(_norm_by_triton, _gradient_by_triton),
}
