"""What the modules of this package hand to each other: rows as read, rows as tokens, and the report on them."""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

Row = dict[str, object]

NUMBERS_SHOWN = 10  # rows named in a message


@dataclass(frozen=True)
class SourceFile:
    """One file of a dataset. Its row n has the number offset + n in the whole dataset."""

    name: str
    """The file's name within the dataset's folder."""
    unit: str
    """What n counts: "line" or "row", both from 1."""
    offset: int = 0


def locate(numbers: Iterable[int], files: Sequence[SourceFile], origin: str) -> str:
    """Say where rows are, as compilers do: "data/a.jsonl:3, 17; data/b.parquet row 1".

    Args:
        numbers: the numbers of the rows in the dataset, in ascending order.
        origin: the path of the dataset's file or folder, or its name.
    """

    def file_of(number: int) -> SourceFile:
        return [file for file in files if file.offset < number][-1]

    places = []
    for file, group in itertools.groupby(numbers, key=file_of):
        path = origin if origin.endswith(file.name) else f"{origin}/{file.name}"
        rows = ", ".join(str(number - file.offset) for number in group)
        places.append(f"{path}:{rows}" if file.unit == "line" else f"{path} row {rows}")
    return "; ".join(places)


@dataclass(frozen=True)
class Rows:
    """The rows that were read."""

    rows: list[Row]
    numbers: list[int]
    """The number of each row in the dataset."""
    columns: list[str]
    """The columns of all rows together, in order of appearance."""
    files: list[SourceFile]
    malformed: dict[int, str] = field(default_factory=dict)
    """The number of an entry that is not a row -> the reason."""


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

    def __len__(self) -> int:
        return len(self.row_numbers)

    @cached_property
    def digest(self) -> str:
        """A hash of all rows."""
        total = hashlib.blake2b(digest_size=16)
        for array in (self.input_ids, self.learned, self.offsets, self.row_numbers):
            total.update(np.ascontiguousarray(array).data)
        return total.hexdigest()

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]."""
        return np.diff(self.offsets)

    @cached_property
    def num_targets(self) -> np.ndarray:
        """Learned tokens of each row that have a predecessor to be predicted from, int64 [rows]."""
        starts = self.offsets[:-1]
        return np.add.reduceat(self.learned, starts, dtype=np.int64) - self.learned[starts]


@dataclass(frozen=True)
class DataReport:
    """What became of a dataset's rows. It is kept in the cache beside them."""

    origin: str
    """The path or name of the dataset."""
    dataset_format: str
    num_rows: int
    """Rows that were read, malformed ones included."""
    num_used: int
    num_tokens: int
    num_targets: int
    num_truncated: int
    """Rows cut at context_length."""
    num_tokens_cut: int
    rejected: dict[str, list[int]]
    """The reason -> the numbers of the rows that were left out for it."""
    parts: list[SourceFile]
    """The files of the dataset, in the order in which they were read."""

    @property
    def num_rejected(self) -> int:
        return sum(map(len, self.rejected.values()))

    def places(self) -> list[tuple[str, str]]:
        """(place, reason) of every row that was left out, in the order of the dataset."""
        reasons = sorted((number, reason) for reason, numbers in self.rejected.items() for number in numbers)
        return [(locate([number], self.parts, self.origin), reason) for number, reason in reasons]

    def describe(self) -> str:
        """One line: rows, tokens and truncation."""
        return (
            f"{self.origin}: {self.num_used:,} of {self.num_rows:,} rows, {self.num_tokens:,} tokens "
            f"({self.num_targets:,} learned), {self.num_truncated:,} rows truncated "
            f"({self.num_tokens_cut:,} tokens cut)"
        )

    def describe_rejected(self) -> list[str]:
        """One line for each reason, with the first rows it applies to."""
        return [
            f"{len(numbers):,} x {reason}: {locate(numbers[:NUMBERS_SHOWN], self.parts, self.origin)}"
            + (", ..." if len(numbers) > NUMBERS_SHOWN else "")
            for reason, numbers in self.rejected.items()
        ]
