"""Codes of values by the limits between them."""

import torch

# Fewer values are found sooner than they are compared with each limit.
_FEW = 2**14


def limits_below(values: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """The number of limits below each float32 value, as bytes; all of them for NaN.

    limits: float32 in ascending order, at most 255.
    """
    # A CPU compares many values at once, and would search for one after the other.
    if values.device.type != "cpu" or values.numel() < _FEW:
        return torch.bucketize(values, limits, out_int32=True).to(torch.uint8)
    count = torch.full_like(values, len(limits))
    is_above = torch.empty_like(values)
    for limit in limits.tolist():
        count -= torch.le(values, limit, out=is_above)
    return count.to(torch.uint8)
