"""Rows of parquet files and of tables of `datasets`, as lines of JSON would have them."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp_qlora.data.content import BadRow, Row, most_row_bytes
from fsdp_qlora.data.sources.file_content import max_unpacked_bytes, open_file, too_long
from fsdp_qlora.data.sources.json_text import parse, unique
from fsdp_qlora.data.sources.reading import (
    ChooseColumns,
    NeededRows,
    NumberedRows,
    Ranges,
    Reading,
    Skipped,
)
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import first_line

# Rows of a table at once: a dictionary of one long text can fill them all; 1000 are no faster.
BATCH_ROWS = 16
# The value of a table's column that is not used. It is not blank: a column that may change what an
# answer means has to look filled.
UNREAD = "not read"


def read_parquet(path: Path, reading: Reading) -> NeededRows:
    """The needed rows of a parquet file.

    Columns that are not used are not read, nor groups of rows before the first one that is needed.
    """
    last = 0
    with _open_parquet(path) as file, _refusals(path, lambda: last):
        num_rows = file.metadata.num_rows
        last, skipped = skip_rows(num_rows, reading)
        reading.share = lambda: last / max(1, num_rows)
        yield last, skipped
        for row_number, row in _rows_between(path, file, reading.used, [(last, num_rows)]):
            last = row_number
            yield row_number, row


def read_parquet_ranges(path: Path, used: ChooseColumns, ranges: Ranges) -> NumberedRows:
    """The rows of a parquet file that lie in ranges of its bytes.

    All of a group of rows are taken to have the same number of bytes.
    """
    last = 0
    with _open_parquet(path) as file, _refusals(path, lambda: last):
        scale = file.metadata.num_rows / max(1, path.stat().st_size)
        numbers = [(math.ceil(start * scale), math.ceil(stop * scale)) for start, stop in ranges]
        for row_number, row in _rows_between(path, file, used, numbers):
            last = row_number
            yield row_number, row


def count_parquet_rows(path: Path) -> int:
    """The number of rows of a parquet file. Raises UserError if it cannot be read."""
    with _open_parquet(path) as file:
        return int(file.metadata.num_rows)


@contextlib.contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    """A parquet file, which names each column once. Raises UserError."""
    import pyarrow.parquet

    with open_file(path) as raw:
        with _refusals(path, lambda: 0):
            file = pyarrow.parquet.ParquetFile(raw)
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise ValueError(f"a column name occurs twice: {', '.join(names)}")
        yield file


@contextlib.contextmanager
def _refusals(path: Path, last: Callable[[], int]) -> Iterator[None]:
    """Raise UserError where a parquet file cannot be read. last: the row that was read last."""
    try:
        yield
    except UserError:
        raise
    # It raises all kinds: ArrowException, OSError, UnicodeDecodeError, OverflowError, ...
    except Exception as error:
        place = f"{path} row {last() + 1}" if isinstance(error, BadRow) else str(path)
        behind = f"after row {last()}, " if last() and place == str(path) else ""
        raise UserError(
            f"{place}: not a parquet file that can be read ({behind}{first_line(error)}). Copy "
            "or download it again."
        ) from error


def skip_rows(num_rows: int, reading: Reading) -> tuple[int, Skipped]:
    """The number of the last row that is not needed, and how many count as skipped.

    Args:
        num_rows: of the table, which are numbered from 1.
    """
    last = min(num_rows, reading.after + reading.skip)
    return last, Skipped(last - min(num_rows, reading.after))


def _rows_between(
    path: Path, file: Any, used: ChooseColumns, ranges: Sequence[tuple[int, int]]
) -> NumberedRows:
    """The rows of a parquet file in these ranges of row numbers from 0, in order.

    Only groups of rows with some of them are read.
    """
    names = file.schema_arrow.names
    chosen = used(names)
    columns = [name for name in names if name in chosen]
    _check_groups(path, file.metadata, columns)
    begin = 0
    for group in range(file.metadata.num_row_groups):
        end = begin + file.metadata.row_group(group).num_rows
        inside = [
            (max(begin, a), min(end, b)) for a, b in ranges if a < end and b > begin and a < b
        ]
        if inside:
            batches = file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns)
            for first, needed in _slices(batches, begin, inside):
                yield from number_rows(needed, str(path), first + 1, names)
        begin = end


def _slices(
    batches: Iterable[Any], first: int, ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, Any]]:
    """Yield the parts of batches in ranges, with the row numbers at which they begin."""
    for batch in batches:
        end = first + batch.num_rows
        for start, stop in ranges:
            if start < end and stop > first:
                begin = max(start, first)
                yield begin, batch.slice(begin - first, min(stop, end) - begin)
        first = end
        if first >= ranges[-1][1]:
            return


def _check_groups(path: Path, metadata: Any, columns: Iterable[str]) -> None:
    """Refuse a group of rows that unpacks to more than text does.

    The file's own figures tell it, before a page of it is unpacked.
    """
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        parts = [group.column(index) for index in range(group.num_columns)]
        used = [part for part in parts if part.path_in_schema.startswith(tuple(columns))]
        # A dictionary of one value may stand for millions of rows: each counts as a byte at least.
        unpacked = sum(max(part.total_uncompressed_size, part.num_values) for part in used)
        if unpacked > max_unpacked_bytes(sum(part.total_compressed_size for part in used)):
            raise too_long(f"{path}, a group of {group.num_rows} rows when unpacked")


def number_rows(table: Any, place: str, first: int, columns: Sequence[str]) -> NumberedRows:
    """The rows of a table from number `first` on.

    Refuses one that is too long before any is made Python objects.
    """
    most = most_row_bytes()
    # Row by row only where all together are too long: slicing each takes time.
    if table.nbytes > most:
        for index in range(table.num_rows):
            if table.slice(index, 1).nbytes > most:
                raise too_long(f"{place} row {first + index}")
    absent = dict.fromkeys(columns, UNREAD)
    for row_number, row in enumerate(_rows_of(table), start=first):
        try:
            numbered = {
                name: _as_json(value, table.schema.field(name).type) for name, value in row.items()
            }
        except ValueError as reason:  # a BadRow, or a value of type JSON that is none
            yield row_number, BadRow(str(reason))
        else:
            yield row_number, absent | numbered


def _rows_of(batch: Any) -> Iterator[Row]:
    """The rows of a batch. Raises BadRow at the first that cannot be read, with the column."""
    # to_pylist makes all rows before it gives the first, so nothing was given when it fails.
    with contextlib.suppress(Exception):
        yield from batch.to_pylist()
        return
    for index in range(batch.num_rows):
        row = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                row[name] = column[index].as_py()
            except Exception as error:
                raise BadRow(f"column {name!r}: {error}") from error
        yield row


def _as_json(value: Any, kind: Any) -> Any:
    """A value of a table as lines of JSON have it. kind: its type of Arrow. Raises as `parse`.

    Structs have no nulls: tables fill with them what an object lacks. Nulls of maps and of JSON
    texts were written.
    """
    import pyarrow

    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return parse(value)
    if pyarrow.types.is_map(kind):
        return unique([(str(key), _as_json(inner, kind.item_type)) for key, inner in value])
    if pyarrow.types.is_struct(kind):
        return {
            name: _as_json(inner, kind.field(name).type)
            for name, inner in value.items()
            if inner is not None
        }
    is_list = pyarrow.types.is_nested(kind) and hasattr(kind, "value_type")
    if is_list and (
        pyarrow.types.is_nested(kind.value_type) or isinstance(kind.value_type, pyarrow.JsonType)
    ):
        return [_as_json(inner, kind.value_type) for inner in value]
    return value
