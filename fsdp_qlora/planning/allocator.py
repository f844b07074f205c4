"""Memory that torch's caching allocator reserves for a sequence of allocations, without a GPU.

Of an empty pool with expandable segments (PYTORCH_ALLOC_CONF), as a run has them, on one stream:
c10/cuda/CUDACachingAllocator.cpp of torch 2.11.
"""

from collections.abc import Iterable
from typing import NamedTuple

# Bytes that torch's allocator reserves and does not use, fitted to the rows of
# benchmarks/standin_memory.py. The first three count in units of a block's largest matrix in the
# compute dtype, by where blocks come from. "trained" counts float32 numbers for each weight of a
# block that trains whole; from the host it is gathered in memory of a stream of its own, and copied
# out. "exchanged" counts a rank's hidden states where ranks share rows, as what is exchanged for
# attention has sizes of its own. "moved" counts what a block moves to host memory.
FACTORS = {
    "gathered": 0.8,
    "device": 0.8,
    "host": 1.2,
    "trained": 0.4,
    "trained from host": 1.3,
    "exchanged": 0.5,
    "moved": 0.4,
    "moved beside host": 1.1,
}
# Fitted to the same rows: where inputs go to the host, rows are long, and what comes next fills
# larger gaps.
MOST_OF_GAPS = 2**28
SEGMENT = 512
"""Bytes that all sizes are rounded to."""
# Allocations up to this size are among themselves.
_MOST_OF_SMALL = 2**20
# Memory comes from the driver in pieces of this size: for small allocations, and for others.
_SMALL_PIECE = 2 * 2**20
_LARGE_PIECE = 20 * 2**20


class Change(NamedTuple):
    """An allocation, or its end. key: of the allocation; another one may have it afterwards."""

    key: object
    size: int
    """Bytes; 0 for an end."""


class _Gap(NamedTuple):
    """Free bytes, ordered by size and place."""

    size: int
    start: int


class _Piece:
    """The reserved memory of small allocations, or of large ones."""

    def __init__(self, piece: int) -> None:
        self._piece = piece
        self.reserved = 0
        # Without gaps beside each other. The last bytes are a gap of any size, which is not listed.
        self._gaps: list[_Gap] = []
        self._end = 0

    def allocate(self, size: int) -> int:
        """The place of an allocation."""
        # The smallest gap that is large enough; memory that can grow comes last.
        found = min((gap for gap in self._gaps if gap.size >= size), default=None)
        if found is None:
            start = self._end
            self._end += size
            pieces = -(-self._end // self._piece)
            self.reserved = max(self.reserved, pieces * self._piece)
            return start
        self._gaps.remove(found)
        if found.size > size:
            self._gaps.append(_Gap(found.size - size, found.start + size))
        return found.start

    def free(self, start: int, size: int) -> None:
        """End an allocation, and join its bytes with gaps at their sides."""
        stop = start + size
        for gap in [*self._gaps]:
            if gap.start + gap.size == start or gap.start == stop:
                self._gaps.remove(gap)
                start = min(start, gap.start)
                stop = max(stop, gap.start + gap.size)
        if stop == self._end:
            self._end = start
        else:
            self._gaps.append(_Gap(stop - start, start))


def reserved_bytes(changes: Iterable[Change]) -> int:
    """The bytes that are reserved after a sequence of allocations and their ends."""
    small = _Piece(_SMALL_PIECE)
    large = _Piece(_LARGE_PIECE)
    places: dict[object, tuple[_Piece, int, int]] = {}
    for key, size in changes:
        if not size:
            memory, start, rounded = places.pop(key)
            memory.free(start, rounded)
            continue
        rounded = -(-size // SEGMENT) * SEGMENT
        memory = small if rounded <= _MOST_OF_SMALL else large
        places[key] = memory, memory.allocate(rounded), rounded
    return small.reserved + large.reserved
