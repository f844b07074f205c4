"""Adapted linear layers computed together train as each alone: in every family, on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from tests.helpers.metrics import read_metrics
from tests.helpers.rounding import SGD
from tests.helpers.rows import make_rows
from tests.helpers.run import all_slow_but
from tests.layers.shards import relative_error
from tests.parity.test_families import FAMILIES, KNOWN, SMALL
from tests.parity.test_train_types import train_ours

# biases; experts; latents
IN_CI = {"qwen2", "qwen3_moe", "deepseek_v3"}


def trained(folder: Path, out: Path, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and gradient norms of a run, and its adapter."""
    settings = {"num_epochs": 2, "gradient_accumulation_steps": 2, "train_type": "qlora", **SGD}
    losses, _ = train_ours(folder, make_rows(8, seed=3), out, **settings | options)
    return losses + read_metrics(out, "grad_norm"), load_file(out / "adapter_model.safetensors")


def assert_near(adapter: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert adapter.keys() == expected.keys()
    for name, values in adapter.items():
        # Weights that no token reaches stay zero.
        assert expected[name].any() == values.any()
        if values.any():
            assert relative_error(values, expected[name].double()) < 1e-4, name


@pytest.mark.parametrize("family", all_slow_but("qwen2", KNOWN, nightly={*FAMILIES} - IN_CI))
def test_layers_computed_together_train_as_each_alone(family, models, tmp_path):
    known = CONFIG_MAPPING[family]().to_dict()
    sizes = {key: size for key, size in SMALL.items() if key in known}
    folder = models(family, **sizes | FAMILIES[family])
    plain, expected = trained(folder, tmp_path / "plain", kernels="plain")
    lean, adapter = trained(folder, tmp_path / "lean", kernels="auto")
    assert lean == pytest.approx(plain, rel=1e-5)
    assert_near(adapter, expected)
    has_other_bits = not all(map(torch.equal, adapter.values(), expected.values()))
    # Each layer of phi3 has an input of its own, as q, k and v are one layer.
    assert has_other_bits == (family != "phi3")


@pytest.mark.parametrize(
    "options",
    [
        {"rank_pattern": "q_proj=2,v_proj=7,up_proj=6"},
        pytest.param({"lora_target_modules": "q_proj,v_proj,down_proj"}, marks=pytest.mark.slow),
    ],
    ids=["other ranks", "some layers"],
)
def test_groups_of_other_ranks_or_some_layers_train_as_each_alone(options, models, tmp_path):
    plain, expected = trained(models("qwen2"), tmp_path / "plain", kernels="plain", **options)
    lean, adapter = trained(models("qwen2"), tmp_path / "lean", kernels="auto", **options)
    assert lean == pytest.approx(plain, rel=1e-5)
    assert_near(adapter, expected)


def test_layers_computed_together_train_in_16_bits(models, tmp_path):
    options = {"precision": "bf16", "recompute": "all"}
    plain, _ = trained(models(), tmp_path / "plain", kernels="plain", **options)
    lean, _ = trained(models(), tmp_path / "lean", kernels="auto", **options)
    assert lean == pytest.approx(plain, rel=2e-2) and lean != plain
