"""Which parts of a turn are learned, against texts written by hand for published templates."""

import json
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config.cli import options_of, parse_options
from fsdp_qlora.config.learn import read_learn
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.tokenization import EncodedRow, encode
from fsdp_qlora.data.content import BadRow
from fsdp_qlora.data.dataset_text import DatasetText
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.learned_turns import EMPTY
from fsdp_qlora.data.text.preferences import with_mismatched_answers
from fsdp_qlora.data.text.rendering import Renderer
from fsdp_qlora.data.text.templates import ChosenTemplate
from fsdp_qlora.data.text.turn_parts import has_end_of_reasoning
from fsdp_qlora.planning.reading import (
    earlier_run,
    pick_data,
    say_kept_learning,
    with_kept_rows,
)
from fsdp_qlora.utils.errors import UserError
from tests.data.conftest import WORKER
from tests.helpers.run import ROOT

HERE = Path(__file__).parent / "turn_parts"
PUBLISHED = ROOT / "tests" / "rollouts" / "chat_templates"
EXPECTED: dict[str, dict[str, dict[str, list[list[str]]]]] = json.loads(
    (HERE / "expected.json").read_text()
)
# Tokens that end turns, and marks in turns, which are tokens of their own in the first tokenizer.
ENDS = ["<|im_end|>", "</s>", "<｜end▁of▁sentence｜>", "<turn|>", "<|tool_response>", "<|eot_id|>"]
ENDS += ["<|return|>", "<|call|>", "<|end|>", "<|user|>", "<|assistant|>", "<|observation|>"]
MARKS = ["<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<tool_call>"]
MARKS += ["</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>", "<|channel|>"]
MARKS += ["<|start|>", "<|message|>", "<|tool_calls_section_end|>", "<｜tool▁calls▁begin｜>"]
MARKS += ["<|tool_calls_section_begin|>", "<｜tool▁calls▁end｜>", "<|im_start|>", '<|"|>']


def calls(*names: str, city: str = "Rome") -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": name}} for name in names]
    for call in made:
        call["function"] |= {"arguments": {"city": city}}  # type: ignore[operator]
    return {"tool_calls": made}


def says(content: str, thought: str = "", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **more}
    return message | ({"reasoning_content": thought} if thought else {})


def asks(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


ANSWER = says("Sunny.", "Sun it is.")
CHATS = {
    "tools": [
        asks("Weather?"),
        says("I look.", "Rome, so tools.", **calls("find", "wind")),
        result("sun"),
        result("weak"),
        ANSWER,
    ],
    # Some templates take one call in a turn, and no words beside it.
    "one call": [
        asks("Weather?"),
        says("", "Rome, so tools.", **calls("find")),
        result("sun"),
        ANSWER,
    ],
    "plain": [asks("Weather?"), says("Where?"), asks("Rome."), says("Sunny.")],
}
ONE_CALL = ("gptoss", "llama3_1")


def source_of(name: str) -> str:
    own = HERE / f"{name}.jinja"
    return (own if own.exists() else PUBLISHED / f"{name}.jinja").read_text()


@cache
def tokenizer_of(name: str, *, has_marks: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that was trained on the texts of a template until it has long tokens.

    Nothing keeps its tokens from spanning words, spaces and marks.

    has_marks: whether the marks in turns are tokens.
    """
    texts = [
        "".join(run for row in rows for run in row)
        for chats in EXPECTED[name].values()
        for rows in chats.values()
    ]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    marks = [*ENDS, *MARKS] if has_marks else ENDS
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def encoded(
    tokenizer: PreTrainedTokenizerFast, template: str, row: dict[str, Any], learn: str
) -> list[EncodedRow]:
    """The rows that a row of a dataset becomes."""
    resolved = read_learn(learn).resolved(writes_blocks=has_end_of_reasoning(template)).text
    format_name = "messages" if "messages" in row else "alpaca"
    format_name = "label" if "label" in row else format_name
    row_format = FORMATS[format_name]
    chosen = ChosenTemplate("chat", chat=template)
    renderer = Renderer(tokenizer, chosen, resolved, row_format.template, [WORKER])
    rendered = renderer.render(row_format.read(row))
    return [*encode([(1, each) for each in rendered], tokenizer, 1000)]


def runs_of(row: EncodedRow, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of each stretch of learned tokens."""
    tokens = zip(row.ids.tolist(), row.learned.tolist(), strict=True)
    stretches = [
        (is_learned, [token for token, _ in group])
        for is_learned, group in groupby(tokens, key=lambda token: token[1])
    ]
    return [str(tokenizer.decode(ids)) for is_learned, ids in stretches if is_learned]


def learned(
    name: str, messages: list[dict[str, Any]], learn: str, *, has_marks: bool = True
) -> list[list[str]]:
    """The learned stretches of each row of a chat."""
    tokenizer = tokenizer_of(name, has_marks=has_marks)
    rows = encoded(tokenizer, source_of(name), {"messages": messages}, learn)
    return [runs_of(row, tokenizer) for row in rows]


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("name", EXPECTED)
def test_parts_of_turns_are_learned_to_the_token(name, has_marks):
    found = {}
    for chat, masks in EXPECTED[name].items():
        is_one = chat == "tools" and name in ONE_CALL
        messages = CHATS["one call" if is_one else chat]
        found[chat] = {
            learn: learned(name, messages, learn, has_marks=has_marks) for learn in masks
        }
    assert found == EXPECTED[name]


PLAIN = "{% for m in messages %}{% if m.role == 'assistant' %}<bot>{{ m.content }}<|im_end|>{% else %}<user>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"  # noqa: E501
CALLING = PLAIN.replace(
    "{{ m.content }}<|im_end|>",
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}<|im_end|>",
)
THINKING = PLAIN.replace("<bot>{{", "<bot>Thought: {{ m.thinking }}; {{")
OPENING = PLAIN.replace("%}<bot>{% endif %}", "%}<bot><think>{% endif %}").replace(
    "<bot>{{", "<bot><think>{{"
)
JSON_CALLS = PLAIN.replace(
    "<bot>{{ m.content }}",
    "<bot>{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}",
)
RAW_CALLS = PLAIN.replace(
    "{{ m.content }}<|im_end|>",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>",
)
EXAMPLE = '<tool_call>{"name": "find", "arguments": {}}</tool_call> is a call.'
CALL = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
FUNCTION_CALL = "<tool_call>\n<function=find>\n</function>\n</tool_call>"
HM = says("<think>hm</think>\n\nno")
# what a case is about -> the template, the turn of the assistant, the words, what is learned
UNUSUAL: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "reasoning in the content": (PLAIN, HM, "-reasoning", ["no<|im_end|>"]),
    "no first mark": (OPENING, says("hm</think>no"), "-reasoning", ["no<|im_end|>"]),
    "two blocks": (
        PLAIN,
        says("<think>hm</think>\n<think></think>\n<think>so</think>no"),
        "-reasoning",
        ["no<|im_end|>"],
    ),
    "two ways to have reasoning": (
        JSON_CALLS,
        says("<think>so</think>no", thinking="hm"),
        "-reasoning",
        ["no<|im_end|>"],
    ),
    "Kimi's marks": (PLAIN, says("◁think▷hm◁/think▷no"), "-reasoning", ["no<|im_end|>"]),
    "an empty block of the row": (
        PLAIN,
        says("<think>\n\n</think>\n\nno"),
        "-empty_reasoning",
        ["no<|im_end|>"],
    ),
    "a block with words": (
        PLAIN,
        HM,
        "-empty_reasoning",
        ["<think>hm</think>\n\nno<|im_end|>"],
    ),
    "an empty block in a template without marks": (
        PLAIN,
        says("<think></think>no"),
        "assistant",
        ["<think></think>no<|im_end|>"],
    ),
    "a mark within the words": (
        JSON_CALLS,
        says("no", "a </think> b"),
        "-reasoning",
        ["no<|im_end|>"],
    ),
    "an answer that begins with a space": (
        JSON_CALLS,
        says(" no", "hm"),
        "-reasoning",
        [" no<|im_end|>"],
    ),
    "a template that takes the space of an answer": (
        JSON_CALLS.replace(
            "</think>{% endif %}{{ m.content", "</think>\n\n{% endif %}{{ m.content | trim"
        ),
        says("\n\nno", "hm"),
        "-reasoning",
        ["no<|im_end|>"],
    ),
    "a call as an example": (
        JSON_CALLS,
        says(EXAMPLE, "", **calls("find")),
        "-tool_calls",
        [EXAMPLE, "<|im_end|>"],
    ),
    "a call in an argument": (
        RAW_CALLS,
        says("so ", "", **calls("find", city=EXAMPLE)),
        "-tool_calls",
        ["so ", "<|im_end|>"],
    ),
    "calls among the words": (
        PLAIN,
        says('so\n<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'),
        "-tool_calls",
        ["so\n", "<|im_end|>"],
    ),
    "calls of several forms": (
        PLAIN,
        says(f"so {CALL}\n{CALL} and {FUNCTION_CALL} no"),
        "-tool_calls",
        ["so ", " and ", " no<|im_end|>"],
    ),
    "an unknown form of calls": (
        CALLING,
        says("no ", "", **calls("find", "wind")),
        "-tool_calls",
        ["no ", "<|im_end|>"],
    ),
    "nothing to leave out": (THINKING, says("no"), "-reasoning", ["Thought: ; no<|im_end|>"]),
}


def learned_of(template: str, row: dict[str, Any], learn: str) -> list[list[str]]:
    """The learned stretches of each row, with the tokens of another template."""
    tokenizer = tokenizer_of("qwen3", has_marks=True)
    return [runs_of(found, tokenizer) for found in encoded(tokenizer, template, row, learn)]


def learned_segments(
    row: dict[str, Any], learn: str, format_name: str = "prompt_completion"
) -> list[list[str]]:
    """The learned texts of each row of a format without a chat template."""
    tokenizer = tokenizer_of("qwen3", has_marks=True)
    row_format = FORMATS[format_name]
    renderer = Renderer(tokenizer, ChosenTemplate(), learn, row_format.template, [WORKER])
    rendered = renderer.render(row_format.read(row))
    return [[segment.text for segment in row.segments if segment.learned] for row in rendered]


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_turns_are_divided_to_the_token(case):
    template, turn, learn, expected = UNUSUAL[case]
    assert learned_of(template, {"messages": [asks("go"), turn]}, learn) == [expected]


def test_a_part_that_cannot_be_found_makes_its_row_a_bad_one():
    row = {"messages": [asks("go"), says("no", "hm")]}
    with pytest.raises(BadRow, match=r"turn 2: where its reasoning .* is unknown"):
        learned_of(THINKING, row, "-reasoning")
    call = "{{ m.tool_calls[0].function.name if m.tool_calls }}"
    around = PLAIN.replace("<bot>{{ m.content }}", f"<bot>{call}{{{{ m.content }}}}{call}")
    row = {"messages": [asks("go"), says("no", "", **calls("find"))]}
    with pytest.raises(BadRow, match=r"turn 2: where its tool calls .* is unknown"):
        learned_of(around, row, "-tool_calls")


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>{'name': 'find', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "find", "arguments": {"text": "a "b" c"}}</tool_call>',
        '<tool_call>{"name": "find", "arguments": {',
        f"{CALL}<tool_call>{{'name': 'find'}}</tool_call>",
        "Write <tool_call> and more.",
    ],
)
def test_calls_in_texts_that_cannot_be_read_make_bad_rows(call):
    with pytest.raises(BadRow, match=r"^turn 2: a tool call in its text cannot be read \("):
        learned_of(PLAIN, {"messages": [asks("go"), says(call)]}, "-tool_calls")
    with pytest.raises(BadRow, match=r"^a tool call in its text cannot be read \("):
        learned_segments({"prompt": "go", "completion": call}, "assistant -tool_calls")


def test_calls_in_responses_of_texts_are_left_out():
    row = {"prompt": f"go {CALL}", "completion": f"<think>{CALL}</think>so {CALL}\n{CALL} no"}
    learned = ["<think>" + CALL + "</think>so ", " no"]
    assert learned_segments(row, "assistant -tool_calls") == [learned]
    assert learned_segments(row, "last -reasoning -tool_calls") == [["so ", " no"]]
    assert learned_segments(row, "all -tool_calls") == [[row["prompt"], *learned]]
    row = {"instruction": "go", "output": f"so {CALL}"}
    [segments] = learned_segments(row, "assistant -tool_calls", "alpaca")
    assert "".join(segments).strip() == "so"


@pytest.mark.parametrize(
    "content",
    [
        "Write </think> behind it.",
        "<think>hm</think>no </think>",
        "<think>hm",
        "so <think>hm</think>no",
        "<think>hm</think>so <think>hm</think>no",
    ],
)
def test_marks_of_reasoning_that_would_stay_learned_make_bad_rows(content):
    with pytest.raises(BadRow, match="turn 2: it has marks of reasoning that are not of blocks"):
        learned_of(PLAIN, {"messages": [asks("go"), says(content)]}, "-reasoning")
    with pytest.raises(BadRow, match="neither in messages nor at the beginning"):
        learned_segments({"prompt": "go", "completion": content}, "assistant -reasoning")


def test_final_counts_results_of_tools_that_a_turn_follows():
    # The second conversation ends with results.
    for messages in (CHATS["tools"], CHATS["tools"][:-1]):
        assert learned("qwen3", messages, "final") == learned("qwen3", messages, "last")
    weightless = [*CHATS["tools"][:-1], ANSWER | {"weight": 0}]
    with pytest.raises(BadRow, match="no assistant turn behind the last result of a tool"):
        learned("qwen3", weightless, "final")


def test_parts_have_no_weight_and_turns_keep_theirs():
    tokenizer = tokenizer_of("qwen3", has_marks=True)
    messages = [asks("go"), says("no", "hm", weight=0.5)]
    [row] = encoded(tokenizer, JSON_CALLS, {"messages": messages}, "all -reasoning")
    stretches = groupby(zip(row.ids, row.learned.tolist(), strict=True), key=lambda each: each[1])
    texts = [
        (weight, tokenizer.decode([token for token, _ in group])) for weight, group in stretches
    ]
    assert texts == [(1, "<user>go<bot>"), (0, "<think>hm</think>"), (0.5, "no<|im_end|>")]


def test_empty_blocks_that_a_template_writes_are_read_and_noted():
    tokenizer = tokenizer_of("qwen3", has_marks=True)
    row = {"instruction": "Weather?", "output": "Sunny."}
    block = "<think>\n\n</think>\n\n"
    for learn, runs, notes in (
        ("assistant", ["Sunny.<|im_end|>"], (EMPTY,)),
        ("last", ["Sunny.<|im_end|>"], (EMPTY,)),
        ("-reasoning", ["Sunny.<|im_end|>"], ()),
        ("+empty_reasoning", [f"{block}Sunny.<|im_end|>"], ()),
    ):
        [found] = encoded(tokenizer, source_of("qwen3"), row, learn)
        assert (runs_of(found, tokenizer), found.notes) == (runs, notes)


def test_mismatched_answers_begin_with_the_parts_that_are_left_out():
    tokenizer = tokenizer_of("qwen3", has_marks=True)
    rows = [
        {"prompt": [asks("Weather?")], "completion": [says("Sunny.")], "label": True},
        {"prompt": [asks("Where?")], "completion": [says("Rome.", "hm")], "label": True},
    ]
    block = "<think>\n\n</think>\n\n"
    thought = "<think>\nhm\n</think>\n\n"
    for learn, sunny, rome in (
        ("assistant", "Sunny.", f"{thought}Rome."),
        ("+empty_reasoning", f"{block}Sunny.", f"{thought}Rome."),
        ("-reasoning", "Sunny.", "Rome."),
    ):
        found = [encoded(tokenizer, source_of("qwen3"), row, learn)[0] for row in rows]
        found = [row._replace(row_number=number) for number, row in enumerate(found)]
        others = [
            row._replace(ids=row.ids[row.split :], learned=row.learned[row.split :])
            for row in with_mismatched_answers(found, 1000)
        ]
        asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"
        assert [tokenizer.decode(row.ids).strip() for row in others] == [
            asked.format("Weather?", f"{thought}Rome."),
            asked.format("Where?", f"{block}Sunny."),
        ]
        runs = [runs_of(row, tokenizer) for row in others]
        assert runs == [[f"{rome}<|im_end|>"], [f"{sunny}<|im_end|>"]]


def test_reasoning_of_texts_is_left_out_where_responses_begin():
    def of_text(completion: str, learn: str, prompt: str = "go: ") -> list[list[str]]:
        return learned_segments({"prompt": prompt, "completion": completion}, learn)

    assert of_text("<think>hm</think>\nno", "assistant -reasoning") == [["no"]]
    assert of_text("hm</think>\nno", "last -reasoning", "go<think>\n") == [["no"]]
    assert of_text("<think>hm</think>no", "assistant -empty_reasoning")[0][0][:7] == "<think>"
    assert of_text("no", "assistant -reasoning -tool_calls") == [["no"]]
    empty = "<think></think>no"
    assert of_text(empty, "assistant -tool_calls") == [[empty]]
    assert of_text(empty, "assistant -empty_reasoning -tool_calls") == [["no"]]
    with pytest.raises(BadRow, match="neither in messages nor at the beginning of a response"):
        of_text("so <think>hm</think>no", "assistant -reasoning")
    tokens = FORMATS["pretokenized"]
    row = tokens.read({"input_ids": [5, 6, 7]})
    tokenizer = tokenizer_of("qwen3", has_marks=True)
    with pytest.raises(BadRow, match="masks of their own"):
        Renderer(
            tokenizer, ChosenTemplate(), "assistant -tool_calls", tokens.template, [WORKER]
        ).render(row)


SPELLINGS = {
    "assistant": ["assistant", " assistant ", "ASSISTANT"],
    "assistant -reasoning": ["-reasoning", "assistant,-reasoning", "-empty_reasoning -Reasoning"],
    "final -reasoning -tool_calls": ["-tool-calls final -reasoning"],
    "last +empty_reasoning": ["last, +empty_reasoning"],
}


def test_words_of_learn_are_read_alike_from_all_places(tmp_path):
    file = tmp_path / "options.yaml"
    for text, spellings in SPELLINGS.items():
        for spelling in spellings:
            file.write_text(f"learn: {spelling.strip()}\n")
            found = [
                parse_options(["--learn", *spelling.split()])[0],
                parse_options([f"--learn={spelling}"])[0],
                options_of(file, {})[0],
                options_of(None, {"learn": spelling})[0],
                options_of(None, {"learn": spelling.split()})[0],
            ]
            assert {read_learn(config.learn).text for config in found} == {text}
    for wrong in ("assistant last", "banana", "-reasoning +empty_reasoning", "none"):
        with pytest.raises(UserError, match="--learn must be assistant, last, final or all, with"):
            parse_options(["--learn", *wrong.split()])
    for wrong, words in (
        ("assistant last", "assistant and last"),
        ("-reasoning +empty-reasoning", r"-reasoning and \+empty_reasoning"),
    ):
        with pytest.raises(UserError, match=f"--learn: {words} contradict each other"):
            parse_options(["--learn", *wrong.split()])
    with pytest.raises(UserError, match="own completions, all of them: leave out --learn"):
        parse_options(["--objective", "grpo", "--rewards", "exact_match", "--learn=-reasoning"])


def test_keys_of_cached_rows_change_only_where_the_default_matters():
    def words(template: str, *learn: str) -> str:
        tokenizer = tokenizer_of("qwen3", has_marks=True)
        tokenizer.chat_template = template
        options = pick_data(TrainConfig(learn=learn or ("assistant",)))
        return DatasetText(tokenizer, options, ()).learn

    try:
        assert words(PLAIN) == words(source_of("qwen3"), "+empty_reasoning") == "assistant"
        assert words(source_of("gptoss")) == words(source_of("llama3_1")) == "assistant"
        assert words(source_of("qwen3")) == "assistant -empty_reasoning"
        assert words(source_of("qwen3"), "last", "-reasoning") == "last -reasoning"
        assert words(source_of("qwen3"), "all") == "all"
    finally:
        tokenizer_of.cache_clear()


def test_a_run_that_continues_keeps_its_empty_blocks(tmp_path):
    def kept(run: dict[str, Any], **given: Any) -> str:
        (tmp_path / "run.json").write_text(json.dumps(run))
        config = TrainConfig(output_dir=str(tmp_path), context_length=64, **given)
        return read_learn(with_kept_rows(config, earlier_run(config).decisions()).learn).text

    before = {"options": {"learn": "assistant", "dataset": ["a.jsonl"]}}
    assert kept(before) == kept(before | {"learn": "assistant +empty_reasoning"})
    assert kept(before) == "assistant +empty_reasoning"
    assert kept(before, learn=("last",)) == "last +empty_reasoning"
    assert kept(before, learn=("-reasoning",)) == "assistant -reasoning"
    assert kept(before | {"learn": "assistant"}) == kept(before, resume="off") == "assistant"
    # Another run in the folder is replaced.
    assert kept(before, resume="auto:replace", dataset=("b.jsonl",)) == "assistant"
    same = {"resume": "auto:replace", "dataset": ("a.jsonl",)}
    assert kept(before, **same) == "assistant +empty_reasoning"


def test_kept_empty_blocks_are_said_where_the_template_writes_some(tmp_path, caplog):
    caplog.set_level("INFO", "fsdp_qlora")
    (tmp_path / "run.json").write_text(json.dumps({"options": {"learn": "assistant"}}))

    def said(template: str, *learn: str) -> list[str]:
        caplog.clear()
        tokenizer = tokenizer_of("qwen3", has_marks=True)
        tokenizer.chat_template = template
        asked = TrainConfig(output_dir=str(tmp_path), learn=learn or ("assistant",))
        kept = with_kept_rows(asked, earlier_run(asked).decisions())
        say_kept_learning(asked, kept, tokenizer)
        return [line for line in caplog.messages if line.startswith("Learn:")]

    try:
        line = "Learn: assistant +empty_reasoning, with which the run was started"
        assert said(source_of("qwen3")) == [line]
        assert said(PLAIN) == said(source_of("qwen3"), "+empty_reasoning") == []
        assert said(source_of("qwen3"), "all") == []
    finally:
        tokenizer_of.cache_clear()
