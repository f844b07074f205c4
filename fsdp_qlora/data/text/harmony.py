"""Reads turns in OpenAI's harmony format, as of gpt-oss: messages on channels."""

import re
from typing import NamedTuple

from fsdp_qlora.data.text.call_readers import ToolCall, object_of
from fsdp_qlora.data.text.loose_values import whole_json

_START = "<|start|>"
_MESSAGE = "<|message|>"
_END = re.compile(r"<\|(?:end|call|return)\|>")
_FUNCTION = re.compile(r"to=functions\.([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_BEGINS = re.compile(
    r"\s*(?:<\|start\|>)?(?:assistant)?(?: to=[^<]*)?<\|channel\|>[^<]*(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>"
)


class MessageSpan(NamedTuple):
    """A message of a turn, and its place in the turn's text with all of its marks."""

    header: str
    span: tuple[int, int]

    @property
    def function(self) -> str:
        """The name of the function that it calls; "" if it calls none."""
        found = _FUNCTION.search(self.header)
        return found[1] if found else ""

    @property
    def is_reasoning(self) -> bool:
        return not self.function and _ANALYSIS.search(self.header) is not None

    def words(self, text: str) -> str:
        """The text of the message, without white space around it."""
        body = text[slice(*self.span)].partition(_MESSAGE)[2]
        end = _END.search(body)
        return (body[: end.start()] if end else body).strip()


def harmony_spans(text: str) -> list[MessageSpan]:
    """The messages of a turn's text, in order; none if the text is not in this format."""
    if not _BEGINS.match(text):
        return []
    spans = []
    place = 0
    while place < len(text):
        header_end = text.find(_MESSAGE, place)
        if header_end < 0:
            break
        end = _END.search(text, header_end)
        last = end.end() if end else len(text)
        spans.append(MessageSpan(text[place:header_end], (place, last)))
        place = last
    return spans


def read_harmony(text: str) -> tuple[str, str, list[ToolCall]]:
    """(content, reasoning, calls) of a turn, which begins behind <|start|>assistant.

    Raises:
        BadCall, BadValue: the arguments of a call are not an object of JSON.
    """
    contents = []
    reasoning = []
    calls = []
    for message in text.split(_START):
        header, found, body = message.removeprefix("assistant").partition(_MESSAGE)
        end = _END.search(body)
        body = body[: end.start()] if end else body
        function = _FUNCTION.search(header)
        if not found:  # a turn that was cut in a header, or no harmony at all
            contents.append(header)
        elif function:
            calls.append(ToolCall(function[1], object_of(function[1], whole_json(body or "{}"))))
        elif _ANALYSIS.search(header):
            reasoning.append(body)
        else:
            contents.append(body)
    return "\n".join(filter(None, contents)), "\n".join(reasoning), calls
