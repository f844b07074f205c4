"""Prompts of a run that makes its rows: what a row asks, what functions get of it, and which rows
are left out.
"""

import contextlib
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fsdp_qlora.__main__ import main
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.schedule import StepRows
from fsdp_qlora.data.content import Chat, PreferenceRow, prompt_text, without_answer
from fsdp_qlora.data.run_data import RunData, read_rows
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.recognition import RequestedFormat
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.observability.page.run_folder import _answers
from fsdp_qlora.planning.reading import pick_data
from fsdp_qlora.planning.run_rows import make_schedule
from fsdp_qlora.training.generation.prompt_format import read_questions
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.training.rl.answerer import Answerer
from fsdp_qlora.training.rl.rewards import Scorer
from fsdp_qlora.training.rl.source import Rollouts
from fsdp_qlora.utils.errors import TrainingError, UserError
from tests.helpers.rows import write_rows
from tests.helpers.run import flags
from tests.helpers.tokenizers import make_tokenizer
from tests.rollouts.test_server import damaged

pytestmark = pytest.mark.quick

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "sort"}]


def read(folder: Path, rows: list[Any], **options: Any) -> RunData:
    """The rows of a run whose dataset is a file with these."""
    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHATML
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    usual = {
        "dataset": (str(path),),
        "max_completion_length": 8,
        "objective": "grpo",
        "rewards": ("number",),
    }
    picked = pick_data(TrainConfig(**{**usual, **options}))
    return read_rows(tokenizer, picked, vocab_size=len(tokenizer))


def texts(data: RunData, folder: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(prompt.ids) for prompt in data.prompts]


def test_prompts_keep_text_and_render_questions_and_messages(tmp_path):
    rows = [
        {"prompt": "sort:"},
        {"prompt": ASKED, "answer": "1"},
        {"messages": [*ASKED, {"role": "assistant", "content": "no"}]},
        {"question": "sort?"},
        {"instruction": "sort", "input": "b a"},
    ]
    data = read(tmp_path, rows)
    found = texts(data, tmp_path)
    assert found[0] == "<s>sort:"
    assert found[1] == found[2] == "<system>be brief<user>sort<assistant>"
    assert "Question:\nsort?" in found[3] and found[3].endswith("Answer:\n") and "b a" in found[4]
    assert [prompt.content for prompt in data.prompts[:2]] == ["sort:", ASKED]
    assert data.prompts[2].content == ASKED and data.prompts[3].content == "sort?"
    filled = texts(read(tmp_path, [{"question": "sort?"}], prompt_template="chat"), tmp_path)
    assert filled == ["<user>sort?<assistant>"]


# The columns of rows that GRPO knows as prompts, as texts know them -> the text before the
# completion.
KNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "problem": ({"problem": "sort", "solution": "1"}, "### Instruction:\nsort\n\n### Response:"),
    "query": ({"query": "sort"}, "### Instruction:\nsort\n\n### Response:"),
    "conversations": (
        {"conversations": [{"from": "human", "value": "sort"}]},
        "<user>sort<assistant>",
    ),
    "a chat of functions": ({"contents": [*ASKED]}, "<system>be brief<user>sort<assistant>"),
    "guanaco": (
        {"text": "### Human: a### Assistant: b### Human: c### Assistant: d"},
        "### Human: c### Assistant:",
    ),
    "another case": ({"Question": "sort?"}, "Question:\nsort?"),
    "a system prompt": (
        {"prompt": "sort", "system": "be brief"},
        "<system>be brief<user>sort<assistant>",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_grpo_knows_the_prompt_columns_that_texts_know(name, tmp_path):
    row, text = KNOWN[name]
    data = read(tmp_path, [row])
    assert text in texts(data, tmp_path)[0]
    columns = data.prompts[0].columns
    assert {name: columns[name] for name in row if name != "prompt"} == {
        k: row[k] for k in row if k != "prompt"
    }


TOOLS = [{"name": "f"}]
# Columns beside a prompt -> what a chat has of them, or why the row is left out.
BESIDE: list[tuple[dict[str, Any], dict[str, Any] | str]] = [
    ({"messages": ASKED[1:], "tools": TOOLS}, {"tools": TOOLS}),
    ({"prompt": "sort", "functions": TOOLS}, {"tools": TOOLS}),
    ({"conversations": ASKED[1:], "system": "s", "tools": TOOLS}, {"tools": TOOLS}),
    ({"prompt": "sort", "context": "x"}, "context is filled"),
    ({"prompt": "sort", "input": "x"}, "input is filled"),
    ({"prompt": ASKED, "history": [["a", "b"]]}, "history is filled"),
    ({"question": "sort", "tools": TOOLS}, "tools is filled"),
    ({"messages": ASKED, "audio": "a.mp3"}, "audio: only text"),
]


@pytest.mark.parametrize(("row", "expected"), BESIDE)
def test_columns_that_change_a_prompt_are_used_or_refused(row, expected, tmp_path):
    if isinstance(expected, dict):
        prompt = RequestedFormat().find_prompt(row).prompt(row)[0]
        assert isinstance(prompt, Chat) and prompt.tools == expected["tools"]
        return
    column = expected.split()[0].strip(":")
    with pytest.raises(UserError, match=rf"{expected}.*--columns ignore={column}"):
        read(tmp_path, [row])
    if row.get("prompt") != "sort":  # as `generate` takes an instruction
        with pytest.raises(UserError, match=rf"no usable question: {expected}[^;]*\.$"):
            read_questions(write_rows(tmp_path / "prompts.jsonl", [row]))
    kept = read(tmp_path, [row], columns=(f"own={column}",)).prompts[0].columns
    assert kept["own"] == row[column]


def test_columns_and_a_format_name_the_prompt(tmp_path):
    row = {"messages": ASKED, "task": "list", "question": "sort?"}
    found = [
        *texts(read(tmp_path, [row], columns=("instruction=task", "ignore=messages")), tmp_path),
        *texts(read(tmp_path, [row], dataset_format="question_answer"), tmp_path),
    ]
    assert "Instruction:\nlist" in found[0] and "Question:\nsort?" in found[1]
    with pytest.raises(UserError, match="no prompt in a column"):
        read(tmp_path, [{"messages": ASKED}], dataset_format="question_answer")


# Columns that can be a prompt, and that of its answer, in the order in which they count.
IN_ORDER = {
    "instruction": "output",
    "conversations": "",
    "question": "answer",
    "prompt": "completion",
    "query": "response",
    "problem": "solution",
    "input": "output",
}


# SFT refuses these two.
UNUSED = [("conversations", "input"), ("prompt", "input")]


@pytest.mark.parametrize(
    ("first", "second"), [p for p in itertools.combinations(IN_ORDER, 2) if p not in UNUSED]
)
def test_training_grpo_dpo_and_generate_ask_the_same_prompt(first, second, tmp_path):
    row: dict[str, Any] = {
        name: [{"from": "human", "value": name}] if name == "conversations" else name
        for name in (second, first)
    }
    answered = row | {column: "yes" for name in row if (column := IN_ORDER[name])}
    reading = RequestedFormat().find([*answered], [answered])
    trained = FORMATS[reading.dataset_format].read(
        {name: answered[column] for column, name in reading.names.items()}
    )
    preferred = FORMATS["preference"].read(row | {"chosen": "yes", "rejected": "no"})
    assert isinstance(preferred, PreferenceRow)
    [generated] = read_questions(write_rows(tmp_path / "prompts.jsonl", [answered]))
    asked = [
        without_answer(trained),
        without_answer(preferred.answers[0]),
        generated.content,
        RequestedFormat().find_prompt(answered).prompt(answered)[0],
    ]
    assert list(map(prompt_text, asked)) == [first] * 4


def test_reward_functions_get_all_columns(tmp_path):
    rows = [{"task": "sort", "prompt_id": 7, "answer": [1, 2], "completion": "old", "other": "x"}]
    data = read(tmp_path, rows, columns=("prompt=task", "ignore=other"))
    assert data.prompts[0].columns == {"prompt_id": 7, "answer": [1, 2]}
    with pytest.raises(UserError, match=r"has no column 'missing'\. It has: task, prompt_id"):
        read(tmp_path, rows, columns=("prompt=missing",))


# Rows whose right answer is in no column of its own -> that answer.
GOLD: dict[str, tuple[dict[str, Any], str | None]] = {
    "verl": (
        {
            "prompt": ASKED,
            "reward_model": {"style": "rule", "ground_truth": "42"},
            "data_source": "x",
        },
        "42",
    ),
    "open-r1": ({"prompt": ASKED, "verification_info": '{"ground_truth": "42"}'}, "42"),
    "a turn": ({"messages": [*ASKED, {"role": "assistant", "content": "42"}]}, "42"),
    "a turn of gpt": (
        {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "42"}]},
        "42",
    ),
    "a text": ({"prompt": "sort", "completion": "42"}, "42"),
    "messages": ({"prompt": ASKED, "completion": [{"role": "assistant", "content": "42"}]}, "42"),
    "a column": (
        {"messages": [*ASKED, {"role": "assistant", "content": "no"}], "solution": "42"},
        None,
    ),
    "an open chat": ({"messages": ASKED, "reward_model": "{broken", "ground_truth": "42"}, None),
}


def test_a_gold_turn_or_nested_answer_is_the_right_answer(tmp_path):
    prompts = read(tmp_path, [row for row, _ in GOLD.values()]).prompts
    assert [prompt.for_rewards.get("answer") for prompt in prompts] == [
        right for _, right in GOLD.values()
    ]
    assert not any("answer" in prompt.columns for prompt in prompts)  # by which runs are recognized


def test_prompts_are_known_as_rows_and_have_room_for_completions(tmp_path):
    data = read(tmp_path, [{"prompt": "sort:"}, {"prompt": "list the river"}])
    for row, prompt in enumerate(data.prompts):
        assert (
            data.known_rows[row].input_ids.tolist() == prompt.ids
            and data.lengths[row] == len(prompt.ids) + 8
        )
    assert not len(data.train) and not data.known_rows.learned.any()
    assert data.known_rows.row_numbers.tolist() == [1, 2] and data.context_length == 16


def test_rollout_planning_works_without_a_dot_token(tmp_path):
    letters = Tokenizer(BPE({"<s>": 0, "</s>": 1, "a": 2}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="</s>")
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "aa"}, {"prompt": "?"}])
    usual = {
        "objective": "grpo",
        "rewards": ("number",),
        "max_completion_length": 3,
        "max_bad_rows": 1.0,
    }
    config = TrainConfig(dataset=(str(path),), **usual)
    data = read_rows(tokenizer, pick_data(config), vocab_size=3)
    assert data.known_rows.input_ids.tolist() == [2, 2] and data.lengths.tolist() == [5]
    assert [reason for _, reason in data.rejected] == ["the prompt has no tokens"]


def test_rows_without_a_prompt_or_room_are_left_out(tmp_path, lines):
    rows = [
        {"prompt": "sort"},
        {"prompt": ""},
        {"answer": "1"},
        {"prompt": "z" * 40},
        "{broken\n",
        {"prompt": 3},
    ]
    with pytest.raises(UserError, match="5 of 6 rows cannot be used"):
        read(tmp_path, rows, context_length=32)
    data = read(tmp_path, rows, context_length=32, max_bad_rows=1.0)
    assert len(data.prompts) == 1
    reasons = {place.rpartition(":")[2]: reason for place, reason in data.rejected}
    assert ("no room") in reasons["4"] and ("no prompt in a column") in reasons["2"] == reasons[
        "3"
    ] != reasons["6"]
    with pytest.raises(UserError, match="has no prompts"):
        read(tmp_path, rows, dataset=("dummy",))


def test_changed_prompt_columns_are_another_run(tmp_path):
    before, after = (
        read(tmp_path, [{"prompt": "sort", "answer": answer}]) for answer in ("1", "2")
    )
    again = read(tmp_path, [{"prompt": "sort", "answer": "1"}])
    assert before.identity == again.identity != after.identity


def test_steps_have_whole_groups_and_an_epoch_leaves_out_the_rest(tmp_path):
    data = read(tmp_path, [{"prompt": f"sort {number}"} for number in range(7)])
    usual = {
        "objective": "grpo",
        "rewards": ("number",),
        "num_generations": 4,
        "num_epochs": 2,
        "context_length": 64,
    }
    config = TrainConfig(**usual, gradient_accumulation_steps=6, num_iterations=2)
    schedule = make_schedule(config, data, 2)
    assert (schedule.global_batch_size, schedule.steps_per_epoch, schedule.total_steps) == (
        12,
        4,
        8,
    )
    steps = [rows.reshape(3, 4) for _, rows in schedule.rows_of_steps(data.train_rows)]
    assert all((step == step[:, :1]).all() for step in steps)  # a prompt's answers are together
    for first in range(0, 8, 2):
        assert (steps[first] == steps[first + 1]).all()
    for epoch in (steps[:4], steps[4:]):
        assert len({int(row) for step in epoch for row in step[:, 0]}) == 6
    assert (steps[0] != steps[4]).any()
    [(_, rows)] = [each for each in schedule.rows_of_steps(data.train_rows, first=5)][:1]
    assert (rows.reshape(3, 4) == steps[5]).all()
    with pytest.raises(UserError, match=r"not a multiple of 5\. Give 2, 3, 4, 6, 12"):
        make_schedule(dataclasses.replace(config, num_generations=5), data, 2)
    with pytest.raises(
        UserError,
        match=r"needs 12 prompts \(48 answers, 4 to each\), and there are 7",
    ):
        make_schedule(dataclasses.replace(config, gradient_accumulation_steps=24), data, 2)


def test_a_plan_for_other_gpus_takes_no_more_prompts_than_there_are(models, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"sort {number}"}) + "\n" for number in range(9)))
    asked = {
        "objective": "grpo",
        "rewards": "length:4",
        "num_generations": 2,
        "model_name": models(),
        "dataset": rows,
    }
    asked |= {"max_completion_length": 8, "num_gpus": 2, "gpu": "RTX 3090"}
    assert main(["plan", "--auto", "true", *flags(**asked)]) == 0
    said = capsys.readouterr().out
    # 16 would need 16
    assert "Generation: 2 answers to each of 8 prompts for a step, of 8 on a rank 8 at a" in said
    assert "fits: " in said and "2 x 8 rows per step" in said


# --- the rows of steps, made of answers ---


class Parrot:
    """An engine that says the same number of tokens as there are in the prompt."""

    def __call__(self, prompts: list[list[int]], _: int, version: int, *images: Any) -> Any:
        return [Completion([5 + version] * len(ids), True) for ids in prompts]


@pytest.fixture
def rollouts(tmp_path: Path, alone: Ranks) -> Callable[..., Iterator[StepRows]]:
    """The rows of a run's steps, two of which learn from the same answers; they are in tmp_path /
    "rollouts.jsonl".
    """
    data = read(tmp_path, [{"prompt": f"sort {'a' * number}"} for number in range(8)])
    usual = {
        "objective": "grpo",
        "rewards": ("length:1",),
        "num_generations": 2,
        "num_iterations": 2,
    }
    config = TrainConfig(**usual, context_length=64, gradient_accumulation_steps=4, max_steps=4)

    def steps(word: str = "length:1", **since: Any) -> Iterator[StepRows]:
        scorer = Scorer([word], zero_on_error=False, seconds=60)
        place = tmp_path / "rollouts.jsonl"
        answerer = Answerer(Parrot(), str)
        made = Rollouts(data, answerer, scorer, place, alone, Control(), None, "group")
        return made.steps(make_schedule(config, data, 1), **since)

    return steps


def edited(path: Path, line: int, **changes: Any) -> None:
    lines = path.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | changes)
    path.write_text("\n".join(lines) + "\n")


CHANGES = {"advantage": 77.0}, {"token_ids": "x"}, {"rewards": 3}, {"step": 1}, {"prompt": 7}


@pytest.mark.parametrize("changes", CHANGES)
def test_a_checkpoint_recognizes_the_answers_that_it_needs(changes, rollouts, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    first, second, third = itertools.islice(rollouts(), 3)
    since = {"first": 3, "position": third.position}
    assert first.position == second.position != third.position
    edited(path, 1, **changes)  # of the first two steps
    fourth = next(rollouts(**since))
    assert fourth.position == third.position and fourth.table.digest == third.table.digest
    edited(path, 5, **changes)
    before = path.read_bytes()
    with pytest.raises(
        TrainingError,
        match=r"lacks answers that step 4 learns from, or has others .* Restore it",
    ):
        next(rollouts(**since))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 100), marks=pytest.mark.slow)], ids=["20", "80"]
)
def test_damaged_rollouts_are_refused_or_give_the_same_rows(seeds, rollouts, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    ends = Counter[bool]()
    [*_, third] = itertools.islice(rollouts(), 3)
    whole = path.read_bytes()
    memory = psutil.Process().memory_info().rss
    for seed in seeds:
        path.write_bytes(damaged(whole, seed))
        with contextlib.suppress(TrainingError):
            assert (
                next(rollouts(first=3, position=third.position)).table.digest == third.table.digest
            )
            ends[True] += 1
        _answers(path)  # of the report
    assert 0 < ends[True] < len(seeds) and psutil.Process().memory_info().rss - memory < 2**30


def test_generations_without_any_reward_are_told(rollouts, tmp_path, lines):
    (tmp_path / "own.py").write_text("def f(completions, **_): return [None] * len(completions)")
    steps = rollouts(f"{tmp_path / 'own.py'}:f")
    next(steps)
    assert "no reward function gives a value" in lines[-1]
