"""Rows as token ids, one after the other in flat arrays; and the report on what became of a
dataset's rows.
"""

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, NamedTuple, get_type_hints

import numpy as np

from fsdp_qlora.data.content import SourceFile
from fsdp_qlora.utils.text import fit_line

Numbers = Sequence[int] | np.ndarray

_ROWS_COUNTED = 4096  # at a time


# What an array has a value for, so that slices and joined tables keep it.
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
    """The images of all rows, by the names that `images.keep` gave them, uint8 [images, 16]."""
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
        return np.cumsum(
            [
                0,
                *(
                    self.image_sizes[:, 0]
                    if len(self.image_sizes)
                    else np.zeros(len(self), np.int64)
                ),
            ]
        )

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
        return (
            self.document_targets.reshape(len(self), -1).sum(axis=1)
            if len(self.splits)
            else self.document_targets
        )

    @cached_property
    def document_targets(self) -> np.ndarray:
        """Learned tokens of each document that have a predecessor, int64 [documents]."""
        offsets_of_all = self.document_offsets
        counts = np.empty(len(offsets_of_all) - 1, np.int64)
        # numpy adds up numbers as wide as their sum
        for first in range(0, len(counts), _ROWS_COUNTED):
            offsets = offsets_of_all[first : first + _ROWS_COUNTED + 1]
            learned = self.learned[offsets[0] : offsets[-1]] != 0
            starts = offsets[:-1] - offsets[0]
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
        return (
            np.stack([2 * numbers, 2 * numbers + 1], axis=1).ravel()
            if len(self.splits)
            else numbers
        )

    def learned_documents(self, rows: Numbers) -> np.ndarray:
        """The numbers of the documents that a model learns from: of a row with a label only the
        first.
        """
        return self.documents(rows)[::2] if len(self.desired) else self.documents(rows)

    @cached_property
    def as_documents(self) -> "TokenizedRows":
        """A row for each document, in the same memory: a pair's row i becomes the rows 2 * i and 2
        * i + 1.
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
        for start, split, end in zip(self.offsets[:-1], self.splits, self.offsets[1:], strict=True):
            length = min(split, end - start - split)
            is_same = (
                self.input_ids[start : start + length]
                == self.input_ids[start + split : start + split + length]
            )
            shared.append(length if is_same.all() else is_same.argmin())
        return np.array(shared, dtype=np.int64)

    def num_computed(self, *, shares_prompts: bool) -> np.ndarray:
        """Tokens of each row that a model computes, int64 [rows]; a shared prompt once, if it
        `shares_prompts`.
        """
        return self.lengths - self.num_shared if shares_prompts else self.lengths

    def num_learned_from(self, *, shares_prompts: bool) -> np.ndarray:
        """Tokens of each row's learned documents that a model computes in one micro-batch, int64
        [rows].
        """
        return (
            self.splits if len(self.desired) else self.num_computed(shares_prompts=shares_prompts)
        )


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
    last = np.cumsum([0, *(int(part.row_numbers.max(initial=0)) * renumber for part in parts)])
    arrays["row_numbers"] += last[:-1].repeat([len(part) for part in parts])
    sizes = (
        [np.resize(part.image_sizes, (len(part), 2)) for part in parts]
        if len(arrays["images"])
        else []
    )
    arrays["image_sizes"] = np.concatenate([NO_ROWS.image_sizes, *sizes])
    joined = TokenizedRows(offsets=offsets, **arrays)
    counts = {"token": tokens[-1], "row": len(joined), "document": len(joined.document_offsets) - 1}
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
    parts = [
        np.asarray(part, np.int32)
        for pair in zip(prompts, completions, strict=True)
        for part in pair
    ]
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    learned = np.tile([False, True], len(prompts))
    ids = np.concatenate([np.zeros(0, np.int32), *parts])
    return TokenizedRows(
        ids, np.repeat(learned, np.diff(ends)), ends[::2], np.array(numbers, np.int64)
    )


# --- the report ---

NUMBERS_SHOWN = 10  # rows named in a message
_NAMED = 5  # unused columns in one
CUT_SHARE_TO_WARN = 0.05  # of the tokens
# Why a row is left out, besides what a format or template says of it.
NO_ROOM = "no room for a response within context_length"
NO_TARGET = "nothing to learn"
NO_ROOM_FOR_TURN = "a turn that is a row of its own has no room within context_length"


@dataclass(kw_only=True)
class RowCounts:
    """How many of a dataset's rows were read, used and cut, and their tokens."""

    num_rows: int = 0
    """Rows that were read, malformed ones included."""
    num_used: int = 0
    """Rows to train on, those of `num_apart` included."""
    num_tokens: int = 0
    num_targets: int = 0
    num_truncated: int = 0
    """Rows cut at context_length."""
    num_tokens_cut: int = 0
    num_apart: int = 0
    """Rows besides one for each row that was read: turns of chats and pieces of texts."""

    def count(self, rows: TokenizedRows) -> None:
        """Count the rows that are used, and their tokens."""
        self.num_used = len(rows)
        self.num_tokens = len(rows.input_ids)
        self.num_targets = int(rows.num_targets.sum())


@dataclass
class DataReport(RowCounts):
    """A dataset's rows that were used, cut or left out, and why. The cache keeps it with them."""

    origin: str
    """The path or name of the dataset."""
    dataset_format: str = ""
    parts: list[SourceFile] = field(default_factory=list)
    """The files of the dataset, in the order in which they were read."""
    rejected: dict[str, list[int]] = field(default_factory=dict)
    """The reason -> the numbers of the rows that were left out for it."""
    notes: dict[str, list[int]] = field(default_factory=dict)
    """An oddity -> the numbers of the rows that have it, which are used."""
    unused_columns: list[str] = field(default_factory=list)
    length_of_99_percent: int = 0
    """The tokens that 99% of the rows have at most, before any is cut."""
    is_chat: bool = False
    """Whether rows were filled into a chat template."""
    is_filled: bool = False
    """Whether rows were filled into a prompt template."""

    def reject(self, row_number: int, reason: str) -> None:
        self.rejected.setdefault(reason, []).append(row_number)

    def note(self, row_number: int, what: str) -> None:
        self.notes.setdefault(what, []).append(row_number)

    @property
    def num_rejected(self) -> int:
        return sum(map(len, self.rejected.values()))

    @property
    def num_too_long(self) -> int:
        """Rows that are left out because the prompt alone fills the context."""
        return len(self.rejected.get(NO_ROOM, []))

    def places(self) -> list[tuple[str, str]]:
        """(place, reason) of every row that was left out, in the order of the dataset."""
        reasons = sorted(
            (row_number, reason)
            for reason, numbers in self.rejected.items()
            for row_number in numbers
        )
        return [(self._locate([row_number]), reason) for row_number, reason in reasons]

    def describe(self) -> str:
        """One line: rows, tokens and truncation."""
        apart = f" and {self.num_apart:,} pieces of them" if self.num_apart else ""
        cut = f" in {self.num_truncated:,} rows" if self.num_truncated else ""
        text = (
            f"Rows: {self.num_used - self.num_apart:,} of {self.num_rows:,} rows{apart}, "
            f"{self.num_tokens:,} tokens "
            f"({self.num_targets:,} learned), {self.num_tokens_cut:,} tokens cut{cut}: "
        )
        return fit_line(text, self.origin)

    def describe_rejected(self) -> list[str]:
        """A line for each reason, with the first rows that were left out for it."""
        return self._lines(self.rejected)

    def describe_notes(self) -> list[str]:
        """One line for each oddity of rows that are used, and for columns that are not."""
        names = [fit_line(name) for name in self.unused_columns[:_NAMED]]
        more = len(self.unused_columns) - _NAMED
        unused = (
            f"{self.origin}: columns that the format {self.dataset_format} does not use: "
            f"{', '.join(names)}"
        )
        unused += f" and {more:,} more" if more > 0 else ""
        return [*([unused] if names else []), *self._lines(self.notes)]

    def describe_cut(self, context_length: int) -> list[str]:
        """A line of advice where many tokens are cut or prompts fill the context."""
        share = self.num_tokens_cut / max(1, self.num_tokens + self.num_tokens_cut)
        problems = [f"{share:.0%} of the tokens are cut off"] if share > CUT_SHARE_TO_WARN else []
        problems += (
            [f"{self.num_too_long:,} rows have no room for a response"] if self.num_too_long else []
        )
        needed = self.length_of_99_percent
        advice = (
            (f"--context_length {needed} would keep 99% of the rows whole.")
            if needed > context_length
            else ""
        )
        line = (
            f"{self.origin}: with --context_length {context_length} {' and '.join(problems)}. "
            f"{advice}"
        )
        return [line.rstrip()] if problems else []

    def _locate(self, numbers: Iterable[int]) -> str:
        """The places of ascending row numbers as compilers give them: "data/a.jsonl:3, 17;
        data/b.parquet row 1".
        """

        def file_of(row_number: int) -> SourceFile:
            return self.parts[
                bisect.bisect_left(self.parts, row_number, key=lambda file: file.offset) - 1
            ]

        places = []
        for file, group in itertools.groupby(numbers, key=file_of):
            path = self.origin if self.origin.endswith(file.name) else f"{self.origin}/{file.name}"
            rows = ", ".join(str(row_number - file.offset) for row_number in group)
            places.append(f"{path}:{rows}" if file.unit == "line" else f"{path} row {rows}")
        return "; ".join(places)

    def _lines(self, rows: Mapping[str, list[int]]) -> list[str]:
        lines = []
        for what, numbers in sorted(rows.items(), key=lambda item: item[1]):
            places = self._locate(numbers[:NUMBERS_SHOWN]) + (", ...") * (
                len(numbers) > NUMBERS_SHOWN
            )
            lines.append(f"{places}: {what}" + f" ({len(numbers):,} rows)" * (len(numbers) > 1))
        return lines
