"""SiLU(gate) * up and its gradients, each in one kernel with the bits of torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, ways_in_use
from fsdp_qlora.model.kernels.rounding import (
    BY_NUMPY,
    divided,
    has_rows,
    jit,
    libdevice,
    rounded,
    rounded_to,
    runs_by_triton,
    tl,
    triton,
)


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up, a new tensor; both are [.., width]."""
    return WAYS[_way(gate, up)].product(gate, up)


def silu_gradients_(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, keeps_grad: bool = False
) -> None:
    """Overwrite gate and up by their gradients, and grad by SiLU(gate) * up.

    Args:
        grad: of the product. All are [.., width], of one dtype.
        keeps_grad: leave grad as it is.
    """
    WAYS[_way(grad, gate, up)].gradients_(grad, gate, up, keeps_grad)


def is_silu(activation: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a function has the bits of torch's SiLU, tried on a CPU."""
    x = torch.linspace(-100, 100, 2001, device="cpu")
    try:
        return all(torch.equal(activation(each), F.silu(each)) for each in (x, x.bfloat16()))
    except (RuntimeError, TypeError, AttributeError):
        return False


def _way(*tensors: torch.Tensor) -> str:
    way = ways_in_use().gate
    if way == PLAIN or not runs_by_triton(*tensors):
        return PLAIN
    return way if all(has_rows(tensor) for tensor in tensors) else PLAIN


# --- by torch ---


def _product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    activated = F.silu(gate)
    # In place the result would have gate's dtype; of two dtypes it has the wider one.
    return activated.mul_(up) if gate.dtype == up.dtype else activated * up


def _gradients_(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, keeps_grad: bool) -> None:
    activated = F.silu(gate)
    gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    product = None if keeps_grad else activated * up
    up.copy_(activated.mul_(grad))
    if product is not None:
        grad.copy_(product)


# --- by Triton ---

BLOCK = 1024
# A thread has 8 elements, which are one access of 128 bits in 16 bits. 1 + exp(-x) is fused in
# torch's kernels, too.
SETTINGS: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 4, "enable_fp_fusion": True}


def _product_by_triton(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    product = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(product_kernel, gate, up, product, **SETTINGS)
    return product


def _gradients_by_triton_(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, keeps_grad: bool
) -> None:
    _launch(gradients_kernel, grad, gate, up, KEEPS_GRAD=keeps_grad, **SETTINGS)


def _launch(kernel: Any, *tensors: torch.Tensor, **settings: Any) -> None:
    if not tensors[0].numel():
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(1, -1) for tensor in tensors)
    rows = [tensor.view(-1, tensor.shape[-1]) for tensor in tensors]
    num_rows, width = rows[0].shape
    blocks = triton.cdiv(width, BLOCK)
    strides = (each.stride(0) for each in rows)
    kernel[(num_rows * blocks,)](*rows, *strides, width, blocks, **settings)


@jit(do_not_specialize=["blocks"])
def product_kernel(
    gate,
    up,
    product,
    gate_row,
    up_row,
    product_row,
    width,
    blocks,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of a row; `gate_row` and the like are the strides of rows, in elements."""
    row, columns = _place(blocks, BLOCK)
    inside = columns < width
    dtype: tl.constexpr = gate.dtype.element_ty
    g = tl.load(gate + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + columns, mask=inside, other=0.0).to(tl.float32)
    activated = rounded(divided(g, 1.0 + _exp(-g)), dtype)
    tl.store(product + row * product_row + columns, rounded_to(activated * u, dtype), mask=inside)


@jit(do_not_specialize=["blocks"])
def gradients_kernel(
    grad,
    gate,
    up,
    grad_row,
    gate_row,
    up_row,
    width,
    blocks,
    BLOCK: tl.constexpr,
    KEEPS_GRAD: tl.constexpr,
):
    row, columns = _place(blocks, BLOCK)
    inside = columns < width
    dtype: tl.constexpr = gate.dtype.element_ty
    grad += row * grad_row
    gate += row * gate_row
    up += row * up_row
    d = tl.load(grad + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + columns, mask=inside, other=0.0).to(tl.float32)
    divisor = 1.0 + _exp(-g)
    activated = rounded(divided(g, divisor), dtype)
    sigmoid = divided(1.0, divisor)
    # torch has dy * s * (1 + x * (1 - s)), of which its compiler makes this.
    slope = tl.fma(g, 1.0 - sigmoid, 1.0)
    grad_activated = rounded(d * u, dtype)
    if not KEEPS_GRAD:
        tl.store(grad + columns, rounded_to(activated * u, dtype), mask=inside)
    tl.store(gate + columns, rounded_to(grad_activated * sigmoid * slope, dtype), mask=inside)
    tl.store(up + columns, rounded_to(activated * d, dtype), mask=inside)


@jit
def _place(blocks, BLOCK: tl.constexpr):
    """The program's row, and its columns in it."""
    program = tl.program_id(0).to(tl.int64)
    return program // blocks, (program % blocks) * BLOCK + tl.arange(0, BLOCK)


# With CUDA's own exp and an IEEE division, which torch's kernels have.


@jit
def _exp(x):
    if BY_NUMPY:
        return tl.exp(x)
    return libdevice.exp(x)


class GateWay(NamedTuple):
    """The two functions of a way."""

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gradients_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]


WAYS = {
    PLAIN: GateWay(_product, _gradients_),
    TRITON: GateWay(_product_by_triton, _gradients_by_triton_),
}
