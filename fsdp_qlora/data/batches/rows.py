"""Rows as token ids, one after the other in flat arrays."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch

from fsdp_qlora.data.batches.row_images import (
    NO_IMAGES,
    RowImages,
    images_of_rows,
    join_images,
)
from fsdp_qlora.data.batches.shared_tokens import (
    RowTokens,
    SharedTokens,
    num_equal,
    shared_in_groups,
    shared_in_pairs,
)
from fsdp_qlora.data.batches.side_by_side import FlatArray, SideBySide, chunks_of

Numbers = Sequence[int] | np.ndarray
Unit = Literal["row", "document", "token"]
Learns = Literal["all", "first_document"]
"""The documents of each row that the model learns from. A second document that is not learned from
measures something: the divergence from the reference, or what the teacher predicts.
"""

# Rows whose targets are counted at a time, so that the temporary arrays stay small.
_ROWS_COUNTED = 4096
# Tokens of rows whose documents are compared at a time.
_TOKENS_COMPARED = 2**19


class Column(NamedTuple):
    """Values of rows besides their tokens."""

    per: Unit
    """The unit that each value is of."""
    values: np.ndarray
    """[rows], [documents] or [tokens]."""


@dataclass(frozen=True, eq=False)
class TokenizedRows:
    """Rows one after the other; row i is [offsets[i] : offsets[i + 1]] of the flat arrays."""

    input_ids: FlatArray
    """int32 [tokens]."""
    learned: FlatArray
    """bool [tokens], true where the token is a target; float32 where targets have weights."""
    offsets: np.ndarray
    """int64 [rows + 1]."""
    row_numbers: np.ndarray
    """The number of each row in the dataset, int64 [rows]."""
    splits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens of the first document of each row, int64 [rows], where rows are two: a chosen and a
    rejected answer, an answer with a label and another row's, or a student's row and its teacher's.
    """
    learns: Learns = "all"
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Values that some kinds of rows have, by name:

    - `desired`, bool per row: the label of an answer. From tokenization.py, for
      `MicroBatch.desired`.
    - `reference`, float32 per document: the reference's log-probability, if it is computed before
      training. From cache.py, for `MicroBatch.reference`.
    - `advantages`, float32 per row: of a completion that the run has sampled. From rl/source.py,
      for target values.
    - `prompt_tokens`, int64 per row: tokens that all rows with the same number begin with
      (`shared_of_prompts`). From rl/rollout_rows.py, for `shared_tokens`.
    - `old_logps`, `sampled_logps`, float32 per token: log-probabilities under the policy that
      sampled the completion, if it has changed since, and as the engine gives them; 0 for prompts.
      From rl/source.py, for target values.

    Columns per token are values of targets (target_values.py) under their own names.
    """
    images: RowImages = NO_IMAGES
    """The images of each row, which are in each of its documents."""

    def __len__(self) -> int:
        return len(self.row_numbers)

    def __getitem__(self, row: int) -> "TokenizedRows":
        """One row, which shares its memory with all."""
        bounds: dict[Unit, slice] = {
            "token": slice(*self.offsets[row : row + 2]),
            "row": slice(row, row + 1),
            "document": slice(self.num_documents * row, self.num_documents * (row + 1)),
        }
        input_ids = self.input_ids[bounds["token"]]
        return TokenizedRows(
            input_ids,
            self.learned[bounds["token"]],
            np.array([0, len(input_ids)], dtype=np.int64),
            self.row_numbers[bounds["row"]],
            self.splits[bounds["row"]],
            self.learns,
            {
                name: Column(column.per, column.values[bounds[column.per]])
                for name, column in self.columns.items()
            },
            self.images.of_row(row),
        )

    def with_columns(self, per: Unit, **values: np.ndarray) -> "TokenizedRows":
        """The same rows with these columns added or replaced."""
        added = {name: Column(per, array) for name, array in values.items()}
        return dataclasses.replace(self, columns=dict(self.columns) | added)

    @cached_property
    def digest(self) -> str:
        """A hash of all rows, the same on every machine and in every start."""
        total = hashlib.blake2b(digest_size=16)
        for array in self.arrays.values():
            for chunk in chunks_of(array):
                total.update(np.ascontiguousarray(chunk).data)
        # A run folder has the digest of earlier versions, in which each row of a teacher had a
        # label, to be learned like one that has.
        if self.learns == "first_document" and "desired" not in self.columns:
            total.update(np.ones(len(self), np.bool_).data)
        return total.hexdigest()

    @property
    def arrays(self) -> dict[str, FlatArray]:
        """All arrays, by names for a file: "token/old_logps" is a column's."""
        arrays: dict[str, FlatArray] = {name: getattr(self, name) for name in _ARRAYS}
        for name, column in sorted(self.columns.items()):
            arrays[f"{column.per}/{name}"] = column.values
        arrays["images"] = self.images.names
        arrays["image_sizes"] = self.images.sizes
        return arrays

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, FlatArray], learns: str, digest: str | None = None
    ) -> "TokenizedRows":
        """The reverse of `arrays`.

        Args:
            digest: of the rows, if it is known and the arrays have been verified.
        Raises:
            KeyError or ValueError: the arrays are others.
        """
        left: dict[str, Any] = dict(arrays)
        fields = {name: left.pop(name) for name in _ARRAYS}
        images = RowImages(left.pop("images"), left.pop("image_sizes"))
        if learns not in get_args(Learns):
            raise ValueError(f"rows cannot learn {learns!r}")
        columns = {}
        for key, values in left.items():
            per, _, name = key.partition("/")
            if per not in get_args(Unit):
                raise ValueError(f"{key!r} is no column")
            columns[name] = Column(cast("Unit", per), values)
        rows = cls(**fields, learns=cast("Learns", learns), columns=columns, images=images)
        if digest is not None:
            # As if it had been computed: a copy with other columns computes its own.
            vars(rows)["digest"] = digest
        return rows

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]."""
        return np.diff(self.offsets)

    @property
    def num_documents(self) -> int:
        """Documents of each row."""
        return 2 if len(self.splits) else 1

    @cached_property
    def num_targets(self) -> np.ndarray:
        """Learned tokens of each row that have a predecessor to be predicted from, int64 [rows]."""
        if not len(self.splits):
            return self.document_targets
        return self.document_targets.reshape(len(self), -1).sum(axis=1)

    @cached_property
    def target_ends(self) -> np.ndarray:
        """The number of targets up to the end of each row, int64 [rows]."""
        return self.num_targets.cumsum()

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
        """The numbers of the documents of some rows that a model learns from."""
        documents = self.documents(rows)
        return documents[::2] if self.learns == "first_document" else documents

    @cached_property
    def as_documents(self) -> "TokenizedRows":
        """A row for each document, in the same memory.

        Row i of a pair becomes the rows 2 * i and 2 * i + 1.
        """
        if not len(self.splits):
            return self
        columns = {name: column for name, column in self.columns.items() if column.per != "row"}
        return TokenizedRows(
            self.input_ids,
            self.learned,
            self.document_offsets,
            self.row_numbers.repeat(2),
            columns=columns,
            images=self.images.repeated(2),
        )

    def describe_numbers(self, rows: np.ndarray) -> str:
        """The numbers of some rows in the dataset, as text."""
        numbers = sorted(self.row_numbers[rows].tolist())
        return f"{', '.join(map(str, numbers[:32]))}{', ...' if len(numbers) > 32 else ''}"

    @cached_property
    def num_shared(self) -> np.ndarray:
        """Length of the common prefix of each row's two documents, int64 [rows]."""
        shared = np.zeros(len(self), np.int64)
        # In pieces: the rows are mapped from a file. A piece has one row at least.
        first = 0
        while first < len(self):
            most = self.offsets[first] + _TOKENS_COMPARED
            end = max(first + 1, int(np.searchsorted(self.offsets, most, side="right")) - 1)
            offsets = self.offsets[first : end + 1]
            ids = self.input_ids[offsets[0] : offsets[-1]]
            starts = offsets[:-1] - offsets[0]
            splits = self.splits[first:end]
            lengths = np.minimum(splits, np.diff(offsets) - splits)
            shared[first:end] = num_equal(ids, starts, starts + splits, lengths)
            first = end
        return shared

    @cached_property
    def _computed_of_pairs(self) -> np.ndarray:
        """Tokens of each pair with its common prefix once, int64 [rows]."""
        return self.lengths - self.num_shared

    def shared_tokens(self, rows: np.ndarray) -> SharedTokens | None:
        """The tokens that documents of some rows share with others of these rows.

        The documents are those of pairs, or answers to the same prompts. None if there are none.
        """
        if len(self.splits):
            shared = shared_in_pairs(self.num_shared[rows])
        elif self._prompt_tokens is not None:
            shared = shared_in_groups(self.row_numbers[rows], self._prompt_tokens[rows])
        else:
            return None
        return shared if np.any(shared.counts) else None

    @property
    def _prompt_tokens(self) -> np.ndarray | None:
        column = self.columns.get("prompt_tokens")
        return column.values if column else None

    def computed(self, *, shares_prompts: bool) -> RowTokens:
        """Tokens of each row that a model computes.

        A model that `shares_prompts` computes the prompt of a pair, or of answers, once.
        """
        if not shares_prompts:
            return RowTokens(self.lengths, self.row_numbers)
        if len(self.splits):
            return RowTokens(self._computed_of_pairs, self.row_numbers)
        return RowTokens(self.lengths, self.row_numbers, self._prompt_tokens)

    def learned_from(self, *, shares_prompts: bool) -> RowTokens:
        """Tokens of each row's learned documents that a micro-batch computes."""
        if self.learns == "first_document":
            return RowTokens(self.splits, self.row_numbers)
        return self.computed(shares_prompts=shares_prompts)


class Lengths(NamedTuple):
    """Tokens of each document in a micro-batch.

    shared: tokens that documents begin with and others compute, as lists.
    """

    of_documents: list[int]
    shared: SharedTokens | None = None
    image_values: int = 0  # as in `Rendered`, of the micro-batch with the most
    example_image: Mapping[str, torch.Tensor] = MappingProxyType({})  # what is made of an image

    @property
    def num_computed(self) -> int:
        return sum(self.of_documents) - (sum(self.shared.counts) if self.shared else 0)

    @property
    def num_squares(self) -> int:
        """Work of attention: squares of the lengths of documents, less those of shared tokens."""
        squares = sum(length**2 for length in self.of_documents)
        return squares - (sum(count**2 for count in self.shared.counts) if self.shared else 0)


# The arrays that all rows have, in the order of `TokenizedRows.digest`.
_ARRAYS = ("input_ids", "learned", "offsets", "row_numbers", "splits")
NO_ROWS = TokenizedRows(
    np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(1, np.int64), np.zeros(0, np.int64)
)


def join_rows(
    parts: Sequence[TokenizedRows], *, renumber: bool = False, copies_tokens: bool = True
) -> TokenizedRows:
    """The rows of all parts, copied; of one part that part itself.

    Args:
        renumber: whether the parts are datasets of their own: then row numbers continue from part
            to part.
        copies_tokens: whether `input_ids` and `learned` are copied, too, and not side by side.
    Raises:
        ValueError: only some of the parts have a column. Rows without images may be beside rows
            with some.
    """
    # Parts without rows say nothing about columns.
    parts = [part for part in parts if len(part)] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    lengths = [len(part.input_ids) for part in parts]
    firsts = np.cumsum([0, *lengths[:-1]])
    ends = [part.offsets[1:] + first for part, first in zip(parts, firsts, strict=True)]
    row_numbers = np.concatenate([part.row_numbers for part in parts])
    if renumber:
        # After the highest number, not the count: rows that were left out keep their numbers.
        last = np.cumsum([0, *(int(part.row_numbers.max(initial=0)) for part in parts)])
        row_numbers += last[:-1].repeat([len(part) for part in parts])
    splits = np.concatenate([part.splits for part in parts])
    if len(splits) not in (0, len(row_numbers)):
        raise ValueError("only some of the tables to join have splits")
    if len({part.learns for part in parts}) > 1:
        raise ValueError("the tables to join learn other documents of their rows")
    input_ids = SideBySide([part.input_ids for part in parts])
    learned = SideBySide([part.learned for part in parts])
    return TokenizedRows(
        input_ids[:] if copies_tokens else input_ids,
        learned[:] if copies_tokens else learned,
        np.concatenate([[0], *ends]),
        row_numbers,
        splits,
        parts[0].learns,
        _join_columns([part.columns for part in parts]),
        join_images([part.images for part in parts], [len(part) for part in parts]),
    )


def _join_columns(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """The columns that all parts have. Raises ValueError if only some of them have one."""
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        if not all(name in part for part in parts):
            raise ValueError(f"only some of the tables to join have {name}")
        values = np.concatenate([part[name].values for part in parts])
        joined[name] = Column(parts[0][name].per, values)
    return joined


def join_completions(
    prompts: Sequence[Numbers],
    completions: Sequence[Numbers],
    numbers: Numbers,
    images: Sequence[RowImages] | None = None,
) -> TokenizedRows:
    """A row of each prompt and its completion, which is learned.

    Args:
        numbers: of the prompts' rows in the dataset.
        images: of each prompt, as those of a table of one row; None where no prompt has any.
    """
    parts: list[np.ndarray] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        parts += [np.asarray(prompt, np.int32), np.asarray(completion, np.int32)]
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    learned = np.tile([False, True], len(prompts))
    ids = np.concatenate([np.zeros(0, np.int32), *parts])
    return TokenizedRows(
        ids,
        np.repeat(learned, np.diff(ends)),
        ends[::2],
        np.array(numbers, np.int64),
        images=images_of_rows(images or ()),
    )


def beside_teacher(
    documents: TokenizedRows, images: Sequence[RowImages] | None = None
) -> TokenizedRows:
    """Rows of a student's and a teacher's document each, of which the student's is learned.

    Args:
        documents: rows of one document, the student's and the teacher's in turn, without images.
        images: of each row, in both of its documents; None where no row has any.
    """
    return dataclasses.replace(
        documents,
        # Two documents become a row, which is split where the second one begins.
        offsets=documents.offsets[::2],
        row_numbers=documents.row_numbers[::2],
        splits=np.diff(documents.offsets)[::2],
        learns="first_document",
        images=images_of_rows(images or ()),
    )
