"""The second quantization of 4-bit weights: their absmax in 8 bits (Dettmers et al. 2023), in bitsandbytes' packing.

Decoded for a matrix at a time, or for a decoder block's layers together while the block is at work.
"""

import functools
from collections.abc import Sequence
from typing import Protocol

import bitsandbytes.functional as bnb
import torch

from fsdp_qlora.quantizers.bnb_4bit_format import NESTED_BLOCKSIZE


class DoublyQuantized(Protocol):
    """A layer's statistics; see Bnb4bitWeight. offset is the value of absmax_offset."""

    num_blocks: int
    offset: float

    @property
    def absmax(self) -> torch.Tensor: ...

    @property
    def nested_absmax(self) -> torch.Tensor: ...


class BlockStatistics:
    """The absmax of a decoder block's layers, decoded by four kernels for all of them instead of two for each.

    What a block has decoded stays until another block decodes its own, float32 and an eighth of the codes' bytes: what
    is computed again in the backward pass, and the gradients after it, need no more. Frozen weights do not change once
    they are loaded, which must be before the first pass.

    Args:
        layers: gathered together; each has whole groups of 256 absmax, so that all are one tensor to the kernel.
        latest: of the model.
    """

    def __init__(self, layers: Sequence[DoublyQuantized], latest: "Latest") -> None:
        self._layers, self._latest = layers, latest

    def absmax(self, index: int) -> torch.Tensor:
        """That of a layer, float32 [blocks]. Only while the block's weights are gathered."""
        latest = self._latest
        if latest.block is not self:
            latest.block, latest.absmax = None, ()  # freed before there is more
            latest.absmax = self._decode()
            latest.block = self
        return latest.absmax[index]

    def _decode(self) -> Sequence[torch.Tensor]:
        layers = self._layers
        # Bytes in storage's dtype, in rows of equal width.
        codes = torch.cat([layer.absmax for layer in layers]).view(torch.uint8).view(-1)
        nested = torch.cat([layer.nested_absmax for layer in layers]).view(torch.float32).view(-1)
        absmax = _decode_8bit(codes, nested).split([layer.num_blocks for layer in layers])
        torch._foreach_add_(absmax, [layer.offset for layer in layers])
        return absmax


class Latest:
    """The block that decoded last, and what it decoded."""

    def __init__(self) -> None:
        self.block: BlockStatistics | None = None
        self.absmax: Sequence[torch.Tensor] = ()


def can_share(layer: DoublyQuantized) -> bool:
    """Whether a layer's absmax can lie before another's in one tensor."""
    return layer.num_blocks % NESTED_BLOCKSIZE == 0


def decode_absmax(codes: torch.Tensor, nested_absmax: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Undo the second quantization: one float32 per block of weights."""
    return _decode_8bit(codes, nested_absmax).add_(offset)


@functools.cache
def nested_code(device: torch.device) -> torch.Tensor:
    """The 256 float32 values of bitsandbytes' dynamic 8-bit map, which encode the nested absmax."""
    return bnb.create_dynamic_map().to(device)


def _decode_8bit(codes: torch.Tensor, nested_absmax: torch.Tensor) -> torch.Tensor:
    decoded: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise.default(
        codes, nested_absmax, nested_code(codes.device), NESTED_BLOCKSIZE, torch.float32
    )
    return decoded
