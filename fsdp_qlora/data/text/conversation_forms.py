"""The forms in which chat templates want a conversation: its calls, tools, roles and reasoning.

Runs in the worker of chat templates.
"""

import contextlib
import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from fsdp_qlora.data.content import texts_of
from fsdp_qlora.data.text.conversation import REASONING, Message, Render, T, Tools, squeezed
from fsdp_qlora.data.text.linked_calls import with_names


def written(make: Callable[[list[Message], Tools], T], messages: list[Message], tools: Tools) -> T:
    """The result of `make` for the first way of writing a conversation that the template takes."""
    import jinja2

    # These errors mean a form that the template does not know. If it knows none, the last line
    # raises the error of the row's own.
    for way in _ways(messages, tools):
        with contextlib.suppress(TypeError, jinja2.UndefinedError):
            return make(*way)
    return make(messages, tools)


def _ways(messages: list[Message], tools: Tools) -> Iterator[tuple[list[Message], Tools]]:
    """The ways of writing a conversation, the row's own first.

    Some templates want a content in each message that calls tools, arguments as text, OpenAI's
    form of tools, or the name of the tool in each result.
    """
    chats = _with_calls(messages)
    named = with_names(messages)
    if named != messages:
        chats += _with_calls(named)
    all_tools = [tools]
    if any("function" not in tool for tool in tools or ()):
        in_openai_form = [
            tool if "function" in tool else {"type": "function", "function": tool}
            for tool in tools or ()
        ]
        all_tools.append(in_openai_form)
    yield from itertools.product(chats, all_tools)


def _with_calls(messages: list[Message]) -> list[list[Message]]:
    """Messages, and with them those whose calls are written in another way."""
    if not any("tool_calls" in message for message in messages):
        return [messages]
    with_content = [({"content": ""} | message) for message in messages]
    return [messages, with_content, _with_text(messages), _with_text(with_content)]


def _with_text(messages: list[Message]) -> list[Message]:
    """Messages whose calls have their arguments as text."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return messages


def readable(render: Render, messages: list[Message]) -> list[Message]:
    """Messages with the roles and names that the template reads."""
    return _with_thoughts(render, _with_system(render, messages))


def _with_system(render: Render, messages: list[Message]) -> list[Message]:
    """Messages with the role system for developer, its newer name, if the template lacks that."""
    texts = [
        text for message in messages if message["role"] == "developer" for text in texts_of(message)
    ]
    if not texts:
        return messages
    as_system = [
        (message | {"role": "system"}) if message["role"] == "developer" else message
        for message in messages
    ]
    for way in (messages, as_system):
        with contextlib.suppress(Exception):  # a template can raise anything
            written = squeezed(render(way)[0])
            if all(squeezed(text) in written for text in texts):
                return way
    return messages


def _with_thoughts(render: Render, messages: list[Message]) -> list[Message]:
    """Messages whose reasoning has the name that the template reads.

    It becomes a part of the content if the template reads that.
    """
    thoughts = [_thought_of(message) for message in messages]
    if not any(thoughts):
        return messages
    named = [
        (dict.fromkeys(REASONING, thought) | message) if thought else message
        for message, thought in zip(messages, thoughts, strict=True)
    ]
    # Up to the first reasoning: templates leave it out of earlier turns, which would tell nothing.
    first = next(turn for turn, thought in enumerate(thoughts) if thought)
    in_parts = [
        _in_parts(message, thought) if thought else message
        for message, thought in zip(messages, thoughts, strict=True)
    ]
    for way in (named, in_parts):
        with contextlib.suppress(Exception):  # a template can raise anything
            text = render(way[: first + 1])[0]
            if squeezed(thoughts[first]) in squeezed(text) and not any(
                mark in text for mark in _LISTED
            ):
                return way
    return named


def _thought_of(message: Message) -> Any:
    """The reasoning of a message, under any name; "" if it has none."""
    for name in REASONING:
        if message.get(name):
            return message[name]
    return ""


# Where a template writes out a list that it wants as text: the form of Python and that of JSON.
_LISTED = ("'type': 'thinking'", '"type": "thinking"')


def _in_parts(message: Message, thought: str) -> Message:
    """A message with its reasoning as a part of the content."""
    plain = {name: value for name, value in message.items() if name not in REASONING}
    content = message.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return plain | {"content": [{"type": "thinking", "thinking": thought}, *parts]}
