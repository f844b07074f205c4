"""Agents' logs of every form: the messages that they are, what is learned, and the refusals.

The logs are in agent_logs.jsonl, one a line. A log has the messages that it means, written by hand,
and the places of those that are learned; a damaged one has the reason.
"""

import contextlib
import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from fsdp_qlora.data.content import BadRow, Chat
from fsdp_qlora.data.text import linked_calls
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.recognition import RequestedFormat
from fsdp_qlora.data.text.rendering import Renderer
from fsdp_qlora.data.text.templates import TEMPLATES, ChosenTemplate
from tests.data.conftest import WORKER
from tests.data.rows import write_jsonl, write_parquet
from tests.rollouts.tool_templates import TEMPLATES as FAMILIES
from tests.rollouts.tool_templates import tokenizer_of

NESTED = '{"a": ' * 100_000 + "1" + "}" * 100_000
LINES = (Path(__file__).parent / "agent_logs.jsonl").read_text(encoding="utf-8").splitlines()
LOGS: list[dict[str, Any]] = [
    json.loads(line.replace('"NESTED"', json.dumps(NESTED))) for line in LINES
]
GOOD = {log["name"]: log for log in LOGS if "messages" in log}
BAD = {log["name"]: log for log in LOGS if "reason" in log}


def read(log: dict[str, Any], name: str = "auto") -> Chat:
    row = log["row"]
    reading = RequestedFormat(name).find(list(row), [row])
    assert reading.dataset_format == log["format"]
    content = FORMATS[log["format"]].read(reading.named(row))
    assert isinstance(content, Chat)
    return content


@pytest.mark.parametrize("name", GOOD)
def test_a_log_is_recognized_and_means_these_messages(name):
    log = GOOD[name]
    chat = read(log)
    assert chat.messages == log["messages"]
    assert chat.learned_turns("assistant") == log["learned"]
    assert chat.tools == log.get("tools")
    assert chat.notes == tuple(log.get("notes", ())) and not chat.unused


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_log_is_refused_with_its_reason(name):
    with pytest.raises(BadRow) as error:
        read(BAD[name], BAD[name]["format"])
    assert BAD[name]["reason"] in str(error.value)


def written_by_qwen(message: dict[str, Any], is_earlier: bool) -> str:
    """A turn behind Qwen3.5's prompt, which opens a block for reasoning.

    The template leaves out an empty block before a later question.
    """
    calls = [
        f"<tool_call>\n<function={call['function']['name']}>\n"
        + "".join(
            f"<parameter={name}>\n{as_text(value)}\n</parameter>\n"
            for name, value in call["function"]["arguments"].items()
        )
        + "</function>\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    words = message.get("content") or ""
    said = [words, "\n".join(calls)] if words and calls else [words + "\n".join(calls)]
    thought = message.get("reasoning_content", "")
    block = "" if is_earlier and not thought else f"{thought}\n</think>\n\n"
    return block + "\n\n".join(said) + "<|im_end|>"


def as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def written_by_gpt_oss(message: dict[str, Any], is_earlier: bool) -> str:
    """A turn behind gpt-oss's prompt; with a call, words are its reasoning."""
    thought = message.get("reasoning_content")
    words = message.get("content")
    if "tool_calls" in message:
        [call] = message["tool_calls"]
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        thought = thought or words
        end = f" to=functions.{call['function']['name']}<|channel|>commentary json<|message|>"
        end += f"{arguments}<|call|>"
    else:
        end = f"<|channel|>final<|message|>{words}<|return|>"
    if thought:
        return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{end}"
    return end


def can_be_gpt_oss(message: dict[str, Any]) -> bool:
    """Whether the template writes a turn: one call, with reasoning or words beside it."""
    calls = message.get("tool_calls", ())
    is_twice = bool(message.get("reasoning_content") and message.get("content"))
    return len(calls) < 2 and not (calls and is_twice)


# The name of a template -> how it writes a turn, and which turns it writes.
WRITTEN = {
    "Qwen3.5": (written_by_qwen, lambda message: True),
    "gpt-oss": (written_by_gpt_oss, can_be_gpt_oss),
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("family", WRITTEN)
def test_the_assistants_turns_of_a_log_are_learned(family, name):
    write, can_be = WRITTEN[family]
    tokenizer = tokenizer_of(FAMILIES[family])
    chosen = ChosenTemplate(chat=FAMILIES[family].text)
    renderer = Renderer(tokenizer, chosen, "assistant", TEMPLATES["alpaca"], [WORKER])
    messages = GOOD[name]["messages"]
    questions = [place for place, message in enumerate(messages) if message["role"] == "user"]
    turns = [(messages[place], place < questions[-1]) for place in GOOD[name]["learned"]]
    if not all(can_be(message) for message, _ in turns):
        with pytest.raises(BadRow):
            renderer.render(read(GOOD[name]))
        return
    rows = renderer.render(read(GOOD[name]))
    learned = [segment.text for row in rows for segment in row.segments if segment.learned]
    assert sorted(learned) == sorted(write(*turn) for turn in turns)


def test_bad_logs_of_a_file_are_listed_with_their_numbers(prepare, tmp_path):
    for name in ("messages", "items", "atif", "request_response", "responses", "verifiers"):
        logs = [log for log in LOGS if log["format"] == name and "input" not in log["row"]]
        logs = logs or [log for log in LOGS if log["format"] == name]
        logs.sort(key=lambda log: "reason" in log)  # the first rows tell the format
        path = write_jsonl(tmp_path / f"{name}.jsonl", [log["row"] for log in logs])
        tokenizer = tokenizer_of(FAMILIES["Qwen3.5"])
        tokenizer.chat_template = FAMILIES["Qwen3.5"].text
        _, report = prepare(path, tokenizer=tokenizer, max_bad_rows=1, context_length=9000)
        assert report.dataset_format == name
        expected = {n: log["reason"] for n, log in enumerate(logs, start=1) if "reason" in log}
        found = {n: reason for reason, numbers in report.rejected.items() for n in numbers}
        assert found.keys() == expected.keys()
        assert all(expected[n] in found[n] for n in expected)


def test_damaged_logs_never_raise_another_error():
    chance = random.Random(0)
    for log in [*GOOD.values()] * 30:
        row = copy.deepcopy(log["row"])
        damage(row, chance)
        with contextlib.suppress(BadRow):
            FORMATS[log["format"]].read(row)


def damage(value: Any, chance: random.Random) -> None:
    """Put another value in one place of an object or a list."""
    while True:
        keys = [*value] if isinstance(value, dict) else [*range(len(value))]
        key = chance.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and chance.random() < 0.85:
            value = value[key]
            continue
        value[key] = chance.choice([None, [], {}, 7, "x", [None], [{}], {"type": "x"}, True])
        return


def test_columns_of_other_formats_are_read_as_before():
    said = GOOD["chat: one call"]["row"]["messages"]
    logs = [GOOD[name]["row"] for name in ("items: a coding agent", "verifiers: an episode")]
    beside = logs[0] | logs[1] | GOOD["ATIF: ends with a call"]["row"]
    for name, row in (
        ("messages", {"messages": said}),
        ("prompt_completion", {"prompt": said[:2], "completion": said[2:]}),
        ("text", {"text": "go on"}),
        ("alpaca", {"instruction": "hi", "input": "so", "output": "go on"}),
    ):
        assert RequestedFormat().find([*row, *beside], [row | beside]).dataset_format == name
    for row in ({"input": "hi", "output": "go on"}, {"input": ['{"type'], "output": "go on"}):
        assert RequestedFormat().find([*row], [row]).dataset_format == "alpaca"


# Columns of datasets that may have those of logs beside them -> the format.
OF_OTHER_FORMATS = {
    "instruction output": "alpaca",
    "input_ids": "pretokenized",
    "chosen rejected": "preference",
    "messages": "messages",
    "conversations": "sharegpt",
    "instruction response": "dolly",
    "question answer": "question_answer",
    "prompt completion": "prompt_completion",
    "text": "text",
    "question response": "question_answer",
    "question solution": "question_answer",
    "question answers": "question_answer",
    "query response": "alpaca",
    "query answer": "alpaca",
    "problem solution": "alpaca",
    "prompt response": "alpaca",
    "inputs targets": "alpaca",
    "source target": "alpaca",
    "user assistant": "alpaca",
    "conversation": "sharegpt",
    "contents": "messages",
    "chosen_messages rejected_messages": "preference",
    "chosen_response rejected_response": "preference",
    "response_j response_k": "preference",
}


@pytest.mark.parametrize("columns", OF_OTHER_FORMATS)
def test_columns_of_logs_beside_others_do_not_make_a_log(columns):
    names = ("items: a coding agent", "verifiers: an episode", "ATIF: ends with a call")
    beside = {"request": GOOD["exchange: Anthropic"]["row"]["request"]}
    for name in names:
        beside |= GOOD[name]["row"]
    row = beside | dict.fromkeys(columns.split(), "go on")
    assert RequestedFormat().find([*row], [row]).dataset_format == OF_OTHER_FORMATS[columns]
    reading = RequestedFormat().find_prompt({"prompt": "hi", "response": "so"} | beside)
    assert reading.dataset_format == "prompt_completion"


def test_logs_of_tables_and_of_folders_are_those_of_lines(prepare, tmp_path):
    tokenizer = tokenizer_of(FAMILIES["Qwen3.5"])
    tokenizer.chat_template = FAMILIES["Qwen3.5"].text
    for name in ("items: a coding agent", "ATIF: two calls in a step", "verifiers: an episode"):
        [row] = [GOOD[name]["row"]]
        folder = tmp_path / GOOD[name]["format"]
        folder.mkdir()
        (folder / "first.json").write_text(json.dumps(row, indent=1), encoding="utf-8")
        (folder / "second.json").write_text(json.dumps(row, indent=1), encoding="utf-8")
        options = {"tokenizer": tokenizer, "context_length": 9000}
        lines, _ = prepare(write_jsonl(tmp_path / "a.jsonl", [row, row]), **options)
        assert prepare(folder, **options)[0].digest == lines.digest
        table = write_parquet(tmp_path / "a.parquet", [row, row])
        assert prepare(table, **options)[0].digest == lines.digest


def test_a_log_without_its_answer_is_a_prompt():
    for name, answer, num in (
        ("responses: earlier turns, and calls at the end", "output", 3),
        ("items: a coding agent", "", 7),
        ("exchange: Anthropic", "response", 4),
    ):
        row = {key: value for key, value in GOOD[name]["row"].items() if key != answer}
        prompt, _ = RequestedFormat().find_prompt(row).prompt(row)
        assert isinstance(prompt, Chat) and prompt.messages == GOOD[name]["messages"][:num], name


def test_names_of_tools_are_written_where_a_template_needs_them():
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'tool' %}{{ m.name + ': ' }}"
        "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% endfor %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = tokenizer_of(FAMILIES["Qwen3.5"])
    chosen = ChosenTemplate(chat=template)
    renderer = Renderer(tokenizer, chosen, "assistant", TEMPLATES["alpaca"], [WORKER])
    [row] = renderer.render(read(GOOD["chat: ends with calls"]))
    assert "[tool]ls: a.txt[assistant]" in "".join(segment.text for segment in row.segments)


def test_rows_with_ids_on_one_side_alone_are_read_as_before():
    messages = copy.deepcopy(GOOD["chat: parallel calls"]["row"]["messages"])
    for call in messages[1]["tool_calls"]:
        call.pop("id")
    messages[2]["tool_call_id"] = "another"
    chat = FORMATS["messages"].read({"messages": messages})
    assert isinstance(chat, Chat) and chat.messages[2]["tool_call_id"] == "another"
    assert linked_calls.in_order_of_calls(chat.messages) == chat.messages


def parallel(ids: list[Any], result_ids: list[Any], **more: Any) -> dict[str, Any]:
    calls = [
        {"function": {"name": name, "arguments": {}}} | ({} if each is None else {"id": each})
        for name, each in zip(("ls", "pwd"), ids, strict=True)
    ]
    results = [
        {"role": "tool", "content": "so"} | ({} if each is None else {"tool_call_id": each}) | more
        for each in result_ids
    ]
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}, *results]
    return {"request": {"messages": said}, "response": "Done."}


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (parallel([None, None], [None, None]), ["ls", "pwd"]),
        (parallel([None, None], [None]), [None]),
        (parallel(["", ""], ["", ""]), ["ls", "pwd"]),
        (parallel([0, 1], [1, 0]), ["ls", "pwd"]),
        (parallel([None, None], [None], tool_name="pwd"), ["pwd"]),
    ],
)
def test_results_without_ids_get_names_by_their_places(row, names):
    chat = FORMATS["request_response"].read(row)
    assert isinstance(chat, Chat)
    assert [each.get("name") for each in chat.messages if each["role"] == "tool"] == names


ASKED = {"messages": [{"role": "user", "content": "hi"}]}
CHOICES = {"choices": [{"message": {"role": "assistant", "content": "so"}}]}


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ('{"city": "Paris"}', '{"city": "Paris"}'),
        ("[Note] hi", "[Note] hi"),
        ('{"error": "none"}', '{"error": "none"}'),
        ("[1, 2]", "[1, 2]"),
        ('{"output": 3, "role": "king"}', '{"output": 3, "role": "king"}'),
        (json.dumps(CHOICES), "so"),
        ('{"role": "assistant", "content": "so"}', "so"),
    ],
)
def test_a_text_is_a_response_only_where_it_is_one_in_json(response, content):
    chat = FORMATS["request_response"].read({"request": ASKED, "response": response})
    assert isinstance(chat, Chat) and chat.messages[-1]["content"] == content
    if content == response:
        items = {"request": {"input": "[hi] there"}, "response": response}
        chat = FORMATS["request_response"].read(items)
        assert isinstance(chat, Chat)
        assert [message["content"] for message in chat.messages] == ["[hi] there", content]


def test_nulls_of_tables_count_as_missing():
    said = {"role": "assistant", "content": "so", "type": "message"}
    request = {"messages": None, "input": "hi", "status": None}
    row = {"request": request, "response": {"output": [said], "status": "completed"}}
    chat = FORMATS["request_response"].read(row)
    assert isinstance(chat, Chat) and len(chat.messages) == 2
    row["response"]["status"] = "incomplete"
    with pytest.raises(BadRow, match="its status is 'incomplete'"):
        FORMATS["request_response"].read(row)
    text = {"type": "text", "text": "hi", "source": {"path": None}}
    steps = [
        {"source": "user", "message": [text], "observation": None},
        {"source": "agent", "message": "so", "observation": {"results": None}},
    ]
    chat = FORMATS["atif"].read({"schema_version": "ATIF-v1.7", "steps": steps})
    assert isinstance(chat, Chat)
    assert [message["content"] for message in chat.messages] == ["hi", "so"]


def test_an_answer_that_is_cut_without_choices_is_refused():
    response = {"role": "assistant", "content": "so", "finish_reason": "length"}
    with pytest.raises(BadRow, match="the response ends with 'length'"):
        FORMATS["request_response"].read({"request": ASKED, "response": response})


@pytest.mark.parametrize("name", ["items", "atif", "verifiers", "responses"])
def test_logs_with_columns_of_json_text_are_the_same(name):
    for log in GOOD.values():
        row = {
            column: json.dumps(value)
            if isinstance(value, dict | list) and column not in ("output", "images")
            else value
            for column, value in log["row"].items()
        }
        if log["format"] == name and not ("input" in row and "output" not in row):
            assert read(log | {"row": row}) == read(log), log["name"]
