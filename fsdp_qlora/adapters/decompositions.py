"""Initial values of A and B computed from the weight: PiSSA, OLoRA, LoftQ.

Shapes: weight [out, in] float32, A [rank, in], B [out, rank]; `scaling` is the factor of B A in the adapted layer.
"""

from collections.abc import Callable

import torch

Factors = tuple[torch.Tensor, torch.Tensor]


def pissa(weight: torch.Tensor, rank: int, scaling: float) -> Factors:
    """The weight's `rank` largest singular values and vectors (Meng et al. 2024)."""
    # On a GPU torch's default is Jacobi's method (gesvdj), slow and inexact for matrices that large.
    driver = "gesvd" if weight.is_cuda else None
    left, values, right = torch.linalg.svd(weight, full_matrices=False, driver=driver)
    return _split(left[:, :rank], values[:rank], right[:rank], scaling)


def pissa_niter(weight: torch.Tensor, rank: int, scaling: float, *, iterations: int, seed: int) -> Factors:
    """PiSSA by randomized SVD (Halko et al. 2009): much faster, slightly less accurate."""
    devices = [weight.device] if weight.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        left, values, right = torch.svd_lowrank(weight, q=rank, niter=iterations)
    return _split(left, values, right.T, scaling)


def olora(weight: torch.Tensor, rank: int) -> Factors:
    """The first `rank` columns of Q and rows of R of the weight's QR decomposition (Büyükakyüz 2024)."""
    orthogonal, triangular = torch.linalg.qr(weight)
    return triangular[:rank], orthogonal[:, :rank]


def loftq(
    weight: torch.Tensor, rank: int, scaling: float, *, quantize: Callable[[torch.Tensor], torch.Tensor]
) -> Factors:
    """The largest singular values of the quantization error (Li et al. 2023, one iteration, PEFT's default).

    With one iteration the base is the quantized weight itself, which anyone can reproduce.

    Args:
        quantize: weight -> its quantized values.
    """
    return pissa(weight.float() - quantize(weight).float(), rank, scaling)


def _split(left: torch.Tensor, values: torch.Tensor, right: torch.Tensor, scaling: float) -> Factors:
    root = (values / scaling).sqrt()
    return root[:, None] * right, left * root
