"""The content that a format reads from a row, before a template turns it into text: one of `Content`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason under which it is counted."""


@dataclass(frozen=True)
class Segment:
    """A piece of a row's text."""

    text: str
    learned: bool
    """True where the model learns to write the text, false where it only reads it."""
    ends: bool = False
    """Whether an end-of-sequence token follows. One always follows the last segment."""


@dataclass(frozen=True)
class Fields:
    """An instruction and its response, for a prompt template."""

    instruction: str
    response: str
    context: str = ""
    system: str = ""
    history: tuple[tuple[str, str], ...] = ()
    """Earlier (instruction, response) pairs."""


@dataclass(frozen=True)
class Chat:
    """A conversation, for a chat template."""

    messages: list[dict[str, Any]]
    """Each with `role`; `content`, `tool_calls` or both; and what else chat templates know."""
    tools: list[dict[str, Any]] | None = None
    weights: tuple[int | None, ...] = ()
    """Of each message: 1 or 0 where the row says whether it is learned, None where it does not."""

    unused: tuple[str, ...] = ()
    """Names of what turns have besides."""

    def learned_turns(self, learn: str) -> list[int]:
        """The places of the messages that are learned: those of the assistant, all or the last, without weight 0."""
        turns = [turn for turn, message in enumerate(self.messages) if message["role"] == "assistant"]
        weights = self.weights or (None,) * len(self.messages)
        return [turn for turn in (turns[-1:] if learn == "last" else turns) if weights[turn] != 0]


@dataclass(frozen=True)
class Text:
    """Text exactly as in the row, without a template."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Tokens:
    """Tokens as the row has them."""

    ids: Sequence[int]
    learned: Sequence[bool]


Content = list[Segment] | Fields | Chat | Text | Tokens
"""A list of segments is tokenized segment by segment, as a filled prompt template is."""


@dataclass(frozen=True)
class Rendered:
    """A row as text, or as tokens."""

    segments: list[Segment] = field(default_factory=list)
    is_joint: bool = False
    """Whether the text is tokenized as a whole, as it is when the model is used, where no token crosses a boundary."""
    is_templated: bool = False
    """Whether the text has the tokens that begin and end it, as a chat template writes them."""
    tokens: Tokens | None = None
    notes: tuple[str, ...] = ()
    """What is odd about the row, though it is used."""


def text_of(row: Mapping[str, object], column: str, *, required: bool = True) -> str:
    """The text of a column; "" if it is blank and not required. Raises BadRow."""
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"{column} is not text but {type(value).__name__}")
    if not value or value.isspace():
        if required:
            raise BadRow(f"empty {column}")
        return ""
    return unicode_of(value, column)


def unicode_of(text: str, where: str) -> str:
    """The text, unless it has lone surrogates: JSON can contain them, a tokenizer cannot read them. Raises BadRow."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"{where} has half a surrogate pair") from error
    return text
