"""Strict JSON: values with their place, no name twice in an object, and no other surprise."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fsdp_qlora.data.content import BadRow, Row

# Names under which an object holds its rows.
LISTS = ("data", "rows", "train", "examples", "instances")


def values_of(text: str) -> Iterator[Any]:
    """The JSON values of a text, one after another, with or without commas between.

    Raises as `parse`.
    """
    end = 0
    while mark := MARK.search(text, end):
        value, end = parse(text, mark.start())
        yield value


def parse(text: str, at: int | None = None) -> Any:
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


def unique(pairs: list[tuple[str, object]]) -> Row:
    """The object, if no name occurs twice.

    Python would keep the last value, which may not be the one meant.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise BadRow(f"{name!r} occurs twice in an object")
    return values


def held_rows(value: object) -> list[Any] | None:
    """The rows that an object holds as the only one of `LISTS` that is an array of objects."""
    if not isinstance(value, dict):
        return None
    lists = [value[name] for name in LISTS if isinstance(value.get(name), list)]
    # With two lists it is unknown which one is meant: then the object is a row itself.
    if len(lists) != 1 or not lists[0] or not isinstance(lists[0][0], dict):
        return None
    rows: list[Any] = lists[0]
    return rows


def require_object(value: object) -> Row:
    """The value, if it is an object. Raises BadRow."""
    if not isinstance(value, dict):
        kinds = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
        raise BadRow(f"expected an object with columns, found {kinds.get(type(value), 'a number')}")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=unique)
# The first character of a value.
MARK = re.compile(r"[^\s,]")
