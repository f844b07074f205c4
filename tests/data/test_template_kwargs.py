"""Variables of the chat template that rows set: the same tokens as apply_chat_template with them,
or a bad row.
"""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.data.content import BadRow
from fsdp_qlora.data.text.chat_template import _variables_of
from fsdp_qlora.data.text.template_kwargs import RESERVED, read_kwargs
from fsdp_qlora.utils.errors import UserError
from tests.data.rows import write_csv, write_jsonl, write_parquet
from tests.data.test_own_data import prepare
from tests.helpers.tokenizers import spelled_tokenizer

__all__ = ["prepare"]  # a fixture

# As Qwen3's: without reasoning the prompt has an empty block. As gpt-oss's: an effort, which the
# template else sets.
TEMPLATE = (
    "{{ bos_token }}{% if effort is not defined %}{% set effort = 'low' %}{% endif "
    "%}{{ '[' + effort + ']' }}{% for m in messages %}{% set content = m.content %}{{ "
    "'[' + m.role + ']' + content }}{% if m.role == 'assistant' %}{{ eos_token }}{% "
    "endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% if enable_thinking is "
    "defined and not enable_thinking %}<t></t>{% endif %}{% endif %}"
)
ASK = {"role": "user", "content": "hi"}
SAY = {"role": "assistant", "content": "go on"}
OFF = {"enable_thinking": False}
HIGH = {"effort": "high"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found = spelled_tokenizer("byte_level")
    found.chat_template = TEMPLATE
    return found


def expected(
    tokenizer: PreTrainedTokenizerFast, kwargs: dict[str, Any], answer: str = "go on"
) -> str:
    prompt = tokenizer.apply_chat_template(
        [ASK], add_generation_prompt=True, tokenize=False, **kwargs
    )
    return f"{prompt}{answer}</s>"


# The columns of a row, besides the question and its answer -> the variables that reach the
# template.
GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "an object": ({"chat_template_kwargs": OFF | HIGH}, OFF | HIGH),
    "its text": ({"chat_template_kwargs": json.dumps(OFF)}, OFF),
    "columns": (OFF | HIGH, OFF | HIGH),
    "both": ({"chat_template_kwargs": HIGH, **OFF, "effort": "high"}, OFF | HIGH),
    "null": ({"chat_template_kwargs": None, "enable_thinking": None}, {}),
}
# The objective -> the columns of its rows.
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"messages": [ASK, SAY]},
    "dpo": {"prompt": [ASK], "chosen": [SAY], "rejected": [{**SAY, "content": "no"}]},
    "kto": {"prompt": [ASK], "completion": [SAY], "label": True},
    "distill": {"messages": [ASK, SAY], "teacher_prompt": "so"},
    "instructions": {"instruction": "hi", "output": "go on"},
    "prompts": {"prompt": "hi", "completion": "go on", "tools": [{"name": "so"}]},
}


@pytest.mark.parametrize("given", GIVEN)
def test_variables_of_a_row_reach_the_template(given, prepare, tokenizer, tmp_path):
    columns, kwargs = GIVEN[given]
    for name, row in ROWS.items():
        options: dict[str, Any] = {} if name in ("instructions", "prompts") else {"objective": name}
        options |= {"prompt_template": "chat"} if name == "instructions" else {}
        path = write_jsonl(tmp_path / f"{name}.jsonl", [{**row, **columns, "extra": 1}])
        data, said = prepare(path, **options)
        first = data.train.as_documents[0].input_ids
        assert tokenizer.decode(first) == expected(tokenizer, kwargs), name
        assert ("does not use: extra") in said and (
            "leaves out what the row has for: enable"
        ) not in said, name


@pytest.mark.parametrize("given", GIVEN)
def test_variables_of_a_row_reach_the_prompts_of_grpo(given, prepare, tokenizer, tmp_path):
    columns, kwargs = GIVEN[given]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [ASK], **columns}])
    data, _ = prepare(path, objective="grpo", rewards=("number",), max_completion_length=4)
    asked = tokenizer.apply_chat_template(
        [ASK], add_generation_prompt=True, tokenize=False, **kwargs
    )
    assert [tokenizer.decode(prompt.ids) for prompt in data.prompts] == [asked]


def test_tables_and_other_names_give_the_same_variables(prepare, tokenizer, tmp_path):
    rows = [
        {"messages": [ASK, SAY], "think": n > 0, "effort": "high", "chat_template_kwargs": {"a": n}}
        for n in range(2)
    ]
    found = [
        prepare(write(tmp_path / name, rows), columns=("enable_thinking=think", "ignore=effort"))
        for write, name in ((write_jsonl, "a.jsonl"), (write_parquet, "a.parquet"))
    ]
    texts = [expected(tokenizer, OFF), expected(tokenizer, {"enable_thinking": True})]
    for data, said in found:
        assert [tokenizer.decode(data.train[row].input_ids) for row in range(2)] == texts
        assert "leaves out what the row has for: a" in said
    path = write_csv(
        tmp_path / "a.csv",
        [{"messages": json.dumps([ASK, SAY]), "chat_template_kwargs": json.dumps(OFF)}],
    )
    assert tokenizer.decode(prepare(path)[0].train.input_ids) == texts[0]


def test_other_variables_are_other_rows_in_the_token_cache(prepare, tmp_path):
    path = tmp_path / "a.jsonl"
    digests = []
    for kwargs in ({}, OFF, HIGH, OFF):
        data, _ = prepare(
            write_jsonl(path, [{"messages": [ASK, SAY], "chat_template_kwargs": kwargs}])
        )
        digests.append(data.train.digest)
    assert len(set(digests)) == 3 and digests[1] == digests[3]


# The reason -> the columns of a row.
BAD: dict[str, dict[str, Any]] = {
    "chat_template_kwargs is not an object with the template's variables but list": {
        "chat_template_kwargs": [1]
    },
    "chat_template_kwargs is not JSON": {"chat_template_kwargs": "{"},
    "enable_thinking is 'no', and can be true or false; --columns ignore=enable_thinking trains "
    "without it": {"enable_thinking": "no"},
    "enable_thinking is 1, and can be true or false": {
        "chat_template_kwargs": {"enable_thinking": 1}
    },
    "effort is 'False', and can be true or false; --columns ignore=effort trains without it": {
        "effort": "False"
    },
    "enable_thinking is False in one column and True in another": {
        "chat_template_kwargs": OFF,
        "enable_thinking": True,
    },
    **{
        f"chat_template_kwargs: a row cannot set {name}": {"chat_template_kwargs": {name: "x"}}
        for name in sorted(RESERVED)
    },
}


@pytest.mark.parametrize(
    "reason",
    ["chat_template_kwargs is not JSON", "chat_template_kwargs: a row cannot set bos_token"],
)
def test_a_row_with_bad_variables_is_named(reason, prepare, tmp_path):
    with pytest.raises(UserError, match=rf"a\.jsonl:1: {reason}"):
        prepare(write_jsonl(tmp_path / "a.jsonl", [{"messages": [ASK, SAY], **BAD[reason]}]))


def test_variables_of_wrong_types_and_reserved_names_are_bad_rows():
    columns = {name: name for name in ("chat_template_kwargs", "enable_thinking", "effort")}
    for reason, row in BAD.items():
        with pytest.raises(BadRow) as error:
            read_kwargs(row, columns)
        assert str(error.value) == reason


def test_only_what_a_template_wants_to_be_given_is_a_variable():
    macro = (
        "{% macro say(text) %}{{ text if text is defined }}{% endmacro %}{% set date = "
        "date | default('x') %}"
    )
    assert set(_variables_of(TEMPLATE + macro)) - RESERVED == {"effort", "enable_thinking", "date"}
    assert _variables_of("{% if %}") == []
