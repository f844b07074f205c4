"""Readers of local files.

They are strict: a malformed file is refused with the place of the fault.
"""

import contextlib
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from fsdp_qlora.data.content import MAX_ROW, BadRow, Row, most_row_bytes
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import open_named, record_of
from fsdp_qlora.utils.text import first_line

NumberedRows = Iterator[tuple[int, Row | BadRow]]
ChooseColumns = Callable[[Sequence[str]], Collection[str]]
"""The file's columns that are used."""

# Times its size that a .json or .parquet may unpack to; text is packed 3 to 20 times.
_MOST_PACKED = 100
# Rows of a table at once: a dictionary of one long text can fill them all; 1000 are no faster.
BATCH_ROWS = 16
# The value of a table's column that is not used. It is not blank: a column that may change what an
# answer means has to look filled.
UNREAD = "not read"
# Names under which an object holds its rows.
LISTS = ("data", "rows", "train", "examples", "instances")


def _open_zst(packed: IO[bytes]) -> Any:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(packed, "zstd"))


# The last suffix of a packed file -> how it is opened.
PACKED: dict[str, Callable[[IO[bytes]], Any]] = {".gz": gzip.open, ".zst": _open_zst}


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """The content of a file, unpacked. Raises UserError where that is damaged."""
    try:
        with (
            open_named(path) as raw,
            PACKED.get(path.suffix.lower(), contextlib.nullcontext)(raw) as file,
        ):
            yield file
    except (EOFError, OSError, zlib.error) as error:
        if getattr(error, "errno", None) is not None:  # of the disk, not of the content
            raise
        raise UserError(
            f"{path}: the packed file is damaged or cut off ({error}). Copy it again."
        ) from error


def _max_unpacked_bytes(num_bytes: int) -> int:
    """The bytes that `num_bytes` packed ones may unpack to."""
    return max(most_row_bytes(), _MOST_PACKED * num_bytes)


def _too_long(place: str) -> UserError:
    return UserError(
        f"{place}: longer than {most_row_bytes() / 2**20:.0f} MiB. Is it damaged? If not, allow it "
        f"with the environment variable {MAX_ROW}, in MiB."
    )


def _lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file.

    Raises UserError for one that is too long, before all of it is in memory.
    """
    most = most_row_bytes()
    for line_number in count(1):
        # One byte more than allowed tells a line that is too long from one that just fits.
        line = file.readline(most + 1)
        if not line:
            return
        if len(line) > most:
            raise _too_long(f"{path}:{line_number}")
        yield line


def read_lines(path: Path, parse: Callable[[str], Row]) -> NumberedRows:
    """One row per line. Blank lines are skipped. Numbers are line numbers."""
    has_rows = False
    with open_file(path) as file:
        for line_number, line in enumerate(_lines(path, file), start=1):
            try:
                text = _decode(line).rstrip("\r\n")
                if text and not text.isspace():
                    yield line_number, parse(text)
                    has_rows = True
            except BadRow as reason:
                # A bad last line without an end is a file cut off: its other rows are missing, too.
                if has_rows and not line.endswith(b"\n"):
                    raise UserError(
                        f"{path}:{line_number}: {reason}. The file ends within this line, so it is "
                        "incomplete. Copy or download it again."
                    ) from reason
                yield line_number, reason


def read_json(path: Path) -> NumberedRows:
    """Read the objects in an array, or one after another.

    An only object may have them in one of its `LISTS`.
    """
    try:
        with open_file(path) as file:
            most = _max_unpacked_bytes(path.stat().st_size)
            content = file.read(most + 1)
        if len(content) > most:
            raise _too_long(str(path))
        values = list(_values(_decode(content)))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: {error.msg} (column {error.colno}).") from error
    except BadRow as reason:
        raise UserError(f"{path}: {reason}.") from reason
    if len(values) == 1:
        [value] = values
        values = value if isinstance(value, list) else _held(value) or values
    for row_number, value in enumerate(values, start=1):
        try:
            yield row_number, _require_object(value)
        except BadRow as reason:
            yield row_number, reason


def _held(value: object) -> list[Any] | None:
    """The rows that an object holds as the only one of `LISTS` that is an array of objects."""
    if not isinstance(value, dict):
        return None
    lists = [value[name] for name in LISTS if isinstance(value.get(name), list)]
    # With two lists it is unknown which one is meant: then the object is a row itself.
    if len(lists) != 1 or not lists[0] or not isinstance(lists[0][0], dict):
        return None
    rows: list[Any] = lists[0]
    return rows


def read_csv(path: Path) -> NumberedRows:
    """Read strings under a header line, separated by commas, semicolons or tabs.

    A row has the number of its first line.
    """
    # The default, 128 KiB, is less than a long text. The module takes no more than a C long, which
    # may have 32 bits.
    csv.field_size_limit(min(most_row_bytes(), 2**31 - 1))
    with open_file(path) as file:
        lines = _csv_lines(path, file)
        first = next(lines, "")
        # Excel writes all of them, by the language of the system.
        delimiter = next((mark for mark in ",;\t" if mark in first), ",")
        reader = csv.reader(chain([first], lines), strict=True, delimiter=delimiter)
        try:
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise UserError(f"{path}:1: a column name occurs twice: {', '.join(header)}.")
            line_number = reader.line_num + 1
            for values in reader:
                if values and len(values) != len(header):
                    yield (
                        line_number,
                        BadRow(f"{len(values)} values, but the header has {len(header)}"),
                    )
                elif values:
                    yield line_number, dict(zip(header, values, strict=True))
                line_number = reader.line_num + 1
        except csv.Error as error:
            if str(error).startswith("field larger than"):
                raise _too_long(f"{path}:{reader.line_num}") from error
            raise UserError(f"{path}:{reader.line_num}: {error}.") from error


def _csv_lines(path: Path, file: IO[bytes]) -> Iterator[str]:
    # Some files end lines with a carriage return.
    parts = (part for line in _lines(path, file) for part in line.splitlines(keepends=True))
    for line_number, part in enumerate(parts, start=1):
        try:
            yield _decode(part)
        except BadRow as reason:
            advice = "Save the file as CSV UTF-8, or convert it: iconv -f cp1252 -t utf-8."
            raise UserError(f"{path}:{line_number}: {reason}. {advice}") from reason


def read_parquet(path: Path, used: ChooseColumns = tuple) -> NumberedRows:
    """The rows of a parquet file. Columns that are not used are not read."""
    import pyarrow.parquet

    last = 0
    with open_file(path) as raw:
        try:
            file = pyarrow.parquet.ParquetFile(raw)
            schema = file.schema_arrow
            if len(set(schema.names)) < len(schema.names):
                raise ValueError(f"a column name occurs twice: {', '.join(schema.names)}")
            chosen = used(schema.names)
            columns = [name for name in schema.names if name in chosen]
            _check_groups(path, file.metadata, columns)
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                for row_number, row in number_rows(batch, str(path), last + 1, schema.names):
                    last = row_number
                    yield row_number, row
        except UserError:
            raise
        # It raises all kinds: ArrowException, OSError, UnicodeDecodeError, OverflowError, ...
        except Exception as error:
            place = f"{path} row {last + 1}" if isinstance(error, BadRow) else str(path)
            behind = f"after row {last}, " if last and place == str(path) else ""
            raise UserError(
                f"{place}: not a parquet file that can be read ({behind}{first_line(error)}). Copy "
                "or download it again."
            ) from error


def _check_groups(path: Path, metadata: Any, columns: Iterable[str]) -> None:
    """Refuse a group of rows that unpacks to more than text does.

    The file's own figures tell it, before a page of it is unpacked.
    """
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        parts = [group.column(index) for index in range(group.num_columns)]
        used = [part for part in parts if part.path_in_schema.startswith(tuple(columns))]
        # A dictionary of one value may stand for millions of rows: each counts as a byte at least.
        unpacked = sum(max(part.total_uncompressed_size, part.num_values) for part in used)
        if unpacked > _max_unpacked_bytes(sum(part.total_compressed_size for part in used)):
            raise _too_long(f"{path}, a group of {group.num_rows} rows when unpacked")


def number_rows(table: Any, place: str, first: int, columns: Sequence[str]) -> NumberedRows:
    """The rows of a table from number `first` on.

    Refuses one that is too long before any is made Python objects.
    """
    most = most_row_bytes()
    # Row by row only where all together are too long: slicing each takes time.
    if table.nbytes > most:
        for index in range(table.num_rows):
            if table.slice(index, 1).nbytes > most:
                raise _too_long(f"{place} row {first + index}")
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
    """A value of a table as lines of JSON have it. kind: its type of Arrow. Raises as `_parse`.

    Structs have no nulls: tables fill with them what an object lacks. Nulls of maps and of JSON
    texts were written.
    """
    import pyarrow

    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return _parse(value)
    if pyarrow.types.is_map(kind):
        return _unique([(str(key), _as_json(inner, kind.item_type)) for key, inner in value])
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


class FileKind(NamedTuple):
    """How to read a kind of file."""

    unit: str
    """The unit of a row's number: "line" or "row"."""
    read: Callable[[Path, ChooseColumns], NumberedRows]
    """Takes the path and the columns that are used."""


_JSON = FileKind("row", lambda path, used: read_json(path))
_JSON_LINES = FileKind("line", lambda path, used: read_lines(path, _parse_line))
_TEXT = FileKind("line", lambda path, used: read_lines(path, lambda text: {"text": text}))

FILE_KINDS: dict[str, FileKind] = {
    ".json": _JSON,
    ".jsonl": _JSON_LINES,
    ".csv": FileKind("line", lambda path, used: read_csv(path)),
    ".tsv": FileKind("line", lambda path, used: read_csv(path)),
    ".txt": _TEXT,
    ".parquet": FileKind("row", read_parquet),
}


def kind_of(path: Path) -> FileKind | None:
    """How to read a file, by its name, which may end as packed files do."""
    name = Path(path.name.lower())
    return FILE_KINDS.get(Path(name.stem).suffix if name.suffix in PACKED else name.suffix)


def look_into(path: Path) -> FileKind | None:
    """How to read a file.

    The first two lines of JSON and text tell it, and where they do not, the name does.
    """
    kind = kind_of(path)
    if kind not in (_JSON, _JSON_LINES, _TEXT):
        return kind
    try:
        with open_file(path) as file:
            lines = (
                line
                for line in iter(partial(file.readline, most_row_bytes()), b"")
                if not line.isspace()
            )
            is_lines = _is_lines(*(_decode(line).strip() for line in islice(lines, 2)))
    except (ValueError, OSError):  # said where the rows are read
        return kind
    if is_lines is None:
        return kind
    if is_lines:
        return _JSON_LINES
    return _TEXT if kind is _TEXT else _JSON


def _is_lines(first: str = "", *others: str) -> bool | None:
    """Whether JSON that begins with these lines is one object a line; None if they do not tell."""
    if _ARRAY.match(first):
        return False
    try:
        value, *more = _values(first)
    except json.JSONDecodeError as error:
        # an object goes on in the next line
        return False if first[0] == "{" and error.pos >= len(first) else None
    if not isinstance(value, dict) or not value:
        return None
    return not more and first.endswith("}") and (bool(others) or _held(value) is None)


def hash_file(path: Path) -> str:
    """SHA-256 of the content."""
    try:
        # Names go into the key of the cache, which is JSON: Linux allows any bytes in them.
        str(path).encode()
        return record_of(path).sha256
    except UnicodeEncodeError as error:
        raise UserError(
            f"dataset: the name of {str(path)!a} is not UTF-8 text. Rename the file."
        ) from error
    except OSError as error:
        raise UserError(f"dataset: {path} cannot be read ({error.strerror}).") from error


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 text (byte {error.start}: {error.reason})") from error


def _parse_line(text: str) -> Row:
    try:
        return _require_object(_parse(text))
    except json.JSONDecodeError as error:
        raise BadRow(
            f"{error.msg} (column {error.colno}); each line must be one JSON object"
        ) from error


def _values(text: str) -> Iterator[Any]:
    """The JSON values of a text, one after another, with or without commas between.

    Raises as `_parse`.
    """
    end = 0
    while mark := _MARK.search(text, end):
        value, end = _parse(text, mark.start())
        yield value


def _parse(text: str, at: int | None = None) -> Any:
    """JSON to a value; from a place of the text on to a value and where it ends.

    Raises:
        json.JSONDecodeError: with the place.
        BadRow: it is JSON that cannot be used.
    """
    try:
        return _DECODER.decode(text) if at is None else _DECODER.raw_decode(text, at)
    except (json.JSONDecodeError, BadRow):
        raise
    except RecursionError as error:
        raise BadRow("nested too deeply") from error
    except ValueError as error:  # Python reads no number of more than 4300 digits
        raise BadRow(f"a number that cannot be read ({error})") from error


def _unique(pairs: list[tuple[str, object]]) -> Row:
    """The object, if no name occurs twice.

    Python would keep the last value, which may not be the one meant.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise BadRow(f"{name!r} occurs twice in an object")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
_MARK = re.compile(r"[^\s,]")
_ARRAY = re.compile(r"\[\s*(\{|$)")


def _require_object(value: object) -> Row:
    if not isinstance(value, dict):
        kinds = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
        raise BadRow(f"expected an object with columns, found {kinds.get(type(value), 'a number')}")
    return value
