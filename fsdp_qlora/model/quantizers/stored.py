"""Stored bytes of quantized weights in their parameters."""

import torch
from torch import nn

from fsdp_qlora.distributed.shards import local_part


def row_bytes(parameter: torch.Tensor) -> int:
    """Bytes of a row of a matrix."""
    return parameter.shape[1] * parameter.element_size()


def write_bytes(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Store the bytes of `values` in this rank's part of a parameter. Zeroes the rest of it."""
    # As bytes, so that no copy kernel sees codes that look like NaN (see QuantizedWeight).
    local = local_part(parameter)
    target = local.view(-1).view(torch.uint8)
    source = values.reshape(-1).view(torch.uint8)
    target[: source.numel()] = source.to(target.device)
    # The memory is uninitialized, and its padding would differ between runs.
    target[source.numel() :] = 0
