"""What a part of a message is: text, reasoning, calls and results of tools, in the forms of several
APIs and of tables.
"""

import datetime
import decimal
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fsdp_qlora.api import _in_file
from fsdp_qlora.data.content import BadRow, Chat, PreferenceRow
from fsdp_qlora.data.text import chats, linked_calls, tool_forms
from fsdp_qlora.data.text.chats import HIDDEN
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.recognition import RequestedFormat
from tests.data.rows import rows_of, write_jsonl

pytestmark = pytest.mark.quick

ASK = {"role": "user", "content": "sort"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
THINKS = {"role": "assistant", "content": "blue", "reasoning_content": "hm"}
CALLS = {"role": "assistant", "content": "so", "tool_calls": [{"id": "c1", **CALL}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


def says(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(parts), **more}


def read(messages: list[dict[str, Any]], **columns: Any) -> Chat:
    chat = FORMATS["messages"].read({"messages": messages, **columns})
    assert isinstance(chat, Chat)
    return chat


# Answers that think "hm" and say "blue".
THINKING: dict[str, dict[str, Any]] = {
    "reasoning with text": says(text("hm", "reasoning"), text("blue")),
    "Anthropic": says({"type": "thinking", "thinking": "hm", "signature": "x"}, text("blue")),
    "Mistral": says({"type": "thinking", "thinking": [text("h"), text("m")]}, text("blue")),
    "OpenAI's responses": says(
        {"type": "reasoning", "content": [], "summary": [text("hm", "summary_text")]},
        text("blue", "output_text"),
    ),
    "Gemini": {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "blue"}]},
    "in a field too": says(text("hm", "thinking"), text("blue"), reasoning_content="hm"),
    "a list in a field": {**THINKS, "reasoning_content": [text("hm", "summary_text")]},
}
ADDS = {"type": "tool_use", "name": "add", "input": {"a": 1}}
FUNCTION_CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
PATCH = {"name": "patch", "input": "-a\n+b"}
# Messages in parts behind a question -> as OpenAI's chat API has them.
SAME: dict[str, tuple[list[Any], list[Any]]] = {
    **{name: ([answer], [THINKS]) for name, answer in THINKING.items()},
    "text": (
        [
            {**ASK, "content": [text("so"), text("rt", "input_text")]},
            says(text("blue", "output_text")),
        ],
        [ASK, {"role": "assistant", "content": "blue"}],
    ),
    "a summary": (
        [says(text("h", "summary_text"), text("m", "summary_text"), text("blue"))],
        [{**THINKS, "reasoning_content": "h\n\nm"}],
    ),
    "reasoning alone": ([says(text("hm", "reasoning"))], [{**THINKS, "content": ""}]),
    "a call and its result": (
        [
            says(text("so"), {**ADDS, "id": "c1"}),
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [text("2")]},
                    text("sort"),
                ],
            },
        ],
        [CALLS, RESULT, ASK],
    ),
    "a call alone": (
        [says(FUNCTION_CALL)],
        [{"role": "assistant", "tool_calls": CALLS["tool_calls"]}],
    ),
    "a call in a field too": (
        [says(text("so"), ADDS, tool_calls=[{"id": "c1", **CALL}])],
        [CALLS],
    ),
    "a custom tool": (
        [{"role": "assistant", "tool_calls": [{"id": "c1", "type": "custom", "custom": PATCH}]}],
        [
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "patch", "arguments": {"input": "-a\n+b"}},
                    }
                ],
            }
        ],
    ),
    "parameters": (
        [{"role": "assistant", "tool_calls": [{"name": "add", "parameters": {"a": 1}}]}],
        [{"role": "assistant", "tool_calls": [CALL]}],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_parts_are_what_their_types_say(name):
    parts, fields = SAME[name]
    assert read([ASK, *parts, THINKS]).messages == [ASK, *fields, THINKS]


def test_parts_mean_the_same_in_every_format_and_in_prompts():
    answer = says(text("hm", "reasoning"), text("blue"))
    for row_format, row in {
        "prompt_completion": {"prompt": [ASK], "completion": [answer]},
        "label": {"messages": [ASK, answer], "label": True},
        "preference": {
            "prompt": [ASK],
            "chosen": [answer],
            "rejected": [{**THINKS, "content": "red"}],
        },
    }.items():
        content = FORMATS[row_format].read(row)
        chat = content.answers[0] if isinstance(content, PreferenceRow) else content
        assert isinstance(chat, Chat) and chat.messages == [ASK, THINKS], row_format
    row = {"prompt": [ASK, answer, ASK]}
    prompt, _ = RequestedFormat().find_prompt(row).prompt(row)
    assert isinstance(prompt, Chat) and prompt.messages == [ASK, THINKS, ASK]


def test_reasoning_without_text_is_left_out_with_a_note():
    for hidden in (
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "encrypted_content": "x", "summary": []},
    ):
        chat = read([ASK, says(hidden, text("hm", "thinking"), text("blue"))])
        assert chat.messages == [ASK, THINKS] and chat.notes == (HIDDEN,)
    assert read([ASK, THINKS]).notes == ()


def test_a_refusal_is_what_the_assistant_says():
    says_no = {"role": "assistant", "content": "no"}
    for answer in (
        {"role": "assistant", "content": None, "refusal": "no"},
        says({"type": "refusal", "refusal": "no"}),
    ):
        chat = read([ASK, answer])
        assert chat.messages == [ASK, says_no] and chat.unused == ()


def test_a_system_prompt_may_be_in_parts():
    system = [{**text("be kind"), "cache_control": {"type": "ephemeral"}}, text("and brief")]
    expected = {"role": "system", "content": "be kind\n\nand brief"}
    assert read([ASK, THINKS], system=system).messages == [expected, ASK, THINKS]
    assert read([ASK, THINKS], system=["be kind", "and brief"]).messages[0] == expected
    assert read([ASK, THINKS], system=[]).messages == [ASK, THINKS]
    with pytest.raises(BadRow, match="a part of system is not text"):
        read([ASK, THINKS], system=[{"type": "image"}])


def test_tools_of_anthropic_become_those_of_chats():
    tool = {"name": "add", "description": "Adds", "input_schema": {"type": "object"}}
    expected = {"name": "add", "description": "Adds", "parameters": {"type": "object"}}
    assert read([ASK, THINKS], tools=[tool]).tools == [{"type": "function", "function": expected}]
    assert read([ASK, THINKS], tools=[expected]).tools == [expected]  # as it is


def test_tools_of_other_apis_keep_their_schemas_in_logs():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    expected = {"name": "add", "description": "Adds", "parameters": schema}
    plain = {"name": "add", "description": "Adds"}
    for tool in (
        {**plain, "inputSchema": schema},
        {**plain, "parametersJsonSchema": schema},
        {"functionDeclarations": [expected]},
        {"function_declarations": [expected]},
    ):
        chat = chats.read_log({"tools": [tool]}, [ASK, THINKS])
        assert chat.tools == [{"type": "function", "function": expected}] and chat.notes == ()
    chat = chats.read_log({"tools": [{"googleSearch": {}}]}, [ASK, THINKS])
    assert chat.tools is None and chat.notes == (tool_forms.LEFT_OUT,)


def test_results_must_be_of_calls_where_both_have_ids():
    twice = {**CALLS, "tool_calls": [{"id": "c1", **CALL}, {"id": "c2", **CALL}]}
    second = {**RESULT, "tool_call_id": "c2"}
    swapped = read([ASK, twice, second, RESULT, THINKS])
    assert swapped.messages == [ASK, twice, second, RESULT, THINKS]
    assert swapped.notes == (linked_calls.OTHER_ORDER,)
    for messages, reason in (
        ([CALLS, second], "turn 3: its tool_call_id 'c2' is of no call"),
        ([RESULT, CALLS], "turn 2: its tool_call_id 'c1' is of no call"),
        ([CALLS, RESULT, RESULT], "turn 4: a second result of the call 'c1'"),
        ([CALLS, ASK, RESULT, RESULT], "turn 5: a second result of the call 'c1'"),
    ):
        with pytest.raises(BadRow, match=reason):
            read([ASK, *messages])
    for messages in (
        [twice, RESULT, THINKS],
        [CALLS, RESULT, CALLS, ASK, THINKS],
        [CALLS, ASK, RESULT, THINKS],
        [CALLS, THINKS, RESULT, THINKS],
    ):
        assert read([ASK, *messages]).notes == (linked_calls.ABANDONED,)
        with pytest.raises(BadRow, match="has no result before it"):
            chats.read_log({}, [ASK, *messages])
    for messages in (
        [CALLS, RESULT, twice],
        [CALLS, THINKS],
        [{**CALLS, "tool_calls": [CALL]}, second],
        [{**CALLS, "tool_calls": [{**CALL, "id": "fc_1", "call_id": "c2"}]}, second],
        [{**CALLS, "tool_calls": [{**CALL, "id": ""}]}, {**RESULT, "tool_call_id": ""}],
    ):
        assert read([ASK, *messages]).notes == ()


# What the refusal calls a part -> a turn that has it.
UNKNOWN: dict[str, dict[str, Any]] = {
    "tool_result, and only text": says(text("blue", "tool_result")),
    "functionCall, and only text": says({"functionCall": {"name": "add"}}),
    "reasoning, which only an answer can have": {**ASK, "content": [text("hm", "reasoning")]},
    "tool_use, which only an answer can have": {**ASK, "content": [{"type": "tool_use"}]},
    "document, and only text": {**ASK, "content": [text("x", "document")]},
}
GOES = {"type": "tool_use", "name": "go", "input": {}}
# The reason -> a turn behind a question.
BAD: dict[str, dict[str, Any]] = {
    **{f"turn 2: a part of its content is {part}": turn for part, turn in UNKNOWN.items()},
    "turn 2: its parts are not in the order": says(text("blue"), text("hm", "reasoning")),
    "turn 2: its reasoning in reasoning_content differs from": says(
        text("hm", "reasoning"), text("a"), reasoning_content="ah"
    ),
    "turn 2: its reasoning has no text": says({"type": "reasoning", "id": "x"}, text("blue")),
    "turn 2: the assistant says nothing": says({"type": "redacted_thinking", "data": "x"}),
    "turn 2: its tool calls differ from": says(GOES, tool_calls=[CALL]),
    "turn 2: a tool call without a name": says({"type": "tool_use", "input": {}}),
}


@pytest.mark.parametrize("reason", BAD)
def test_parts_of_no_known_meaning_are_refused_by_name(reason):
    with pytest.raises(BadRow, match=reason):
        read([ASK, BAD[reason], THINKS])


DAY = datetime.date(2026, 1, 2)
PRICE = decimal.Decimal("1.50")
MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
# In the order that tables of older pyarrow have.
VALUES = {"at": MOMENT, "count": decimal.Decimal(2), "day": DAY, "ids": [DAY], "price": PRICE}
PLAIN = {
    "at": "2026-01-02T03:04:05+00:00",
    "count": 2,
    "day": "2026-01-02",
    "ids": ["2026-01-02"],
    "price": 1.5,
}


def with_values(values: dict[str, Any]) -> dict[str, Any]:
    """A row with values in a call, in its result and in the tool's description."""
    call = {"function": {"name": "add", "arguments": values}}
    messages = [
        ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": values},
        THINKS,
    ]
    return {"messages": messages, "tools": {"name": "add", "parameters": {"default": values}}}


def test_values_of_tables_reach_tools_as_those_of_json(tmp_path):
    def shown(path: Path) -> Chat:
        [row] = rows_of(path)
        return read(**row)

    plain = shown(write_jsonl(tmp_path / "a.jsonl", [with_values(PLAIN)]))
    assert json.loads(plain.messages[2]["content"]) == PLAIN
    assert plain.tools == [{"name": "add", "parameters": {"default": PLAIN}}]
    table = pyarrow.Table.from_pylist([{"tools": with_values(VALUES)["tools"], "values": VALUES}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    [row] = rows_of(tmp_path / "a.parquet")
    assert read(**with_values(row["values"]) | {"tools": row["tools"]}) == plain
    assert shown(Path(_in_file([with_values(VALUES)]))) == plain
    numpy = {**VALUES, "count": np.int64(2), "price": np.float64(1.5)}
    assert read(**with_values(numpy)) == plain


def test_the_answer_of_a_tool_is_text_or_parts_or_json():
    for content, words in (
        ("2", "2"),
        ([text("2")], "2"),
        ([{"text": "2"}], "2"),
        ([{"title": "a", "text": "2"}], '[{"title": "a", "text": "2"}]'),
        (["2", 3], '["2", 3]'),
        (2.5, "2.5"),
        (DAY, "2026-01-02"),
        ([], ""),
    ):
        result = {"role": "tool", "content": content}
        assert read([ASK, CALLS, result, THINKS]).messages[2]["content"] == words


def test_a_value_that_json_cannot_have_is_named():
    for value, reason in (
        (decimal.Decimal("0.12345678901234567890"), "more digits"),
        (b"x", "cannot represent|cannot be JSON"),
    ):
        with pytest.raises(BadRow, match=reason):
            read(**with_values({"value": value}))
    assert read(**with_values({"id": uuid.UUID(int=1)})).tools


def test_tools_may_be_one_object_or_its_text():
    tool = {"name": "add", "parameters": {}}
    for tools in (tool, [tool], json.dumps(tool), json.dumps([tool]), [json.dumps(tool)]):
        assert read([ASK, THINKS], tools=tools).tools == [tool]
    with pytest.raises(BadRow, match="tools is not a list of objects"):
        read([ASK, THINKS], tools={"add": {}})
