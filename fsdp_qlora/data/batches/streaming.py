"""Streaming: rows are read, shuffled and tokenized while the run trains, so that they need not fit in memory.

Every rank reads the same stream, knows all rows of a step and computes its own: no row is on two ranks, all ranks have
equally many steps, and the stream does not depend on their number. Rows are read in blocks, and each block is shuffled
in itself. A position in the stream is where a block begins and how many of its rows were given: a resumed run does not
read what came before.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from fsdp_qlora.data.batches.rows import DataReport, TokenizedRows, join_rows
from fsdp_qlora.data.batches.schedule import BEGINNING, Schedule, StepRows, epoch_order
from fsdp_qlora.data.sources.files import ChooseColumns
from fsdp_qlora.data.sources.source import Entry, Source, read_entries
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

Item = TypeVar("Item")


@dataclass(frozen=True)
class StreamPosition:
    """The place at which the stream continues.

    part: the dataset's file in which the block begins, after its row number `after`. offset: the numbers of the rows in
    the files before. taken: rows of the block, shuffled, that were given already.
    """

    epoch: int = 0
    part: int = 0
    after: int = 0
    offset: int = 0
    taken: int = 0


@dataclass(eq=False)
class RowStream:
    """The rows of a dataset, epoch after epoch without an end."""

    source: Source
    tokenize: Callable[[Iterable[Entry]], tuple[TokenizedRows, DataReport]]
    """Makes the rows of a block tokens; called in a thread of its own."""
    used: ChooseColumns
    block_rows: int
    """Rows that are shuffled together."""
    seed: int
    max_bad_rows: float
    """The share of the rows so far that may be left out."""
    num_rows: int | None
    """Rows of an epoch, those that cannot be used included; None if unknown."""
    _num_read: int = 0
    _num_bad: int = 0
    _rest: tuple[StreamPosition, Iterator[Entry]] | None = None  # what follows the last block, kept open

    def steps(
        self, schedule: Schedule, *, first: int = 0, position: Mapping[str, Any] = BEGINNING
    ) -> Iterator[StepRows]:
        """Give every step from `first` on, read ahead in a thread; each has a table of its own.

        Raises:
            UserError: a file cannot be read, or too many rows cannot be used; the same on every rank.
        """
        num_ahead = max(2, self.block_rows // schedule.global_batch_size)
        return read_ahead(self._steps(schedule, StreamPosition(**position), first), num=num_ahead)

    def _steps(self, schedule: Schedule, position: StreamPosition, first: int) -> Iterator[StepRows]:
        rows = self.rows(position)
        for step in range(first, schedule.total_steps):
            index = step % schedule.steps_per_epoch
            size = min(schedule.global_batch_size, schedule.num_rows - index * schedule.global_batch_size)
            taken = list(islice(rows, size))
            table = join_rows([block[row] for block, row, _ in taken])
            yield StepRows(step, table, np.arange(size), dataclasses.asdict(taken[-1][2]))

    def rows(self, position: StreamPosition) -> Iterator[tuple[TokenizedRows, int, StreamPosition]]:
        """Give (block, index of a row in it, the position after that row), without an end."""
        was_empty = False
        while True:
            block, following = self._shuffled_block(position)
            seed = (position.offset + position.after << 32) + self.seed
            order = epoch_order(np.arange(len(block)), seed=seed, epoch=position.epoch)
            for taken in range(position.taken, len(order)):
                is_last = taken + 1 == len(order)
                yield block, int(order[taken]), following if is_last else dataclasses.replace(position, taken=taken + 1)
                was_empty = False
            if following.epoch > position.epoch:
                if was_empty:
                    raise UserError(f"{self.source.origin}: a whole epoch has no row that can be used.")
                was_empty = True
            position = following

    def _shuffled_block(self, position: StreamPosition) -> tuple[TokenizedRows, StreamPosition]:
        entries, following = self.read_block(position, self.block_rows)
        tokenized, report = self.tokenize(entries)
        self._num_read += report.num_rows
        self._num_bad += report.num_rejected
        for line in report.describe_rejected():
            log.warning("Rows left out, %s", line)
        if self._num_bad > self.max_bad_rows * self._num_read:
            [(where, reason), *_] = report.places() or [(self.source.origin, "see above")]
            raise UserError(
                f"{self.source.origin}: {self._num_bad:,} of {self._num_read:,} rows so far cannot be used, allowed "
                f"are {self.max_bad_rows:.1%}. Repair them or raise --max_bad_rows.\n  {where}: {reason}"
            )
        return tokenized, following

    def read_block(self, position: StreamPosition, num_rows: int) -> tuple[list[Entry], StreamPosition]:
        """Up to `num_rows` rows from the beginning of a block, and where the next block begins."""
        following = dataclasses.replace(position, taken=0)
        kept = self._rest[1] if self._rest and self._rest[0] == following else None
        entries = kept or read_entries(
            self.source.parts, self.used, part=position.part, offset=position.offset, after=position.after
        )
        block = list(islice(entries, num_rows))
        if len(block) < num_rows:
            following, self._rest = StreamPosition(position.epoch + 1), None
        else:
            last = block[-1]
            following = StreamPosition(position.epoch, last.part, last.row_number, last.offset)
            self._rest = following, entries
        return block, following


def read_ahead(items: Iterator[Item], *, num: int) -> Iterator[Item]:
    """The items, up to `num` of which a thread reads ahead. Its exceptions are raised here."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
    end: Any = object()
    try:
        ahead = deque(thread.submit(next, items, end) for _ in range(num))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(thread.submit(next, items, end))
            yield item
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def sample_evenly(items: Iterable[Item], most: int) -> tuple[int, list[Item]]:
    """The number of items, and `most` to half as many of them at even distances, or all if they are fewer."""
    count, kept, distance = 0, list[Item](), 1
    for count, item in enumerate(items, start=1):
        kept += [item] if (count - 1) % distance == 0 else []
        if len(kept) > most:
            kept, distance = kept[::2], 2 * distance
    return count, kept
