"""Chat rows in OpenAI's and in ShareGPT's columns become the same messages.

They are checked before a template sees them.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_qlora.data.content import (
    BadRow,
    Chat,
    Row,
    plain_value,
    refuse_media,
    text_of,
    texts_of,
    unicode_of,
)
from fsdp_qlora.data.text import linked_calls, parts, tool_forms
from fsdp_qlora.data.text.conversation import REASONING
from fsdp_qlora.data.text.images import Images

# How roles are called in datasets -> in chat templates.
ROLES = (
    {role: role for role in ("system", "developer", "user", "assistant", "tool")}
    | dict.fromkeys(("human", "prompter"), "user")
    | dict.fromkeys(
        ("gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"), "assistant"
    )
    | dict.fromkeys(
        ("function", "observation", "function_response", "tool_response", "ipython"), "tool"
    )
)
CALLS = ("function_call", "tool_call")  # turns that are a call of a tool, as JSON
_VALUES = ("default", "const", "enum", "examples")  # of JSON Schema
KEPT = ("name", "tool_call_id")  # what chat templates know besides
TOOL_NAME = "tool_name"  # Ollama's, of a result
# How much a turn is learned, as OpenAI, axolotl, ms-swift and LLaMA-Factory call it.
WEIGHTS = ("weight", "train", "loss", "loss_weight")
# A question and its answer in one object, as ms-swift and Capybara write them.
PAIRS = (("human", "assistant"), ("user", "assistant"), ("input", "output"))
# Of a call, as OpenAI, Anthropic, Llama and Gemini have them.
ARGUMENTS = ("arguments", "input", "parameters", "args")
HIDDEN = "reasoning without text, such as encrypted reasoning, is left out"
_USED = {
    "role",
    "from",
    *parts.CONTENTS,
    "tool_calls",
    "function_call",
    *KEPT,
    TOOL_NAME,
    *REASONING,
    *WEIGHTS,
}


def read_turns(row: Row, column: str) -> Chat:
    """Turns of `role` and `content` or of `from` and `value`, with `tools` and `system`.

    Raises BadRow.
    """
    return read_chat(row, turns(row.get(column), column))


def read_prompted(row: Row) -> Chat:
    """Messages in `prompt`, if there are any, and in `completion`.

    Messages of the prompt are not learned. Raises BadRow.
    """
    prompt = said_by("user", row["prompt"], "prompt") if row.get("prompt") else []
    answer = said_by("assistant", row.get("completion"), "completion")
    return read_chat(row, [(turn | {"weight": 0}) for turn in prompt] + answer)


def said_by(role: str, value: object, column: str) -> list[dict[str, Any]]:
    """The turns in a column that may also be a text or a single message. Raises BadRow."""
    if isinstance(value, str):
        return [{"role": role, "content": text_of({column: value}, column)}]
    return turns([value] if isinstance(value, Mapping) else value, column)


def turns(value: object, column: str) -> list[dict[str, Any]]:
    """The turns in a column, as they are. Raises BadRow."""
    if isinstance(value, str):  # csv has no other way
        value = _json(value, column)
    value = parsed(value)
    if not isinstance(value, Sequence) or not all(isinstance(turn, Mapping) for turn in value):
        raise BadRow(f"{column} is not a list of turns")
    if not value:
        raise BadRow(f"empty {column}")
    return [message for turn in value for message in _said(turn)]


def _said(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    for question, answer in PAIRS:
        if turn.keys() >= {question, answer}:
            roles = (("user", question), ("assistant", answer))
            return [
                {"role": role, "content": turn[name]}
                for role, name in roles
                if turn[name] is not None
            ]
    role = ROLES.get(str(_called(turn)).lower())
    if role == "user":
        return parts.without_results(turn)
    refusal = turn.get(parts.REFUSAL)
    if role == "assistant" and refusal and turn.get("content") is None:
        # OpenAI has the words of an answer that refuses in a field of its own.
        return [dict(turn) | {"content": refusal, parts.REFUSAL: None}]
    return [dict(turn)]


def _called(turn: Mapping[str, Any]) -> Any:
    """The role of a turn, as its row has it."""
    return turn.get("role") if turn.get("role") is not None else turn.get("from")


def read_chat(row: Row, turns: list[dict[str, Any]], *, is_log: bool = False) -> Chat:
    """The turns as messages, with what else the row has for a chat.

    is_log: whether each call must have its result before others speak. Raises BadRow.
    """
    images = Images(row)
    messages = [
        _message(turn, turn_number, images) for turn_number, turn in enumerate(turns, start=1)
    ]
    for turn_number, message in enumerate(messages, start=1):
        _check_unicode(message, f"turn {turn_number}")
    notes = linked_calls.check(messages, is_log=is_log)
    if any(map(parts.hide_reasoning, turns)):
        notes.append(HIDDEN)
    weights = [_weight(turn, turn_number) for turn_number, turn in enumerate(turns, start=1)]
    system = _system(row.get("system"))
    if system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": unicode_of(system, "system")})
        weights.insert(0, None)
    images.show_rest(messages)
    unused = dict.fromkeys(
        key
        for turn in turns
        for key, value in turn.items()
        if value is not None and key not in _USED
    )
    return Chat(
        messages,
        _tools(row.get("tools")),
        tuple(weights),
        tuple(unused),
        tuple(images.shown),
        notes=tuple(notes),
    )


def _system(value: object) -> str:
    """The text of a system prompt, which Anthropic's API has in parts, too. Raises BadRow."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else ""
    texts = []
    for part in value:
        text = part
        if not isinstance(part, str):
            text = part.get("text") if parts.kind_of(part) == "text" else None
        if not isinstance(text, str):
            raise BadRow("a part of system is not text")
        texts.append(text)
    return "\n\n".join(texts)


def read_log(row: Row, turns: list[dict[str, Any]]) -> Chat:
    """Read turns of an agent's log, with `tools`, `system` and `images`.

    Results get the order of their calls and the names of the functions, and tools OpenAI's form.
    Raises BadRow.
    """
    chat = read_chat(row, turns, is_log=True)
    messages = linked_calls.with_names(linked_calls.in_order_of_calls(chat.messages))
    tools, tool_notes = tool_forms.all_in_chat_form(chat.tools or [])
    notes = [note for note in chat.notes if note != linked_calls.OTHER_ORDER]
    return dataclasses.replace(
        chat, messages=messages, tools=tools or None, notes=(*notes, *tool_notes)
    )


def only_read(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns in front of an answer, of which nothing is learned. Raises BadRow.

    An answer that goes on from an assistant's turn would be learned as one of its own.
    """
    if turns and ROLES.get(str(_called(turns[-1])).lower()) == "assistant":
        raise BadRow("the answer goes on from a turn of the assistant, which is cut there")
    return [(turn | {"weight": 0}) for turn in turns]


def _message(turn: dict[str, Any], turn_number: int, images: Images) -> dict[str, Any]:
    """One turn as OpenAI writes it."""
    called = _called(turn)
    where = f"turn {turn_number}"
    content = next((turn[name] for name in parts.CONTENTS if turn.get(name) is not None), None)
    if called in CALLS:
        return {"role": "assistant", "tool_calls": _calls([_json(content, where)], turn_number)}
    if not isinstance(called, str) or called.lower() not in ROLES:
        raise BadRow(f"{where}: unknown role {called!r}; known: {', '.join([*ROLES, *CALLS])}")
    message: dict[str, Any] = {"role": ROLES[called.lower()]}
    is_answer = message["role"] == "assistant"
    content_parts = parts.split(
        _result(content) if message["role"] == "tool" else content, where, is_answer=is_answer
    )
    calls = _all_calls(turn, content_parts, turn_number)
    if calls:
        message["tool_calls"] = calls
    thoughts = _thoughts(turn, content_parts, where) if is_answer else {}
    if content_parts.content is not None:
        message["content"] = images.read(content_parts.content, turn_number, can_show=not is_answer)
    elif content_parts.thought:
        message["content"] = ""
    elif "tool_calls" not in message:
        raise BadRow(f"{where}: its content is null")
    if message["role"] == "user":
        for text in texts_of(message):
            refuse_media(text, where)
    message |= _kept(turn, message["role"]) | thoughts
    is_empty = not any(
        str(message.get(key) or "").strip() for key in ("content", "tool_calls", *KEPT, *REASONING)
    )
    if is_answer and is_empty and _weight(turn, turn_number) != 0:
        raise BadRow(f"{where}: the assistant says nothing")
    return message


def _kept(turn: Mapping[str, Any], role: str) -> dict[str, str]:
    kept = {name: turn.get(name) for name in KEPT}
    if kept["name"] is None and role == "tool":
        kept["name"] = turn.get(TOOL_NAME)
    kept["tool_call_id"] = _id(kept["tool_call_id"])
    return {name: value for name, value in kept.items() if isinstance(value, str)}


def _id(value: object) -> object:
    """An id, which some logs have as a number, as text."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else value


def _thoughts(turn: Mapping[str, Any], content_parts: parts.Said, where: str) -> dict[str, str]:
    """The reasoning of an answer, from fields of its own or from parts of the content.

    Raises BadRow.
    """
    # A bool is no text but a mark, as in Gemini's parts.
    given = {name: turn[name] for name in REASONING if not isinstance(turn.get(name), bool | None)}
    thoughts = {name: parts.words_of(value, where) for name, value in given.items()}
    if not content_parts.thought or content_parts.thought in thoughts.values():
        return thoughts
    if any(thoughts.values()):
        raise BadRow(
            f"{where}: its reasoning in {', '.join(thoughts)} differs from the one in its content"
        )
    return {REASONING[0]: content_parts.thought}


def _result(content: object) -> object:
    """The answer of a tool: text, or parts; any other value as JSON."""
    value = plain_value(content)
    is_listed = isinstance(value, list) and all(isinstance(part, Mapping) for part in value)
    is_parts = is_listed and all(
        part.keys() == {"text"} or isinstance(part.get("type"), str) for part in value
    )
    if value is None or isinstance(value, str) or is_parts:
        return content if is_parts else value
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise BadRow(f"the answer of a tool cannot be JSON ({error})") from error


def _weight(turn: Mapping[str, Any], turn_number: int) -> float | None:
    for name in WEIGHTS:
        weight = turn.get(name)
        if weight is not None and not (isinstance(weight, int | float) and 0 <= weight < math.inf):
            raise BadRow(
                f"turn {turn_number}: its {name} is {weight!r}, and can be 0 (only read), "
                "1 or another number"
            )
        if weight is not None:
            # An int says that a mask is enough for the turn (chat_template.py).
            return int(weight) if weight in (0, 1) else float(weight)
    return None


def _all_calls(
    turn: Mapping[str, Any], content_parts: parts.Said, turn_number: int
) -> list[dict[str, Any]]:
    """The calls of tools, from fields of their own or from parts of the content. Raises BadRow."""
    calls = turn.get("tool_calls") or turn.get("function_call")
    called = _calls(calls, turn_number) if calls else []
    among_parts = _calls(list(content_parts.calls), turn_number)
    # The same calls may be in both, with ids in one of them alone.
    functions, functions_among_parts = (
        [call["function"] for call in calls] for calls in (called, among_parts)
    )
    if called and among_parts and functions != functions_among_parts:
        raise BadRow(f"turn {turn_number}: its tool calls differ from the ones in its content")
    return called or among_parts


def _calls(calls: object, turn_number: int) -> list[dict[str, Any]]:
    """Calls of tools, each with a name.

    Arguments are an object, which is what templates write out again.
    """
    where = f"turn {turn_number}"
    tool_calls = []
    if isinstance(calls, str):
        calls = _json(calls, f"{where}: its tool calls")
    listed: list[Any] = parsed(calls if isinstance(calls, list) else [calls])
    for call in listed:
        function = _function(call) if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise BadRow(f"{where}: a tool call without a name")
        arguments: Any = next((function[name] for name in ARGUMENTS if function.get(name)), {})
        if isinstance(arguments, str):
            arguments = _json(arguments, f"{where}: the arguments of {function['name']}")
        if not isinstance(arguments, dict):
            raise BadRow(f"{where}: the arguments of {function['name']} are not an object")
        # An item of OpenAI's responses has an id of its own, too, of which no result is.
        all_ids = [_id(call.get(name)) for name in ("call_id", "id")]
        ids = [each for each in all_ids if isinstance(each, str)]
        tool_call: dict[str, Any] = {"id": ids[0]} if ids else {}
        tool_call["type"] = "function"
        tool_call["function"] = {"name": function["name"], "arguments": plain_value(arguments)}
        tool_calls.append(tool_call)
    return tool_calls


def _function(call: dict[str, Any]) -> Any:
    """The function of a call; of OpenAI's custom tools, one that takes their text."""
    custom = call.get("custom")
    if isinstance(custom, Mapping) and isinstance(custom.get("input"), str):
        return {"name": custom.get("name"), "arguments": {tool_forms.INPUT: custom["input"]}}
    return call.get("function") or call


def needs_template(row: Row) -> bool:
    """Whether a row has what only a chat template shows: a system prompt, tools or images.

    Raises BadRow.
    """
    return bool(row.get("system") or row.get("images") or _tools(row.get("tools")))


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        tools = _json(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    if isinstance(tools, Mapping) and tools.keys() & {"name", "function"}:
        tools = [tools]
    tools = plain_value(parsed(tools))
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("tools is not a list of objects")
    _check_unicode(tools, "tools")
    return [tool_forms.with_parameters(_schema(tool)) for tool in tools]


def _schema(value: Any) -> Any:
    """A tool's description without nulls, which mean nothing in it but as values.

    A template would write them out.
    """
    if isinstance(value, Mapping):
        return {
            key: inner if key in _VALUES else _schema(inner)
            for key, inner in value.items()
            if inner is not None or key in _VALUES
        }
    return [_schema(inner) for inner in value] if isinstance(value, list) else value


def _check_unicode(value: object, where: str) -> None:
    """Raise BadRow if a text or a name within a value has half a surrogate pair."""
    unicode_of(json.dumps(value, ensure_ascii=False, skipkeys=True, default=str), where)


def parsed(values: object) -> Any:
    """A list whose objects may each be JSON text, as tables have objects of different kinds."""
    if not isinstance(values, list):
        return values
    return [
        _json(value, "") if isinstance(value, str) and value[:1] == "{" else value
        for value in values
    ]


def filled(value: Mapping[str, Any]) -> dict[str, Any]:
    """An object without its nulls, which tables write for keys that it has not."""
    return {key: inner for key, inner in value.items() if inner is not None}


def parsed_text(value: object, where: str) -> Any:
    """A value, or that in a text of JSON. A text of another kind stays as it is. Raises BadRow."""
    return _json(value, where) if isinstance(value, str) and value[:1] in ("{", "[") else value


def _json(text: object, where: str) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{where} is not JSON") from error
