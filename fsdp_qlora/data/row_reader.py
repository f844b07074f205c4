"""Reads the entries of a dataset as content, batch by batch."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from fsdp_qlora.data.batches.report import DataReport
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.content import TOO_DEEP, BadRow, Row
from fsdp_qlora.data.sources.source import ROWS_LOOKED_AT, ROWS_PER_BATCH, Entry, Source
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


def read_contents(
    entries: Iterable[Entry],
    source: Source,
    kind: KindOfRows[ContentT],
    report: DataReport,
) -> Iterator[list[tuple[int, ContentT]]]:
    """Yield batches of (row number, content), so that few rows are in memory.

    Rows that cannot be read are in the report.

    Raises:
        UserError: no row has a column, or as `KindOfRows.look_at`.
    """
    columns: dict[str, None] = {}
    num_columns = None
    remaining = iter(entries)
    while batch := list(islice(remaining, ROWS_PER_BATCH)):
        rows = _number(batch, source, report)
        columns.update(dict.fromkeys(column for _, row, _ in rows for column in row))
        if rows and len(columns) != num_columns:
            first_rows = [row for _, row, _ in rows[:ROWS_LOOKED_AT]]
            kind.look_at(list(columns), first_rows, report)
            num_columns = len(columns)
        yield _read(rows, kind, report)
    if not columns:
        raise UserError(_describe_nothing(report))


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
