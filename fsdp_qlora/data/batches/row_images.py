"""The images of rows, by their names in the store of images."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class RowImages:
    """The images of rows, in the order of the rows. Both arrays are empty if no row has any."""

    names: np.ndarray
    """The names that `image_store.keep` gives, uint8 [images, 16]."""
    sizes: np.ndarray
    """The number of images of each row, and of the values that the processor makes of them, int64
    [rows, 2].
    """

    @classmethod
    def of_one_row(cls, names: Sequence[bytes], num_values: int) -> "RowImages":
        """The images of a table of one row. num_values: as in `sizes`."""
        if not names:
            return NO_IMAGES
        flat = np.frombuffer(b"".join(names), np.uint8)
        return cls(flat.reshape(len(names), -1), np.array([[len(names), num_values]], np.int64))

    def __len__(self) -> int:
        """The number of images."""
        return len(self.names)

    @property
    def hex_names(self) -> list[str]:
        """The names of all images, as text."""
        return [bytes(name).hex() for name in self.names]

    @property
    def counts(self) -> np.ndarray:
        """Images of each row, int64 [rows]."""
        return self.sizes[:, 0]

    @property
    def num_values(self) -> np.ndarray:
        """Values of each row's images, int64 [rows]."""
        return self.sizes[:, 1]

    @cached_property
    def _firsts(self) -> np.ndarray:
        """The index of each row's first image, and the number of all, int64 [rows + 1]."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    def of_row(self, row: int) -> "RowImages":
        """The images of one row."""
        if not len(self.sizes):
            return self
        return RowImages(self.names[slice(*self._firsts[row : row + 2])], self.sizes[row : row + 1])

    def repeated(self, times: int) -> "RowImages":
        """The images of rows that are there `times` times each, one behind the other."""
        if not len(self.sizes):
            return self
        sizes = self.sizes.repeat(times, axis=0)
        counts = sizes[:, 0]
        firsts = self._firsts[:-1].repeat(times)
        places = np.arange(counts.sum()) + (firsts - counts.cumsum() + counts).repeat(counts)
        return RowImages(self.names[places], sizes)


NO_IMAGES = RowImages(np.zeros((0, 16), np.uint8), np.zeros((0, 2), np.int64))


def images_of_rows(images: Sequence[RowImages]) -> RowImages:
    """The images of a table, from those of each row as a table of one row."""
    return join_images(images, [1] * len(images)) if images else NO_IMAGES


def join_images(parts: Sequence[RowImages], num_rows: Sequence[int]) -> RowImages:
    """The images of all parts, which may have rows without images.

    Args:
        num_rows: of each part.
    """
    names = np.concatenate([part.names for part in parts])
    if not len(names):
        return NO_IMAGES
    # np.resize fills the rows of a part without images with zeros.
    sizes = [np.resize(part.sizes, (count, 2)) for part, count in zip(parts, num_rows, strict=True)]
    return RowImages(names, np.concatenate(sizes))
