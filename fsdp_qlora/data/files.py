"""Readers of local files. They are strict: a malformed file is refused with the place of the fault."""

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fsdp_qlora.data.rows import Row, Rows, SourceFile, locate
from fsdp_qlora.errors import UserError


class Malformed(ValueError):
    """An entry that is not a row. The message is the reason, without the place."""


NumberedRows = Iterator[tuple[int, Row | Malformed]]


def read_jsonl(path: Path) -> NumberedRows:
    """One object per line. Blank lines are skipped. Numbers are line numbers."""
    has_rows = False
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
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
    """An array of objects."""
    try:
        text = _decode(path.read_bytes())
        if not text or text.isspace():
            return
        values = _parse(text)
    except json.JSONDecodeError as error:
        hint = " A file with one object per line is named .jsonl." if error.msg == "Extra data" else ""
        raise UserError(f"{path}:{error.lineno}: {error.msg} (column {error.colno}).{hint}") from error
    except Malformed as reason:
        raise UserError(f"{path}: {reason}.") from reason
    if not isinstance(values, list):
        raise UserError(f"{path}: expected an array of objects, found {_kind(values)}.")
    for number, value in enumerate(values, start=1):
        try:
            yield number, _require_object(value)
        except Malformed as reason:
            yield number, reason


def read_csv(path: Path) -> NumberedRows:
    """Comma-separated values under a header line. Every value is a string. A row's number is that of its first line."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default, 128 KiB, is less than a long text
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
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
            where = f"{path}: after line {reader.line_num}"
            raise UserError(f"{where}: not UTF-8 text ({error.reason}).") from error


def read_parquet(path: Path) -> NumberedRows:
    """The rows of a parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from enumerate(rows, start=1)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a parquet file that can be read ({error}).") from error


@dataclass(frozen=True)
class FileKind:
    """How to read a kind of file."""

    read: Callable[[Path], NumberedRows]
    unit: str
    """What its rows are numbered by: "line" or "row"."""


FILE_KINDS: dict[str, FileKind] = {
    ".json": FileKind(read_json, "row"),
    ".jsonl": FileKind(read_jsonl, "line"),
    ".csv": FileKind(read_csv, "line"),
    ".parquet": FileKind(read_parquet, "row"),
}


def read_files(origin: Path, files: list[Path], limit: int | None) -> Rows:
    """Read files one after the other, up to `limit` entries, malformed ones included. The rest is not read.

    Raises:
        UserError: a file cannot be read at all (the message names the place), or no file has a row.
    """
    rows: list[Row] = []
    numbers: list[int] = []
    malformed: dict[int, str] = {}
    sources: list[SourceFile] = []
    columns: dict[str, None] = {}
    last = 0
    for path in files:
        kind = FILE_KINDS[path.suffix.lower()]
        source = SourceFile(path.name, kind.unit, offset=last)
        sources.append(source)
        room = None if limit is None else limit - len(rows) - len(malformed)
        for number, row in islice(kind.read(path), room):
            last = source.offset + number
            if isinstance(row, Malformed):
                malformed[last] = str(row)
                continue
            rows.append(row)
            numbers.append(last)
            columns.update(dict.fromkeys(row))
    if not rows:
        if not malformed:
            raise UserError(f"{origin}: the dataset is empty. Give one with rows.")
        number, reason = next(iter(malformed.items()))
        place = locate([number], sources, str(origin))
        raise UserError(f"{place}: {reason}. None of its {len(malformed):,} rows can be read.")
    return Rows(rows, numbers, list(columns), sources, malformed)


def find_files(path: Path) -> list[Path]:
    """The file itself, or the folder's files of known kinds, sorted by name. Hidden files are ignored.

    Raises:
        UserError: there is no file of a known kind.
    """
    kinds = ", ".join(FILE_KINDS)
    if not path.is_dir():
        if path.suffix.lower() not in FILE_KINDS:
            raise UserError(f"dataset: {path} is not of a known kind. Kinds: {kinds}.")
        if not path.is_file():  # reading a pipe or a device might never end
            raise UserError(f"dataset: {path} is not a regular file. Write the rows to a file and give its path.")
        return [path]
    files = [
        file for file in path.iterdir() if file.suffix.lower() in FILE_KINDS and file.name[0] != "." and file.is_file()
    ]
    if not files:
        raise UserError(f"dataset: the folder {path} has no file of a known kind. Kinds: {kinds}.")
    return sorted(files, key=lambda file: file.name)


def hash_file(path: Path) -> str:
    """SHA-256 of the content."""
    digest = hashlib.sha256()
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
