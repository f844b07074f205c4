"""Logs of OpenAI's Responses API: lists of items become messages."""

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_qlora.data.content import FOLDER, BadRow, Chat, Row, text_of
from fsdp_qlora.data.text import chats, parts, tool_forms

Item = Mapping[str, Any]
Turn = dict[str, Any]
# Texts of two messages that follow each other are one answer.
_PARAGRAPH = {"type": "text", "text": "\n\n"}


def read_response(row: Row) -> Chat:
    """`input` and `output`, of which only the output is learned, with `instructions` and `tools`.

    Raises BadRow.
    """
    _refuse_a_part(row)
    asked = _instructions(row) + _turns(row.get("input"), "input", "user")
    return _chat(row, chats.only_read(asked) + _turns(row.get("output"), "output", "assistant"))


def read_items(row: Row) -> Chat:
    """All `items` of a log, with `instructions` and `tools`. Raises BadRow."""
    _refuse_a_part(row)
    return _chat(row, _instructions(row) + _turns(row.get("items"), "items", "user"))


def is_response(row: Row) -> bool:
    """Whether the columns of `read_response` hold items."""
    return are_items(row.get("output")) or (
        isinstance(row.get("output"), str | None) and are_items(row.get("input"))
    )


def is_items(row: Row) -> bool:
    """Whether the column of `read_items` holds items, one of which is no message."""
    items = _listed(row.get("items"))
    return are_items(items) and any(
        str(item.get("type")) in _READERS for item in chats.parsed(items)
    )


def _listed(value: object) -> object:
    """A list of items, also in a text of JSON; other values as they are."""
    try:
        items = chats.parsed_text(value, "")
    except BadRow:
        return value
    return items if are_items(items) else value


def are_items(value: object) -> bool:
    """Whether a value is a list of items, which have a role or a known type."""
    try:
        items = chats.parsed(value)
    except BadRow:
        return False
    return (
        isinstance(items, list)
        and bool(items)
        and all(
            isinstance(item, Mapping) and ("role" in item or str(item.get("type")) in _READERS)
            for item in items
        )
    )


def _refuse_a_part(row: Row) -> None:
    """Raise BadRow where a part of the log is elsewhere or missing."""
    status = row.get("status")
    if status not in (None, "", "completed"):
        raise BadRow(f"its status is {status!r}, so the answer is not whole")
    if row.get("error"):
        raise BadRow(f"its error is filled: {str(row['error'])[:60]}")
    if row.get("previous_response_id"):
        raise BadRow("previous_response_id is filled, so the log begins in another row")


def _chat(row: Row, turns: list[Turn]) -> Chat:
    return chats.read_log({name: row.get(name) for name in ("tools", "images", FOLDER)}, turns)


def _instructions(row: Row) -> list[Turn]:
    return _turns(row["instructions"], "instructions", "system") if row.get("instructions") else []


def _turns(value: object, column: str, role: str) -> list[Turn]:
    """The turns of a list of items, or of a text that `role` says. Raises BadRow."""
    if role != "assistant":  # an answer may be JSON
        value = _listed(value)
    if isinstance(value, str):
        return [{"role": role, "content": text_of({column: value}, column)}]
    items = chats.parsed(value)
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise BadRow(f"{column} is not a list of items")
    if not items:
        raise BadRow(f"empty {column}")
    turns: list[Turn] = []
    for item_number, item in enumerate(items, start=1):
        turn = _turn(item, f"{column} item {item_number}")
        if turns and turn["role"] == turns[-1]["role"] == "assistant":
            turns[-1]["content"] = _joined(turns[-1]["content"], turn["content"])
        else:
            turns.append(turn)
    return turns


def _joined(content: list[Any], more: list[Any]) -> list[Any]:
    is_text = [parts.kind_of(part) in (*parts.TEXTS, parts.REFUSAL) for part in (content + more)]
    place = len(content)
    between = [_PARAGRAPH] if content and more and all(is_text[place - 1 : place + 1]) else []
    return content + between + more


def _turn(item: Item, where: str) -> Turn:
    kind = str(item.get("type") or ("message" if "role" in item else None))
    if kind not in _READERS:
        raise BadRow(f"{where} is {kind}, and can be one of {', '.join(_READERS)}")
    if item.get("status") not in (None, "completed"):
        raise BadRow(f"{where}: its status is {item['status']!r}, so it is not whole")
    return _READERS[kind](item, where)


def _message(item: Item, where: str) -> Turn:
    role = item.get("role")
    content = item.get("content")
    if role == "assistant":
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(content, list):
            raise BadRow(f"{where}: its content is neither text nor parts")
    return {"role": role, "content": content}


def _reasoning(item: Item, where: str) -> Turn:
    words = [item[name] for name in ("content", "summary") if item.get(name)]
    part = {"type": "reasoning", "content": words[0]} if words else {"type": parts.REDACTED}
    return {"role": "assistant", "content": [part]}


def _call(item: Item, where: str) -> Turn:
    if not isinstance(item.get("arguments"), str | Mapping):
        raise BadRow(f"{where}: a function_call without arguments")
    # Without the item's own id, which is another one.
    call = {name: item.get(name) for name in ("type", "call_id", "name", "arguments")}
    return {"role": "assistant", "content": [call | {"call_id": _id_of(item, where)}]}


def _custom_call(item: Item, where: str) -> Turn:
    if not isinstance(item.get("input"), str):
        raise BadRow(f"{where}: a custom_tool_call without input")
    call = {"type": "function_call", "arguments": {tool_forms.INPUT: item["input"]}}
    return _call(dict(item) | call, where)


def _result(item: Item, where: str) -> Turn:
    return {"role": "tool", "tool_call_id": _id_of(item, where), "content": item.get("output")}


def _id_of(item: Item, where: str) -> str:
    if not isinstance(item.get("call_id"), str):
        raise BadRow(f"{where}: an item of a call without a call_id")
    return str(item["call_id"])


_READERS: dict[str, Callable[[Item, str], Turn]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _result,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _result,
}
