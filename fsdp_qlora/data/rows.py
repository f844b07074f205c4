"""What is handed from one part of the data package to the next."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

Row = dict[str, object]

NUMBERS_SHOWN = 10  # rows named in a message


@dataclass(frozen=True)
class Part:
    """One file of a dataset. Its row n has the number offset + n in the whole dataset."""

    name: str
    unit: str  # what n counts: "line" or "row", both from 1
    offset: int = 0

    def place(self, number: int, origin: str) -> str:
        """Where a row is, as compilers write it: "rows.jsonl:3", or "rows.parquet row 3".

        Args:
            origin: the path of the file, or of the folder that it is in.
        """
        path = origin if origin.endswith(self.name) else f"{origin}/{self.name}"
        return f"{path}{':' if self.unit == 'line' else ' row '}{number - self.offset}"


@dataclass(frozen=True)
class Rows:
    """The rows that were read, with the number of each."""

    rows: list[Row]
    numbers: list[int]
    columns: list[str]  # of all rows together, in order of appearance
    parts: list[Part]
    malformed: dict[int, str] = field(default_factory=dict)  # number of what is no row -> why


@dataclass(frozen=True, eq=False)
class TokenizedRows:
    """Rows one after the other; row i is [offsets[i] : offsets[i + 1]] of the flat arrays."""

    input_ids: np.ndarray  # int32 [tokens]
    learned: np.ndarray  # bool [tokens], true where the token is a target
    offsets: np.ndarray  # int64 [rows + 1]
    row_numbers: np.ndarray  # int64 [rows], the number of the row in the dataset

    def __len__(self) -> int:
        return len(self.row_numbers)

    @cached_property
    def digest(self) -> str:
        """Hash of all rows, equal where they are equal."""
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
    """What became of a dataset's rows."""

    origin: str
    dataset_format: str
    num_rows: int  # read
    num_used: int
    num_tokens: int
    num_targets: int
    num_truncated: int  # rows cut at context_length
    num_tokens_cut: int
    rejected: dict[str, list[int]]  # reason -> numbers of the rows
    parts: list[Part]

    @property
    def num_rejected(self) -> int:
        return sum(map(len, self.rejected.values()))

    def places(self) -> list[tuple[str, str]]:
        """(place, reason) of every row that was left out, in the order of the dataset."""
        reasons = sorted((number, reason) for reason, numbers in self.rejected.items() for number in numbers)
        return [(self.part_of(number).place(number, self.origin), reason) for number, reason in reasons]

    def part_of(self, number: int) -> Part:
        """The file that a row is in."""
        return [part for part in self.parts if part.offset < number][-1]

    def locate(self, numbers: Sequence[int]) -> str:
        """Say where rows are: "lines 3, 17", or "b.jsonl line 3; c.csv line 1" for a folder."""
        places = []
        for part, group in itertools.groupby(numbers, key=self.part_of):
            local = [str(number - part.offset) for number in group]
            file = f"{part.name} " if len(self.parts) > 1 else ""
            places.append(f"{file}{part.unit}{'s' if len(local) > 1 else ''} {', '.join(local)}")
        return "; ".join(places)

    def describe(self) -> str:
        """One line: rows, tokens and truncation."""
        return (
            f"{self.origin}: {self.num_used:,} of {self.num_rows:,} rows, {self.num_tokens:,} tokens "
            f"({self.num_targets:,} learned), {self.num_truncated:,} rows truncated "
            f"({self.num_tokens_cut:,} tokens cut)"
        )

    def describe_rejected(self) -> list[str]:
        """One line per reason, with the first rows it holds for."""
        return [
            f"{len(numbers):,} x {reason}: {self.locate(numbers[:NUMBERS_SHOWN])}"
            + (", ..." if len(numbers) > NUMBERS_SHOWN else "")
            for reason, numbers in self.rejected.items()
        ]
