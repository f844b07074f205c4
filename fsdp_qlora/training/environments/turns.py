"""Conversations with an environment, as TRL builds them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]


class Turn(NamedTuple):
    """A request for an answer."""

    messages: list[Message]
    """The whole conversation."""
    tools: list[dict[str, Any]]
    """JSON schemas, as chat templates take them."""


def first_messages(row: Mapping[str, Any]) -> list[Message]:
    """The prompt of a row as messages; an empty one if the environment gives it."""
    prompt = row.get("prompt")
    if isinstance(prompt, list) and prompt:
        return prompt
    return [{"role": "user", "content": prompt or ""}]


def add_observation(
    messages: Sequence[Message], observation: str | list[Any] | None
) -> list[Message]:
    """Add the result of `reset` to a prompt.

    Messages follow the prompt, or take the place of an empty one. A text or a list of blocks is
    appended to the last message.
    """
    if observation is None:
        return list(messages)
    *before, last = messages
    if isinstance(observation, list) and all(_is_message(each) for each in observation):
        kept = messages if last.get("content") or before else []
        return [*kept, *observation]
    content: Any = last.get("content") or ""
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*before, last | {"content": content + observation}]


def answer_messages(observation: str | list[Any] | None) -> list[Message]:
    """The environment's answer to an answer without calls."""
    if observation is None:
        return []
    if isinstance(observation, list) and all(_is_message(each) for each in observation):
        return observation
    return [{"role": "user", "content": observation}]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value
