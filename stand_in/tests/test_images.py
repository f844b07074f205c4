"""Rows with images, and adapters on what computes them, on two ranks of the stand-in: numbers of
the CPU.
"""

import functools
import operator
from collections.abc import Callable
from pathlib import Path

import pytest

from stand_in.beside_cpu import Differences, run_both, weights_in
from stand_in.environment import PYTHON, Rank, run
from tests.helpers.run import flags
from tests.parity.test_image_rows import make_family
from tests.parity.test_tower_adapters import fill_zeros

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

    def start(out: Path, settings: dict[str, object]) -> list[Rank]:
        options = {
            **OPTIONS,
            "model_name": folder,
            "dataset": folder / "rows.jsonl",
            "output_dir": out / "output",
            "lora_target_modules": targets,
            "recompute": recompute,
        }
        settings = {"PHANTOM_CC": 90, **settings}
        ended = run(["train.py", *flags(**options)], out, ranks=2, settings=settings)
        said = "\n".join(rank.output[-4000:] for rank in ended)
        assert [rank.status for rank in ended] == [0, 0], said
        return ended

    beside = run_both(start, tmp_path, folder)
    print(f"| {family}, {targets}, recompute {recompute} | {beside.differences} |")
    assert beside.strays == {}
    assert all(map(operator.le, beside.differences, HALVES)), beside.differences
    trained = weights_in(tmp_path / "device/output")
    assert any("vision" in name or "visual" in name for name in trained) == ("vision" in targets)
