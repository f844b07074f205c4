"""Rows as they are read, and as content.

Content is what a format finds in a row, before a template turns it into text.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import UUID

import numpy as np

from fsdp_qlora.utils.files import bytes_of_variable

MAX_ROW = "FSDP_QLORA_MAX_ROW_MIB"
Row = Mapping[str, object]
Image = Path | bytes
"""An image of a row: its file, or what is in one."""
Kind = Literal["segments", "template", "text", "document", "chat", "tokens"]
"""How a row is tokenized: each segment for itself (those of a filled prompt template, too); a text
as a whole, as it is when the model is used; a document likewise, with rows for what the context has
no room for; a chat with the tokens that begin and end it; or not at all.
"""
# The name by which a reader finds it in a row, for relative paths. No column of a dataset is called
# so by chance.
FOLDER = "folder of its file"
# How the reason begins that may not be the row's fault: the cache does not keep such rows.
ENDED_WORKERS = "two processes that fill the chat template have ended at it"
TOO_DEEP = "nested too deeply"
NO_TARGET = "nothing to learn"
# Where models of images have one. Within a text it may be about HTML.
_MEDIA = re.compile(r"^\s*<(image|audio|video)>|<(image|audio|video)>\s*$")


@dataclass(frozen=True)
class SourceFile:
    """One file of a dataset. Its row n has the number offset + n in the whole dataset."""

    name: str
    """The file's name within the dataset's folder."""
    unit: str
    """The unit of n: "line", "row" or "byte", all from 1; the byte at which a line begins."""
    offset: int = 0


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason under which it is counted."""


def most_row_bytes() -> int:
    """How long a row may be.

    A packed file or an image of a few KiB may unpack to more than the memory.
    """
    return bytes_of_variable(MAX_ROW)


@dataclass(frozen=True)
class Segment:
    """A piece of a row's text."""

    text: str
    learned: bool | float
    """True where the model learns to write the text, false where it only reads it; or a weight of
    its tokens' loss.
    """
    ends: bool = False
    """Whether an end-of-sequence token follows. One always follows the last segment."""
    is_left_out: bool = False
    """Whether it is only read as a part of an answer that is learned."""


@dataclass(frozen=True)
class Fields:
    """An instruction and its response, for a prompt template."""

    instruction: str
    response: str
    context: str = ""
    system: str = ""
    history: tuple[tuple[str, str], ...] = ()
    """Earlier (instruction, response) pairs."""
    shows: Row | None = None
    """The row, if it has images: then it is a chat."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template that the row sets, for fields that become a `Chat`."""


@dataclass(frozen=True)
class Chat:
    """A conversation, for a chat template."""

    messages: list[dict[str, Any]]
    """Each with `role`; `content`, `tool_calls` or both; and what else chat templates know."""
    tools: list[dict[str, Any]] | None = None
    weights: tuple[float | None, ...] = ()
    """For a message of which the row says it: how much it is learned, 0, 1 or another number; None
    for others.
    """
    unused: tuple[str, ...] = ()
    """Names of what turns have besides."""
    images: tuple[Image, ...] = ()
    """The images in the order in which messages show them, as parts of type image. Then all
    contents are in parts.
    """
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template that the row sets, such as enable_thinking."""
    notes: tuple[str, ...] = ()
    """Oddities of the row, which is used."""

    def refuse_unanswered(self) -> None:
        """Raise BadRow if the assistant says nothing."""
        if not any(message["role"] == "assistant" for message in self.messages):
            raise BadRow("no assistant turn, so nothing to learn")

    def learned_turns(self, learn: str) -> list[int]:
        """The places of the messages that are learned, without weight 0.

        learn: "last" for the last of the assistant's, "final" for those behind the last result of a
        tool that one follows, or the last where there is none; else all of them.
        """
        turns = [
            turn for turn, message in enumerate(self.messages) if message["role"] == "assistant"
        ]
        answered = self.messages[: turns[-1]] if turns else []
        results = [turn for turn, message in enumerate(answered) if message["role"] == "tool"]
        # The last turn, and then its weight: with weight 0 nothing is learned, not the turn before.
        if learn == "final" and results:
            turns = [turn for turn in turns if turn > results[-1]]
        elif learn in ("last", "final"):
            turns = turns[-1:]
        weights = self.weights or (None,) * len(self.messages)
        return [turn for turn in turns if weights[turn] != 0]


@dataclass(frozen=True)
class Rendered:
    """A row as text, or as tokens."""

    segments: Sequence[Segment] = ()
    kind: Kind = "segments"
    ids: Sequence[int] = ()
    """Token ids, as the row has them, instead of segments."""
    learned: Sequence[bool] = ()
    """Whether each of these tokens is learned."""
    desired: bool | None = None
    """The label of a row that has one."""
    notes: tuple[str, ...] = ()
    """Oddities of the row, which is used."""
    images: tuple[bytes, ...] = ()
    """The names of its images, from `image_store.keep`."""
    image_values: int = 0
    """How many numbers the processor makes of them."""
    image_ids: tuple[int, ...] = ()
    """The tokens that stand for images; any model's own, whether the row has images or not."""
    num_image_ids: int = 0
    """How many of these tokens its images are: one more is in its text."""

    def before_part(self) -> "Rendered | None":
        """The text before an answer that begins with a part that is left out; None if none does."""
        of_answer = [i for i, each in enumerate(self.segments) if each.learned or each.is_left_out]
        first = of_answer[0] if of_answer else 0
        if first == 0 or self.segments[first].learned:
            return None
        return dataclasses.replace(self, segments=self.segments[:first], desired=None)


@dataclass(frozen=True)
class PreferenceRow:
    """Answers to one prompt, each with the prompt, of which nothing is learned."""

    answers: Sequence[Chat | Rendered | Fields]
    """A chosen and a rejected one; with `desired` any number."""
    desired: Sequence[bool] = ()
    """The label of each answer, where answers have labels."""


Content = list[Segment] | Fields | Chat | Rendered | PreferenceRow
"""A list of segments is tokenized segment by segment, as a filled prompt template is."""


PromptContent = Fields | Chat | Rendered
"""A prompt: what a row holds in front of its answer."""
NO_CHAT = "the row is not a chat, so its values for a chat template are not used"
AnyContent = TypeVar("AnyContent", bound=Content)


def with_template_kwargs(content: AnyContent, kwargs: Mapping[str, Any]) -> AnyContent:
    """The same with variables for its chat template."""
    if not kwargs or isinstance(content, list):
        return content
    if isinstance(content, PreferenceRow):
        return dataclasses.replace(
            content, answers=[with_template_kwargs(answer, kwargs) for answer in content.answers]
        )
    if isinstance(content, Rendered):
        return dataclasses.replace(content, notes=(*content.notes, NO_CHAT))
    return dataclasses.replace(content, template_kwargs=kwargs)


def without_answer(content: Content) -> PromptContent:
    """The prompt of a row. Raises BadRow if it has none."""
    if isinstance(content, Fields):
        return dataclasses.replace(content, response="")
    if isinstance(content, Chat):
        messages = [*content.messages]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise BadRow("only the assistant speaks, so there is no prompt")
        return dataclasses.replace(content, messages=messages, weights=())
    assert not isinstance(content, PreferenceRow)
    rendered = content if isinstance(content, Rendered) else Rendered(content)
    segments = [*rendered.segments]
    # All of a document is learned, so it is its own prompt.
    while segments and segments[-1].learned and rendered.kind != "document":
        segments.pop()
    return Rendered(segments, "text" if rendered.kind == "document" else rendered.kind)


def shows_images(prompt: PromptContent) -> bool:
    """Whether a prompt shows images."""
    if isinstance(prompt, Fields):
        return prompt.shows is not None
    return isinstance(prompt, Chat) and bool(prompt.images)


def prompt_text(prompt: PromptContent) -> str:
    """The text of a prompt, or of a chat's last message."""
    if isinstance(prompt, Chat):
        return "".join(texts_of(prompt.messages[-1]))
    if isinstance(prompt, Fields):
        return prompt.instruction
    return "".join(segment.text for segment in prompt.segments)


def text_of(row: Row, column: str, *, required: bool = True) -> str:
    """The text of a column; "" if it is blank and not required. Raises BadRow."""
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"{column} is not text but {type(value).__name__}")
    if not value or value.isspace():
        if required:
            raise BadRow(f"empty {column}")
        return ""
    return unicode_of(value, column)


def refuse_media(text: str, where: str) -> None:
    """Raise BadRow where the question of a row without images shows something that is no text."""
    match = _MEDIA.search(text)
    if match is None:
        return
    shown = match[0].strip()
    reason = "no image is given" if shown == "<image>" else "only text and images are read"
    raise BadRow(f"{where}: it shows {shown}, and {reason}")


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content, which may be in parts."""
    content = message.get("content") or []
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if "text" in part]


def plain_value(value: Any) -> Any:
    """A value of a table as JSON has it.

    Dates and times are in ISO's form, decimals are numbers, and other values as they are.
    """
    if isinstance(value, Mapping):
        return {str(key): plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(inner) for inner in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return _number(value)
    if isinstance(value, UUID):
        return str(value)
    is_numpy = isinstance(value, np.generic | np.ndarray)
    return plain_value(value.tolist()) if is_numpy else value


def _number(value: Decimal) -> int | float:
    """The number of JSON with these digits. Raises BadRow if no float has them."""
    if value.is_finite() and value == value.to_integral_value():
        return int(value)
    if value.is_finite() and Decimal(str(float(value))) != value:
        raise BadRow(f"the decimal {value} has more digits than a number of JSON keeps")
    return float(value)


def unicode_of(text: str, where: str) -> str:
    """The text, unless it has lone surrogates. Raises BadRow.

    JSON can contain them, and a tokenizer cannot read them.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"{where} has half a surrogate pair") from error
    return text


def num_common(a: Sequence[object], b: Sequence[object]) -> int:
    """The number of characters, or of turns, that both begin with.

    By bisection, since slices are compared at once: a loop over the characters of a long chat takes
    seconds.
    """
    least = 0
    most = min(len(a), len(b))
    while least < most:
        middle = (least + most + 1) // 2
        if a[least:middle] == b[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
