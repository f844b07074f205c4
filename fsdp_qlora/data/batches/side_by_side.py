"""Arrays side by side, such as those of several files, read as one without being joined."""

from collections.abc import Iterable, Iterator
from typing import NoReturn

import numpy as np


class SideBySide:
    """Arrays of one dimension, which stay where they are, as one array.

    Slices and gathers are read; the whole is never made. The arrays may have different dtypes: what
    is read has the one that joined arrays would have.

    Args:
        chunks: the arrays in their order; those side by side already are taken apart.
    """

    def __init__(self, chunks: Iterable["FlatArray"]) -> None:
        self._chunks: list[np.ndarray] = []
        for chunk in chunks:
            self._chunks += chunk._chunks if isinstance(chunk, SideBySide) else [chunk]
        self.dtype = np.result_type(*(chunk.dtype for chunk in self._chunks))
        lengths = [len(chunk) for chunk in self._chunks]
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._firsts = self._ends - lengths

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays as they are."""
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        """The values of a slice without steps, or at the indices of an integer array.

        A slice within one of the arrays shares its memory if the dtype is the same.
        """
        if isinstance(places, slice):
            return self._between(*places.indices(len(self)))
        return self._gather(places)

    def __array__(self, *_: object, **__: object) -> NoReturn:
        # numpy would ask for one value after another.
        raise TypeError("arrays side by side are not joined: read a slice, or chunk by chunk")

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield the arrays in their order, in the dtype of all."""
        for chunk in self._chunks:
            yield chunk.astype(self.dtype, copy=False)

    def _between(self, start: int, stop: int, step: int) -> np.ndarray:
        if step != 1:
            raise ValueError("slices of arrays side by side have no steps")
        first = int(np.searchsorted(self._ends, start, side="right"))
        parts = [np.zeros(0, self.dtype)]
        for chunk, begin in zip(self._chunks[first:], self._firsts[first:], strict=True):
            if begin >= stop:
                break
            part = chunk[max(0, start - begin) : stop - begin]
            parts.append(part.astype(self.dtype, copy=False))
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def _gather(self, places: np.ndarray) -> np.ndarray:
        if places.size and (places.min() < 0 or places.max() >= len(self)):
            raise IndexError(f"an index below 0, or not below {len(self)}")
        values = np.empty(places.shape, self.dtype)
        numbers = np.searchsorted(self._ends, places, side="right")
        for number in np.unique(numbers):
            is_here = numbers == number
            values[is_here] = self._chunks[number][places[is_here] - self._firsts[number]]
        return values


FlatArray = np.ndarray | SideBySide


def chunks_of(array: FlatArray) -> Iterator[np.ndarray]:
    """Yield the arrays of which an array is made: one, if it is not several side by side."""
    if isinstance(array, SideBySide):
        yield from array.chunks()
    else:
        yield array
