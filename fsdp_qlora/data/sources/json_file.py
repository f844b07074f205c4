"""Reads a JSON file whose rows are no lines: an array, or values one after another.

The file is read piece by piece, so that memory is bounded by its longest row.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fsdp_qlora.data.content import BadRow, most_row_bytes
from fsdp_qlora.data.sources.file_content import (
    max_unpacked_bytes,
    not_text,
    open_file,
    too_long,
)
from fsdp_qlora.data.sources.json_text import MARK, held_rows, parse, require_object
from fsdp_qlora.data.sources.reading import NumberedRows, Reading
from fsdp_qlora.utils.errors import UserError

_PIECE = 2**20  # bytes that are read at once
# An error so close to the end may be of text that has not been read yet: the longest literals are
# -Infinity and pairs of escapes.
_MAY_GO_ON = 16
_NOT_SPACE = re.compile(r"[^ \t\n\r]")


def read_json(path: Path, reading: Reading | None = None) -> NumberedRows:
    """Read the objects in an array, or one after another.

    An only object may have them in one of its `LISTS`: it is read as a whole, as each row is. A
    larger one than a row may be is too, with all of the file in memory.
    """
    try:
        with open_file(path, reading) as file:
            rows = _rows(_Text(path, file))
            for row_number, value in enumerate(rows, start=1):
                try:
                    yield row_number, require_object(value)
                except BadRow as reason:
                    yield row_number, reason
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: {error.msg} (column {error.colno}).") from error
    except BadRow as reason:
        raise UserError(f"{path}: {reason}.") from reason


def _rows(text: "_Text") -> Iterator[Any]:
    """Yield the values that are rows. Raises as `_Text.value`."""
    first = text.find(MARK)
    if first == "[":
        yield from _elements(text)
        if text.find(MARK):
            text.value()  # damage there is said first
            raise UserError(
                f"{text.path}:{text.place[0]}: another value follows the array of rows. Leave one "
                "of them, or write one object a line."
            )
        return
    if not first:
        return
    size = text.path.stat().st_size
    value, length = text.value(max_unpacked_bytes(size))
    if not text.find(MARK):
        yield from held_rows(value) or [value]
        return
    text.check_length(length)
    yield value
    while text.find(MARK):
        yield text.value()[0]


def _elements(text: "_Text") -> Iterator[Any]:
    """Yield the elements of the array that begins at the next character."""
    text.skip()
    if text.next() == "]":
        text.skip()
        return
    while True:
        yield text.value()[0]
        mark = text.next()
        if mark == "]":
            text.skip()
            return
        if mark != ",":
            raise _error("Expecting ',' delimiter", text.place)
        text.skip_comma()


def _error(message: str, place: tuple[int, int]) -> json.JSONDecodeError:
    """An error at a line and column of the file."""
    error = json.JSONDecodeError(message, "", 0)
    error.lineno, error.colno = place
    return error


class _Text:
    """The text of a file, of which a part is in memory.

    Args:
        file: opened at its beginning.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._num_bytes = 0  # that were read, without a mark at the beginning
        self._text = ""
        self._at = 0  # up to here the text is done with
        self._has_ended = False
        # Of the beginning of the text in memory.
        self._line = 1
        self._column = 1
        self._most = most_row_bytes()

    @property
    def place(self) -> tuple[int, int]:
        """Line and column of the next character, both from 1."""
        return self._place_of(self._at)

    def find(self, pattern: re.Pattern[str]) -> str:
        """The next character that the pattern finds, which stays the next one; "" at the end."""
        while True:
            mark = pattern.search(self._text, self._at)
            if mark:
                self._at = mark.start()
                return mark[0]
            self._at = len(self._text)
            if not self._read_on():
                return ""

    def next(self) -> str:
        """The next character behind white space, which stays the next one; "" at the end."""
        return self.find(_NOT_SPACE)

    def skip(self) -> None:
        """Leave the next character behind."""
        self._at += 1

    def skip_comma(self) -> None:
        """Leave a comma in an array behind, and the white space that follows.

        Raises json.JSONDecodeError if the array ends there.
        """
        comma = self.place
        self.skip()
        if self.next() != "]":
            return
        try:
            parse("[0,]")
        except json.JSONDecodeError as error:
            # Some versions of Python name the comma, others what follows.
            is_of_comma = error.pos == 2
            raise _error(error.msg, comma if is_of_comma else self.place) from error

    def value(self, most: int = 0) -> tuple[Any, int]:
        """The value that begins at the next character, and its number of characters.

        Args:
            most: characters that it may have; 0 for those of a row.
        Raises:
            UserError: it has more.
            json.JSONDecodeError or BadRow: as `parse`.
        """
        most = most or self._most
        while True:
            try:
                value, end = parse(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._may_go_on(error):
                    raise _error(error.msg, self._place_of(error.pos)) from error
            else:
                # A number may go on, too.
                if self._has_ended or end < len(self._text) - _MAY_GO_ON:
                    length = end - self._at
                    self.check_length(length, most)
                    self._at = end
                    return value, length
            self.check_length(len(self._text) - self._at - _MAY_GO_ON, most)
            self._read_on()

    def check_length(self, length: int, most: int = 0) -> None:
        """Raise UserError if a value at the next character has more than `most` characters."""
        if length > (most or self._most):
            raise too_long(f"{self.path}:{self.place[0]}")

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        """Whether an error may be of a value of which the end has not been read."""
        if self._has_ended:
            return False
        is_near = error.pos >= len(self._text) - _MAY_GO_ON
        return is_near or error.msg.startswith("Unterminated string")

    def _place_of(self, at: int) -> tuple[int, int]:
        """Line and column of a place in memory, both from 1."""
        num_lines = self._text.count("\n", 0, at)
        if num_lines:
            return self._line + num_lines, at - self._text.rfind("\n", 0, at)
        return self._line, self._column + at

    def _read_on(self) -> bool:
        """Forget what is done with, and read on. Returns False at the end of the file."""
        if self._has_ended:
            return False
        # At least as much as is there: a long value is parsed few times.
        data = self._file.read(max(_PIECE, len(self._text) - self._at))
        self._has_ended = not data
        num_decoded = self._num_bytes - len(self._decoder.getstate()[0])
        try:
            more = self._decoder.decode(data, final=self._has_ended)
        except UnicodeDecodeError as error:
            raise not_text(error, num_decoded) from error
        self._num_bytes += len(data)
        if self._num_bytes == len(data):
            self._num_bytes = len(data.removeprefix(codecs.BOM_UTF8))
        self._line, self._column = self._place_of(self._at)
        self._text = self._text[self._at :] + more
        self._at = 0
        return True
