"""What is learned of sampled answers: steps against TRL's GRPOTrainer, gradients against formulas in float64."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.preferences.answers import CASES, STEPS, learn, run_on
from tests.preferences.pairs import sketch, start_adapter
from tests.tiny import on_ranks

Models = Callable[..., Path]
TRL = json.loads(Path(__file__).with_name("trl_grpo.json").read_text())
OFF = 1e-5
OF_REWARDS = ("reward", "reward_std", "frac_reward_zero_std")


@pytest.fixture(scope="module")
def starts(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Family -> a model and the adapter to start from."""
    folder = tmp_path_factory.mktemp("starts")
    families = {family for family, _ in CASES.values()}
    return {family: (models(family), start_adapter(models(family), folder / family)) for family in families}


def numbers(output: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((output / "metrics.json").read_text())
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_five_steps_are_those_of_trl(ranks: int, starts: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    runs = []
    for number, (case, (family, options)) in enumerate(CASES.items()):
        # Two micro-batches on one rank, one or two on each of two.
        split = {"batch_size": 6 // (1 + number % 2), "gradient_accumulation_steps": 2 * (1 + number % 2) // ranks}
        batching = {"batching": ("padding_free", "padded", "packed")[number % 3]}
        runs.append(run_on(*starts[family], tmp_path / case, **split, **batching, **options))
    statuses, said = on_ranks(ranks, learn, (runs, [TRL[case]["advantages"] for case in CASES]), tmp_path / "logs")
    assert statuses == [0] * ranks, said[-5000:]
    for case in CASES:
        found = numbers(tmp_path / case)
        assert len(found) == len(TRL[case]["steps"]) == STEPS
        for ours, theirs in zip(found, TRL[case]["steps"], strict=True):
            expected = {key: value for key, value in theirs.items() if key not in OF_REWARDS}
            assert {key: ours[key] for key in expected} == pytest.approx(expected, rel=OFF, abs=OFF), case
        assert sketch(tmp_path / case) == pytest.approx(TRL[case]["adapter"], rel=OFF, abs=OFF), case
