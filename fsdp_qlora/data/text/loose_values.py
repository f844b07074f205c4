"""Reads values that look like JSON or Python, as models write them in tool calls.

Every reader takes a text and a place in it, and takes time in proportion to what it reads.
"""

import json
import math
import re
from typing import Any, NoReturn

MOST_DEPTH = 64
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_WORD = re.compile(r"\w+")
_KEY = re.compile(r"[\w.$-]+")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
_HEX = re.compile(r"u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})")
# Where a string ends whose quotes are not escaped inside of it.
_BARE_END = re.compile(r"'(?=\s*[,)\]}])")


class BadValue(ValueError):
    """A value that cannot be read; the message is for whoever wrote it."""


def _no_constant(name: str) -> NoReturn:
    raise BadValue(f"{name} is not a value of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise BadValue("a number is too large")
    return number


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, strict=False)


def skip_space(text: str, place: int) -> int:
    """The place of the next character that is not white space, or the end of the text."""
    found = _SPACE.match(text, place)
    assert found is not None
    return found.end()


def read_json(text: str, place: int) -> tuple[Any, int]:
    """A value of JSON and where it ends.

    Line breaks may stand in strings as they are. The last of equal keys counts.

    Raises:
        BadValue: it is not JSON, has numbers beyond what Python reads, or is nested too deeply.
    """
    try:
        value, end = _DECODER.raw_decode(text, skip_space(text, place))
    except BadValue:
        raise
    except RecursionError:
        raise BadValue("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadValue(f"it is not valid JSON ({error.msg})") from None
    except ValueError:  # more digits than Python turns into an int
        raise BadValue("a number is too large") from None
    check_value(value)
    return value, end


def whole_json(text: str) -> Any:
    """The value of a text that is JSON and nothing else. Raises BadValue."""
    value, end = read_json(text, 0)
    if skip_space(text, end) < len(text):
        raise BadValue("text follows the JSON")
    return value


def check_value(value: Any) -> None:
    """Raise BadValue where a value is nested too deeply or has half a surrogate pair."""
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise BadValue("it is nested too deeply")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str) and not is_unicode(item):
                raise BadValue("a text has half a surrogate pair")
        level = inner


def is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class LooseReader:
    """Reads literals of JSON and of Python, also mixed.

    Args:
        quote: a mark that begins and ends a text besides the quotes of both, such as <|"|>; what is
            between two of them is taken as it is. Then keys have no quotes.
        escapes: whether outermost texts have backslashes before their own quotes. Without, such a
            text ends at a quote that a comma or a bracket follows.
    """

    def __init__(self, *, quote: str = "", escapes: bool = True) -> None:
        self._quote = quote
        self._escapes = escapes

    def read(self, text: str, place: int, depth: int = 0) -> tuple[Any, int]:
        """A value and where it ends. Raises BadValue."""
        if depth > MOST_DEPTH:
            raise BadValue("it is nested too deeply")
        place = skip_space(text, place)
        first = text[place : place + 1]
        if self._quote and text.startswith(self._quote, place):
            return self._marked(text, place)
        if first == "'" and depth == 0 and not self._escapes:
            return _bare(text, place)
        if first and first in "'\"":
            return _quoted(text, place)
        if first == "{":
            return self._mapping(text, place, depth)
        if first == "[":
            return self._list(text, place, depth)
        return _plain(text, place)

    def _marked(self, text: str, place: int) -> tuple[str, int]:
        start = place + len(self._quote)
        end = text.find(self._quote, start)
        if end < 0:
            raise BadValue("a text has no end")
        return text[start:end], end + len(self._quote)

    def _list(self, text: str, place: int, depth: int) -> tuple[list[Any], int]:
        values = []
        place = skip_space(text, place + 1)
        while not text.startswith("]", place):
            value, place = self.read(text, place, depth + 1)
            values.append(value)
            place = behind_comma(text, place, "]")
        return values, place + 1

    def _mapping(self, text: str, place: int, depth: int) -> tuple[dict[str, Any], int]:
        values = {}
        place = skip_space(text, place + 1)
        while not text.startswith("}", place):
            key, place = self._key(text, place, depth)
            place = skip_space(text, place)
            if not text.startswith(":", place):
                raise BadValue("a key has no colon behind it")
            values[key], place = self.read(text, place + 1, depth + 1)
            place = behind_comma(text, place, "}")
        return values, place + 1

    def _key(self, text: str, place: int, depth: int) -> tuple[str, int]:
        bare = _KEY.match(text, place)
        if bare:
            return bare[0], bare.end()
        key, place = self.read(text, place, depth + 1)
        if not isinstance(key, str):
            raise BadValue("a key is not text")
        return key, place


def behind_comma(text: str, place: int, closing: str) -> int:
    """Where the next item begins, or the closing bracket. Raises BadValue if there is neither."""
    place = skip_space(text, place)
    if text.startswith(",", place):
        return skip_space(text, place + 1)
    if not text.startswith(closing, place):
        raise BadValue(f"neither a comma nor {closing} follows a value")
    return place


def _bare(text: str, place: int) -> tuple[str, int]:
    end = _BARE_END.search(text, place + 1)
    if not end:
        raise BadValue("a text has no end")
    return text[place + 1 : end.start()], end.end()


def _quoted(text: str, place: int) -> tuple[str, int]:
    """A text in quotes, in which a backslash stands before quotes, breaks and codes."""
    quote = text[place]
    plain = re.compile(rf"[^{quote}\\]*")
    pieces = []
    place += 1
    while True:
        found = plain.match(text, place)
        assert found is not None
        pieces.append(found[0])
        place = found.end()
        if text.startswith(quote, place):
            break
        if place + 1 >= len(text):
            raise BadValue("a text has no end")
        code = _HEX.match(text, place + 1)
        if code:
            pieces.append(chr(int(code[1] or code[2], 16)))
            place = code.end()
        else:
            pieces.append(_ESCAPES.get(text[place + 1], text[place + 1]))
            place += 2
    # Two codes may be the halves of one character.
    joined = "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return joined, place + 1


def _plain(text: str, place: int) -> tuple[Any, int]:
    """A number, or a word for true, false or nothing."""
    number = _NUMBER.match(text, place)
    if number:
        try:
            is_integer = number[1] is None and number[2] is None
            return (int(number[0]) if is_integer else _finite(number[0])), number.end()
        except BadValue:
            raise
        except ValueError:
            raise BadValue("a number is too large") from None
    word = _WORD.match(text, place)
    if not word or word[0] not in _WORDS:
        shown = text[place : place + 20]
        raise BadValue(f"no value begins with {shown!r}")
    return _WORDS[word[0]], word.end()
