"""Where auto puts a model: by the sizes, and alike on all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig

from fsdp_qlora.adapters.insert import LoraOptions
from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.model.precision import PRECISIONS
from fsdp_qlora.planning.build_model import LayerOptions, build_model
from fsdp_qlora.planning.placement import (
    Placement,
    Sized,
    candidates,
    choose,
    describe_choice,
    describe_reduction,
    with_margin,
)
from fsdp_qlora.planning.step_memory import Step, StepBytes, estimate_step
from fsdp_qlora.ranks.distributed import Ranks, least_over_ranks

pytestmark = pytest.mark.quick

DDP, SHARDED, OFFLOADED = Placement("ddp", False), Placement("full_shard", False), Placement("full_shard", True)
HYBRID = [Placement("hybrid_full_shard", False), Placement("hybrid_full_shard", True)]
GIB = 2**30


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        (("auto", "auto"), 4, [DDP, *HYBRID, SHARDED, OFFLOADED]),  # on two nodes
        (("auto", True), 4, [HYBRID[1], OFFLOADED]),
        (("auto", "auto"), 2, [DDP, SHARDED, OFFLOADED]),
        (("auto", "auto"), 1, [SHARDED, OFFLOADED]),
        (("auto", False), 2, [DDP, SHARDED]),
        (("auto", True), 2, [OFFLOADED]),
        (("full_shard", "auto"), 2, [SHARDED, OFFLOADED]),
        (("full_shard", False), 2, [SHARDED]),
        (("ddp", True), 2, [Placement("ddp", True)]),
        (("auto", 5), 1, [Placement("full_shard", 5)]),
    ],
)
def test_auto_leaves_open_what_is_not_asked_for(given: Any, ranks: int, expected: list[Placement]) -> None:
    assert candidates(*given, world_size=ranks, per_node=2, on_gpu=True) == expected
    # On a CPU nothing is left open.
    strategy, offload = given
    here = "full_shard" if strategy == "auto" else strategy
    assert candidates(*given, world_size=ranks, per_node=2, on_gpu=False) == [
        Placement(here, offload != "auto" and offload)
    ]


def test_the_fastest_that_fits_is_taken_and_said_with_the_sizes() -> None:
    sized = [Sized(DDP, 13 * GIB), Sized(SHARDED, 10 * GIB), Sized(OFFLOADED, 4 * GIB)]
    assert [choose(sized, free * GIB) for free in (13, 12, 9, 1)] == [DDP, SHARDED, OFFLOADED, OFFLOADED]
    line = describe_choice(sized, 23 * GIB)
    assert line and line.startswith("Placement: ddp. With a margin ddp needs 13.0 GiB, full_shard needs 10.0 GiB, ")
    assert "on each GPU, and 23.0 GiB are free. The base is not sharded, since it fits: --sharding_strategy" in line
    assert "not sharded" not in str(describe_choice(sized, 11 * GIB))
    assert describe_choice(sized, None) == (
        "Placement, on each GPU: ddp if 13.0 GiB are free, full_shard if 10.0 GiB are free, else full_shard with the "
        "base in host memory (4.0 GiB)."
    )


def test_gradients_that_do_not_fit_unsharded_are_reduced_in_each_micro_batch_before_anything_slower_is_chosen() -> None:
    found = candidates("auto", "auto", world_size=2, per_node=2, on_gpu=True, accumulates=(True, False))
    # A rank with a whole model has whole gradients in any case.
    reducing = [each._replace(accumulates=False) for each in (SHARDED, OFFLOADED)]
    assert found == [DDP, SHARDED, reducing[0], OFFLOADED, reducing[1]]
    assert candidates("auto", False, world_size=1, per_node=1, on_gpu=True, accumulates=(True, False)) == [SHARDED]
    sized = [Sized(each, needs * GIB) for each, needs in zip(found, (15, 12, 10, 6, 4), strict=True)]
    assert [choose(sized, free * GIB).accumulates for free in (15, 12, 11, 6, 1)] == [True, True, False, True, False]
    assert str(describe_choice(sized, 13 * GIB)).startswith("Placement: full_shard. With a margin ddp needs 15.0 GiB, ")
    assert describe_reduction(sized, 12 * GIB) is None
    assert describe_reduction(sized, 11 * GIB) == (
        "Gradients are reduced in each micro-batch: with a margin, to add them up on each GPU until the last one needs "
        "12.0 GiB, and 11.0 GiB are free."
    )
    # Where the rest is asked for, and where whole modules train.
    assert describe_choice(sized[1:3], 11 * GIB) is None and choose(sized[1:3], None) == SHARDED
    whole = candidates("auto", "auto", world_size=2, per_node=2, on_gpu=True, accumulates=(False,))
    sized = [Sized(each, 9 * GIB) for each in whole]
    assert len(whole) == 3 and choose(sized, None) == SHARDED._replace(accumulates=False)
    assert describe_reduction(sized, 1 * GIB) is None and describe_choice(sized, 1 * GIB)


def test_all_ranks_decide_by_the_rank_that_has_least() -> None:
    store = dist.HashStore()
    ranks = [Ranks(rank, rank, 3, 3, torch.device("cpu")) for rank in range(3)]
    for rank, free in zip(ranks[1:], (30, 20), strict=True):
        store.set(f"free/{rank.rank}", str(free))
    assert least_over_ranks(25, "free", ranks[0], store) == 20


def _step_of_8b(train_type: str = "qlora", **changed: Any) -> StepBytes:
    config = LlamaConfig(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    quantizer = {"quant_type": "nf4", "double_quant": True} if train_type == "qlora" else {}
    layers = LayerOptions(lora=LoraOptions(), quantizer=quantizer)
    bf16 = PRECISIONS["bf16"]
    meta = build_model(config, TRAIN_TYPES[train_type], bf16, torch.device("cpu"), layers, attn_implementation="sdpa")
    step = {"num_shards": 2, "frees_blocks": True, "cpu_offload": False, "num_rows": 2, "num_tokens": 4096, **changed}
    return estimate_step(meta.parts, Step(precision=bf16, **step))


def test_what_a_step_needs_is_that_of_the_stand_ins_allocator() -> None:
    # docs/gpu.md: expected bytes there come from another program, and the figures of real allocations are near them.
    found = _step_of_8b()
    assert found.kept / GIB == pytest.approx(1.125, abs=1e-3)
    # No rank has the whole head: 384 tokens of each rank, 4,096 wide, and their gradients.
    assert found.ends == 0 and found.exchanged == 2 * 2 * 384 * 4096 * 2
    assert _step_of_8b(cpu_offload=True).ends / GIB == pytest.approx(1.159 / 2, abs=1e-3)
    assert _step_of_8b("full").ends / GIB == pytest.approx(1.159, abs=1e-3)
    assert found.copies / GIB == pytest.approx(0.081, abs=1e-3)
    assert found.blocks / GIB == pytest.approx(2 * 0.093, abs=2e-3)
    whole = _step_of_8b(num_shards=1, frees_blocks=False)
    assert whole.blocks == whole.ends == whole.exchanged == 0 and whole.copies == found.copies
    accumulated = _step_of_8b(accumulates=True)
    assert accumulated.gradients == 2 * found.copies > found.gradients
    assert _step_of_8b(offloads_activations=True).kept == found.kept // 18
    # All weights in float32, and their copies in bf16: a whole copy beside the parameters.
    full = _step_of_8b("full", num_shards=1, frees_blocks=False)
    assert full.blocks / GIB == pytest.approx(2 * 36 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) + 8192) / GIB)


def test_the_margin_is_more_than_what_the_allocator_loses() -> None:
    # Reserved for 8.458 GiB: 10.010, and 0.8 GiB of NCCL's (docs/gpu.md).
    assert with_margin(int(8.458 * GIB)) > 10.010 * GIB + 0.7 * GIB
