"""Activations in host memory: the numbers of a run that keeps or recomputes them, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fsdp_qlora.sharding import host_activations
from fsdp_qlora.sharding.host_activations import ActivationStore
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank in bf16": (1, {"precision": "bf16"}),
    "one rank, offloaded base": (1, {"use_cpu_offload": True, "precision": "fp32"}),
    "full_shard in bf16": (2, {"sharding_strategy": "full_shard", "precision": "bf16"}),
    "ddp, plain ways": (
        2,
        {"sharding_strategy": "ddp", "precision": "fp32", "kernels": "plain"},
    ),
    "offloaded base": (2, {"use_cpu_offload": True, "precision": "bf16"}),
    "DoRA with dropout": (1, {"train_type": "bnb_dora", "lora_dropout": 0.2}),
    "all weights": (2, {"train_type": "full", "precision": "bf16", "lr": 1e-4}),
}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves tensors of any size, and overwrites host memory that is given back."""

    def poison(self: ActivationStore, part: torch.Tensor) -> None:
        give_back(self, part.fill_(255))

    give_back = ActivationStore.give_back
    monkeypatch.setattr(ActivationStore, "give_back", poison)
    monkeypatch.setattr(host_activations, "LEAST_BYTES", 1)
    monkeypatch.setattr(host_activations, "PART_BYTES", 1000)


def train(
    ranks: int, folder: Path, options: dict[str, Any]
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    train_ok(ranks, folder, **options)
    name = "model" if options.get("train_type") == "full" else "adapter_model"
    return read_metrics(folder), load_file(folder / f"{name}.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_a_run_has_the_bits_of_one_that_keeps_or_recomputes(case, models, tmp_path, poisoned):
    ranks, changes = CASES[case]
    options: dict[str, Any] = {
        "model_name": models(num_hidden_layers=4),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(16)),
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "lr": 1e-2,
        **changes,
    }
    of_host = train(ranks, tmp_path / "host", {**options, "recompute": "host"})
    for recompute in ("none", "all"):
        losses, weights = train(ranks, tmp_path / recompute, {**options, "recompute": recompute})
        assert losses == of_host[0] and len(losses) == 4
        assert all(torch.equal(of_host[1][name], each) for name, each in weights.items())
