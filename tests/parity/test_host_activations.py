"""Activations in host memory: the numbers of a run that keeps or recomputes them, to the bit."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fsdp_qlora.sharding import host_activations
from fsdp_qlora.sharding.host_memory import SideStream
from tests.helpers.host_activations import poison
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags, on_ranks
from tests.preferences.pairs import make_pairs

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
    "beside a reference": (1, {"objective": "dpo", "precision": "bf16"}),
    "shared rows": (2, {"context_parallel_size": 2, "precision": "fp32"}),
    "experts": (
        2,
        {
            "family": "qwen3_moe",
            "precision": "bf16",
            "lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj",
        },
    ),
    "a hybrid": (1, {"family": "qwen3_next", "precision": "fp32"}),
    "all weights": (2, {"train_type": "full", "precision": "bf16", "lr": 1e-4}),
}

NIGHTLY = ("shared rows", "experts", "a hybrid", "ddp, plain ways")


def train_rank(argv: list[str], moves: bool) -> int:
    """A run in poisoned memory, whose blocks must move something to the host if it is to."""
    import train

    copies = 0
    copy_all = SideStream.copy_all

    def counting(side: SideStream, pairs: Any) -> Any:
        nonlocal copies
        copies += 1
        return copy_all(side, pairs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_activations.SideStream, "copy_all", counting)
        poison(patch, least=1, part=1000)
        status = train.main(argv)
    # At least eight storages of three blocks go and come in each of eight micro-batches.
    assert not moves or copies >= 2 * 8 * 3 * 8
    return status


def trained(
    ranks: int, folder: Path, options: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a run, and its result."""
    argv = flags(output_dir=folder, quant_cache="off", log_to="jsonl", **options)
    moves = options["recompute"] == "host"
    statuses, output = on_ranks(ranks, train_rank, (argv, moves), folder.parent / "logs")
    assert statuses == [0] * ranks, output[-4000:]
    name = "model" if options.get("train_type") == "full" else "adapter_model"
    return read_metrics(folder), load_file(folder / f"{name}.safetensors")


@pytest.mark.parametrize("case", all_slow_but("full_shard in bf16", CASES, nightly=NIGHTLY))
def test_a_run_has_the_bits_of_one_that_keeps_or_recomputes(case, models, tmp_path):
    ranks, changes = CASES[case]
    changes = dict(changes)
    family = changes.pop("family", "llama")
    rows = make_pairs(16) if "objective" in changes else make_rows(16)
    options: dict[str, Any] = {
        "model_name": models(family, num_hidden_layers=4),
        "dataset": write_rows(tmp_path / "rows.jsonl", rows),
        "context_length": 256,
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "lr": 1e-2,
        **changes,
    }
    losses, weights = trained(ranks, tmp_path / "host", {**options, "recompute": "host"})
    assert len(losses) == 4 and all(map(math.isfinite, losses))
    for recompute in ("none", "all"):
        others, own = trained(ranks, tmp_path / recompute, {**options, "recompute": recompute})
        assert others == losses and own.keys() == weights.keys()
        assert all(torch.equal(weights[name], each) for name, each in own.items())
