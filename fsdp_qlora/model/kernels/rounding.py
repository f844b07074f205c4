"""Rounding of Triton's kernels, as torch's kernels do it, and where they can run.

Triton comes with torch's builds for CUDA. Without it kernels are plain functions that nobody calls.
"""

from __future__ import annotations  # those of kernels name `tl`, which may be missing

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import libdevice
except ImportError:
    triton = tl = libdevice = None

__all__ = [
    "BY_NUMPY",
    "computes_by_triton",
    "divided",
    "has_rows",
    "has_triton",
    "jit",
    "libdevice",
    "rounded",
    "rounded_to",
    "runs_by_triton",
    "tl",
    "triton",
]


def jit(function: Any = None, **options: Any) -> Any:
    """Compile by Triton at the first call.

    options: of triton.jit, such as the arguments whose values a kernel is not compiled for.
    """
    if triton:
        return triton.jit(function, **options)
    return function or (lambda function: function)


# With TRITON_INTERPRET=1 numpy computes, on the CPU, for tests: slowly, and without libdevice.
INTERPRETED = bool(triton and triton.knobs.runtime.interpret)
BY_NUMPY = tl.constexpr(INTERPRETED) if triton else None

_DTYPES = {torch.bfloat16, torch.float16, torch.float32}


def has_triton(device: torch.device) -> bool:
    """Whether kernels run there: on a card."""
    return device.type == "cuda" or (INTERPRETED and device.type == "cpu")


def computes_by_triton(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel can read and write tensors of a floating dtype there: on a card."""
    return has_triton(device) and dtype in _DTYPES


def runs_by_triton(*tensors: torch.Tensor) -> bool:
    """Whether a kernel can read and write them: of one floating dtype, on a card."""
    first, *others = tensors
    if not computes_by_triton(first.dtype, first.device):
        return False
    return all(other.dtype == first.dtype for other in others)


def has_rows(x: torch.Tensor) -> bool:
    """Whether x is [rows, width] in its own memory, with each row in one piece."""
    if x.is_contiguous():
        return True
    outer = zip(x.stride()[:-2], x.stride()[1:-1], x.shape[1:-1], strict=True)
    return x.stride(-1) == 1 and all(first == stride * size for first, stride, size in outer)


@jit
def divided(a, b):
    """a / b, float32, rounded to the nearest."""
    if BY_NUMPY:
        return a / b
    return tl.div_rn(a, b)


@jit
def rounded_to(x, dtype: tl.constexpr):
    """x, float32, in the dtype: to the nearest, ties to even."""
    if dtype == tl.float32:
        return x
    if BY_NUMPY and dtype == tl.bfloat16:
        # Triton's interpreter cuts off what does not fit.
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype, fp_downcast_rounding="rtne")


@jit
def rounded(x, dtype: tl.constexpr):
    """x, float32, with the values that the dtype has."""
    return rounded_to(x, dtype).to(tl.float32)
