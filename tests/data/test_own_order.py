"""Rows in their own order: a curriculum."""

from pathlib import Path

import pytest

from fsdp_qlora.checkpoint.run_folder import StartRequest, find_differences
from fsdp_qlora.config.marks import MAY_DIFFER
from fsdp_qlora.config.options import TrainConfig, names_marked
from fsdp_qlora.config.text import resolved_options
from fsdp_qlora.planning.run_rows import make_schedule
from fsdp_qlora.utils.errors import UserError
from tests.data.rows import write_jsonl, write_parquet

pytestmark = pytest.mark.quick


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    first = write_jsonl(tmp_path / "a.jsonl", [{"text": f"a {i}"} for i in range(13)])
    return first, write_parquet(tmp_path / "b.parquet", [{"text": f"b {i}"} for i in range(8)])


@pytest.mark.parametrize("data_size", [1, 2])
def test_rows_in_their_own_order_come_alike_in_each_epoch(read, two, data_size):
    options = {"shuffle": False, "eval_fraction": 0.2, "num_epochs": 3}
    config, data = read(*two, **options, gradient_accumulation_steps=4 // data_size)
    assert data.train.row_numbers.tolist() == list(range(1, 22))
    schedule = make_schedule(config, data, data_size)
    assert "in the dataset's order" in schedule.describe(0)
    steps = list(schedule.rows_of_steps(data.train_rows))
    held_out = set(data.eval_rows.tolist())
    in_order = [row for row in range(21) if row not in held_out]
    assert [row for _, rows in steps for row in rows] == 3 * in_order
    # A run that continues in the middle of the second epoch has the steps that are left.
    resumed = schedule.rows_of_steps(data.train_rows, first=6)
    assert [(step, rows.tolist()) for step, rows in resumed] == [
        (step, rows.tolist()) for step, rows in steps[6:]
    ]


def test_prompts_in_their_own_order_have_their_answers_together(read, tmp_path):
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"sort {i}"} for i in range(5)])
    options = {"objective": "grpo", "rewards": ("number",), "num_generations": 2, "num_epochs": 2}
    options |= {"context_length": 64, "max_completion_length": 8, "shuffle": False}
    config, data = read(prompts, **options, gradient_accumulation_steps=4)
    schedule = make_schedule(config, data, 1)
    steps = [rows.tolist() for _, rows in schedule.rows_of_steps(data.train_rows)]
    # The last prompt fills no step.
    assert steps == 2 * [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_a_mixture_and_another_order_on_resume_are_refused(read, two):
    first, second = two
    with pytest.raises(UserError, match="weights of datasets mix some of each"):
        read(f"{first}:0.7", f"{second}:0.3", shuffle=False)
    stored = {"options": resolved_options(TrainConfig())}
    request = StartRequest(resolved_options(TrainConfig(shuffle=False)), names_marked(MAY_DIFFER))
    stored |= {"world_size": 1, "global_batch_size": 1}
    assert find_differences(stored, {}, request) == ["--shuffle was True and is False"]
