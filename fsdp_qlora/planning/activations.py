"""Where the activations of blocks are while a step runs: on the device or in host memory."""

from collections.abc import Sequence
from typing import NamedTuple

from fsdp_qlora.sharding.host_activations import PARTS_AT_ONCE, is_spread


class OnHost(NamedTuple):
    """Activations in host memory of the first blocks, which do not keep all on the device."""

    inputs: bool = False
    """The inputs of all of them, which are computed again."""
    blocks: int = 0
    """The number of blocks that keep all activations there. The others are computed again."""
    attention: bool = False
    """Blocks that are computed again keep attention's output for long documents, wherever their
    inputs are."""


ON_DEVICE = OnHost()


class Here(NamedTuple):
    """Bytes on the device: of inputs of blocks, of their other activations, and of attention's
    output where the others are computed again.
    """

    inputs: int = 0
    kept: int = 0
    attention: int = 0


class Activations:
    """The activations of a micro-batch.

    Args:
        kept: bytes of each block's, besides its input.
        hidden: bytes of an input.
        first: the first block that has a backward pass.
        leaving: number of first blocks that do not keep all on the device.
        attention: bytes of attention's output that each block keeps where it is computed again.
    """

    def __init__(
        self,
        kept: Sequence[int],
        hidden: int,
        first: int,
        leaving: int,
        on_host: OnHost,
        attention: Sequence[int] = (),
    ) -> None:
        self.kept = kept
        self.hidden = hidden
        self.first = first
        self.leaving = leaving
        self.on_host = on_host
        moved = [index for index in range(leaving) if is_spread(index, on_host.blocks, leaving)]
        self.moved = [index for index in moved if index >= first]
        again = [index for index in range(first, len(kept)) if self.is_computed_again(index)]
        self.attention = {index: attention[index] for index in again if attention}

    def is_computed_again(self, index: int) -> bool:
        """Whether a block computes its activations again."""
        return index < self.leaving and index not in self.moved

    def in_backward(self, index: int) -> Here:
        """In a block's backward pass."""
        earlier = [each for each in self.moved if each < index]
        here = {index} & {*self.moved}
        # One that moved comes back in the backward pass of the next such block, and at the latest
        # in that of the block behind it.
        if earlier and (self.moved[-1] >= index or earlier[-1] == index - 1):
            here.add(earlier[-1])
        # The block's own is among those that are computed again.
        return self._sum(here, index)._replace(attention=self._attention(index - 1))

    def at_loss(self) -> Here:
        """Between the forward and the backward pass."""
        last = len(self.kept) - 1
        lag = self.leaving // max(self.on_host.blocks, 1)
        return self._sum({each for each in self.moved if each + lag > last}, last)

    def _sum(self, here: set[int], last: int) -> Here:
        """Bytes of blocks up to `last`, if of those that moved `here` are on the device."""
        inputs = kept = 0
        attention = self._attention(last)
        for index in range(self.first, last + 1):
            if index in here or index not in self.moved:
                inputs += 1
                kept += 0 if self.is_computed_again(index) else self.kept[index]
        # From the host one block's input comes while another one's is in use.
        if self.on_host.inputs:
            inputs = min(inputs, 2)
        return Here(inputs * self.hidden, kept, attention)

    def _attention(self, last: int) -> int:
        """Bytes of attention's output of blocks up to `last`."""
        sizes = [size for index, size in self.attention.items() if index <= last]
        # From the host one block's comes while another one's is in use.
        return sum(sizes[-1:] if self.on_host.inputs else sizes)

    @property
    def moved_bytes(self) -> int:
        """Bytes that go to host memory, and come back."""
        return sum(self.kept[index] + self.hidden for index in self.moved)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        if self.on_host.inputs:
            return self.leaving * self.hidden
        # in parts of one size, several of which are allocated at once
        return -(-self.moved_bytes // PARTS_AT_ONCE) * PARTS_AT_ONCE

    @property
    def host_attention_bytes(self) -> int:
        """Bytes of host memory for attention's output."""
        return sum(self.attention.values()) if self.on_host.inputs else 0
