"""Which tokens of a row are learned, against tokens and masks written by hand."""

import contextlib
import itertools
import json
import re
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config.learn import Learn
from fsdp_qlora.data.batches.tokenization import (
    DOUBLE_BOS,
    MERGED,
    NO_END,
    EncodedRow,
    encode,
)
from fsdp_qlora.data.content import BadRow, Chat, Fields, Segment
from fsdp_qlora.data.text.chat_template import ChatTemplate, TemplateWorker
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.learned_turns import APART
from fsdp_qlora.data.text.rendering import Renderer
from fsdp_qlora.data.text.templates import ChosenTemplate, find_template
from fsdp_qlora.distributed.supervision.clock import within
from fsdp_qlora.training.generation.prompt_format import PromptFormat
from fsdp_qlora.utils.errors import UserError
from tests.data.conftest import WORKER
from tests.data.rows import rows_of, write_parquet
from tests.data.test_turns import BEHIND, CALLING, KEEPS, TEMPLATES, WORDS
from tests.helpers.run import ROOT
from tests.helpers.tokenizers import spelled_tokenizer

KINDS = ["byte_level", "sentencepiece"]

ASK = "{% for m in messages %}{% if m.role == 'assistant' %}"
TAGS = {
    "with generation tags": "[a]{% generation %}{{ m.content + '</s>' }}{% endgeneration %}",
    "without": "[a]{{ m.content + '</s>' }}",
}
REST = "{% else %}{{ '[' + m.role[0] + ']' + m.content }}{% endif %}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}[a]{% endif %}"


def template(
    answer: str = TAGS["without"], begin: str = "{{ bos_token }}", prompt: str = PROMPT
) -> str:
    return begin + ASK + answer + REST + prompt


def turns(*contents: str) -> list[dict[str, Any]]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]


CHAT = {"messages": turns("hi", "go on", "so", "no")}
# The whole row, and under each token whether it is learned. SentencePiece puts a blank in front of
# a text.
TOKENS = {
    "byte_level": "<s> [ u ] hi [ a ] go Ġon </s> [ u ] so [ a ] no </s>",
    "sentencepiece": "<s> ▁ [ u ] hi [ a ] go ▁on </s> ▁ [ u ] so [ a ] no </s>",
}
MASKS = {
    ("byte_level", "assistant"): """
         0  0 0 0 0  0 0 0 1  1   1    0 0 0 0  0 0 0 1  1""",
    ("byte_level", "last"): """
         0  0 0 0 0  0 0 0 0  0   0    0 0 0 0  0 0 0 1  1""",
    ("byte_level", "all"): """
         1  1 1 1 1  1 1 1 1  1   1    1 1 1 1  1 1 1 1  1""",
    ("sentencepiece", "assistant"): """
         0  0 0 0 0 0  0 0 0 1  1   1    0 0 0 0 0  0 0 0 1  1""",
    ("sentencepiece", "last"): """
         0  0 0 0 0 0  0 0 0 0  0   0    0 0 0 0 0  0 0 0 1  1""",
    ("sentencepiece", "all"): """
         1  1 1 1 1 1  1 1 1 1  1   1    1 1 1 1 1  1 1 1 1  1""",
}


def mask(learn: str, kind: str = "byte_level") -> list[int]:
    return [int(bit) for bit in MASKS[kind, learn].split()]


def encoded(
    tokenizer: PreTrainedTokenizerFast,
    format_name: str,
    row: dict[str, Any],
    learn: str = "assistant",
    **chosen: Any,
) -> list[EncodedRow]:
    """The rows that a row of a dataset becomes."""
    row_format = FORMATS[format_name]
    renderer = Renderer(tokenizer, ChosenTemplate(**chosen), learn, row_format.template, [WORKER])
    rendered = renderer.render(row_format.read(row))
    return [*encode([(1, each) for each in rendered], tokenizer, 1000)]


def tokens_of(
    kind: str, format_name: str, row: dict[str, Any], learn: str = "assistant", **chosen: Any
) -> tuple[list[str], list[int], tuple[str, ...]]:
    """The row's tokens, 1 for each that is learned, and the notes on the row."""
    tokenizer = spelled_tokenizer(kind)
    [found] = encoded(tokenizer, format_name, row, learn, **chosen)
    return (
        tokenizer.convert_ids_to_tokens(found.ids.tolist()),
        found.learned.astype(int).tolist(),
        found.notes,
    )


@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize(("kind", "learn"), MASKS)
def test_a_chat_is_learned_turn_by_turn(kind, tags, learn):
    tokens, learned, notes = tokens_of(kind, "messages", CHAT, learn, chat=template(TAGS[tags]))
    assert tokens == TOKENS[kind].split()
    assert learned == mask(learn, kind)
    assert notes == ()


def of_messages(
    *messages: dict[str, Any], learn: str = "assistant", chat: str | None = None
) -> tuple[list[str], list[int], tuple[str, ...]]:
    return tokens_of("byte_level", "messages", {"messages": [*messages]}, learn, chat=chat)


def fill(
    chat_template: ChatTemplate, worker: TemplateWorker = WORKER, chat: Chat | None = None
) -> list[list[str]]:
    """What is learned of each row of a chat."""
    rows, _ = chat_template.fill(chat or Chat(CHAT["messages"]), worker, learn=Learn())
    return [[segment.text for segment in row if segment.learned] for row in rows]


def test_turns_are_learned_whole_if_tokens_begin_with_a_sign():
    mistral = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + "
        "m.content + '[/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    tokens, learned, notes = tokens_of(
        "tekken", "messages", {"messages": turns("so:", "go on", "hi:go", "no")}, chat=mistral
    )
    assert " ".join(tokens) == "<s> [INST] so : [/INST] go Ġon </s> [INST] hi :go [/INST] no </s>"
    assert learned == [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert notes == ()
    tokens, learned, notes = tokens_of(
        "tekken", "prompt_completion", {"prompt": "so:", "completion": "go"}
    )
    assert (tokens, learned, notes) == (
        ["<s>", "so", ":", "go", "</s>"],
        [0, 0, 0, 1, 1],
        (MERGED,),
    )


@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize("weight", [{"weight": 0}, {"train": False}, {"loss": False}])
def test_turns_of_weight_0_are_masked(tags, weight):
    messages = turns("hi", "go on", "so", "no")
    messages[1] |= weight
    chat = template(TAGS[tags])
    for learn in ("assistant", "last"):
        assert of_messages(*messages, learn=learn, chat=chat)[1:] == (mask("last"), ())
    _, learned, _ = of_messages(*messages, learn="all", chat=chat)
    assert learned == [1] * 8 + [0] * 3 + [1] * 9
    messages[3] |= weight
    with pytest.raises(BadRow, match="weight above 0"):
        of_messages(*messages, chat=chat)


def test_template_workers_render_rows_in_order():
    tokenizer = spelled_tokenizer("byte_level")
    row_format = FORMATS["messages"]
    rows: list[dict[str, Any]] = [{"messages": turns(f"hi {i}", f"go {i}")} for i in range(250)]
    rows[77] = {"messages": [{"role": "user", "content": "so"}]}
    contents = [row_format.read(row) for row in rows]
    found = []
    workers = [WORKER, TemplateWorker()]
    for some in (workers[:1], workers):
        renderer = Renderer(
            tokenizer, ChosenTemplate(chat=template()), "assistant", row_format.template, some
        )
        found.append(renderer.render_all(contents))
    workers[1].close()
    assert str(found[0].pop(77)) == str(found[1].pop(77)) and found[0] == found[1]
    assert len({str(rows) for rows in found[0]}) == 249


def test_turns_rewritten_later_by_a_template_become_own_rows():
    rewriting = template(
        TAGS["without"].replace("m.content", "(m.content if loop.last else '...')")
    )
    tokenizer = spelled_tokenizer("byte_level")
    found = encoded(tokenizer, "messages", CHAT, chat=rewriting)
    for row, length in zip(found, (2, 4), strict=True):
        tokens, _, _ = of_messages(*CHAT["messages"][:length], learn="last", chat=rewriting)
        assert tokenizer.convert_ids_to_tokens(row.ids.tolist()) == tokens
    assert [row.notes for row in found] == [(APART,), ()]
    tokens_of("byte_level", "messages", CHAT, "all", chat=rewriting)


def test_rows_of_tool_chats_begin_with_the_tokens_of_their_prompts():
    tokenizer = spelled_tokenizer("byte_level")
    for name, messages in ((KEEPS, CALLING), (BEHIND, WORDS)):
        tokenizer.chat_template = TEMPLATES[name]
        found = encoded(tokenizer, "messages", {"messages": messages})
        assert [row.ids[: row.learned.argmax()].tolist() for row in found] == [
            tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True)["input_ids"]
            for turn in (1, 3)
        ]


# Template -> (who is refused, a word of the reason).
HOSTILE = {
    "{{ raise_exception('roles must alternate') }}": (BadRow, "roles must alternate"),
    "{{ ''.__class__.__mro__ }}": (BadRow, "__class__"),
    "{% if %}": (UserError, "line 1"),
    "{{ 'a' * 99999999999 }}": (BadRow, "2 GiB"),
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": (
        BadRow,
        "2 s",
    ),
    "{{ (messages | length) ** (9 ** 9) }}": (BadRow, "2 s"),  # within one operation
}


@pytest.fixture(scope="module")
def impatient() -> Iterator[TemplateWorker]:
    worker = TemplateWorker(seconds_per_chat=2)
    yield worker
    worker.close()


@pytest.mark.parametrize("bad", HOSTILE)
def test_a_hostile_template_fails_only_its_own_row(bad, impatient):
    refusal, word = HOSTILE[bad]
    only_here = "{% if messages[0].content == 'hi' %}" + bad + "{% endif %}" + template()
    chat_template = ChatTemplate(spelled_tokenizer("byte_level"), only_here)
    with pytest.raises((BadRow, UserError), match=re.escape(word)) as error:
        fill(chat_template, impatient)
    assert error.type is refusal
    if refusal is BadRow:
        assert fill(chat_template, impatient, Chat(turns("so", "no"))) == [["no</s>"]]


def test_a_worker_imports_no_module_of_the_current_folder(tmp_path, monkeypatch):
    for name in ("json", "jinja2", "transformers", "fsdp_qlora", "signal", "re"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})"
        )
    monkeypatch.chdir(tmp_path)
    worker = TemplateWorker()
    fill(ChatTemplate(spelled_tokenizer("byte_level"), template()), worker)
    worker.close()
    assert not (tmp_path / "ran").exists()


def nested(depth: int) -> Any:
    return {"properties": nested(depth - 1)} if depth else {}


def deep_list(depth: int) -> Any:
    found: Any = "x"
    for _ in range(depth):
        found = [found]
    return found


# How many levels of a value Python's JSON takes depends on its version; how many calls a template
# takes does not.
CALLS_ITSELF = (
    "{% macro call() %}{{ call() }}{% endmacro %}{{ call() if tools and tools[0].name == 'self' }}"
)
SHORT = turns("hi", "no")
# Chat that costs its row alone -> a word of the reason.
EXTREME = {
    "tools that JSON cannot say": (Chat(SHORT, [{"name": object()}]), "cannot represent"),
    "tools nested 400 deep": (Chat(SHORT, [{"name": "go", **nested(400)}]), ""),
    "a tool for which the template calls itself": (
        Chat(SHORT, [{"name": "self"}]),
        "nested too deeply",
    ),
    "tools nested 5,000 deep": (
        Chat(SHORT, [{"name": deep_list(5000)}]),
        "cannot represent|too deeply",
    ),
    "100,000 messages": (Chat(turns(*["hi"] * 100_000)), "did not end within"),
}


@pytest.mark.parametrize("name", EXTREME)
def test_extreme_chats_are_rejected_as_bad_rows(name):
    chat, reason = EXTREME[name]
    chat_template = ChatTemplate(
        spelled_tokenizer("byte_level"), CALLS_ITSELF + "{{ tools | tojson if tools }}" + template()
    )
    worker = TemplateWorker(seconds_per_chat=2)
    try:
        fill(chat_template, worker, Chat(SHORT))
        with pytest.raises(BadRow, match=reason) if reason else contextlib.nullcontext():
            fill(chat_template, worker, chat)
        assert fill(chat_template, worker, Chat(SHORT))
    finally:
        worker.close()


def test_prompts_are_filled_in_the_bounded_process_too():
    tokenizer = spelled_tokenizer("byte_level")
    tokenizer.chat_template = template()
    asked = [{"role": "system", "content": "so"}, {"role": "user", "content": "hi"}]
    prompts = PromptFormat(tokenizer, {"kind": "chat"})
    expected = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    for content in (Fields("hi", "", system="so"), Chat(asked)):
        assert prompts.encode(content).ids == expected
    prompts.close()
    with pytest.raises(UserError, match="more than 2 GiB"):
        PromptFormat(tokenizer, {"kind": "chat", "chat_template": "{{ 'a' * 99999999999 }}"})


def test_killed_template_worker_is_replaced_and_timeouts_end_the_run(monkeypatch):
    worker = TemplateWorker()
    chat_template = ChatTemplate(spelled_tokenizer("byte_level"), template())
    ask = partial(chat_template.fill, Chat(CHAT["messages"]), worker, learn=Learn())
    first = ask()
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP):
        assert worker._process is not None
        worker._process.send_signal(number)
        limits = iter((1.0, 600.0))  # of this process, and of the one that is started
        monkeypatch.setattr(
            "fsdp_qlora.distributed.supervision.clock.within",
            lambda _, call, all=limits: within(next(all), call),
        )
        assert ask() == first
    monkeypatch.undo()
    worker.seconds_per_chat = 0.1
    endless = ChatTemplate(spelled_tokenizer("byte_level"), "{{ 9 ** (9 ** (9 ** 9)) }}")
    for refusal in (BadRow, BadRow, UserError):  # three in a row are the template's fault
        with pytest.raises(refusal, match="did not end within"):
            fill(endless, worker)
    worker.close()


def test_long_chats_have_more_time_and_do_not_blame_the_template():
    worker = TemplateWorker()
    fill(ChatTemplate(spelled_tokenizer("byte_level"), template()), worker)
    worker.seconds_per_chat = 0.1
    endless = ChatTemplate(spelled_tokenizer("byte_level"), "{{ 9 ** (9 ** (9 ** 9)) }}")
    for num, seconds in ((300, "0.6"), (300, "0.6"), (300, "0.6"), (3000, "1")):
        with pytest.raises(BadRow, match=f"within {seconds} s for it.*{2 * num} .*--learn final"):
            fill(endless, worker, Chat(SHORT[:1] + SHORT[-1:] * (2 * num - 1)))
    worker.close()


def test_templates_that_print_the_date_render_the_same_on_resume():
    dated = "{{ strftime_now('%d %b %Y') }}" + template(begin="")
    tokens, _, _ = tokens_of("byte_level", "messages", CHAT, chat=dated)
    assert "".join(tokens).startswith("26ĠJulĠ2024[u]")


@pytest.mark.parametrize("kind", KINDS)
def test_bos_and_eos_in_a_text_are_not_added_twice(kind):
    blank = [] if kind == "byte_level" else ["▁"]
    for text in ("go on", "<s>go on", "go on</s>"):
        tokens, learned, notes = tokens_of(kind, "text", {"text": text})
        assert tokens == ["<s>", *blank, "go", "Ġon" if kind == "byte_level" else "▁on", "</s>"]
        assert learned == [1] * len(tokens)
        assert notes == ()


def test_tokens_across_prompt_and_answer_are_split_and_logged():
    row = {"prompt": "so: ", "completion": "on"}
    tokens, learned, notes = tokens_of("byte_level", "prompt_completion", row)
    assert tokens == ["<s>", "so", ":", "Ġ", "o", "n", "</s>"]
    assert learned == [0, 0, 0, 0, 1, 1, 1]
    assert notes == (MERGED,)
    tokens, learned, notes = tokens_of(
        "byte_level", "prompt_completion", {"prompt": "so:", "completion": " on"}
    )
    assert (tokens, learned, notes) == (["<s>", "so", ":", "Ġon", "</s>"], [0, 0, 0, 1, 1], ())


UNUSUAL = {
    "bos token twice": (template(begin="{{ bos_token + bos_token }}"), {}, (DOUBLE_BOS,)),
    "no end of turn": (template("[a]{{ m.content + '.' }}"), {}, (NO_END,)),
    "unknown fields": (
        template(),
        {"lang": "en", "note": None},
        ("turns have fields that are not used: lang",),
    ),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_template_behavior_is_logged(case):
    chat, more, expected = UNUSUAL[case]
    first, *rest = CHAT["messages"]
    assert of_messages({**first, **more}, *rest, chat=chat)[2] == expected


def test_pretokenized_rows_are_used_unchanged():
    for row, expected in (
        ({"input_ids": [5, 6, 7]}, [1, 1, 1]),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, [0, 1, 1]),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "loss_mask": [1, 0, 1]}, [0, 0, 1]),
        ({"input_ids": [5, 6, 7], "completion_mask": [False, True, False]}, [0, 1, 0]),
    ):
        tokens, learned, _ = tokens_of("byte_level", "pretokenized", row)
        assert (len(tokens), learned) == (3, expected)
    with pytest.raises(BadRow, match="shift them back"):
        tokens_of("byte_level", "pretokenized", {"input_ids": [5, 6, 7], "labels": [6, 7, -100]})


def test_alpaca_prompts_hold_system_and_history_with_answers_learned():
    row = {"instruction": "so", "output": "no", "system": "on", "history": [["hi", "go"]]}
    tokens, learned, _ = tokens_of("byte_level", "alpaca", row)
    text = "".join(tokens).replace("Ġ", " ").replace("Ċ", "\n")
    assert text == (
        "<s>on\n\n### Instruction:\nhi\n\n### Response:go</s>\n\n### Instruction:\nso\n\n### "
        "Response:no</s>"
    )
    assert [*itertools.compress(tokens, learned)] == ["go", "</s>", "no", "</s>"]
    assert sum(tokens_of("byte_level", "alpaca", row, "last")[1]) == 2
    assert sum(tokens_of("byte_level", "alpaca", row, "all")[1]) == len(tokens)
    tokens, learned, _ = tokens_of("byte_level", "alpaca", row, chat=template())
    assert "".join(tokens) == "<s>[s]on[u]hi[a]go</s>[u]so[a]no</s>"


def test_a_template_file_fills_fields_and_learns_from_the_response(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text(
        'Q {question} ({context})\nA {answer}!\n===\nQ {question} {"a": 1}\nA {answer}!\n'
    )
    row = {"question": "hi {context}", "answer": "go", "context": "so"}
    for given, text in (
        (row, "Q hi {context} (so)\nA go!"),
        (row | {"context": ""}, 'Q hi {context} {"a": 1}\nA go!'),
    ):
        segments = find_template(str(file)).prompt.fill(FORMATS["question_answer"].read(given))  # type: ignore[union-attr, arg-type]
        assert "".join(segment.text for segment in segments) == text
        assert segments[-1] == Segment("go!", True)
    [page] = re.findall(
        r"^```text\n(.*?)^```", (ROOT / "docs" / "data.md").read_text(), re.M | re.S
    )
    file.write_text(page)
    fields = FORMATS["alpaca"].read({"instruction": "Why?", "output": "So."})
    segments = find_template(str(file)).prompt.fill(fields)  # type: ignore[union-attr, arg-type]
    assert "".join(segment.text for segment in segments) == "Q: Why?\nA: So."
    file.write_text("Q {ask}")
    with pytest.raises(UserError, match=r"mine.txt: \{ask\} is not known. Known: \{instruction\}"):
        find_template(str(file))
    with pytest.raises(UserError, match=r"no_such .*alpaca, .*chatml, .*chat"):
        find_template("no_such")


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_tool_calls_of_every_form_reach_the_template_as_objects():
    seen = (
        "{% for tool in tools %}{{ tool.name }}{% endfor %}{% for m in messages %}[{{ "
        "m.role[0] }}]{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ "
        "call.function.arguments.a }}{% endfor %}{{ m.content or '' }}{% if m.role == "
        "'assistant' %}</s>{% endif %}{% endfor %}" + PROMPT
    )
    function = {"name": "add", "arguments": {"a": 1}}
    silent = {"role": "assistant", "content": None}
    forms = [
        {**silent, "tool_calls": [CALL]},
        {**silent, "tool_calls": [{"type": "function", "function": function}]},
        {**silent, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "tool_call", "content": json.dumps(function)},
        {"from": "function_call", "value": json.dumps(function)},
    ]
    rest = [
        {"role": "tool", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "no"},
    ]
    for form, tools in itertools.product(forms, ([{"name": "go"}], '[{"name": "go"}]')):
        row = {"conversations": [{"from": "human", "value": "so"}, form, *rest], "tools": tools}
        tokens, learned, _ = tokens_of("byte_level", "sharegpt", row, chat=seen)
        assert "".join(tokens) == "go[u]so[a]add1</s>[t]hi[a]no</s>"
        spoken = itertools.compress(tokens, learned)
        assert "".join(spoken) == "add1</s>no</s>"


def test_tokenizers_template_is_used_and_a_missing_one_is_named():
    tokenizer: PreTrainedTokenizerFast = spelled_tokenizer("byte_level")
    with pytest.raises(UserError, match="no chat template"):
        fill(ChatTemplate(tokenizer))
    tokenizer.chat_template = template()
    assert fill(ChatTemplate(tokenizer)) == [["go on</s>", "no</s>"]]


def test_nulls_added_by_arrow_are_dropped_before_the_template(tmp_path):
    def row(name: str, *, schema: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
        return {
            "messages": messages,
            "tools": [{"name": name, "parameters": {"properties": schema}}],
        }

    rows = [
        row("go", schema={"a": {"default": 1}}, a=1),
        row("so", schema={"b": {"type": "x"}}, b=2),
    ]
    read = FORMATS["messages"].read
    plain = [read(found) for found in rows]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for path in (write_parquet(tmp_path / "a.parquet", rows), tmp_path / "saved"):
        assert [read(found) for found in rows_of(path)] == plain
    null = row("go", schema={"a": {"default": None, "description": None}, "b": None}, a=None)
    chat = read(null)
    assert isinstance(chat, Chat) and chat.tools is not None
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}
    assert chat.tools[0]["parameters"]["properties"] == {"a": {"default": None}}
