"""Readers of tool calls in the text of a turn, one for each way in which templates write them."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from fsdp_qlora.data.text.conversation import Tools
from fsdp_qlora.data.text.loose_values import (
    BadValue,
    LooseReader,
    behind_comma,
    read_json,
    skip_space,
    whole_json,
)


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: dict[str, Any]


class Types:
    """The types of arguments, which the schemas of tools say.

    Some forms write all values as text: the schema tells the number 7 from the text "7".
    """

    def __init__(self, tools: Tools = None) -> None:
        self._properties = dict(map(_properties_of, tools or ()))

    def value(self, function: str, key: str, raw: str) -> Any:
        """The value of an argument that is written as text.

        Without a type it is JSON if it can be read as such. A value that does not have its type
        stays text, which the function may refuse.
        """
        properties = self._properties.get(function) or {}
        types = _types_of(properties.get(key))
        if not types:
            return _json_or_text(raw)
        for name in types:
            reader = _TYPED.get(name)
            if reader:
                try:
                    return reader(raw.strip())
                except (ValueError, KeyError):
                    continue
        return raw


def _properties_of(tool: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a tool's function, and the schemas of its arguments."""
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        return "", {}
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    name = str(function.get("name"))
    return name, properties if isinstance(properties, dict) else {}


def _types_of(schema: Any) -> list[str]:
    """The types that a schema allows, in its order."""
    if not isinstance(schema, dict):
        return []
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    types = [name for name in names if isinstance(name, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            types += _types_of(choice)
    if schema.get("nullable"):
        types.append("null")
    return types


def _json_or_text(raw: str) -> Any:
    try:
        return whole_json(raw)
    except BadValue:
        return raw


def _integer(raw: str) -> int:
    number = whole_json(raw)
    if isinstance(number, bool) or not isinstance(number, int | float) or number != int(number):
        raise ValueError(raw)
    return int(number)


def _number(raw: str) -> int | float:
    number = whole_json(raw)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(raw)
    return number


def _of_type(kind: type) -> Callable[[str], Any]:
    def read(raw: str) -> Any:
        value = whole_json(raw)
        if not isinstance(value, kind):
            raise ValueError(raw)
        return value

    return read


_TYPED: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    # Templates in Jinja write True for true.
    "boolean": lambda raw: {"true": True, "false": False}[raw.lower()],
    "null": lambda raw: {"null": None, "none": None}[raw.lower()],
    "object": _of_type(dict),
    "array": _of_type(list),
}


# --- the readers: text, place, types -> calls and where they end ---

Found = tuple[list[ToolCall], int]
Reader = Callable[[str, int, Types], Found]


class BadCall(ValueError):
    """A call that cannot be read; the message is for the model that wrote it."""


class NoCall(Exception):
    """Text that only looks like a call."""


def call_of(value: Any) -> ToolCall:
    """A call from its object of JSON, under the names that templates use."""
    if not isinstance(value, dict):
        raise BadCall("a call is not an object of JSON")
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str) or not name:
        raise BadCall("a call has no name")
    arguments = value.get("arguments", value.get("parameters"))
    return ToolCall(name, object_of(name, {} if arguments is None else arguments))


def object_of(name: str, arguments: Any) -> dict[str, Any]:
    """The arguments of a call, which may be JSON in a text."""
    if isinstance(arguments, str):
        arguments = whole_json(arguments)
    if not isinstance(arguments, dict):
        raise BadCall(f"the arguments of {name} are not an object of JSON")
    return arguments


def objects(opening: str, closing: str) -> Reader:
    """Read {"name": ..., "arguments": {...}} between marks, or a list of such objects.

    The closing mark may be absent at the end of a turn.
    """
    head = re.compile(opening)
    tail = re.compile(rf"\s*(?:{closing}|\Z)")

    def read(text: str, place: int, types: Types) -> Found:
        start = head.match(text, place)
        assert start is not None
        value, place = read_json(text, start.end())
        end = tail.match(text, place)
        if not end:
            raise BadCall("a call has no end behind its JSON")
        values = value if isinstance(value, list) else [value]
        return [*map(call_of, values)], end.end()

    return read


def bare_objects(text: str, place: int, types: Types) -> Found:
    """Read calls of Llama 3, a turn that is an object of JSON with a name and parameters.

    Other objects are answers in JSON.
    """
    calls = []
    place = skip_space(text, place)
    if text.startswith(_PYTHON_TAG, place):
        place += len(_PYTHON_TAG)
    elif not _BARE_CALL.match(text, place):
        raise NoCall
    while text.startswith("{", place):
        value, place = read_json(text, place)
        calls.append(call_of(value))
        between = _BETWEEN.match(text, place)
        assert between is not None
        place = between.end()
    if not calls or place < len(text):
        raise BadCall("a call is not alone in its turn as an object of JSON")
    return calls, place


_PYTHON_TAG = "<|python_tag|>"
_BARE_CALL = re.compile(r'\{\s*"(?:name|parameters|type)"\s*:')
_BETWEEN = re.compile(r"[\s;]*(?:<\|(?:eom_id|eot_id)\|>)?[\s;]*")


def named(opening: str, closing: str, loose: LooseReader | None = None) -> Reader:
    """Read a name, in the group `name` of a pattern, and an object with the arguments behind it.

    loose: reads objects that are not JSON.
    """
    head = re.compile(opening)
    tail = re.compile(rf"\s*(?:{closing})")

    def read(text: str, place: int, types: Types) -> Found:
        start = head.match(text, place)
        if not start:
            raise BadCall("a call has no name with arguments behind it")
        value, place = loose.read(text, start.end()) if loose else read_json(text, start.end())
        end = tail.match(text, place)
        if not end:
            raise BadCall(f"the call of {start['name']} has no end behind its arguments")
        return [ToolCall(start["name"], object_of(start["name"], value))], end.end()

    return read


class Pairs(NamedTuple):
    """A form whose arguments are pairs of marks with the key and the value as text."""

    head: re.Pattern[str]
    key: re.Pattern[str]
    end_of_value: str
    tail: re.Pattern[str]
    in_lines: bool
    """Whether values have lines of their own."""

    def read(self, text: str, place: int, types: Types) -> Found:
        """Read one call."""
        start = self.head.match(text, place)
        if not start:
            raise BadCall("a call has no name")
        name = start["name"]
        place = start.end()
        arguments = {}
        key = self.key.match(text, place)
        while key:
            end = text.find(self.end_of_value, key.end())
            if end < 0:
                raise BadCall(f"the argument {key['key']} of {name} has no end")
            raw = text[key.end() : end]
            if self.in_lines:
                raw = raw.removeprefix("\n").removesuffix("\n")
            arguments[key["key"]] = types.value(name, key["key"], raw)
            place = skip_space(text, end + len(self.end_of_value))
            key = self.key.match(text, place)
        tail = self.tail.match(text, place)
        if not tail:
            raise BadCall(f"the call of {name} has no end behind its arguments")
        return [ToolCall(name, arguments)], tail.end()


def python_calls(loose: LooseReader) -> Reader:
    """Read a list of calls as Python has them, [f(a=1), g()]."""

    def read(text: str, place: int, types: Types) -> Found:
        calls = []
        place = skip_space(text, place + len(_LIST_BEGINS)) + 1
        while not text.startswith("]", place):
            name = _FUNCTION.match(text, place)
            if not name:
                raise BadCall("a list of calls has no name with a bracket behind it")
            place = skip_space(text, name.end())
            arguments = {}
            while not text.startswith(")", place):
                key = _PARAMETER.match(text, place)
                if not key:
                    raise BadCall(f"an argument of {name[1]} has no name")
                arguments[key[1]], place = loose.read(text, key.end())
                place = behind_comma(text, place, ")")
            calls.append(ToolCall(name[1], arguments))
            place = behind_comma(text, place + 1, "]")
        end = skip_space(text, place + 1)
        if not text.startswith(_LIST_ENDS, end):
            raise BadCall("a list of calls has no end")
        return calls, end + len(_LIST_ENDS)

    return read


_LIST_BEGINS = "<|tool_call_start|>"
_LIST_ENDS = "<|tool_call_end|>"
_FUNCTION = re.compile(r"\s*([\w.]+)\s*\(")
_PARAMETER = re.compile(r"\s*(\w+)\s*=")
