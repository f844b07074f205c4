"""Rows as token ids, one after the other in flat arrays."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, NamedTuple, get_type_hints

import numpy as np

Numbers = Sequence[int] | np.ndarray

# Rows whose targets are counted at a time, so that the temporary arrays stay small.
_ROWS_COUNTED = 4096

# Each array says what it has a value for, so that slices and joined tables keep it.
PerToken = Annotated[np.ndarray, "token"]
PerRow = Annotated[np.ndarray, "row"]
PerDocument = Annotated[np.ndarray, "document"]
PerImage = Annotated[np.ndarray, "image"]


@dataclass(frozen=True, eq=False)
class TokenizedRows:
    """Rows one after the other; row i is [offsets[i] : offsets[i + 1]] of the flat arrays."""

    input_ids: PerToken
    """int32 [tokens]."""
    learned: PerToken
    """bool [tokens], true where the token is a target; float32 where targets have weights."""
    offsets: np.ndarray
    """int64 [rows + 1]."""
    row_numbers: PerRow
    """The number of each row in the dataset, int64 [rows]."""
    splits: PerRow = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens of the first document of each row, int64 [rows], where rows are two: a chosen and a
    rejected answer, or an answer with a label and another row's.
    """
    desired: PerRow = field(default_factory=lambda: np.zeros(0, np.bool_))
    """The label of each row, bool [rows], where rows have one."""
    reference: PerDocument = field(default_factory=lambda: np.zeros(0, np.float32))
    """The reference's log-probability of each document, float32 [documents], where it was computed
    before training.
    """
    advantages: PerRow = field(default_factory=lambda: np.zeros(0, np.float32))
    """The advantage of each row, float32 [rows], where rows are sampled completions with their
    prompts.
    """
    old_logps: PerToken = field(default_factory=lambda: np.zeros(0, np.float32))
    """Log-probability of each token under the policy that sampled it, float32 [tokens], where the
    policy has changed since.
    """
    sampled_logps: PerToken = field(default_factory=lambda: np.zeros(0, np.float32))
    """The same as the engine gives them, float32 [tokens], where they are asked for."""
    images: PerImage = field(default_factory=lambda: np.zeros((0, 16), np.uint8))
    """The images of all rows, by the names of `image_store.keep`, uint8 [images, 16]."""
    image_sizes: PerRow = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Where rows have images: how many each has, and how many numbers the processor makes of them,
    int64 [rows, 2].
    """

    def __len__(self) -> int:
        return len(self.row_numbers)

    def __getitem__(self, row: int) -> "TokenizedRows":
        """One row, which shares its memory with all."""
        num_documents = 2 if len(self.splits) else 1
        bounds: dict[str, Sequence[int] | np.ndarray] = {
            "token": self.offsets[row : row + 2],
            "row": (row, row + 1),
            "document": (num_documents * row, num_documents * (row + 1)),
            "image": self._first_images[row : row + 2],
        }
        arrays = {
            name: getattr(self, name)[slice(*bounds[index])] for name, index in INDEXED_BY.items()
        }
        return TokenizedRows(
            offsets=np.array([0, len(arrays["input_ids"])], dtype=np.int64), **arrays
        )

    @cached_property
    def _first_images(self) -> np.ndarray:
        """The index of each row's first image, and the number of all, int64 [rows + 1]."""
        counts = np.zeros(len(self), np.int64)
        if len(self.image_sizes):
            counts = self.image_sizes[:, 0]
        return np.cumsum([0, *counts])

    @cached_property
    def digest(self) -> str:
        """A hash of all rows."""
        # Of the bytes in the order of the fields: the same on every machine and in every start.
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
        if not len(self.splits):
            return self.document_targets
        return self.document_targets.reshape(len(self), -1).sum(axis=1)

    @cached_property
    def document_targets(self) -> np.ndarray:
        """Learned tokens of each document that have a predecessor, int64 [documents]."""
        offsets_of_all = self.document_offsets
        counts = np.empty(len(offsets_of_all) - 1, np.int64)
        # In pieces: numpy widens what it adds to the dtype of the sum, eight bytes for each token.
        for first in range(0, len(counts), _ROWS_COUNTED):
            offsets = offsets_of_all[first : first + _ROWS_COUNTED + 1]
            learned = self.learned[offsets[0] : offsets[-1]] != 0
            starts = offsets[:-1] - offsets[0]
            # Nothing predicts the first token of a document, so it is no target.
            counts[first : first + len(starts)] = (
                np.add.reduceat(learned, starts, dtype=np.int64) - learned[starts]
            )
        return counts

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
        if not len(self.splits):
            return numbers
        return np.stack([2 * numbers, 2 * numbers + 1], axis=1).ravel()

    def learned_documents(self, rows: Numbers) -> np.ndarray:
        """The numbers of the documents that a model learns from.

        Of a row with a label this is only the first: the second one, its prompt with another row's
        answer, measures the divergence from the reference.
        """
        documents = self.documents(rows)
        return documents[::2] if len(self.desired) else documents

    @cached_property
    def as_documents(self) -> "TokenizedRows":
        """A row for each document, in the same memory.

        Row i of a pair becomes the rows 2 * i and 2 * i + 1.
        """
        if not len(self.splits):
            return self
        kept = {
            name: getattr(self, name)
            for name, index in INDEXED_BY.items()
            if index in ("token", "document")
        }
        return TokenizedRows(
            offsets=self.document_offsets, row_numbers=self.row_numbers.repeat(2), **kept
        )

    def describe_numbers(self, rows: np.ndarray) -> str:
        """The numbers of some rows in the dataset, as text."""
        numbers = sorted(self.row_numbers[rows].tolist())
        return f"{', '.join(map(str, numbers[:32]))}{', ...' if len(numbers) > 32 else ''}"

    @cached_property
    def num_shared(self) -> np.ndarray:
        """Length of the common prefix of each row's two documents, int64 [rows]."""
        shared = []
        # A loop, but one comparison of arrays for each row: the rows are mapped from a file.
        for start, split, end in zip(self.offsets[:-1], self.splits, self.offsets[1:], strict=True):
            length = min(split, end - start - split)
            is_same = (
                self.input_ids[start : start + length]
                == self.input_ids[start + split : start + split + length]
            )
            # argmin of bool is the first false one
            shared.append(length if is_same.all() else is_same.argmin())
        return np.array(shared, dtype=np.int64)

    def num_computed(self, *, shares_prompts: bool) -> np.ndarray:
        """Tokens of each row that a model computes, int64 [rows].

        A model that `shares_prompts` computes the prompt of a pair once.
        """
        return self.lengths - self.num_shared if shares_prompts else self.lengths

    def num_learned_from(self, *, shares_prompts: bool) -> np.ndarray:
        """Tokens of each row's learned documents that a model computes in one micro-batch, int64
        [rows].
        """
        if len(self.desired):
            return self.splits
        return self.num_computed(shares_prompts=shares_prompts)


class Lengths(NamedTuple):
    """Tokens of each document in a micro-batch. shared: of each pair, tokens that both begin with,
    computed once.
    """

    of_documents: list[int]
    shared: list[int] | None = None
    image_values: int = 0  # as in `Rendered`, of the micro-batch with the most

    @property
    def num_computed(self) -> int:
        return sum(self.of_documents) - sum(self.shared or ())


INDEXED_BY: dict[str, str] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(TokenizedRows, include_extras=True).items()
    if name != "offsets"
}
NO_ROWS = TokenizedRows(
    np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(1, np.int64), np.zeros(0, np.int64)
)


def join_rows(parts: Sequence[TokenizedRows], *, renumber: bool = False) -> TokenizedRows:
    """The rows of all parts, copied; of one part that part itself.

    Args:
        renumber: whether the parts are datasets of their own: then row numbers continue from part
            to part.
    Raises:
        ValueError: only some of the parts have an array. Rows without images may be beside rows
            with some.
    """
    if len(parts) == 1:
        return parts[0]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in INDEXED_BY}
    tokens = np.cumsum([0, *(len(part.input_ids) for part in parts)])
    offsets = np.concatenate(
        [[0], *(part.offsets[1:] + first for part, first in zip(parts, tokens, strict=False))]
    )
    if renumber:
        # After the highest number, not the count: rows that were left out keep their numbers.
        last = np.cumsum([0, *(int(part.row_numbers.max(initial=0)) for part in parts)])
        arrays["row_numbers"] += last[:-1].repeat([len(part) for part in parts])
    sizes = [NO_ROWS.image_sizes]
    if len(arrays["images"]):
        # np.resize fills the rows of a part without images with zeros.
        sizes += [np.resize(part.image_sizes, (len(part), 2)) for part in parts]
    arrays["image_sizes"] = np.concatenate(sizes)
    joined = TokenizedRows(offsets=offsets, **arrays)
    counts = {"token": tokens[-1], "row": len(joined), "document": len(joined.document_offsets) - 1}
    # An array is empty where rows have no such thing: then it has to be empty in all parts.
    for name, index in INDEXED_BY.items():
        if index in counts and len(arrays[name]) not in (0, counts[index]):
            raise ValueError(f"only some of the tables to join have {name}")
    return joined


def join_completions(
    prompts: Sequence[Numbers], completions: Sequence[Numbers], numbers: Numbers
) -> TokenizedRows:
    """A row of each prompt and its completion, which is learned. numbers: of the prompts' rows in
    the dataset.
    """
    parts: list[np.ndarray] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        parts += [np.asarray(prompt, np.int32), np.asarray(completion, np.int32)]
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    learned = np.tile([False, True], len(prompts))
    ids = np.concatenate([np.zeros(0, np.int32), *parts])
    return TokenizedRows(
        ids, np.repeat(learned, np.diff(ends)), ends[::2], np.array(numbers, np.int64)
    )
