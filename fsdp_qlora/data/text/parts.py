"""Parts of a message's content.

The type of a part says what it is, whatever fields it has besides.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsdp_qlora.data.content import BadRow

TEXTS = ("text", "input_text", "output_text")
IMAGES = ("image", "image_url", "input_image")
THOUGHTS = (
    "thinking",
    "reasoning",
    "reasoning_content",
    "reasoning_text",
    "summary_text",
    "thought",
)
REDACTED = "redacted_thinking"
REFUSAL = "refusal"
CALLS = ("tool_use", "tool_call", "function_call")
RESULT = "tool_result"
CONTENTS = ("content", "value", "parts")  # how the content of a turn is called
# Where a part has the words of its reasoning; OpenAI has a list of parts in the last two.
_WORDS = ("text", "thinking", "reasoning", "reasoning_content", "thought", "content", "summary")
_PARAGRAPH = "\n\n"


class Said(NamedTuple):
    """The parts of a turn, by their meaning."""

    content: object
    """Text, or parts of text and images; None where all parts were reasoning and calls."""
    thought: str = ""
    calls: Sequence[Mapping[str, Any]] = ()


def kind_of(part: object) -> str:
    """The type of a part, or the names of its fields where it has none."""
    if not isinstance(part, Mapping):
        return type(part).__name__
    if part.get("type") is not None:
        return str(part["type"])
    if part.get("thought") is True:  # Gemini's reasoning, which has its words in text
        return "thought"
    return "text" if "text" in part else " and ".join(map(str, part))


def split(content: object, where: str, *, is_answer: bool) -> Said:
    """Take reasoning and calls of tools out of a content in parts.

    Raises:
        BadRow: a question has such parts, or they are in an order in which no chat template writes
            them.
    """
    if not isinstance(content, list | tuple):
        return Said(content)
    if is_answer:
        content = [_as_text(part) for part in content if not is_hidden(part)]
    # 0 for reasoning, 1 for text and images, 2 for calls: the order of chat templates.
    ranks = [_rank(part) for part in content]
    if not set(ranks) & {0, 2}:
        return Said(content)
    if not is_answer:
        kind = next(
            kind_of(part) for part, rank in zip(content, ranks, strict=True) if rank in (0, 2)
        )
        raise BadRow(f"{where}: a part of its content is {kind}, which only an answer can have")
    # Blank texts say nothing, so they may be in any place.
    filled = [
        rank for part, rank in zip(content, ranks, strict=True) if rank != 1 or not _is_blank(part)
    ]
    if filled != sorted(filled):
        raise BadRow(
            f"{where}: its parts are not in the order in which chat templates write them: "
            "reasoning, text, calls"
        )
    thoughts, others, calls = (
        [part for part, r in zip(content, ranks, strict=True) if r == rank] for rank in range(3)
    )
    spoken = None if all(map(_is_blank, others)) else others
    return Said(
        spoken, _PARAGRAPH.join(filter(None, (words_of(part, where) for part in thoughts))), calls
    )


def is_hidden(part: object) -> bool:
    """Whether it is reasoning that an API gives encrypted alone."""
    kind = kind_of(part)
    if kind not in THOUGHTS or not isinstance(part, Mapping):
        return kind == REDACTED
    return bool(part.get("encrypted_content")) and not any(part.get(name) for name in _WORDS)


def hide_reasoning(turn: Mapping[str, Any]) -> bool:
    """Whether a part of an answer is reasoning that cannot be read."""
    contents = [turn[name] for name in CONTENTS if isinstance(turn.get(name), list | tuple)]
    return any(is_hidden(part) for content in contents for part in content)


def _as_text(part: object) -> object:
    """A part in which the assistant refuses to answer, as text; others as they are."""
    if isinstance(part, Mapping) and kind_of(part) == REFUSAL:
        return {"type": "text", "text": part.get(REFUSAL)}
    return part


def _rank(part: object) -> int:
    kind = kind_of(part)
    if kind in THOUGHTS:
        return 0
    return 2 if kind in CALLS else 1


def _is_blank(part: object) -> bool:
    text = part.get("text") if isinstance(part, Mapping) else None
    return isinstance(text, str) and not text.strip()


def words_of(thought: object, where: str) -> str:
    """The text of reasoning, which may be in parts. Raises BadRow if it has none."""
    if isinstance(thought, str):
        return thought
    if isinstance(thought, list | tuple):
        between = "" if all(kind_of(part) in TEXTS for part in thought) else _PARAGRAPH
        return between.join(words_of(part, where) for part in thought)
    texts = []
    if isinstance(thought, Mapping):
        texts = [thought[name] for name in _WORDS if thought.get(name) is not None]
    if not texts:
        raise BadRow(f"{where}: its reasoning has no text ({kind_of(thought)})")
    filled = [text for text in texts if text]
    return words_of(filled[0] if filled else "", where)


def without_results(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a question that has results of tools among its parts, as Anthropic's API has it.

    The results become turns of a tool.
    """
    name = next((name for name in CONTENTS if turn.get(name) is not None), "")
    content = turn.get(name)
    if not isinstance(content, list | tuple) or all(kind_of(part) != RESULT for part in content):
        return [dict(turn)]
    turns: list[dict[str, Any]] = []
    for is_result, parts in itertools.groupby(content, key=lambda part: kind_of(part) == RESULT):
        group = list(parts)
        if not is_result:
            turns += [dict(turn) | {name: group}]
            continue
        turns += [
            {
                "role": "tool",
                "content": _or_empty(part.get("content")),
                "tool_call_id": part.get("tool_use_id"),
            }
            for part in group
        ]
    return turns


def _or_empty(content: object) -> object:
    return "" if content is None else content
