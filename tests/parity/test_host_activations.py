"""Activations in host memory: the numbers of a run that keeps or recomputes them, to the bit."""

import math
from typing import Any

import pytest
import torch

from fsdp_qlora.sharding import host_activations
from fsdp_qlora.sharding.host_memory import SideStream
from tests.helpers.host_activations import poison
from tests.helpers.run import all_slow_but
from tests.helpers.short_runs import options_of, trained

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


@pytest.mark.parametrize("case", all_slow_but("full_shard in bf16", CASES, nightly=NIGHTLY))
def test_a_run_has_the_bits_of_one_that_keeps_or_recomputes(case, models, tmp_path):
    ranks, changes = CASES[case]
    options = options_of(changes, models, tmp_path, num_blocks=4)
    options["recompute"] = "host"
    losses, weights = trained(ranks, tmp_path / "host", options, train_rank, True)
    assert len(losses) == 4 and all(map(math.isfinite, losses))
    for recompute in ("none", "all"):
        options["recompute"] = recompute
        others, own = trained(ranks, tmp_path / recompute, options, train_rank, False)
        assert others == losses and own.keys() == weights.keys()
        assert all(torch.equal(weights[name], each) for name, each in own.items())
