"""Where the rows of optimizer steps come from: rows in memory, a stream, or what else gives them step by step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from fsdp_qlora.data.rows import TokenizedRows
from fsdp_qlora.data.schedule import Schedule

BEGINNING: Mapping[str, int] = {}


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of one optimizer step on all ranks.

    position: where the source continues after them, as JSON for a checkpoint; empty where the step says it.
    """

    step: int
    table: TokenizedRows
    rows: np.ndarray
    """Indices of rows of `table`, int64."""
    position: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_targets(self) -> int:
        return int(self.table.num_targets[self.rows].sum())


class RowSource(Protocol):
    """Gives the same rows on every rank, and in every run with the same options."""

    def steps(
        self, schedule: Schedule, *, first: int = 0, position: Mapping[str, int] = BEGINNING
    ) -> Iterator[StepRows]:
        """Give the rows of every step from `first` on; `position` is that of the step before."""


class RowsInMemory(NamedTuple):
    """Some rows of a table, in the order that the schedule gives an epoch."""

    table: TokenizedRows
    rows: np.ndarray

    def steps(
        self, schedule: Schedule, *, first: int = 0, position: Mapping[str, int] = BEGINNING
    ) -> Iterator[StepRows]:
        for step, rows in schedule.rows_of_steps(self.rows, first=first):
            yield StepRows(step, self.table, rows)
