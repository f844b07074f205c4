"""Reads turns in OpenAI's harmony format, as of gpt-oss: messages on channels."""

import re

from fsdp_qlora.data.text.call_readers import ToolCall, object_of
from fsdp_qlora.data.text.loose_values import whole_json

_START = "<|start|>"
_MESSAGE = "<|message|>"
_END = re.compile(r"<\|(?:end|call|return)\|>")
_FUNCTION = re.compile(r"to=functions\.([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


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
