"""Reads the entries of a dataset as content, batch by batch."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from fsdp_qlora.data.batches.report import DataReport
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.content import TOO_DEEP, BadRow, Row
from fsdp_qlora.data.sources.source import (
    BEGINNING,
    ROWS_LOOKED_AT,
    ROWS_PER_BATCH,
    Entry,
    Place,
    Source,
    place_after,
)
from fsdp_qlora.utils.errors import UserError

ContentT = TypeVar("ContentT")
NumberedRow = tuple[int, Row, str]
"""A row's number in the dataset, its columns, and the folder of its file."""


class KindOfRows(Protocol[ContentT]):
    """Rows of one kind: how their content is found in columns, and becomes tokens."""

    def look_at(self, columns: Sequence[str], rows: Sequence[Row], report: DataReport) -> None:
        """Decide how rows are read: before the first batch, and again when columns are added.

        Args:
            columns: of all rows until now, since those of one batch may lack one that others have.
            rows: the first of the batch.
        Raises:
            UserError: such rows cannot be used.
        """

    def read(self, row: Row, folder: str) -> ContentT:
        """Read a row, whose relative paths are of this folder. Raises BadRow."""

    def tokenize(
        self, contents: Sequence[tuple[int, ContentT]], report: DataReport
    ) -> tuple[TokenizedRows, list[int]]:
        """Tokenize a batch of (row number, content). Rows that cannot be used are in the report.

        Returns:
            The tokens, and the number of each row's before any are cut.
        """


class RowReader(Generic[ContentT]):
    """Reads the entries of a dataset as content, batch by batch, so that few rows are in memory.

    Args:
        entries: those to read.
        after: where they begin.
        columns: of the rows before them, for which `kind` has decided how rows are read.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        source: Source,
        kind: KindOfRows[ContentT],
        *,
        after: Place = BEGINNING,
        columns: Sequence[str] = (),
    ) -> None:
        self.place = after
        """Where reading goes on."""
        self._entries = iter(entries)
        self._source = source
        self._kind = kind
        self._columns = dict.fromkeys(columns)
        self._num_columns = len(columns) if columns else None
        self._following = next(self._entries, None)

    @property
    def is_at_end(self) -> bool:
        """Whether all entries have been read."""
        return self._following is None

    @property
    def columns(self) -> list[str]:
        """The columns of all rows until now, in their order."""
        return list(self._columns)

    def next_batch(self, report: DataReport) -> list[tuple[int, ContentT]]:
        """The (row number, content) of the rows of the next batch.

        Rows that cannot be read are in the report.

        Raises:
            UserError: all is read and no row has a column, or as `KindOfRows.look_at`.
        """
        rows = _number(self._next_entries(), self._source, report)
        self._columns.update(dict.fromkeys(column for _, row, _ in rows for column in row))
        if rows and len(self._columns) != self._num_columns:
            first_rows = [row for _, row, _ in rows[:ROWS_LOOKED_AT]]
            self._kind.look_at(self.columns, first_rows, report)
            self._num_columns = len(self._columns)
        contents = _read(rows, self._kind, report)
        if self.is_at_end and not self._columns:
            raise UserError(_describe_nothing(report))
        return contents

    def _next_entries(self) -> list[Entry]:
        if self._following is None:
            return []
        batch = [self._following, *islice(self._entries, ROWS_PER_BATCH - 1)]
        self._following = next(self._entries, None)
        self.place = place_after(batch[-1], self.place.num_entries + len(batch))
        return batch


def read_contents(
    entries: Iterable[Entry],
    source: Source,
    kind: KindOfRows[ContentT],
    report: DataReport,
) -> Iterator[list[tuple[int, ContentT]]]:
    """Yield the batches of a `RowReader`.

    Rows that cannot be read are in the report. Raises as `RowReader.next_batch` does.
    """
    reader = RowReader(entries, source, kind)
    yield reader.next_batch(report)
    while not reader.is_at_end:
        yield reader.next_batch(report)


def _describe_nothing(report: DataReport) -> str:
    """Why no row can be read, and what to do."""
    [(place, reason), *_] = report.places() or [(report.origin, "the dataset is empty")]
    if report.num_rows:
        return f"{place}: {reason}. None of its {report.num_rows:,} rows can be read."
    return f"{place}: {reason}. Give one with rows."


def _number(batch: Sequence[Entry], source: Source, report: DataReport) -> list[NumberedRow]:
    """The entries that are rows. The others are in the report."""
    rows: list[NumberedRow] = []
    for file, number_in_file, row, _ in batch:
        if report.parts[-1:] != [file]:
            report.parts.append(file)
        row_number = file.offset + number_in_file
        if isinstance(row, BadRow):
            report.reject(row_number, str(row))
        else:
            rows.append((row_number, row, source.folder_of(file.name)))
    report.num_rows += len(batch)
    return rows


def _read(
    rows: Sequence[NumberedRow], kind: KindOfRows[ContentT], report: DataReport
) -> list[tuple[int, ContentT]]:
    """The content of the rows that can be read. The others are in the report."""
    contents: list[tuple[int, ContentT]] = []
    for row_number, row, folder in rows:
        try:
            contents.append((row_number, kind.read(row, folder)))
        except BadRow as reason:
            report.reject(row_number, str(reason))
        except RecursionError:
            report.reject(row_number, TOO_DEEP)
    return contents
