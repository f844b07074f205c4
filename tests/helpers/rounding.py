"""How far apart two computations of the same may be on any processor, and an optimizer under which
it stays so.
"""

import math
from typing import Any

import torch

# Stochastic gradient descent: Adam makes a whole step of the rounding error of a gradient that is
# nearly zero.
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "lr_scheduler": "constant", "warmup": 0}
# How many standard deviations a sum of roundings may be off: by chance 3e-8 are farther.
_DEVIATIONS = 6


def rounding(additions: int, *, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> float:
    """Largest difference of two sums of the same terms, in any orders, vectors and fused
    operations.

    Each is off by at most 6 sqrt(n) u times the sum of the terms' magnitudes, where u is half of
    eps (Higham and Mary 2019, theorem 2.4: roundings do not all go in one direction, as the n u of
    the worst case has them).

    Args:
        additions: n, of the longest sum. scale: the sum of its terms' magnitudes; 1 for a relative
        difference.
    """
    return _DEVIATIONS * math.sqrt(additions) * torch.finfo(dtype).eps * scale
