"""The forms in which models write tool calls: a new one is a row of FORMS.

Which form a model has is found by proof: its chat template writes calls that are known, and the
form is one that reads the same calls from the text.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fsdp_qlora.data.text.call_readers import (
    BadCall,
    NoCall,
    Pairs,
    Reader,
    ToolCall,
    Types,
    bare_objects,
    named,
    objects,
    python_calls,
)
from fsdp_qlora.data.text.conversation import THOUGHTS, Tools
from fsdp_qlora.data.text.harmony import read_harmony
from fsdp_qlora.data.text.loose_values import BadValue, LooseReader, is_unicode

MOST_CALLS = 64
"""Calls in one turn, at most."""


class ParsedTurn(NamedTuple):
    """A turn of the assistant in parts."""

    content: str
    reasoning: str
    calls: list[ToolCall]
    problem: str
    """A sentence for the model where a call is malformed, and "" otherwise. With a problem there
    are no calls, and the content is the whole text behind the reasoning.
    """


class Form(NamedTuple):
    """A form of calls.

    A text is searched for `begins`; `read` reads one or more calls from there.
    """

    name: str
    begins: re.Pattern[str]
    read: Reader | None
    """None where `whole` reads turns."""
    whole: Callable[[str], tuple[str, str, list[ToolCall]]] | None = None
    """(content, reasoning, calls) of a turn whose form has a place for each."""


_NAME = r"(?P<name>[\w.:/-]+)"
_FENCE = "```"
BARE = "JSON alone"

FORMS = [
    Form("harmony", re.compile(r"<\|channel\|>"), None, read_harmony),
    Form("JSON in tags", re.compile("<tool_call>"), objects("<tool_call>", "</tool_call>")),
    Form(
        "functions and parameters in tags",
        re.compile("<tool_call>"),
        Pairs(
            re.compile(r"<tool_call>\s*<function=(?P<name>[^\n>]+)>\s*"),
            re.compile(r"<parameter=(?P<key>[^\n>]+)>"),
            "</parameter>",
            re.compile(r"\s*</function>\s*</tool_call>"),
            in_lines=True,
        ).read,
    ),
    Form(
        "keys and values in tags",
        re.compile("<tool_call>"),
        Pairs(
            re.compile(r"<tool_call>\s*(?P<name>[^\s<]+)\s*"),
            re.compile(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>"),
            "</arg_value>",
            re.compile(r"\s*</tool_call>"),
            in_lines=False,
        ).read,
    ),
    Form(BARE, re.compile(r"\A\s*(?:\{|<\|python_tag\|>)"), bare_objects),
    Form(
        "a list behind [TOOL_CALLS]",
        re.compile(r"\[TOOL_CALLS\]"),
        objects(r"\[TOOL_CALLS\]", ""),
    ),
    Form(
        "names behind [TOOL_CALLS]",
        re.compile(r"\[TOOL_CALLS\]"),
        named(rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?", ""),
    ),
    Form(
        "names and texts in Gemma's marks",
        re.compile(r"<\|tool_call>"),
        named(
            rf"<\|tool_call>\s*call:{_NAME}",
            r"<tool_call\|>(?:<\|tool_response>)?",
            LooseReader(quote='<|"|>'),
        ),
    ),
    Form(
        "DeepSeek's marks",
        re.compile("(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>"),
        named(
            "(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
            rf"{_NAME}\s*(?:<｜tool▁sep｜>)?(?:{_FENCE}json)?",
            rf"(?:{_FENCE})?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
        ),
    ),
    Form(
        "Kimi's marks",
        re.compile(r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>"),
        named(
            r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>\s*(?:functions\.)?"
            r"(?P<name>[\w./-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
            r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
        ),
    ),
    Form(
        "JSON in Cohere's marks",
        re.compile(r"<\|START_ACTION\|>"),
        objects(r"<\|START_ACTION\|>", r"<\|END_ACTION\|>"),
    ),
    Form(
        "Python calls",
        re.compile(r"<\|tool_call_start\|>\s*\["),
        python_calls(LooseReader()),
    ),
    Form(
        "Python calls with bare texts",
        re.compile(r"<\|tool_call_start\|>\s*\["),
        python_calls(LooseReader(escapes=False)),
    ),
]

NO_CALLS = Form("no calls", re.compile("(?!)"), objects("", ""))
"""For turns in which there are no tools."""


def split_calls(text: str, form: Form, types: Types) -> tuple[str, list[ToolCall]]:
    """The text around calls, and the calls. Raises BadCall or BadValue."""
    calls: list[ToolCall] = []
    pieces = []
    place = 0
    assert form.read is not None
    begins = form.begins.search(text)
    while begins:
        try:
            found, end = form.read(text, begins.start(), types)
        except NoCall:
            break
        if not calls or text[place : begins.start()].strip():
            pieces.append(text[place : begins.start()])
        calls += found
        place = end
        if len(calls) > MOST_CALLS:
            break  # and the caller refuses them
        begins = form.begins.search(text, place)
    return "".join([*pieces, text[place:]]), calls


Marks = Sequence[tuple[str, str]]
"""Pairs that begin and end reasoning, as in `THOUGHTS`."""


def parse_turn(
    text: str, form: Form, tools: Tools = None, *, opened: str = "", marks: Marks = THOUGHTS
) -> ParsedTurn:
    """A turn in parts. It never raises for anything that a model writes.

    Args:
        text: the turn without its end token.
        opened: the mark that opens reasoning if the prompt ends within it.
        marks: those of the template.
    """
    reasoning = ""
    rest = text
    if not form.whole:
        reasoning, rest = split_reasoning(text, form, opened, marks)
    try:
        if form.whole:
            content, reasoning, calls = form.whole(text)
        else:
            content, calls = split_calls(rest, form, Types(tools))
        _check(calls)
    except (BadCall, BadValue) as error:
        return ParsedTurn(rest, reasoning, [], f"The tool call cannot be read: {error}.")
    return ParsedTurn(content.strip() if calls else content, reasoning, calls, "")


def _check(calls: list[ToolCall]) -> None:
    if len(calls) > MOST_CALLS:
        raise BadCall(f"there are more than {MOST_CALLS} calls")
    if not all(is_unicode(call.name) for call in calls):
        raise BadCall("a name has half a surrogate pair")


def split_reasoning(text: str, form: Form, opened: str, marks: Marks) -> tuple[str, str]:
    """(the reasoning at the beginning of a turn, the text behind it).

    A turn that does not end its reasoning has nothing else.
    """
    shortened = text.lstrip()
    for opening, closing in THOUGHTS:
        if opening == opened or shortened.startswith(opening):
            inner, _, rest = shortened.removeprefix(opening).partition(closing)
            return inner.strip(), rest.lstrip()
    begins = form.begins.search(text)
    for opening, closing in marks:
        inner, found, rest = text.partition(closing)
        is_before_calls = not begins or begins.start() > len(inner)
        # A prompt behind a tool's result may open it where others do not.
        if found and opening not in inner and is_before_calls:
            return inner.strip(), rest.lstrip()
    return "", text
