"""The rows that a conversation becomes: its text with the places of the turns that are learned.

Runs in the worker of chat templates.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from fsdp_qlora.data.content import BadRow, texts_of
from fsdp_qlora.data.text.conversation import (
    BEGINS,
    ENDS,
    REASONING,
    Conversation,
    Message,
    Span,
    squeezed,
)
from fsdp_qlora.data.text.turn_parts import ReadOnly, Turn, find_read_only

# Notes on rows that are used.
APART = (
    "turns that are rows of their own: the chat template renders them differently when other "
    "turns follow"
)
CUT = "the chat template leaves out a part of what the assistant says, such as its reasoning"
EMPTY = (
    "the chat template writes a block for reasoning without words, which is only read, not learned "
    "(--learn +empty_reasoning learns it)"
)
LEFT_OUT = "the chat template leaves out what the row has for: {}"


class LearnedRow(NamedTuple):
    """A text with the turns that are learned from it."""

    text: str
    spans: list[tuple[int, int, int]]
    """(start, end, turn) of each."""
    read_only: list[Span]
    """The parts of the turns that are only read, in order."""


def learned_rows(
    whole: Conversation, turns: Sequence[int], *, apart: bool, read_only: Collection[str] = ()
) -> tuple[list[LearnedRow], list[str]]:
    """The conversation with the spans of these turns, and turns that are rows of their own.

    A turn is in a row of its own, which ends with it, if the template renders it or the turns
    before differently when others follow: without their reasoning, as a rule. So it is learned as
    the model writes it, behind the prompt that the model gets.

    Args:
        apart: whether turns may become rows of their own.
        read_only: the parts of turns that are only read, as of `Learn`.
    Returns:
        The rows, and notes.
    Raises:
        BadRow: a turn or a part cannot be found, or the template does not write the turn.
    """
    rows: list[LearnedRow] = []
    here = LearnedRow(whole.text, [], [])
    notes = []
    for turn in turns:
        text, span, is_cut = _place(whole, turn, apart=apart)
        parts = ReadOnly([])
        if read_only:
            parts = find_read_only(whole, Turn(turn, whole.messages[turn], text, span), read_only)
        if is_cut:
            notes.append(CUT)
        if parts.has_empty:
            notes.append(EMPTY)
        if text == whole.text:
            here.spans.append((*span, turn))
            here.read_only.extend(parts.spans)
        else:
            rows.append(LearnedRow(text, [(*span, turn)], parts.spans))
            if turn + 1 < len(whole.messages):
                notes.append(APART)
    if rows and here.spans:
        notes.append(APART)
    # Without a turn to learn the conversation is a row, too: `--learn all` learns the text around.
    if here.spans or not rows:
        rows.append(here)
    return rows, list(dict.fromkeys(notes))


def _place(whole: Conversation, turn: int, *, apart: bool) -> tuple[str, Span, bool]:
    """Choose the text with the most of a turn, the whole conversation if all have as much.

    Returns:
        The text, the turn's place in it, and whether a part of the turn is missing.
    """
    message = whole.messages[turn]
    all_places = whole.places(turn)
    places = [place for place in all_places if apart or place[0] == whole.text]
    if not places:
        raise BadRow(f"turn {turn + 1}: {_OTHERWISE if all_places else _UNKNOWN}")
    missing = [_num_missing(message, text[slice(*span)]) for text, span in places]
    text, span = places[missing.index(min(missing))]
    _check_written(turn, message, text[slice(*span)])
    return text, span, min(missing) > 0


_UNKNOWN = (
    "where it begins behind the generation prompt is unknown, because the chat template writes "
    "it, or the turns before, in another way there. Use another chat template with "
    "--prompt_template"
)
_OTHERWISE = (
    "its weight, or what of it is only read, has no place, because the chat template renders it "
    "differently when other turns follow, and --learn all has no rows of its own for it"
)


def _num_missing(message: Message, text: str) -> int:
    """How much of what a turn says a text lacks: its content, its reasoning, its calls."""
    content = "".join(texts_of(message)).lstrip().removeprefix(BEGINS)  # that may be in the prompt
    pieces = [content]
    pieces += [str(message.get(name) or "") for name in REASONING]
    pieces += [call["function"]["name"] for call in message.get("tool_calls") or []]
    # Without white space, which templates change.
    return sum(squeezed(piece) not in squeezed(text) for piece in pieces)


def _check_written(turn: int, message: Message, written: str) -> None:
    """Raise BadRow where a template writes nothing of what is to be learned."""
    calls = message.get("tool_calls") or []
    names = [call["function"]["name"] for call in calls]
    for name in names:
        if name not in written:
            raise BadRow(
                f"turn {turn + 1}: the chat template writes no tool calls; "
                "--prompt_template takes another"
            )
        if written.count(name) < names.count(name):
            raise BadRow(
                f"turn {turn + 1}: the chat template writes one tool call, and there are "
                f"{len(calls)}; --prompt_template takes another"
            )
    # The last word is enough: templates may cut what is before, such as reasoning.
    words = "".join(texts_of(message)).rpartition(ENDS)[2].split()
    # beside calls, some templates have no place for words
    if words and words[-1] not in written and not calls:
        raise BadRow(f"turn {turn + 1}: the chat template does not write the text of this turn")


def left_out(messages: list[Message], tools: list[dict[str, Any]] | None, text: str) -> list[str]:
    """The roles whose messages a template leaves out, and "tools" if it leaves them out.

    The assistant's messages are checked elsewhere.
    """
    written = squeezed(text)
    roles = dict.fromkeys(
        message["role"]
        for message in messages
        if message["role"] in ("system", "developer", "user")
        and any(squeezed(text) not in written for text in texts_of(message))
    )
    functions = [tool.get("function", tool) for tool in tools or []]
    names = [
        tool["name"]
        for tool in functions
        if isinstance(tool, dict) and isinstance(tool.get("name"), str)
    ]
    lost_tools = ["tools"] if names and not any(name in text for name in names) else []
    return [*roles, *lost_tools]
