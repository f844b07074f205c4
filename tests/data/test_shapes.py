# ruff: noqa: E501
"""The shapes of well-known sets: what is learned of each, or the refusal with a command that works."""

import json
import re
import shlex
from typing import Any

import pytest

from fsdp_qlora.commands.run_config import parse_train_config
from tests.data.rows import write_csv, write_jsonl
from tests.data.test_own_data import Rows, prepare, tokenizer

__all__ = ["prepare", "tokenizer"]  # fixtures

ASK = {"role": "user", "content": "hi"}
SAY = {"role": "assistant", "content": "go on"}
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "go on"}]
CALL = {"role": "assistant", "function_call": {"name": "go", "arguments": "{}"}}
FUNCTION = {"name": "go", "description": "goes", "parameters": {}}
LONG = "so it is " * 30
HALF = "half \ud83d end"


def called(arguments: object) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "go", "arguments": arguments}}],
    }


# The columns of sets of which "go on</s>" is learned of the row.
ANSWERED: dict[str, dict[str, Any]] = {
    "Alpaca": {"instruction": "hi", "input": "so", "output": "go on"},
    "Alpaca with another name of the input": {
        "instruction": "hi",
        "context": "so",
        "output": "go on",
    },
    "GPTeacher": {"instruction": "hi", "input": "so", "response": "go on"},
    "Dolly": {"instruction": "hi", "context": "so", "response": "go on", "category": "x"},
    "MetaMath": {"type": "x", "query": "hi", "original_question": "x", "response": "go on"},
    "CodeFeedback": {"query": "hi", "answer": "go on", "lang": "x"},
    "Magicoder": {"lang": "x", "seed": "x", "problem": "hi", "solution": "go on"},
    "HelpSteer": {"prompt": "hi", "response": "go on", "helpfulness": 4},
    "input and output": {"input": "hi", "output": "go on"},
    "FLAN": {"inputs": "hi", "targets": "go on", "task": "x"},
    "source and target": {"source": "hi", "target": "go on"},
    "user and assistant": {"user": "hi", "assistant": "go on"},
    "OpenOrca": {"id": "x", "system_prompt": "so", "question": "hi", "response": "go on"},
    "GSM8K": {"question": "hi", "answer": "go on"},
    "s1K": {"question": "hi", "solution": "go on", "cot_type": "x"},
    "SQuAD": {
        "id": "x",
        "context": "so",
        "question": "hi",
        "answers": {"text": ["go on", "no"], "answer_start": [0, 1]},
    },
    "answers in a list": {"question": "hi", "answer": ["go on"]},
    "TRL, text": {"prompt": "hi ", "completion": "go on"},
    "TRL, chats": {"prompt": [ASK], "completion": [SAY]},
    "Numina": {"problem": "hi", "solution": "go on", "messages": [ASK, SAY]},
    "messages as text": {"messages": json.dumps([ASK, SAY])},
    "OpenAI, weights": {"messages": [ASK, {**SAY, "weight": 0}, ASK, SAY]},
    "LLaMA-Factory, parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "value": "hi"}]},
            {**SAY, "content": [{"type": "text", "value": "go on"}], "loss_weight": 1.0},
        ]
    },
    "LLaMA-Factory, weights": {"messages": [ASK, {**SAY, "loss_weight": 0.0}, ASK, SAY]},
    "no_robots": {"prompt": "hi", "prompt_id": "x", "messages": [ASK, SAY], "category": "x"},
    "WildChat": {
        "conversation_hash": "x",
        "conversation": [{**ASK, "language": "x", "toxic": False}, {**SAY, "toxic": False}],
        "turn": 1,
    },
    "OpenHermes": {"conversations": SHARED, "source": "x", "category": None},
    "SlimOrca": {"conversations": [{**SHARED[0], "weight": 0.0}, {**SHARED[1], "weight": 1.0}]},
    "OpenThoughts": {"system": "so", "conversations": SHARED},
    "LMSYS": {"conversation_id": "x", "model": "x", "conversation": [ASK, SAY], "turn": 1},
    "ms-swift, pairs": {"conversation": [{"human": "hi", "assistant": "go on"}]},
    "Gemini": {
        "contents": [
            {"role": "user", "parts": [{"text": "hi"}]},
            {"role": "model", "parts": [{"text": "go on"}]},
        ]
    },
    "KTO, a good answer": {"messages": [ASK, SAY], "label": True},
    "no images": {"messages": [ASK, SAY], "images": []},
    "no dialogue": {"instruction": "Say <user>: hi", "output": "go on"},
}
# The columns of a set -> what is learned of the row.
LEARNED: dict[str, tuple[dict[str, Any], str]] = {
    **{name: (row, "go on</s>") for name, row in ANSWERED.items()},
    "ms-swift": (
        {"query": "hi", "response": "go on", "system": "so", "history": [["a", "no"]]},
        "no</s>go on</s>",
    ),
    "ms-swift, pretraining": ({"response": "go on"}, "<s>go on</s>"),
    "UltraChat": (
        {"prompt": "hi", "prompt_id": "x", "messages": [ASK, SAY, ASK, SAY]},
        "go on</s>go on</s>",
    ),
    "open-r1": (
        {
            "problem": "hi",
            "solution": "x",
            "answer": "x",
            "messages": [ASK, {**SAY, "content": "<think>so</think>no"}],
        },
        "<think>so</think>no</s>",
    ),
    "Capybara": (
        {
            "source": "x",
            "conversation": [{"input": "hi", "output": "go on"}, {"input": "so", "output": "no"}],
        },
        "go on</s>no</s>",
    ),
    "Wikipedia": ({"id": "x", "url": "x", "title": "x", "text": "go on"}, "<s>go on</s>"),
    "Guanaco": (
        {"text": "### Human: hi### Assistant: go on\n### Human: so### Assistant: no"},
        " go on no</s>",
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_well_known_datasets_are_rendered_as_intended(name, prepare, tokenizer, tmp_path):
    row, expected = LEARNED[name]
    data, _ = prepare(write_jsonl(tmp_path / "a.jsonl", [row]))
    assert tokenizer.decode(data.train.input_ids[data.train.learned]) == expected
    for column in ("input", "context", "system", "system_prompt", "history", "meta_instruction"):
        if column in row and column != "input" * (len(row) == 2):
            told = row[column][0][0] if column == "history" else row[column]
            assert told in tokenizer.decode(data.train.input_ids[~data.train.learned]), column


BAD = {"messages": [ASK, SAY], "label": False}
PAIR = {"chosen": "go on", "rejected": "no", "score_chosen": 9.0, "score_rejected": 1}
HH = {
    side: f"\n\nHuman: hi\n\nAssistant: {answer}"
    for side, answer in (("chosen", "go on"), ("rejected", "no"))
}
DISEASE = {"disease": "x", "Symptom": LONG[:99], "reason": LONG, "TestsAndProcedures": "['x', 'y']"}
SEARCHED = {
    "win": True,
    "tree": {"size": 2, "tree": {"children": [{"children": []}]}},
    "compare_candidates": [],
}
RATED = [
    {
        "prompt": "hi",
        "completions": [{"response": "go on", "score": 4}, {"response": "no", "score": n}],
    }
    for n in (1, 2)
]
NO = {**SAY, "content": "no"}
KTO_COMMANDS = ("--columns ignore=label", "--max_bad_rows 1", "--objective kto")
# The columns of a set -> what the refusal says, and commands that it offers and that work: all.
REFUSED: dict[str, tuple[Rows, str, tuple[str, ...]]] = {
    "KTO chats": (
        [{**BAD, "label": True}, BAD],
        "a.jsonl:2: its label is false: a bad answer",
        KTO_COMMANDS,
    ),
    "KTO texts": (
        [{"prompt": "hi", "completion": "go on", "label": n} for n in (True, False)],
        "its label is false",
        KTO_COMMANDS,
    ),
    "classes": (
        [{"text": "go on", "label": 3}],
        "label is filled, and the format text does not use it",
        ("--columns ignore=label",),
    ),
    "choices": (
        [{"question": "hi", "options": ["go", "no"], "answer": "go on"}],
        "options is filled, and the format question_answer does not use it",
        ("--columns ignore=options",),
    ),
    "images": (
        [{"messages": [ASK, SAY], "images": ["a.png"]}],
        "images: only text can be trained on",
        ("--columns ignore=images",),
    ),
    "audio": (
        [{"conversations": SHARED, "audios": ["a.mp3"]}],
        "audios: only text",
        ("--columns ignore=audios",),
    ),
    "context beside messages": (
        [{"messages": [ASK, SAY], "context": "so"}],
        "trains without it",
        ("--columns ignore=context",),
    ),
    "input beside prompts": (
        [{"prompt": "hi", "completion": "go on", "input": "so"}],
        "input is filled",
        ("--columns ignore=input",),
    ),
    "hh-rlhf": ([HH, HH], "these rows are preferences", ("--objective dpo",)),
    "rated answers": (RATED, "its answers have ratings", ("--rating_threshold 4 --objective dpo",)),
}
# Texts that are dialogues, and what the refusal calls them. --dataset_format text takes them.
DIALOGUES: dict[str, tuple[Rows, str]] = {
    "ChatML": (
        [{"text": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\ngo on<|im_end|>\n"}],
        "(<|im_start|>): questions would be learned",
    ),
    "Llama 2": ([{"text": "<s>[INST] hi [/INST] go on </s>"}], "([INST]): questions"),
    "ChatML from the second row on": (
        [{"text": "go on"}, *[{"text": "<|im_start|>user\nhi<|im_end|>"}] * 2],
        "(<|im_start|>): questions",
    ),
    "oasst1": (
        [{"message_id": "1", "parent_id": None, "role": "prompter", "text": "hi"}],
        "one message of a tree",
    ),
}
# Rows without known columns, and the columns that the refusal proposes.
UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "samsum": (
        {"id": "1", "dialogue": "so so so", "summary": "go on"},
        "instruction=dialogue output=summary",
    ),
    "CNN": (
        {"article": "so so so", "highlights": "go on", "id": "1"},
        "instruction=article output=highlights",
    ),
    "unknown chats": ({"dialog": [ASK, SAY]}, "messages=dialog"),
    "one unknown text": ({"body": "go on"}, "text=body"),
    "a long text": ({"url": "x", "title": "so", "body": LONG}, "text=body"),
    "names with blanks": (
        {"My question": "hi", "its reply": "go on"},
        "'instruction=My question' 'output=its reply'",
    ),
    "Camel": (
        {"role_1": "x", "message_1": "so so", "message_2": "go on"},
        "instruction=message_1 output=message_2",
    ),
    "BELLE's evaluation": (
        {"id": "x", "question": "hi", "std_answer": "go on", "class": "x"},
        "instruction=question output=std_answer",
    ),
}
# Preferences, and options under which the chosen answers alone are learned.
PREFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "UltraFeedback": (
        {"prompt": "hi", **PAIR, "chosen": [ASK, SAY], "rejected": [ASK, NO]},
        "messages=chosen --dataset_format messages",
    ),
    "scored answers": (
        {"prompt": "hi", **PAIR},
        "completion=chosen --dataset_format prompt_completion",
    ),
    "Orca's pairs": (
        {"system": "so", "question": "hi", **PAIR},
        "instruction=question output=chosen --dataset_format alpaca",
    ),
    "LLaMA-Factory's pairs": (
        {
            "conversations": SHARED[:1],
            "chosen": SHARED[1],
            "rejected": {**SHARED[1], "value": "no"},
        },
        "prompt=conversations completion=chosen --dataset_format prompt_completion",
    ),
    "ms-swift's pairs": (
        {"messages": [ASK, SAY], "rejected_response": "no"},
        "ignore=rejected_response --dataset_format messages",
    ),
    "StackExchange's pairs": (
        {"question": "hi", "response_j": "go on", "response_k": "no"},
        "instruction=question output=response_j --dataset_format alpaca",
    ),
}
HALF_A_PAIR = "turn 2 has half a surrogate pair"
# Rows for which the refusal offers no command.
WITHOUT_REMEDY: dict[str, tuple[Rows, str]] = {
    "an image in an instruction": (
        [{"instruction": "<image>\nWho?", "output": "go on"}],
        "instruction: it shows <image>, and no image is given",
    ),
    "an image in a prompt": (
        [{"prompt": "Who? <image>", "completion": "go on"}],
        "prompt: it shows <image>, and no image is given",
    ),
    "an image in the text": (
        [{"messages": [{**ASK, "content": "<image>Who?"}, SAY]}],
        "turn 1: it shows <image>, and no image is given",
    ),
    "BFCL": (
        [{"id": "x", "question": [[ASK]], "function": [FUNCTION]}],
        'No columns have texts, or questions with answers. The first row: {"id"',
    ),
    "WizardLM's tests": (
        [{"idx": n, "Skill": "Math", "Difficulty": 4, "Instruction": f"hi {n}"} for n in (1, 2)],
        "missing columns",
    ),
    "InstructWild": ([{"instruction": "hi", "id": n} for n in (1, 2)], "missing columns"),
    "ToolBench": ([SEARCHED], "missing columns"),
    "trees of another kind": (
        [{"post": "x", "replies": [{"post": "x", "replies": []}]}],
        "missing columns",
    ),
    "a table of diseases": ([DISEASE, DISEASE], "missing columns"),
    "a long row": ([{"a": {"b": LONG * 10}}], "so it is so..."),
    "LIMA": (
        [{"conversations": ["hi", "go on"], "source": "x"}],
        "conversations is not a list of turns",
    ),
    "translation": (
        [{"translation": {"en": "hi", "fr": "no"}}],
        "missing columns. It has: translation",
    ),
    "lists for columns": (
        [{"instruction": ["hi"], "output": ["go on"]}],
        "instruction is not text but list",
    ),
    "half a pair in reasoning": (
        [{"messages": [ASK, {**SAY, "reasoning_content": HALF}]}],
        HALF_A_PAIR,
    ),
    "half a pair in arguments": ([{"messages": [ASK, called({"a": [{"b": HALF}]})]}], HALF_A_PAIR),
    "half a pair in arguments as text": (
        [{"messages": [ASK, called(json.dumps({HALF: 1}))]}],
        HALF_A_PAIR,
    ),
    "half a pair in a tool": (
        [{"messages": [ASK, SAY], "tools": [{**FUNCTION, "description": HALF}]}],
        "tools has half a surrogate pair",
    ),
    "arguments in a list": (
        [{"messages": [ASK, called([["a", "x"]])]}],
        "turn 2: the arguments of go are not an object",
    ),
    "an assistant that calls": (
        [{"messages": [ASK, CALL, SAY], "functions": [FUNCTION]}],
        "turn 2: the chat template writes no tool calls; --prompt_template",
    ),
}
REFUSED |= {name: (rows, says, ()) for name, (rows, says) in WITHOUT_REMEDY.items()}
REFUSED |= {
    name: (rows, says, ("--dataset_format text",)) for name, (rows, says) in DIALOGUES.items()
}
REFUSED |= {
    name: ([row], "missing columns", (f"--columns {columns}",))
    for name, (row, columns) in UNKNOWN.items()
}
REFUSED |= {
    name: ([row], "preferences", ("--objective dpo", f"--columns {columns}"))
    for name, (row, columns) in PREFERENCES.items()
}
# Options with their values, as a message offers them.
OFFERED = re.compile(
    r"(?:--(?:columns(?: (?:\w+=[\w.]+|'[^']+'))+|(?!columns|prompt_template)\w+ \w+)(?: (?=--))?)+"
)


@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_datasets_are_refused_with_a_remedy(name, prepare, tmp_path):
    rows, says, commands = REFUSED[name]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(Exception, match=r"a\.jsonl") as error:
        prepare(path)
    assert says in str(error.value)
    assert tuple(OFFERED.findall(str(error.value))) == commands
    for command in commands:
        config = parse_train_config(
            ["--model_name", "x", "--dataset", str(path), *shlex.split(command)]
        )
        options = vars(config) | {"context_length": 2000}
        assert len(prepare(*options.pop("dataset"), **options)[0].train) >= len(rows) / 2


def test_text_that_mentions_chat_markup_is_still_text(prepare, tmp_path):
    rows = [{"text": "go on"}] * 11 + [{"text": "Write [INST] go [/INST]."}]
    assert len(prepare(write_jsonl(tmp_path / "a.jsonl", rows))[0].train) == 12


def test_label_and_image_columns_of_tables_are_checked(prepare, tmp_path):
    from tests.data.rows import write_parquet

    for more, says in (
        ({"label": False}, "its label is false"),
        ({"images": [{"bytes": b"x"}]}, "images: only text"),
    ):
        path = write_parquet(tmp_path / "a.parquet", [{"messages": [ASK, SAY], **more}])
        with pytest.raises(Exception, match=says):
            prepare(path)
    path = write_csv(
        tmp_path / "a.csv", [{"prompt": "hi", "completion": "go on", "label": "False"}]
    )
    with pytest.raises(Exception, match="its label is false"):
        prepare(path)


def test_function_columns_are_passed_to_the_template_as_tools(prepare, tokenizer, tmp_path):
    (tmp_path / "tools.jinja").write_text(
        "{% for t in tools %}{{ t.name }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content + '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    row: dict[str, Any] = {
        "messages": [ASK, CALL, {"role": "function", "name": "go", "content": "so"}, SAY],
        "functions": [FUNCTION],
    }
    as_texts = {
        "messages": [json.dumps(turn) for turn in row["messages"]],
        "functions": [json.dumps(FUNCTION)],
    }
    for given in (row, as_texts):
        path = write_jsonl(tmp_path / "a.jsonl", [given])
        data, _ = prepare(path, prompt_template=str(tmp_path / "tools.jinja"))
        text = tokenizer.decode(data.train.input_ids)
        assert text == "go[user]hi[assistant]go</s>[tool]so[assistant]go on</s>"
        assert tokenizer.decode(data.train.input_ids[data.train.learned]) == "go</s>go on</s>"
    text_beside = {"prompt": "hi", "completion": "go on", "functions": [FUNCTION]}
    data, _ = prepare(
        write_jsonl(tmp_path / "a.jsonl", [text_beside]),
        prompt_template=str(tmp_path / "tools.jinja"),
    )
    assert tokenizer.decode(data.train.input_ids) == "go[user]hi[assistant]go on</s>"


def test_a_long_text_is_several_rows_with_every_token_once(prepare, tokenizer, tmp_path):
    text = " ".join(f"go on {number}" for number in range(100))
    (tmp_path / "a.txt").write_text(f"{text}\nhi\n")
    whole, _ = prepare(tmp_path / "a.txt")
    data, log = prepare(tmp_path / "a.txt", context_length=64)
    rows = data.train
    (first, last) = whole.train.offsets[1:]
    pieces = [
        rows.input_ids[start:end].tolist()
        for start, end in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)
    ]
    assert {len(piece) for piece in pieces[:-2]} == {64} and rows.learned.all()
    assert (
        pieces[0] + [token for piece in pieces[1:-1] for token in piece[1:]]
        == whole.train.input_ids[:first].tolist()
    )
    assert pieces[-1] == whole.train.input_ids[first:last].tolist()
    assert int(rows.num_targets.sum()) == int(whole.train.num_targets.sum())
    assert "2 of 2 rows" in log and "0 tokens cut" in log


def test_zst_is_unpacked_and_a_damaged_one_refused(prepare, tmp_path):
    import pyarrow

    rows = b"".join(json.dumps({"text": f"go {number}"}).encode() + b"\n" for number in range(5000))
    packed = pyarrow.Codec("zstd").compress(rows, asbytes=True)
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    assert len(prepare(tmp_path / "a.jsonl.zst")[0].train) == 5000
    (tmp_path / "a.jsonl.zst").write_bytes(packed[:-900])
    with pytest.raises(Exception, match=r"packed file is damaged or cut off|incomplete"):
        prepare(tmp_path / "a.jsonl.zst")
