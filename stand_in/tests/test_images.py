"""Rows, pairs and prompts with images, and adapters on what computes them, on two ranks of the
stand-in: numbers of the CPU.
"""

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stand_in.beside_cpu import Beside, Differences, run_both, weights_in
from stand_in.environment import PYTHON, Rank, run
from tests.helpers.metrics import read_metrics
from tests.helpers.run import flags
from tests.parity.test_image_rows import make_family
from tests.parity.test_tower_adapters import fill_zeros
from tests.rollouts.runs import rollouts_of

# transformers' lowest version reads images with it.
if not [*PYTHON.parents[1].glob("lib/python*/site-packages/torchvision")]:
    pytest.skip("the stand-in's environment has no torchvision", allow_module_level=True)

HALVES = Differences(loss=2e-3, grad_norm=2e-2, weights=5e-2)
OPTIONS = {
    "train_type": "qlora",
    "precision": "bf16",
    "optimizer": "sgd",
    "lr": 0.1,
    "sharding_strategy": "full_shard",
    "batch_size": 1,
    "gradient_accumulation_steps": 2,
    "num_epochs": 2,
    "context_length": 256,
    "quant_cache": "off",
    "log_to": "stdout",
    "verbose": True,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(family: str) -> Path:
        folder = make_family(tmp_path_factory.mktemp(family), family)
        fill_zeros(folder)
        return folder

    return make


def run_beside(folder: Path, tmp_path: Path, options: dict[str, Any]) -> Beside:
    """A run of the model on both, without operators that the stand-in cannot compute."""

    def start(out: Path, settings: dict[str, object]) -> list[Rank]:
        argv = flags(model_name=folder, output_dir=out / "output", **{**OPTIONS, **options})
        settings = {"PHANTOM_CC": 90, **settings}
        ended = run(["train.py", *argv], out, ranks=2, settings=settings)
        said = "\n".join(rank.output[-4000:] for rank in ended)
        assert [rank.status for rank in ended] == [0, 0], said
        return ended

    beside = run_both(start, tmp_path, folder)
    assert beside.strays == {}
    return beside


@pytest.mark.parametrize(
    ("family", "targets", "recompute"),
    [
        pytest.param(*case, marks=mark)
        for case, mark in (
            (("qwen3_vl", "all,vision,projector", "all"), pytest.mark.slow),
            (("gemma3", "all", "none"), pytest.mark.slow),
            (("qwen3_vl", "all", "all"), pytest.mark.nightly),
            (("qwen3_vl", "vision,projector", "none"), pytest.mark.nightly),
            (("gemma3", "all,vision", "none"), pytest.mark.nightly),
        )
    ],
)
def test_numbers_of_images_are_those_of_the_cpu(family, targets, recompute, folders, tmp_path):
    folder = folders(family)
    options = {
        "dataset": folder / "rows.jsonl",
        "lora_target_modules": targets,
        "recompute": recompute,
    }
    beside = run_beside(folder, tmp_path, options)
    print(f"| {family}, {targets}, recompute {recompute} | {beside.differences} |")
    assert all(map(operator.le, beside.differences, HALVES)), beside.differences
    trained = weights_in(tmp_path / "device/output")
    assert any("vision" in name or "visual" in name for name in trained) == ("vision" in targets)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        pytest.param("qwen3_vl", "all,vision,projector", marks=pytest.mark.slow),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (("qwen3_vl", "all"), ("gemma3", "all"), ("gemma3", "all,vision"))
        ),
    ],
)
def test_numbers_of_pairs_with_images_are_those_of_the_cpu(family, targets, folders, tmp_path):
    folder = folders(family)
    options = {
        "objective": "dpo",
        "dataset": folder / "pairs.jsonl",
        "lora_target_modules": targets,
        "recompute": "all",
    }
    beside = run_beside(folder, tmp_path, options)
    print(f"| {family}, {targets}, dpo | {beside.differences} |")
    assert all(map(operator.le, beside.differences, HALVES._replace(loss=1e-2)))
    trained = weights_in(tmp_path / "device/output")
    assert any("vision" in name or "visual" in name for name in trained) == ("vision" in targets)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3_vl", marks=pytest.mark.slow),
        pytest.param("gemma3", marks=pytest.mark.nightly),
    ],
)
def test_answers_to_images_train_as_on_the_cpu(family, folders, tmp_path):
    folder = folders(family)
    options = {
        "objective": "grpo",
        "dataset": folder / "rows.jsonl",
        "rewards": "length:4",
        "num_generations": 4,
        "num_iterations": 2,
        "max_completion_length": 8,
        "batch_size": 2,
        "max_steps": 4,
        "shuffle": False,
    }
    beside = run_beside(folder, tmp_path, options)
    print(f"| {family}, grpo | {beside.differences} |")
    of_both = [rollouts_of(tmp_path / place / "output") for place in ("device", "cpu")]
    assert any("images" in line for line in of_both[0])
    tokens = [[line["token_ids"] for line in lines] for lines in of_both]
    assert tokens[0] == tokens[1]
    # Advantages cancel to a loss of about 0, of which a share says nothing.
    losses = [read_metrics(tmp_path / place / "output") for place in ("device", "cpu")]
    assert losses[0] == pytest.approx(losses[1], abs=2e-2)
    assert beside.differences.grad_norm <= 2e-2
    assert beside.differences.weights <= 5e-2
