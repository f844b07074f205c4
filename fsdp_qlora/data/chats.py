"""Chat rows in OpenAI's and in ShareGPT's columns become the same messages, checked before a template sees them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_qlora.data.examples import BadRow, Chat, unicode_of

# How roles are called in datasets -> in chat templates.
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response"), "tool"),
}
CALL = "function_call"  # ShareGPT's turn that is a call of a tool, as JSON
KEPT = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")  # what chat templates know besides


def read_messages(row: Mapping[str, object]) -> Chat:
    """OpenAI's `messages`, with `tools`; `weight` 0 or 1 of a turn says whether it is learned. Raises BadRow."""
    return _chat(row, _turns(row.get("messages"), "messages"))


def read_conversations(row: Mapping[str, object]) -> Chat:
    """ShareGPT's `conversations` of `from` and `value` (or `role` and `content`), with `system`. Raises BadRow."""
    return _chat(row, _turns(row.get("conversations"), "conversations"))


def read_prompted(row: Mapping[str, object], column: str) -> Chat:
    """Messages in `prompt`, if there are any, and in `column`; of the prompt none is learned. Raises BadRow."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    answer = row.get(column)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    asked = _turns(prompt, "prompt") if prompt else []
    return _chat(row, [{**turn, "weight": 0} for turn in asked] + _turns(answer, column))


def _turns(value: object, column: str) -> list[dict[str, Any]]:
    if isinstance(value, str):  # csv has no other way
        value = _json(value, column)
    if not isinstance(value, Sequence) or not all(isinstance(turn, Mapping) for turn in value):
        raise BadRow(f"{column} is not a list of turns")
    if not value:
        raise BadRow(f"empty {column}")
    return [dict(turn) for turn in value]


def _chat(row: Mapping[str, object], turns: list[dict[str, Any]]) -> Chat:
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    weights = [_weight(turn, number) for number, turn in enumerate(turns, start=1)]
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": unicode_of(system, "system")})
        weights.insert(0, None)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("no assistant turn, so nothing to learn")
    return Chat(messages, _tools(row.get("tools")), tuple(weights))


def _message(turn: dict[str, Any], number: int) -> dict[str, Any]:
    """One turn as OpenAI writes it."""
    called = turn.get("role") if turn.get("role") is not None else turn.get("from")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if called == CALL:
        return {"role": "assistant", "tool_calls": _calls([_json(content, f"turn {number}")], number)}
    if not isinstance(called, str) or called.lower() not in ROLES:
        raise BadRow(f"turn {number}: unknown role {called!r}; known: {', '.join([*ROLES, CALL])}")
    message: dict[str, Any] = {"role": ROLES[called.lower()]}
    if turn.get("tool_calls"):
        message["tool_calls"] = _calls(turn["tool_calls"], number)
    if content is not None:
        message["content"] = unicode_of(_plain(content, number), f"turn {number}")
    elif "tool_calls" not in message:
        raise BadRow(f"turn {number}: its content is null")
    return message | {key: turn[key] for key in KEPT if isinstance(turn.get(key), str)}


def _plain(content: object, number: int) -> str:
    """The text of a turn, also of one in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRow(f"turn {number}: its content is not text but {type(content).__name__}")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadRow(f"turn {number}: a part of its content is {kind}, and only text can be trained on")
    return "".join(part["text"] for part in content)


def _weight(turn: Mapping[str, Any], number: int) -> int | None:
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        raise BadRow(f"turn {number}: its weight is {weight!r}, and can be 0 (only read) or 1 (learned)")
    return None if weight is None else int(weight)


def _calls(calls: object, number: int) -> list[dict[str, Any]]:
    """Calls of tools, each with a name; arguments as an object, which is what templates write out again."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        call = _without_nulls(call)
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRow(f"turn {number}: a tool call without a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json(arguments, f"turn {number}: the arguments of {function['name']}") if arguments else {}
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        found.append({**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return found


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        tools = _json(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    tools = _without_nulls(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("tools is not a list of objects")
    return tools


def _without_nulls(value: Any) -> Any:
    """Tables fill what an object lacks with null; a template would write it out."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _json(text: object, where: str) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{where} is not JSON") from error
