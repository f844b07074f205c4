"""What is asserted about values: on the stand-in for CUDA, whose kernels compute nothing, it is not
held.

With PHANTOM_VALUES=1 it is, as on a GPU.
"""

import os

import torch

IS_STAND_IN = os.environ.get("FSDP_QLORA_GPU_TESTS") == "stand-in"
HAS_VALUES = not IS_STAND_IN or os.environ.get("PHANTOM_VALUES") == "1"
left_out = 0  # comparisons that the stand-in does not hold


def holds(condition: bool, message: object = "") -> None:
    """Assert what depends on values: the one place that the stand-in leaves out."""
    global left_out
    left_out += not HAS_VALUES
    assert condition or not HAS_VALUES, message


def same(found: torch.Tensor, expected: torch.Tensor, *, tolerance: float = 0.0) -> None:
    """Assert that a tensor of the GPU is that of the CPU: bit for bit, or to a relative error of
    its norm.
    """
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    found = found.cpu()
    if tolerance == 0.0:
        differ = int((found != expected).sum())
        holds(differ == 0, f"{differ} of {expected.numel()} values differ")
        return
    error = relative_error(found, expected)
    holds(error <= tolerance, f"relative error {error:.2e}, allowed {tolerance:.0e}")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    wanted = expected.double()
    return ((found.cpu().double() - wanted).norm() / wanted.norm()).item()
