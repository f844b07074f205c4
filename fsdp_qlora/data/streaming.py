"""Streaming: rows are read, shuffled and tokenized while the run trains, so that they need not fit in memory.

Every rank reads the same stream, knows all rows of a step and computes its own: no row is on two ranks, all ranks have
equally many steps, and the stream does not depend on their number. Rows are read in blocks, and each block is shuffled
in itself. A place in the stream is where a block begins and how many of its rows were given: a resumed run does not
need what came before.
"""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from fsdp_qlora.data.files import ChooseColumns, Malformed
from fsdp_qlora.data.rows import DataReport, Row, Rows, SourceFile, TokenizedRows
from fsdp_qlora.data.schedule import Schedule, epoch_order
from fsdp_qlora.data.sources import Part
from fsdp_qlora.errors import UserError

log = logging.getLogger("fsdp_qlora")

Item = TypeVar("Item")
Entry = tuple[int, int, int, Row | Malformed]
Tokenize = Callable[[Rows], tuple[TokenizedRows, DataReport]]


@dataclass(frozen=True)
class Place:
    """Where the stream goes on.

    part: the dataset's file in which the block begins, after its row number `after`. offset: the numbers of the rows in
    the files before. taken: rows of the block, shuffled, that were given already.
    """

    epoch: int = 0
    part: int = 0
    after: int = 0
    offset: int = 0
    taken: int = 0


@dataclass(frozen=True)
class StreamOptions:
    """used: the columns that are needed. block_rows: rows that are shuffled together. max_bad_rows: the share of the
    rows so far that may be left out.
    """

    used: ChooseColumns
    block_rows: int
    seed: int
    max_bad_rows: float


class RowStream:
    """The rows of a dataset, epoch after epoch without an end.

    Args:
        tokenize: makes the rows of a block tokens; called in a thread of its own.
        origin: its name. identity: a hash of its content.
        num_rows: of an epoch, those that cannot be used included; None if unknown.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        tokenize: Tokenize,
        options: StreamOptions,
        *,
        origin: str,
        identity: str,
        num_rows: int | None,
    ) -> None:
        self.parts, self.tokenize, self.options = parts, tokenize, options
        self.origin, self.identity, self.num_rows = origin, identity, num_rows
        self._num_read = self._num_bad = 0
        self._left: tuple[Place, Iterator[Entry]] | None = None  # what follows the last block, kept open

    def steps(self, schedule: Schedule, place: Place, *, first: int = 0) -> Iterator[tuple[int, TokenizedRows, Place]]:
        """Give (step, its rows, the place after it) for every step from `first` on, made ahead in a thread.

        Raises:
            UserError: a file cannot be read, or too many rows cannot be used; the same on every rank.
        """

        def made() -> Iterator[tuple[int, TokenizedRows, Place]]:
            rows = self.rows(place)
            for step in range(first, schedule.total_steps):
                index = step % schedule.steps_per_epoch
                size = min(schedule.global_batch_size, schedule.num_rows - index * schedule.global_batch_size)
                taken = list(islice(rows, size))
                yield step, pick_rows([(block, row) for block, row, _ in taken]), taken[-1][2]

        return made_ahead(made(), num=max(2, self.options.block_rows // schedule.global_batch_size))

    def rows(self, place: Place) -> Iterator[tuple[TokenizedRows, int, Place]]:
        """Give (block, index of a row in it, the place after that row), without an end."""
        was_empty = False
        while True:
            block, following = self._shuffled_block(place)
            order = epoch_order(
                np.arange(len(block)), seed=(place.offset + place.after << 32) + self.options.seed, epoch=place.epoch
            )
            for taken in range(place.taken, len(order)):
                is_last = taken + 1 == len(order)
                yield block, int(order[taken]), following if is_last else dataclasses.replace(place, taken=taken + 1)
                was_empty = False
            if following.epoch > place.epoch:
                if was_empty:
                    raise UserError(f"{self.origin}: a whole epoch has no row that can be used.")
                was_empty = True
            place = following

    def _shuffled_block(self, place: Place) -> tuple[TokenizedRows, Place]:
        rows, following = self.read_block(place, self.options.block_rows)
        tokenized, report = self.tokenize(rows)
        self._num_read += report.num_rows
        self._num_bad += report.num_rejected - report.num_too_long
        for line in report.describe_rejected():
            log.warning("Rows left out, %s", line)
        if self._num_bad > self.options.max_bad_rows * self._num_read:
            [(where, reason), *_] = report.places() or [(self.origin, "see above")]
            raise UserError(
                f"{self.origin}: {self._num_bad:,} of {self._num_read:,} rows so far cannot be used, allowed are "
                f"{self.options.max_bad_rows:.1%}. Repair them or raise --max_bad_rows.\n  {where}: {reason}"
            )
        return tokenized, following

    def read_block(self, place: Place, num_rows: int) -> tuple[Rows, Place]:
        """Up to `num_rows` rows from the beginning of a block, and where the next one begins."""
        rows: list[Row] = []
        numbers: list[int] = []
        malformed: dict[int, str] = {}
        files: dict[int, SourceFile] = {}
        columns: dict[str, None] = {}
        following, count = dataclasses.replace(place, taken=0), 0
        entries = self._left[1] if self._left and self._left[0] == following else self._entries(place)
        for part, offset, number, row in islice(entries, num_rows):
            files.setdefault(part, SourceFile(self.parts[part].name, self.parts[part].unit, offset))
            if isinstance(row, Malformed):
                malformed[offset + number] = str(row)
            else:
                rows.append(row)
                numbers.append(offset + number)
                columns.update(dict.fromkeys(row))
            following, count = Place(place.epoch, part, number, offset), count + 1
        if count < num_rows:
            following = Place(place.epoch + 1)
        self._left = (following, entries) if count == num_rows else None
        return Rows(rows, numbers, list(columns), list(files.values()), malformed), following

    def _entries(self, place: Place) -> Iterator[Entry]:
        """Give (part, its offset, the row's number in it, the row) to the end of the epoch."""
        offset, last = place.offset, place.after
        for part in range(place.part, len(self.parts)):
            for number, row in self.parts[part].read(self.options.used, last):
                yield part, offset, number, row
                last = number
            offset, last = offset + last, 0


def pick_rows(chosen: Sequence[tuple[TokenizedRows, int]]) -> TokenizedRows:
    """Rows out of blocks, copied so that the blocks can be freed."""
    spans = [(block, block.offsets[row], block.offsets[row + 1]) for block, row in chosen]
    return TokenizedRows(
        input_ids=np.concatenate([block.input_ids[start:end] for block, start, end in spans]),
        learned=np.concatenate([block.learned[start:end] for block, start, end in spans]),
        offsets=np.cumsum([0, *(end - start for _, start, end in spans)], dtype=np.int64),
        row_numbers=np.array([block.row_numbers[row] for block, row in chosen], dtype=np.int64),
    )


def made_ahead(items: Iterator[Item], *, num: int) -> Iterator[Item]:
    """The items, up to `num` of which are made ahead by a thread. What it raises is raised here."""
    ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(num)
    stopped = threading.Event()

    def put(item: Item | None, error: BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put((item, error), timeout=0.2)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(item, None)
                if stopped.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:
            put(None, error)

    threading.Thread(target=work, name="rows", daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            assert item is not None
            yield item
    finally:
        stopped.set()
