"""Runs that learn from answers to prompts with images."""

import functools
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoImageProcessor

from tests.chaos.harness import adapter, run
from tests.helpers.run import train_ok
from tests.rollouts.image_runs import (
    DISTILLED,
    distilled_answers,
    distilled_steps,
    make_folder,
    numbers,
    options_of,
    plain_steps,
    write_taught,
)
from tests.rollouts.runs import rollouts_of
from tests.rollouts.test_runs import kill_at

pytest.importorskip("PIL.Image")
if hasattr(AutoImageProcessor, "_backends"):
    pytest.skip(
        "images need torchvision with this release of transformers", allow_module_level=True
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> Path:
        return make_folder(tmp_path_factory.mktemp(family), family)

    return make


@pytest.mark.parametrize(
    ("family", "ranks", "batch_size"),
    [
        # whole groups that share their prompt, and a part of a group
        ("qwen3_vl", 1, 8),
        ("qwen3_vl", 2, 2),
        # rows are padded
        ("gemma3", 1, 4),
        pytest.param("qwen3_vl", 1, 1, marks=pytest.mark.nightly),
        pytest.param("gemma3", 2, 2, marks=pytest.mark.nightly),
    ],
)
def test_grpo_with_images_trains_as_a_plain_loop_of_peft(
    family, ranks, batch_size, folders, tmp_path
):
    folder = folders(family)
    split = {"batch_size": batch_size, "gradient_accumulation_steps": 8 // ranks // batch_size}
    said = train_ok(ranks, tmp_path / "out", **options_of(folder, **split))
    shares = family == "qwen3_vl" and batch_size > 1
    assert ("A prompt is computed once for its answers" in said) == shares
    check_as_plain(tmp_path / "out", plain_steps(folder, family, tmp_path / "out"))


def check_as_plain(output: Path, expected: tuple[list[float], list[float], Any]) -> None:
    losses, norms, trained = numbers(output)
    assert len(losses) > 1 and losses == pytest.approx(expected[0], rel=1e-5, abs=1e-5)
    assert norms == pytest.approx(expected[1], rel=1e-5)
    assert trained.keys() == expected[2].keys()
    for name, value in trained.items():
        assert (value - expected[2][name]).norm() < 1e-5 * expected[2][name].norm()


@pytest.mark.parametrize("objective", ["distill", "distill_on_policy"])
def test_self_distillation_with_images_trains_as_a_plain_loop(objective, folders, tmp_path):
    folder = folders("qwen3_vl")
    longest = None if objective == "distill" else 6
    changes = {"objective": objective, "max_completion_length": longest, **DISTILLED}
    split = {"batch_size": 2, "dataset": write_taught(folder)}
    train_ok(2, tmp_path / "out", **options_of(folder, **changes, **split))
    answers = distilled_answers(folder, tmp_path / "out")
    expected = distilled_steps(folder, "qwen3_vl", tmp_path / "out", answers)
    check_as_plain(tmp_path / "out", expected)


def test_grpo_with_images_in_16_bits_is_near_the_plain_loop(folders, tmp_path):
    folder = folders("qwen3_vl")
    split = {"batch_size": 4, "gradient_accumulation_steps": 1, "precision": "bf16"}
    train_ok(2, tmp_path / "out", **options_of(folder, **split))
    losses, norms, _ = numbers(tmp_path / "out")
    expected = plain_steps(folder, "qwen3_vl", tmp_path / "out")
    # The first loss of a generation is about 0.
    assert losses == pytest.approx(expected[0], abs=0.02)
    assert norms == pytest.approx(expected[1], rel=0.02)


@pytest.mark.parametrize("objective", ["grpo", "distill_on_policy"])
def test_a_killed_run_with_images_gives_the_same_bytes(objective, folders, tmp_path):
    folder = folders("qwen3_vl")
    options = options_of(folder, batch_size=2, gradient_accumulation_steps=2)
    # While the second generation is written, and in the second step of it.
    kills = [("rows", 14), ("update", 3)]
    if objective != "grpo":
        taught = {"objective": objective, "dataset": write_taught(folder), **DISTILLED}
        options = options_of(folder, batch_size=1, gradient_accumulation_steps=2, **taught)
        # The same: each step has answers of its own.
        kills = [("rows", 10), ("update", 1)]
    options["save_every"] = 1
    run({**options, "output_dir": tmp_path / "whole"}, tmp_path / "reference")
    out = tmp_path / "out"
    for number, (phase, count) in enumerate(kills):
        killed = {"fault": kill_at, "arguments": (phase, count)}
        run({**options, "output_dir": out}, tmp_path / str(number), [-9, -9], **killed)
    run({**options, "output_dir": out}, tmp_path / "last")
    lines = rollouts_of(out)
    assert {len(line.get("images", ())) for line in lines} == {0, 1, 2}
    assert (out / "rollouts.jsonl").read_bytes() == (
        tmp_path / "whole" / "rollouts.jsonl"
    ).read_bytes()
    assert adapter(out) == adapter(tmp_path / "whole")
