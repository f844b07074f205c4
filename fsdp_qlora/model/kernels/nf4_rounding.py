"""Values rounded to NF4 and FP4 blocks.

On a CPU torch's operators have the bits of bitsandbytes' operator for codes. Its kernels for GPUs
divide by an approximation (`--use_fast_math`), and take a neighbouring code for a few of 10 million
values; its rounding of absmax differs between CPUs and GPUs. What is trained on a GPU and merged on
a CPU needs one rounding. Formats: model/quantizers/bnb_4bit.py.
"""

from __future__ import annotations

import functools

import bitsandbytes.functional as bnb
import torch
import torch.nn.functional as F

from fsdp_qlora.model.kernels.limits import limits_below
from fsdp_qlora.model.kernels.nf4 import BLOCKSIZE, NESTED_BLOCKSIZE

# Of an absmax, so that zeros are not divided by zero.
LEAST_ABSMAX = 1e-38


def _halfway(values: torch.Tensor) -> torch.Tensor:
    return (values[:-1] + values[1:]) / 2


# Made here, on the CPU: where a plan is made, new tensors have no values.
_ABSMAX_LIMITS = _halfway(bnb.create_dynamic_map())

def round_blocks(values: torch.Tensor, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 values to codes, two in a byte [32 * blocks], and float32 absmax [blocks].

    The last block may be short: it is filled up with zeros.
    """
    blocks = _blocks_of(values, BLOCKSIZE)
    absmax = _largest(blocks)
    limits, order = _code_tables(quant_type, values.device)
    codes = _codes(blocks, absmax, limits)
    if quant_type != "nf4":
        codes = order[codes.int()]
    # Even elements are in the high half of a byte, and in the low byte of a pair.
    pairs = codes.view(-1).view(torch.int16)
    return (pairs << 4 | pairs >> 8).to(torch.uint8), absmax


def round_absmax(absmax: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 absmax [blocks] without their mean to bytes, and float32 nested absmax."""
    blocks = _blocks_of(absmax - offset, NESTED_BLOCKSIZE)
    nested = _largest(blocks)
    codes = _codes(blocks, nested, _absmax_limits(absmax.device))
    return codes.view(-1)[: len(absmax)], nested


@functools.cache
def _code_tables(quant_type: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The float32 limits [15] between codes in ascending order, and these codes, uint8 [16]."""
    values = bnb.get_4bit_type(quant_type, device="cpu")
    order = values.argsort()
    return _halfway(values[order]).to(device), order.to(device, torch.uint8)


@functools.cache
def _absmax_limits(device: torch.device) -> torch.Tensor:
    return _ABSMAX_LIMITS.to(device)


def _blocks_of(values: torch.Tensor, size: int) -> torch.Tensor:
    values = values.flatten()
    rest = -values.numel() % size
    if rest:
        # Zeros do not change a block's largest magnitude.
        values = F.pad(values, (0, rest))
    return values.view(-1, size)


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.abs().amax(1)


def _codes(blocks: torch.Tensor, absmax: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    factors = absmax.clamp(min=LEAST_ABSMAX).reciprocal()
    return limits_below(blocks * factors[:, None], limits)
