"""Rows as token ids, one after the other in flat arrays."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

Numbers = Sequence[int] | np.ndarray

_ROWS_COUNTED = 4096  # at a time


@dataclass(frozen=True, eq=False)
class TokenizedRows:
    """Rows one after the other; row i is [offsets[i] : offsets[i + 1]] of the flat arrays."""

    input_ids: np.ndarray
    """int32 [tokens]."""
    learned: np.ndarray
    """bool [tokens], true where the token is a target."""
    offsets: np.ndarray
    """int64 [rows + 1]."""
    row_numbers: np.ndarray
    """The number of each row in the dataset, int64 [rows]."""
    splits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens of the first document of each row, int64 [rows], where rows are two: a chosen and a rejected answer, or an
    answer with a label and another row's."""
    desired: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))
    """The label of each row, bool [rows], where rows have one."""
    reference: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """The reference's log-probability of each document, float32 [documents], where it was computed before training."""
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """The advantage of each row, float32 [rows], where rows are sampled answers with their prompts."""
    old_logps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """Their tokens' log-probabilities when they were sampled, float32 [tokens], where the policy is another by now."""
    sampled_logps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """The same as the engine gives them, float32 [tokens], where they are asked for."""
    images: np.ndarray = field(default_factory=lambda: np.zeros((0, 16), np.uint8))
    """The images of all rows, by the names that `image_store.keep` gave them, uint8 [images, 16]."""
    image_sizes: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Where rows have images: how many each has, and how many numbers the processor makes of them, int64 [rows, 2]."""

    def __len__(self) -> int:
        return len(self.row_numbers)

    def __getitem__(self, row: int) -> "TokenizedRows":
        """One row, which shares its memory with all."""
        start, end = self.offsets[row : row + 2]
        offsets = np.array([0, end - start], dtype=np.int64)
        of_rows = (each[row : row + 1] for each in (self.row_numbers, self.splits, self.desired))
        found = TokenizedRows(self.input_ids[start:end], self.learned[start:end], offsets, *of_rows)
        sizes = self.image_sizes[row : row + 1]
        return dataclasses.replace(found, images=self.images_of(row), image_sizes=sizes) if len(sizes) else found

    def images_of(self, row: int) -> np.ndarray:
        """The images of a row, uint8 [images, 16]."""
        return self.images[self._first_images[row] : self._first_images[row + 1]]

    @cached_property
    def _first_images(self) -> np.ndarray:
        return np.cumsum([0, *self.image_sizes[:, 0]])

    @cached_property
    def digest(self) -> str:
        """A hash of all rows."""
        total = hashlib.blake2b(digest_size=16)
        for array in self.arrays.values():
            total.update(np.ascontiguousarray(array).data)
        return total.hexdigest()

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]."""
        return np.diff(self.offsets)

    @cached_property
    def num_targets(self) -> np.ndarray:
        """Learned tokens of each row that have a predecessor to be predicted from, int64 [rows]."""
        return self.document_targets.reshape(len(self), -1).sum(axis=1) if len(self.splits) else self.document_targets

    @cached_property
    def document_targets(self) -> np.ndarray:
        """Learned tokens of each document that have a predecessor, int64 [documents]."""
        offsets_of_all = self.document_offsets
        found = np.empty(len(offsets_of_all) - 1, np.int64)
        for first in range(0, len(found), _ROWS_COUNTED):  # numpy adds up numbers as wide as their sum
            offsets = offsets_of_all[first : first + _ROWS_COUNTED + 1]
            learned, starts = self.learned[offsets[0] : offsets[-1]], offsets[:-1] - offsets[0]
            found[first : first + len(starts)] = np.add.reduceat(learned, starts, dtype=np.int64) - learned[starts]
        return found

    @cached_property
    def document_offsets(self) -> np.ndarray:
        """The bounds of documents, which attention does not cross, int64 [documents + 1]."""
        if not len(self.splits):
            return self.offsets
        starts = np.stack([self.offsets[:-1], self.offsets[:-1] + self.splits], axis=1)
        return np.append(starts, self.offsets[-1])

    def documents(self, rows: Numbers) -> np.ndarray:
        """The numbers of the documents of some rows, int64."""
        numbers = np.asarray(rows, dtype=np.int64)
        return np.stack([2 * numbers, 2 * numbers + 1], axis=1).ravel() if len(self.splits) else numbers

    def learned_documents(self, rows: Numbers) -> np.ndarray:
        """The numbers of the documents that a model learns from: of a row with a label only the first."""
        return self.documents(rows)[::2] if len(self.desired) else self.documents(rows)

    @cached_property
    def as_documents(self) -> "TokenizedRows":
        """A row for each document, in the same memory: a pair's row i becomes the rows 2 * i and 2 * i + 1."""
        if not len(self.splits):
            return self
        numbers = self.row_numbers.repeat(2)
        return TokenizedRows(self.input_ids, self.learned, self.document_offsets, numbers, reference=self.reference)

    def describe_numbers(self, rows: np.ndarray) -> str:
        """The numbers of some rows in the dataset, as text."""
        numbers = sorted(self.row_numbers[rows].tolist())
        return f"{', '.join(map(str, numbers[:32]))}{', ...' if len(numbers) > 32 else ''}"

    @cached_property
    def num_shared(self) -> np.ndarray:
        """With how many tokens both documents of each row begin, int64 [rows]."""
        found = []
        for start, split, end in zip(self.offsets[:-1], self.splits, self.offsets[1:], strict=True):
            length = min(split, end - start - split)
            is_same = self.input_ids[start : start + length] == self.input_ids[start + split : start + split + length]
            found.append(length if is_same.all() else is_same.argmin())
        return np.array(found, dtype=np.int64)

    def num_computed(self, *, shares_prompts: bool) -> np.ndarray:
        """Tokens of each row that a model computes, int64 [rows]; a shared prompt once, if it `shares_prompts`."""
        return self.lengths - self.num_shared if shares_prompts else self.lengths

    def num_learned_from(self, *, shares_prompts: bool) -> np.ndarray:
        """Tokens of each row's learned documents that a model computes in one micro-batch, int64 [rows]."""
        return self.splits if len(self.desired) else self.num_computed(shares_prompts=shares_prompts)


class Lengths(NamedTuple):
    """Tokens of each document in a micro-batch. shared: of each pair, tokens that both begin with, computed once."""

    of_documents: list[int]
    shared: list[int] | None = None
    image_values: int = 0  # as in `Rendered`, of the micro-batch with the most

    @property
    def num_computed(self) -> int:
        return sum(self.of_documents) - sum(self.shared or ())


NO_ROWS = TokenizedRows(np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(1, np.int64), np.zeros(0, np.int64))


def join_rows(parts: Sequence[TokenizedRows], *, renumber: bool = False) -> TokenizedRows:
    """The rows of all parts, copied; of one part that part itself.

    Args:
        renumber: whether the parts are datasets of their own: then row numbers continue from part to part.
    """
    if len(parts) == 1:
        return parts[0]
    tokens = np.cumsum([0, *(len(part.input_ids) for part in parts)])
    sizes = [part.image_sizes for part in parts] if any(len(part.images) for part in parts) else []
    last = np.cumsum([0, *(int(part.row_numbers.max(initial=0)) * renumber for part in parts)])
    return TokenizedRows(
        np.concatenate([part.input_ids for part in parts]),
        np.concatenate([part.learned for part in parts]),
        np.concatenate([[0], *(part.offsets[1:] + tokens[number] for number, part in enumerate(parts))]),
        np.concatenate([part.row_numbers + last[number] for number, part in enumerate(parts)]),
        np.concatenate([part.splits for part in parts]),
        np.concatenate([part.desired for part in parts]),
        images=np.concatenate([part.images for part in parts]),
        image_sizes=np.concatenate(
            [NO_ROWS.image_sizes, *(np.resize(own, (len(part), 2)) for own, part in zip(sizes, parts, strict=False))]
        ),
    )
