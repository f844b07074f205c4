"""Prompts of a run that makes its rows: what a row asks, what functions get of it, and which rows are left out."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fsdp_qlora.__main__ import main
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.prepare import DataOptions
from fsdp_qlora.planning.run_rows import make_schedule
from fsdp_qlora.training.rl.dataset import PromptData, read_prompts
from fsdp_qlora.utils.errors import UserError
from tests.tiny import flags, make_tokenizer, write_rows

pytestmark = pytest.mark.quick

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "sort"}]


def read(folder: Path, rows: list[Any], **options: Any) -> PromptData:
    """read_prompts of a file with these rows."""
    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHATML
    path = folder / "rows.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    usual = {"dataset": (str(path),), "max_completion_length": 8, "objective": "grpo", "rewards": ("number",)}
    picked = TrainConfig(**{**usual, **options}).pick(DataOptions, image_processor=None)
    return read_prompts(tokenizer, picked, vocab_size=len(tokenizer))


def texts(data: PromptData, folder: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(prompt.ids) for prompt in data.prompts]


def test_prompts_keep_text_and_render_questions_and_messages(tmp_path: Path) -> None:
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
    assert [prompt.asked for prompt in data.prompts[:2]] == ["sort:", ASKED]
    assert data.prompts[2].asked == ASKED and data.prompts[3].asked == "sort?"
    filled = texts(read(tmp_path, [{"question": "sort?"}], prompt_template="chat"), tmp_path)
    assert filled == ["<user>sort?<assistant>"]


def test_reward_functions_get_all_columns(tmp_path: Path) -> None:
    rows = [{"task": "sort", "prompt_id": 7, "answer": [1, 2], "completion": "old", "other": "x"}]
    data = read(tmp_path, rows, columns=("prompt=task", "ignore=other"))
    assert data.prompts[0].columns == {"prompt_id": 7, "answer": [1, 2]}
    with pytest.raises(UserError, match=r"has no column missing\. It has: answer, completion"):
        read(tmp_path, rows, columns=("prompt=missing",))


def test_planned_rows_have_the_longest_possible_completion(tmp_path: Path) -> None:
    data = read(tmp_path, [{"prompt": "sort:"}, {"prompt": "list the river"}])
    for row, prompt in enumerate(data.prompts):
        table = data.train[row]
        assert table.input_ids[: len(prompt.ids)].tolist() == prompt.ids
        assert table.learned.tolist() == [False] * len(prompt.ids) + [True] * 8
    assert data.train.row_numbers.tolist() == [1, 2] and data.context_length == 16


def test_rollout_planning_works_without_a_dot_token(tmp_path: Path) -> None:
    letters = Tokenizer(BPE({"<s>": 0, "</s>": 1, "a": 2}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="</s>")
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "aa"}, {"prompt": "?"}])
    usual = {"objective": "grpo", "rewards": ("number",), "max_completion_length": 3, "max_bad_rows": 1.0}
    config = TrainConfig(dataset=(str(path),), **usual)
    data = read_prompts(tokenizer, config.pick(DataOptions, image_processor=None), vocab_size=3)
    assert data.train.input_ids.tolist() == [2, 2, 1, 1, 1]
    assert [reason for _, reason in data.rejected] == ["the prompt has no tokens"]


def test_rows_without_a_prompt_or_room_are_left_out(tmp_path: Path, lines: list[str]) -> None:
    rows = [{"prompt": "sort"}, {"prompt": ""}, {"answer": "1"}, {"prompt": "z" * 40}, "{broken\n", {"prompt": 3}]
    with pytest.raises(UserError, match="5 of 6 rows cannot be used"):
        read(tmp_path, rows, context_length=32)
    data = read(tmp_path, rows, context_length=32, max_bad_rows=1.0)
    assert len(data.prompts) == 1
    reasons = {place.rpartition(":")[2]: reason for place, reason in data.rejected}
    assert "no room" in reasons["4"] and "no prompt in a column" in reasons["2"] == reasons["3"] != reasons["6"]
    with pytest.raises(UserError, match="has no prompts"):
        read(tmp_path, rows, dataset=("dummy",))


def test_changed_prompt_columns_are_another_run(tmp_path: Path) -> None:
    before, after = (read(tmp_path, [{"prompt": "sort", "answer": answer}]) for answer in ("1", "2"))
    again = read(tmp_path, [{"prompt": "sort", "answer": "1"}])
    assert before.identity == again.identity != after.identity


def test_steps_have_whole_groups_and_an_epoch_leaves_out_the_rest(tmp_path: Path) -> None:
    data = read(tmp_path, [{"prompt": f"sort {number}"} for number in range(7)])
    usual = {"objective": "grpo", "rewards": ("number",), "num_generations": 4, "num_epochs": 2, "context_length": 64}
    config = TrainConfig(**usual, gradient_accumulation_steps=6, num_iterations=2)
    schedule = make_schedule(config, data, 2)
    assert (schedule.global_batch_size, schedule.steps_per_epoch, schedule.total_steps) == (12, 4, 8)
    steps = [rows.reshape(3, 4) for _, rows in schedule.rows_of_steps(data.train_rows)]
    assert all((step == step[:, :1]).all() for step in steps)  # a prompt's answers are together
    for first in range(0, 8, 2):
        assert (steps[first] == steps[first + 1]).all()
    for epoch in (steps[:4], steps[4:]):
        assert len({int(row) for step in epoch for row in step[:, 0]}) == 6
    assert (steps[0] != steps[4]).any()
    [(_, rows)] = [each for each in schedule.rows_of_steps(data.train_rows, first=5)][:1]
    assert (rows.reshape(3, 4) == steps[5]).all()
    with pytest.raises(UserError, match=r"no whole groups of 5\. Give 2, 3, 4, 6, 12"):
        make_schedule(dataclasses.replace(config, num_generations=5), data, 2)
    with pytest.raises(UserError, match=r"needs 12 prompts \(48 answers, 4 to each\), and there are 7"):
        make_schedule(dataclasses.replace(config, gradient_accumulation_steps=24), data, 2)


def test_a_plan_for_other_gpus_takes_no_more_prompts_than_there_are(
    models: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"sort {number}"}) + "\n" for number in range(9)))
    asked = {"objective": "grpo", "rewards": "length:4", "num_generations": 4, "gradient_accumulation_steps": 4}
    asked |= {"model_name": models(), "dataset": rows, "max_completion_length": 8, "num_gpus": 2, "gpu": "RTX 3090"}
    assert main(["plan", "--auto", "true", *flags(**asked)]) == 0
    said = capsys.readouterr().out
    assert "Generation: 4 answers to each of 2 prompts for a step, of 4 on a rank 4 at a" in said
    assert "fits: " in said and "with 16 rows per step on each GPU instead of 4" in said  # 9 prompts: at most 36 in all
