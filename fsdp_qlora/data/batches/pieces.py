"""Pieces of a dataset's tokenized rows: few enough for memory, each one kept as soon as it is made.

A piece knows where the reading of the dataset stood before and after it, so that a preparation goes
on behind any of them, and makes a damaged one again alone.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fsdp_qlora.data.batches.report import DataReport, report_as_json, report_of_json
from fsdp_qlora.data.batches.rows import NO_ROWS, TokenizedRows, join_rows
from fsdp_qlora.data.content import ENDED_WORKERS
from fsdp_qlora.data.text.image_store import UNREADABLE, are_as_kept
from fsdp_qlora.utils.verified_files import Arrays, Metadata

# A piece ends with the batch that reaches either. It takes some ten bytes a token to make one.
MOST_ENTRIES = 65_536
MOST_TOKENS = 4_000_000

State = Mapping[str, Any]
"""Where the reading of a dataset stands, as JSON: `num_rows`, which were read, and what the reader
knows. It is empty at the beginning.
"""


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows that follow each other in a dataset."""

    rows: TokenizedRows
    report: DataReport
    lengths: Mapping[int, int]
    """Tokens of a row before any are cut -> the number of such rows."""
    before: State
    after: State | None
    """None for the last piece."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All of it for a file: the rows' arrays, and the rest as JSON in `facts`.

        The metadata of a safetensors file have another order each time.
        """
        facts = {
            "learns": self.rows.learns,
            "report": report_as_json(self.report),
            "lengths": sorted(self.lengths.items()),
            "before": self.before,
            "after": self.after,
        }
        arrays = {name: array[:] for name, array in self.rows.arrays.items()}
        return arrays | {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}

    @property
    def num_bytes(self) -> int:
        """Bytes of its file."""
        return sum(array.nbytes for array in self.arrays.values())

    @cached_property
    def digest(self) -> str:
        """A hash of the rows, the report and the states."""
        total = hashlib.blake2b(self.rows.digest.encode(), digest_size=16)
        total.update(self.arrays["facts"].data)
        return total.hexdigest()

    @classmethod
    def build(cls, arrays: Arrays, metadata: Metadata) -> "Piece":
        """The reverse of `arrays`. Raises LookupError, TypeError or ValueError for others."""
        left = dict(arrays)
        facts = json.loads(left.pop("facts").tobytes())
        return cls(
            TokenizedRows.from_arrays(left, facts["learns"]),
            report_of_json(facts["report"]),
            dict(facts["lengths"]),
            facts["before"],
            facts["after"],
        )


def num_kept(state: State) -> int:
    """The rows of a dataset that were read before a state."""
    return int(state.get("num_rows", 0))


class Draft:
    """A piece that is being made, batch by batch."""

    def __init__(self, report: DataReport) -> None:
        self.report = report
        self._batches = [NO_ROWS]
        self._num_tokens = 0
        self._lengths: Counter[int] = Counter()

    def add(self, rows: TokenizedRows, lengths: Iterable[int]) -> None:
        """Add the rows of a batch, and each row's tokens before any are cut."""
        self._batches.append(rows)
        self._num_tokens += len(rows.input_ids)
        self._lengths.update(lengths)

    @property
    def fill(self) -> float:
        """The share of a piece that is made, by its rows or its tokens."""
        return max(self.report.num_rows / MOST_ENTRIES, self._num_tokens / MOST_TOKENS)

    @property
    def is_full(self) -> bool:
        return self.fill >= 1

    def finish(self, before: State, after: State | None) -> Piece:
        """The piece of all that was added."""
        rows = join_rows(self._batches)
        self.report.count(rows)
        return Piece(rows, self.report, self._lengths, before, after)


def are_current(rows: TokenizedRows, report: DataReport, *, are_of_this_start: bool) -> bool:
    """Whether rows would be the same if they were made again.

    Images are as they were when the rows were made. Images that could not be read, and rows at
    which processes ended, are tried again in another start. Other ranks of this start must agree
    with the one that made the rows.
    """
    passing = (*UNREADABLE, ENDED_WORKERS)
    lacks_some = any(reason.startswith(passing) for reason in report.rejected)
    return (are_of_this_start or not lacks_some) and are_as_kept(map(bytes, rows.images.names))
