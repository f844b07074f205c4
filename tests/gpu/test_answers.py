"""GRPO on a GPU with the model's own answers: drawn twice they are the same, and 16 bits train on
them.
"""

import math

import pytest

from tests.gpu.cases import COMMON
from tests.gpu.check import holds
from tests.gpu.losses import output_of, run_all
from tests.helpers.metrics import metrics_of
from tests.helpers.rows import write_rows

STEPS = 4
ANSWERS = 8  # of each generation, which two steps learn from


@pytest.fixture(scope="module")
def outputs(inputs, tmp_path_factory):
    """name -> the output folder of a run; two in bf16 with the same options, and one in fp16."""
    folder = tmp_path_factory.mktemp("grpo")
    # Answers of random weights are as long as they may be, but not alike.
    (folder / "own.py").write_text(
        "def letters(completions, **_):\n    return [len(set(said)) / 8 for said in completions]\n"
    )
    rows = [{"prompt": f"sort the list {number}", "answer": "blue"} for number in range(16)]
    options = {
        **inputs(),
        **COMMON,
        "dataset": write_rows(folder / "rows.jsonl", rows),
        "train_type": "qlora",
        "objective": "grpo",
        "rewards": f"{folder / 'own.py'}:letters",
        "num_generations": 4,
        "num_iterations": 2,
        "max_completion_length": 16,
        "batch_size": 4,
        "max_steps": STEPS,
        "num_epochs": 4,
        "deterministic": True,
    }
    runs = {
        name: {**options, "precision": name.split()[0]} for name in ("bf16", "bf16 again", "fp16")
    }
    failures = run_all(runs, folder)
    assert not any(failures.values()), failures
    return {name: output_of(folder, name) for name in runs}


def _answers(output):
    return (output / "rollouts.jsonl").read_text()


def test_the_same_seed_draws_the_same_answers(outputs):
    assert _answers(outputs["bf16"]) == _answers(outputs["bf16 again"])
    assert len(_answers(outputs["bf16"]).splitlines()) == ANSWERS * STEPS // 2
    assert [step["loss"] for step in metrics_of(outputs["bf16"])] == [
        step["loss"] for step in metrics_of(outputs["bf16 again"])
    ]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_first_step_on_new_answers_has_ratios_of_1(precision, outputs):
    steps = metrics_of(outputs[precision])
    assert len(steps) == STEPS
    assert [step["clip_ratio/region_mean"] for step in steps[::2]] == [0, 0]
    assert all(math.isfinite(step["grad_norm"]) for step in steps)
    holds(any(step["grad_norm"] > 0 for step in steps), steps)
