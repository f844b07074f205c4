"""Readers of local files. They are strict: a malformed file is refused with the place of the fault."""

import contextlib
import csv
import gzip
import hashlib
import io
import json
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from fsdp_qlora.data.rows import Row, Rows, SourceFile, locate
from fsdp_qlora.errors import UserError
from fsdp_qlora.loading.hub import first_line


class Malformed(ValueError):
    """An entry that is not a row. The message is the reason, without the place."""


NumberedRows = Iterator[tuple[int, Row | Malformed]]
ChooseColumns = Callable[[Sequence[str]], Collection[str]]
"""The columns that are used, of those of a file."""

LISTS = ("data", "rows", "train", "examples", "instances")  # names under which an object holds its rows


def open_file(path: Path) -> IO[bytes]:
    """The content of a file; a .gz is unpacked."""
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _lines(file: IO[bytes], after: int) -> Iterator[tuple[int, bytes]]:
    """The lines after the first `after` ones, with their numbers from 1."""
    return enumerate(islice(file, after, None), start=after + 1)


def count_lines(path: Path) -> int:
    """How many lines are not blank."""
    with open_file(path) as file:
        return sum(not line.isspace() for line in file)


def read_jsonl(path: Path, after: int = 0) -> NumberedRows:
    """One object per line. Blank lines are skipped. Numbers are line numbers."""
    has_rows = after > 0
    with open_file(path) as file:
        for number, line in _lines(file, after):
            try:
                if text := _decode(line).rstrip():
                    yield number, _require_object(_parse_line(text))
                    has_rows = True
            except Malformed as reason:
                if has_rows and not line.endswith(b"\n"):
                    raise UserError(
                        f"{path}:{number}: {reason}. The file ends within this line, so it is incomplete. "
                        "Copy or download it again."
                    ) from reason
                yield number, reason


def read_json(path: Path) -> NumberedRows:
    """An array of objects, or an object with one of `LISTS` that is such an array."""
    try:
        with open_file(path) as file:
            text = _decode(file.read())
        if not text or text.isspace():
            return
        values = _parse(text)
    except json.JSONDecodeError as error:
        hint = " A file with one object per line is named .jsonl." if error.msg == "Extra data" else ""
        raise UserError(f"{path}:{error.lineno}: {error.msg} (column {error.colno}).{hint}") from error
    except Malformed as reason:
        raise UserError(f"{path}: {reason}.") from reason
    if isinstance(values, dict) and len(lists := [name for name in LISTS if isinstance(values.get(name), list)]) == 1:
        values = values[lists[0]]
    if not isinstance(values, list):
        lists = [name for name, value in values.items() if isinstance(value, list)] if isinstance(values, dict) else []
        named = f" with the keys {', '.join(map(repr, values))}" if isinstance(values, dict) else ""
        raise UserError(
            f"{path}: expected an array of objects, found {_kind(values)}{named}. "
            + (f"If the rows are in {lists[0]!r}, call it 'data'. " if lists else "")
            + "Write [ around the objects, or one object per line into a .jsonl file."
        )
    for number, value in enumerate(values, start=1):
        try:
            yield number, _require_object(value)
        except Malformed as reason:
            yield number, reason


def read_csv(path: Path) -> NumberedRows:
    """Values under a header line, separated by commas, semicolons or tabs. Every value is a string.

    A row's number is that of its first line.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default, 128 KiB, is less than a long text
    with open_file(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if len(header) == 1 and (marks := [mark for mark in ";\t" if mark in header[0]]):  # as Excel writes it
                file.seek(0)
                reader = csv.reader(file, strict=True, delimiter=marks[0])
                header = next(reader)
            if len(set(header)) < len(header):
                raise UserError(f"{path}:1: a column name occurs twice: {', '.join(header)}.")
            number = reader.line_num + 1
            for values in reader:
                if values and len(values) != len(header):
                    yield number, Malformed(f"{len(values)} values, but the header has {len(header)}")
                elif values:
                    yield number, dict(zip(header, values, strict=True))
                number = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: {error}.") from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}:{_line_that_is_not_utf8(path)}: not UTF-8 text ({error.reason}). Save the file as CSV UTF-8, "
                "or convert it: iconv -f cp1252 -t utf-8."
            ) from error


def _line_that_is_not_utf8(path: Path) -> int:
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 1


def read_text(path: Path, after: int = 0) -> NumberedRows:
    """One text per line, in the column `text`. Blank lines are skipped. Numbers are line numbers."""
    with open_file(path) as file:
        for number, line in _lines(file, after):
            try:
                if (text := _decode(line).rstrip("\r\n")) and not text.isspace():
                    yield number, {"text": text}
            except Malformed as reason:
                yield number, reason


def read_parquet(path: Path, used: ChooseColumns = tuple, after: int = 0) -> NumberedRows:
    """The rows of a parquet file. Columns that are not used or hold no text (dates, bytes, ...) are null throughout."""
    import pyarrow.parquet

    count = after
    try:
        with open_file(path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
            schema = file.schema_arrow
            if len(set(schema.names)) < len(schema.names):
                raise ValueError(f"a column name occurs twice: {', '.join(schema.names)}")
            chosen = used(schema.names)
            columns = [field.name for field in schema if field.name in chosen and _may_hold_text(field.type)]
            groups, skip = _groups_after(file, after)
            for whole in file.iter_batches(batch_size=1000, columns=columns, row_groups=groups):
                batch, skip = whole.slice(skip), max(0, skip - whole.num_rows)
                for row in _rows_of(batch):
                    count += 1
                    yield count, dict.fromkeys(schema.names) | without_nulls(row)
    except Exception as error:  # of all kinds: ArrowException, OSError, UnicodeDecodeError, OverflowError, ...
        place = f"{path} row {count + 1}" if isinstance(error, Malformed) else str(path)
        behind = f"after row {count}, " if count and place == str(path) else ""
        raise UserError(
            f"{place}: not a parquet file that can be read ({behind}{first_line(error)}). Copy or download it again."
        ) from error


def _groups_after(file: Any, after: int) -> tuple[list[int], int]:
    """The groups of rows that are left after the first `after` rows, and how many rows of them to skip."""
    for group in range(file.num_row_groups):
        if after < (num_rows := file.metadata.row_group(group).num_rows):
            return list(range(group, file.num_row_groups)), after
        after -= num_rows
    return [], 0


def count_parquet(path: Path) -> int:
    """The number of rows that the file says it has."""
    import pyarrow.parquet

    try:
        with open_file(path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
            return int(file.metadata.num_rows)
    except Exception as error:  # of all kinds, see read_parquet
        raise UserError(f"{path}: not a parquet file that can be read ({first_line(error)}).") from error


def _may_hold_text(kind: Any) -> bool:
    """Whether a column may hold text, as it is or in lists and objects. Others are not read, damaged or not."""
    from pyarrow import types

    no_text = (types.is_temporal, types.is_decimal, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return not any(is_kind(kind) for is_kind in no_text)


def _rows_of(batch: Any) -> Iterator[Row]:
    """The rows of a batch. Raises Malformed at the first that cannot be read, with the column."""
    with contextlib.suppress(Exception):  # before the first row is given: to_pylist makes them all
        yield from batch.to_pylist()
        return
    for index in range(batch.num_rows):
        row = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                row[name] = column[index].as_py()
            except Exception as error:
                raise Malformed(f"column {name!r}: {error}") from error
        yield row


def without_nulls(row: Row) -> Row:
    """A table's row whose objects have no nulls: tables fill with them what an object lacks."""
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(inner) for inner in value]
    return value


@dataclass(frozen=True)
class FileKind:
    """How to read a kind of file."""

    read: Callable[..., NumberedRows]
    """Takes the path, `used` if `is_columnar`, and `after` if it has `count`."""
    unit: str
    """What its rows are numbered by: "line" or "row"."""
    is_columnar: bool = False
    """Whether columns that are not used need not be read."""
    count: Callable[[Path], int] | None = None
    """Counts its rows without reading them, where that is possible; then rows can be skipped too."""


FILE_KINDS: dict[str, FileKind] = {
    ".json": FileKind(read_json, "row"),
    ".jsonl": FileKind(read_jsonl, "line", count=count_lines),
    ".csv": FileKind(read_csv, "line"),
    ".tsv": FileKind(read_csv, "line"),
    ".txt": FileKind(read_text, "line", count=count_lines),
    ".parquet": FileKind(read_parquet, "row", is_columnar=True, count=count_parquet),
}


def kind_of(path: Path) -> FileKind | None:
    """How to read a file, by its name, which may end in .gz."""
    name = path.name.lower().removesuffix(".gz")
    return FILE_KINDS.get(Path(name).suffix)


def read_file(path: Path, used: ChooseColumns = tuple, after: int = 0) -> NumberedRows:
    """The rows of a file of a known kind whose numbers are above `after`.

    Raises:
        UserError: it cannot be read; the message names the place.
    """
    kind = kind_of(path)
    assert kind is not None
    options: dict[str, Any] = {"used": used} if kind.is_columnar else {}
    if kind.count is not None:
        options["after"] = after
    try:
        yield from ((number, row) for number, row in kind.read(path, **options) if number > after)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: the packed file is damaged or cut off ({error}). Copy it again.") from error


def count_rows(path: Path) -> int:
    """How many rows a file of a known kind has, those that cannot be used included. Raises UserError."""
    kind = kind_of(path)
    assert kind is not None
    try:
        return kind.count(path) if kind.count is not None else sum(1 for _ in read_file(path))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: the packed file is damaged or cut off ({error}). Copy it again.") from error


@dataclass(frozen=True)
class Part:
    """A file of a dataset, to be read row by row."""

    name: str
    unit: str
    """As in SourceFile."""
    read: Callable[[ChooseColumns, int], NumberedRows]
    """The rows after a number."""
    count: Callable[[], int | None]
    """The number of rows; None if it is unknown."""


def file_parts(path: Path, files: Sequence[Path]) -> list[Part]:
    """Files as parts of a dataset. `path` is the only one of them, or the folder that their names are relative to."""
    folder = path if path.is_dir() else path.parent
    kinds = {file: kind for file in files if (kind := kind_of(file)) is not None}
    return [
        Part(file.relative_to(folder).as_posix(), kind.unit, partial(read_file, file), partial(count_rows, file))
        for file, kind in kinds.items()
    ]


class Entry(NamedTuple):
    """A row of a dataset: its part, the number of rows before that part, its number in the part, its content."""

    part: int
    offset: int
    number: int
    row: Row | Malformed


def read_entries(
    parts: Sequence[Part], used: ChooseColumns, *, part: int = 0, offset: int = 0, after: int = 0
) -> Iterator[Entry]:
    """Give the entries of the parts from number `part` on, of that one those after number `after`."""
    for index in range(part, len(parts)):
        for number, row in parts[index].read(used, after):
            yield Entry(index, offset, number, row)
            after = number
        offset, after = offset + after, 0


def collect_rows(parts: Sequence[Part], entries: Iterable[Entry]) -> Rows:
    """The rows of these entries, with the places of those that are malformed."""
    rows, numbers, malformed = [], [], {}
    files: dict[int, SourceFile] = {}
    columns: dict[str, None] = {}
    for part, offset, number, row in entries:
        files.setdefault(part, SourceFile(parts[part].name, parts[part].unit, offset))
        if isinstance(row, Malformed):
            malformed[offset + number] = str(row)
            continue
        rows.append(row)
        numbers.append(offset + number)
        columns.update(dict.fromkeys(row))
    return Rows(rows, numbers, list(columns), list(files.values()), malformed)


def read_parts(
    origin: str, parts: Sequence[Part], limit: int | None, start: int = 0, *, used: ChooseColumns = tuple
) -> Rows:
    """Read up to `limit` entries from `start`, malformed ones included. The rest is not read.

    Args:
        used: the columns that are needed.
    Raises:
        UserError: a file cannot be read at all (the message names the place), or there is no row.
    """
    stop = None if limit is None else start + limit
    found = collect_rows(parts, islice(read_entries(parts, used), start, stop))
    if found.rows:
        return found
    if not found.malformed:
        raise UserError(f"{origin}: the dataset is empty. Give one with rows.")
    number, reason = next(iter(found.malformed.items()))
    place = locate([number], found.files, origin)
    raise UserError(f"{place}: {reason}. None of its {len(found.malformed):,} rows can be read.")


def hash_file(path: Path) -> str:
    """SHA-256 of the content."""
    digest = hashlib.sha256()
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"dataset: the name of {str(path)!a} is not UTF-8 text. Rename the file.") from error
    try:
        with path.open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
    except OSError as error:
        raise UserError(f"dataset: {path} cannot be read ({error.strerror}).") from error
    return digest.hexdigest()


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 text (byte {error.start}: {error.reason})") from error


def _parse_line(text: str) -> object:
    try:
        return _parse(text)
    except json.JSONDecodeError as error:
        raise Malformed(f"{error.msg} (column {error.colno}); each line must be one JSON object") from error


def _parse(text: str) -> object:
    """JSON to a value. Raises json.JSONDecodeError with the place, or Malformed."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (json.JSONDecodeError, Malformed):
        raise
    except RecursionError as error:
        raise Malformed("nested too deeply") from error
    except ValueError as error:  # Python reads no number of more than 4300 digits
        raise Malformed(f"a number that cannot be read ({error})") from error


def _unique(pairs: list[tuple[str, object]]) -> Row:
    """The object, if no name occurs twice. Python would keep the last value, which may not be the one meant."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise Malformed(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice in an object")
    return values


def _require_object(value: object) -> Row:
    if not isinstance(value, dict):
        raise Malformed(f"expected an object with columns, found {_kind(value)}")
    return value


def _kind(value: object) -> str:
    kinds = {list: "an array", dict: "an object", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
