"""Runs that do not learn say so once, with the reason; runs that learn say nothing."""

import json
from typing import Any

import pytest

from fsdp_qlora.training.idle import IdleSteps
from tests.helpers.rows import write_rows
from tests.helpers.run import train_ok
from tests.preferences.test_distillation import run_options, taught_rows
from tests.rollouts.runs import inputs

NOTHING = "learned nothing"
OF_CUT = "of the answers were cut"
MORE_ANSWERS = "more --num_generations or a higher --temperature"
WITHOUT_GRADIENT = "The last 5 steps learned nothing: the gradient was 0"
ALL_CUT = "100% of the answers of the last 5 steps were cut at --max_completion_length 4"
NO_REWARD = "def short(completions, **_):\n    return [{value} for _ in completions]\n"


def of_step(grad_norm: float, **others: Any) -> dict[str, Any]:
    return {"grad_norm": grad_norm, **others}


def of_answers(
    equal: float, cut: float, grad_norm: float = 0.0, reward: float = 0.0
) -> dict[str, Any]:
    metrics = {"frac_reward_zero_std": equal, "reward": reward, "completions/clipped_ratio": cut}
    return of_step(grad_norm, **metrics)


IDLE = of_step(0.0)
LEARNS = of_step(0.1)
EQUAL = of_answers(1, 1)
DIFFERENT = of_answers(0.5, 1, 0.3)
WITHOUT_REWARD = of_answers(float("nan"), 1, 0.0, float("nan"))
CUT = {"grad_norm": 0.1, "completions/clipped_ratio": 1.0}
ENDED = {"grad_norm": 0.1, "completions/clipped_ratio": 0.9}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("steps", "at", "said"),
    [
        ([EQUAL] * 20, 5, [f"The last 5 steps {NOTHING}", "equal rewards (0 in", f"100% {OF_CUT}"]),
        ([of_answers(1, 0.25, 0.1, 2.0)] * 9, 5, ["equal rewards (2 in", f"25% {OF_CUT}"]),
        ([of_answers(1, 0)] * 9, 5, ["equal rewards", MORE_ANSWERS]),
        ([DIFFERENT, *[EQUAL] * 5], 6, [NOTHING]),
        ([EQUAL], 1, [f"The last step {NOTHING}"]),
        ([EQUAL] * 2, 2, [f"The last 2 steps {NOTHING}"]),
        ([IDLE] * 9, 5, [WITHOUT_GRADIENT, "--dry_run samples"]),
        ([CUT] * 9, 5, [ALL_CUT]),
        ([{**IDLE, "skipped": True}, *[IDLE] * 5], 6, [NOTHING]),
        ([EQUAL, EQUAL, EQUAL, EQUAL, DIFFERENT] * 5, 0, []),
        ([IDLE, IDLE, IDLE, IDLE, LEARNS] * 5, 0, []),
        ([CUT, CUT, CUT, CUT, ENDED] * 5, 0, []),
        ([DIFFERENT] * 20, 0, []),  # all are cut, and some are better
        ([WITHOUT_REWARD] * 20, 0, []),
    ],
)
def test_steps_in_a_row_without_learning_are_told_once(steps, at, said):
    """Also where each step is of a resumed run."""
    idle = IdleSteps(len(steps), 4)
    told = []
    for number, record in enumerate(steps, 1):
        resumed = IdleSteps(len(steps), 4)
        resumed.load_state(json.loads(json.dumps(idle.state())))
        told += [(number, text) for text in [resumed.add(record)] if text]
        idle = resumed
    assert [number for number, _ in told] == ([at] if at else [])
    assert all(words in text for _, text in told for words in said)


@pytest.mark.parametrize("value", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_grpo_that_cannot_learn_says_why_and_not_again(value, models, tmp_path):
    options = inputs(models, tmp_path, function=NO_REWARD.format(value=value), max_steps=7)
    options |= {"max_completion_length": 4, "gradient_accumulation_steps": 4, "num_epochs": 3}
    said = train_ok(2, tmp_path / "out", **options)
    assert said.count(NOTHING) == 1 and f"equal rewards ({value} in the mean" in said
    assert "of the answers were cut at --max_completion_length 4: raise it" in said
    checkpoint = tmp_path / "out/checkpoints/step_000006"
    said = train_ok(2, tmp_path / "again", **options, resume=checkpoint)
    assert "Resuming at step 6" in said and NOTHING not in said


def test_grpo_that_learns_from_cut_answers_says_nothing(models, tmp_path):
    options = inputs(models, tmp_path, max_completion_length=4, num_epochs=3, max_steps=6)
    options |= {"gradient_accumulation_steps": 8}
    assert "were cut at" not in train_ok(1, tmp_path / "out", **options)


def test_pairs_without_a_gradient_are_told(models, tmp_path):
    """Pairs of which the model prefers the right answer by more than the margin of a hinge."""
    longer = [{"prompt": f"sort {n}", "chosen": " blue", "rejected": " red" * 9} for n in range(8)]
    run = {"model_name": models(), "train_type": "lora", "quant_cache": "off", "lora_rank": 4}
    hinge = {"objective": "cpo", "loss_type": "hinge", "sft_weight": 0.0, "beta": 1.0}
    rows = write_rows(tmp_path / "rows.jsonl", longer)
    said = train_ok(1, tmp_path / "pairs", **run, **hinge, max_steps=6, dataset=rows)
    assert said.count(WITHOUT_GRADIENT) == 1


def test_a_student_all_of_whose_answers_are_cut_is_told(models, tmp_path):
    file = write_rows(tmp_path / "taught.jsonl", taught_rows(20))
    own = {"objective": "distill_on_policy", "max_completion_length": 1, "context_length": 512}
    options = run_options(models(), file, **own, batch_size=2, num_epochs=1, max_steps=6)
    said = train_ok(1, tmp_path / "out", **options)
    assert said.count("were cut at --max_completion_length 1") == 1
