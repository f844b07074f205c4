"""Runs that learn from their own answers to images train adapters in towers as a plain loop does.

They start from an adapter with values in all layers, which is the reference, too.
"""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.run import train_ok
from tests.parity.test_tower_adapters import DECODER, LAYERS
from tests.rollouts.image_runs import (
    DISTILLED,
    distilled_answers,
    distilled_steps,
    make_folder,
    options_of,
    plain_steps,
    write_taught,
)
from tests.rollouts.test_image_runs import check_as_plain


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> Path:
        layers = rf"model\.({DECODER}|{LAYERS[family]})"
        return make_folder(tmp_path_factory.mktemp(family), family, layers)

    return make


@pytest.mark.parametrize(
    ("family", "ranks", "batch_size", "recompute"),
    [
        ("qwen3_vl", 2, 2, "all"),
        ("gemma3", 1, 4, "none"),
        pytest.param("qwen3_vl", 1, 8, "none", marks=pytest.mark.nightly),
        pytest.param("gemma3", 2, 2, "all", marks=pytest.mark.nightly),
    ],
)
def test_grpo_trains_towers_as_a_plain_loop_of_peft(
    family, ranks, batch_size, recompute, folders, tmp_path
):
    folder = folders(family)
    split = {"batch_size": batch_size, "gradient_accumulation_steps": 8 // ranks // batch_size}
    train_ok(ranks, tmp_path / "out", **options_of(folder, recompute=recompute, **split))
    check_as_plain(tmp_path / "out", plain_steps(folder, family, tmp_path / "out"))


@pytest.mark.parametrize(
    "objective", ["distill_on_policy", pytest.param("distill", marks=pytest.mark.nightly)]
)
def test_self_distillation_trains_towers_as_a_plain_loop(objective, folders, tmp_path):
    folder = folders("qwen3_vl")
    longest = None if objective == "distill" else 6
    changes = {"objective": objective, "max_completion_length": longest, **DISTILLED}
    split = {"batch_size": 2, "dataset": write_taught(folder)}
    train_ok(2, tmp_path / "out", **options_of(folder, **changes, **split))
    answers = distilled_answers(folder, tmp_path / "out")
    expected = distilled_steps(folder, "qwen3_vl", tmp_path / "out", answers)
    check_as_plain(tmp_path / "out", expected)
