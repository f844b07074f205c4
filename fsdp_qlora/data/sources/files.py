"""Readers of local files.

They are strict: a malformed file is refused with the place of the fault.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, NamedTuple

from fsdp_qlora.data.content import BadRow, Row, most_row_bytes
from fsdp_qlora.data.sources.file_content import PACKED, decode, lines_of, open_file, too_long
from fsdp_qlora.data.sources.json_file import read_json
from fsdp_qlora.data.sources.json_text import held_rows, parse, require_object, values_of
from fsdp_qlora.data.sources.reading import (
    ChooseColumns,
    NeededRows,
    NumberedRows,
    Ranges,
    Reading,
    Skipped,
    read_over,
)
from fsdp_qlora.data.sources.tables import (
    count_parquet_rows,
    read_parquet,
    read_parquet_ranges,
)
from fsdp_qlora.utils.errors import UserError

# Bytes that are visible characters of ASCII.
_VISIBLE = range(0x21, 0x7F)
_ARRAY = re.compile(r"\[\s*(\{|$)")


def read_lines(path: Path, parse_line: Callable[[str], Row], reading: Reading) -> NeededRows:
    """One row per line. Blank lines are skipped. Numbers are line numbers."""
    with open_file(path, reading) as file:
        lines = enumerate(lines_of(path, file), start=1)
        last, skipped = _skip_lines(lines, reading)
        yield last, skipped
        has_rows = last > 0
        for line_number, line in lines:
            try:
                text = decode(line).rstrip("\r\n")
                if text and not text.isspace():
                    yield line_number, parse_line(text)
                    has_rows = True
            except BadRow as reason:
                # A bad last line without an end is a file cut off: its other rows are missing, too.
                if has_rows and not line.endswith(b"\n"):
                    raise UserError(
                        f"{path}:{line_number}: {reason}. The file ends within this line, so it is "
                        "incomplete. Copy or download it again."
                    ) from reason
                yield line_number, reason


def read_lines_between(
    path: Path, parse_line: Callable[[str], Row], ranges: Ranges
) -> NumberedRows:
    """One row per line that begins in these ranges of bytes.

    Numbers are those of the lines' first bytes, from 1, as of `tail -c +N`.
    """
    most = most_row_bytes()
    with open_file(path) as file:
        for start, stop in ranges:
            at = math.ceil(start)
            if at:
                # The rest of a line that begins before, or the end of that line.
                file.seek(at - 1)
                rest = file.readline(most + 1)
                if len(rest) > most:
                    raise too_long(f"{path} at byte {at}")
                at += len(rest) - 1
            while at < stop:
                line = file.readline(most + 1)
                if not line:
                    break
                if len(line) > most:
                    raise too_long(f"{path} at byte {at}")
                if not _is_blank(line):
                    yield at + 1, _row_of(line, parse_line)
                at += len(line)


def _skip_lines(lines: Iterator[tuple[int, bytes]], reading: Reading) -> tuple[int, Skipped]:
    """Read the lines that are not needed, without parsing them.

    Returns:
        The number of the last one that is not blank, and how many count as skipped.
    """
    line_number = 0
    last = 0
    num_skipped = 0
    while line_number < reading.after or num_skipped < reading.skip:
        line_number, line = next(lines, (0, b""))
        if not line:
            break
        if not _is_blank(line):
            last = line_number
            num_skipped += line_number > reading.after
    return last, Skipped(num_skipped)


def _row_of(line: bytes, parse_line: Callable[[str], Row]) -> Row | BadRow:
    try:
        return parse_line(decode(line).rstrip("\r\n"))
    except BadRow as reason:
        return reason


def _is_blank(line: bytes) -> bool:
    if line[0] in _VISIBLE:
        return False
    try:
        text = decode(line)
    except BadRow:  # a row that cannot be read
        return False
    return not text or text.isspace()


def read_csv(path: Path, reading: Reading) -> NumberedRows:
    """Read strings under a header line, separated by commas, semicolons or tabs.

    A row has the number of its first line.
    """
    # The default, 128 KiB, is less than a long text. The module takes no more than a C long, which
    # may have 32 bits.
    csv.field_size_limit(min(most_row_bytes(), 2**31 - 1))
    with open_file(path, reading) as file:
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
                raise too_long(f"{path}:{reader.line_num}") from error
            raise UserError(f"{path}:{reader.line_num}: {error}.") from error


def _csv_lines(path: Path, file: IO[bytes]) -> Iterator[str]:
    # Some files end lines with a carriage return.
    parts = (part for line in lines_of(path, file) for part in line.splitlines(keepends=True))
    for line_number, part in enumerate(parts, start=1):
        try:
            yield decode(part)
        except BadRow as reason:
            advice = "Save the file as CSV UTF-8, or convert it: iconv -f cp1252 -t utf-8."
            raise UserError(f"{path}:{line_number}: {reason}. {advice}") from reason


class FileKind(NamedTuple):
    """How to read a kind of file."""

    unit: str
    """The unit of a row's number: "line" or "row"."""
    read: Callable[[Path, Reading], NeededRows]
    num_rows: Callable[[Path], int] | None = None
    """Counts the rows without reading them."""
    read_ranges: Callable[[Path, ChooseColumns, Ranges], NumberedRows] | None = None
    """The rows that begin between bytes of a file that is not packed; see `Part.read_ranges`."""


_JSON = FileKind("row", lambda path, reading: read_over(read_json(path, reading), reading))
_JSON_LINES = FileKind(
    "line",
    lambda path, reading: read_lines(path, _parse_line, reading),
    read_ranges=lambda path, used, ranges: read_lines_between(path, _parse_line, ranges),
)
_TEXT = FileKind(
    "line",
    lambda path, reading: read_lines(path, _as_text, reading),
    read_ranges=lambda path, used, ranges: read_lines_between(path, _as_text, ranges),
)
_CSV = FileKind("line", lambda path, reading: read_over(read_csv(path, reading), reading))

FILE_KINDS: dict[str, FileKind] = {
    ".json": _JSON,
    ".jsonl": _JSON_LINES,
    ".csv": _CSV,
    ".tsv": _CSV,
    ".txt": _TEXT,
    ".parquet": FileKind("row", read_parquet, count_parquet_rows, read_parquet_ranges),
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
            is_lines = _is_lines(*(decode(line).strip() for line in islice(lines, 2)))
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
        value, *more = values_of(first)
    except json.JSONDecodeError as error:
        # an object goes on in the next line
        return False if first[0] == "{" and error.pos >= len(first) else None
    if not isinstance(value, dict) or not value:
        return None
    return not more and first.endswith("}") and (bool(others) or held_rows(value) is None)


def _parse_line(text: str) -> Row:
    try:
        return require_object(parse(text))
    except json.JSONDecodeError as error:
        raise BadRow(
            f"{error.msg} (column {error.colno}); each line must be one JSON object"
        ) from error


def _as_text(text: str) -> Row:
    return {"text": text}
