"""Readers of local files: strict, so that a malformed file is refused with the place of the fault."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fsdp_qlora.data.rows import Part, Row, Rows
from fsdp_qlora.errors import UserError

NumberedRows = Iterator[tuple[int, Row]]


def read_jsonl(path: Path) -> NumberedRows:
    """One object per line; blank lines are passed over. Numbers are line numbers."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            text = _decode(line, where).rstrip()
            if text:
                try:
                    value = json.loads(text)
                except json.JSONDecodeError as error:
                    raise UserError(
                        f"{where}: {error.msg} (column {error.colno}). Each line must be one JSON object."
                    ) from error
                yield number, _require_object(value, where)


def read_json(path: Path) -> NumberedRows:
    """An array of objects."""
    text = _decode(path.read_bytes(), str(path))
    if not text or text.isspace():
        return
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        hint = " A file with one object per line is named .jsonl." if error.msg == "Extra data" else ""
        raise UserError(f"{path}:{error.lineno}: {error.msg} (column {error.colno}).{hint}") from error
    if not isinstance(values, list):
        raise UserError(f"{path}: expected an array of objects, found {_kind(values)}.")
    for number, value in enumerate(values, start=1):
        yield number, _require_object(value, f"{path}: element {number}")


def read_csv(path: Path) -> NumberedRows:
    """Comma-separated values under a header line; every value is a string."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default, 128 KiB, is less than a long text
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise UserError(f"{path}:1: a column name occurs twice: {', '.join(header)}.")
            for number, values in enumerate(filter(None, reader), start=1):
                if len(values) != len(header):
                    raise UserError(
                        f"{path}:{reader.line_num}: {len(values)} values, but the header has {len(header)}."
                    )
                yield number, dict(zip(header, values, strict=True))
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
    """How to read a kind of file, and whether its rows are numbered by line or by row."""

    read: Callable[[Path], NumberedRows]
    unit: str


FILE_KINDS: dict[str, FileKind] = {
    ".json": FileKind(read_json, "row"),
    ".jsonl": FileKind(read_jsonl, "line"),
    ".csv": FileKind(read_csv, "row"),
    ".parquet": FileKind(read_parquet, "row"),
}


def read_files(origin: Path, files: list[Path], limit: int | None) -> Rows:
    """Read files one after the other until `limit` rows are there; later lines are not looked at.

    Raises:
        UserError: a file is malformed (it names the place), or there is not one row.
    """
    rows: list[Row] = []
    numbers: list[int] = []
    parts: list[Part] = []
    columns: dict[str, None] = {}
    for path in files:
        kind = FILE_KINDS[path.suffix.lower()]
        part = Part(path.name, kind.unit, offset=numbers[-1] if numbers else 0)
        parts.append(part)
        for number, row in islice(kind.read(path), None if limit is None else limit - len(rows)):
            rows.append(row)
            numbers.append(part.offset + number)
            columns.update(dict.fromkeys(row))
    if not rows:
        raise UserError(f"{origin}: the dataset is empty. Give one with rows.")
    return Rows(rows, numbers, list(columns), parts)


def find_files(path: Path) -> list[Path]:
    """The file itself, or the folder's files of known kinds by name; hidden ones are not data.

    Raises:
        UserError: there is none of a known kind.
    """
    kinds = ", ".join(FILE_KINDS)
    if not path.is_dir():
        if path.suffix.lower() not in FILE_KINDS:
            raise UserError(f"dataset: {path} is of no known kind. Kinds: {kinds}.")
        return [path]
    files = [file for file in path.iterdir() if file.suffix.lower() in FILE_KINDS and file.name[0] != "."]
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


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text (byte {error.start}: {error.reason}).") from error


def _require_object(value: object, where: str) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object with columns, found {_kind(value)}.")
    return value


def _kind(value: object) -> str:
    kinds = {list: "an array", dict: "an object", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
