"""Everything of a prompt besides its tokens as JSON, from which it comes back equal.

Columns of tables have values that JSON lacks, such as dates. A text with some is an object whose
values have tags; without any it is JSON as usual.
"""

import base64
import contextlib
import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import pandas
import pyarrow

from fsdp_qlora.data.content import Chat
from fsdp_qlora.data.prompts import Beside

# The key of an object that is no object of the dataset, but a value of another type.
_TYPE = "$type"
_VALUE = "value"
# A text is read where more calls are on Python's stack than where it was made.
_MOST_LEVELS = 100
_AS_IN_JSON = (str, int, float, bool, type(None))


class NotEncodable(ValueError):
    """A value that no text gives back equal."""


def encode(beside: Beside) -> bytes:
    """The JSON of what is beside a prompt's tokens. Raises NotEncodable."""
    record = _record(beside)
    if _is_deep(record):
        raise NotEncodable("a value is nested too deeply")
    for make in (_untouched, _tagged):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            text = _write(make(record))
            # Their types and their order count as well, which == does not compare.
            if repr(decode(text)) == repr(beside):
                return text
    raise NotEncodable("a value has a type that JSON lacks")


def decode(text: bytes) -> Beside:
    """The reverse of `encode`."""
    record = json.loads(text.decode("utf-8", "surrogatepass"))
    if isinstance(record, dict):
        record = _value_of(record)
    content, columns, answer, teacher_ids, chat, environment = record
    return Beside(content, columns, answer, teacher_ids, _chat_of(chat), environment)


def _write(record: object) -> bytes:
    # Python's texts may have halves of surrogate pairs, which are kept as they are.
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def _record(beside: Beside) -> list[Any]:
    chat = beside.chat
    if chat is None:
        return list(beside)
    if chat.images:
        raise NotEncodable("a prompt has images")
    parts = [chat.messages, chat.tools, [*chat.weights], [*chat.unused], chat.template_kwargs]
    return [*beside._replace(chat=None)[:4], parts, beside.environment]


def _chat_of(parts: list[Any] | None) -> Chat | None:
    if parts is None:
        return None
    messages, tools, weights, unused, template_kwargs = parts
    return Chat(messages, tools, tuple(weights), tuple(unused), template_kwargs=template_kwargs)


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [inner for each in level for inner in _parts_of(each)]
        if not level:
            return False
    return True


def _parts_of(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, list | tuple) else []


# --- values of types that JSON lacks ---


class _Codec(NamedTuple):
    """How values of a type become JSON and come back."""

    name: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _write_instant(value: Any) -> list[Any]:
    """A point in time or a duration, as Arrow has it: its unit, its number and its zone."""
    if isinstance(value, pandas.Timestamp):
        return ["ns", value.value, value.tz and str(value.tz)]
    scalar = pyarrow.scalar(value)
    return [scalar.type.unit, scalar.value, scalar.type.tz]


def _read_instant(parts: list[Any]) -> Any:
    unit, number, zone = parts
    return pyarrow.scalar(number, pyarrow.timestamp(unit, zone)).as_py()


def _write_duration(value: timedelta) -> list[Any]:
    if isinstance(value, pandas.Timedelta):
        return ["ns", value.value]
    return ["us", pyarrow.scalar(value, pyarrow.duration("us")).value]


def _read_duration(parts: list[Any]) -> Any:
    unit, number = parts
    return pyarrow.scalar(number, pyarrow.duration(unit)).as_py()


_CODECS: dict[type, _Codec] = {
    date: _Codec("date", date.isoformat, date.fromisoformat),
    time: _Codec("time", time.isoformat, time.fromisoformat),
    datetime: _Codec("instant", _write_instant, _read_instant),
    pandas.Timestamp: _Codec("instant", _write_instant, _read_instant),
    timedelta: _Codec("duration", _write_duration, _read_duration),
    pandas.Timedelta: _Codec("duration", _write_duration, _read_duration),
    Decimal: _Codec("decimal", str, Decimal),
    UUID: _Codec("uuid", str, UUID),
    bytes: _Codec("bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    tuple: _Codec(
        "tuple",
        lambda values: [_tagged(value) for value in values],
        lambda values: tuple(map(_value_of, values)),
    ),
    dict: _Codec(
        "pairs",
        lambda values: [[_tagged(key), _tagged(value)] for key, value in values.items()],
        lambda pairs: {_value_of(key): _value_of(value) for key, value in pairs},
    ),
    list: _Codec(
        "list",
        lambda values: [_tagged(value) for value in values],
        lambda values: [*map(_value_of, values)],
    ),
}
_READ = {codec.name: codec.read for codec in _CODECS.values()}


def _untouched(record: list[Any]) -> object:
    return record


def _tagged(value: Any) -> Any:
    """A value in which tags name the types that JSON lacks. Raises TypeError for other types."""
    kind = type(value)
    if kind in _AS_IN_JSON:
        return value
    if kind is dict and _TYPE not in value and all(type(key) is str for key in value):
        return {key: _tagged(inner) for key, inner in value.items()}
    codec = _CODECS.get(kind)
    if codec is None:
        raise TypeError(f"no text has a {kind.__name__}")
    return {_TYPE: codec.name, _VALUE: codec.write(value)}


def _value_of(value: Any) -> Any:
    """The reverse of `_tagged`."""
    if not isinstance(value, dict):
        return value
    if _TYPE in value:
        return _READ[value[_TYPE]](value[_VALUE])
    return {key: _value_of(inner) for key, inner in value.items()}
