"""Which models' blocks are planned as graphs, and with which tokens."""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.data.batches.graph_lengths import MOST_TOKENS
from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.model.adapters.insert import LoraOptions
from fsdp_qlora.model.architecture.precision import PRECISIONS
from fsdp_qlora.model.build_model import LayerOptions, build_model
from fsdp_qlora.model.kernels.in_use import GRAPHS, Ways, using_ways
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.planning.activations import OnHost
from fsdp_qlora.planning.allocator import reserved_bytes
from fsdp_qlora.planning.blocks import BlockBytes
from fsdp_qlora.planning.estimate import estimate_memory
from fsdp_qlora.planning.fit import Placement
from fsdp_qlora.planning.graph_memory import blocks_by_graphs
from fsdp_qlora.planning.memory import Memory, Step
from fsdp_qlora.planning.storages import CountedStorages
from tests.helpers.models import SIZES

pytestmark = pytest.mark.quick

STEP = Step(
    precision=PRECISIONS["bf16"],
    optimizer="adamw",
    layout=Layout(1, 1, "full_shard"),
    placement=Placement("full_shard"),
    num_tokens=4100,
    recomputing=4,
)


def parts_of(family: str = "llama", **changes: Any) -> ModelParts:
    config = AutoConfig.for_model(family, **SIZES | {"num_hidden_layers": 4} | changes)
    layers = LayerOptions(LoraOptions(rank=4), {"quant_type": "nf4", "double_quant": True})
    kind = TRAIN_TYPES["qlora"]
    cpu = torch.device("cpu")
    return build_model(config, kind, STEP.precision, cpu, layers, attn_implementation="sdpa").parts


def test_graphs_are_for_models_with_many_blocks_by_them():
    parts = parts_of()

    def by_graphs(**changes: Any) -> list[int]:
        return blocks_by_graphs(parts, dataclasses.replace(STEP, **changes))

    assert by_graphs() == [0, 1, 2, 3]
    assert by_graphs(recomputing=2) == [0, 1]
    assert by_graphs(recomputing=1) == by_graphs(recomputing=0) == []
    # of three that do not keep theirs on the GPU, two are on the host
    assert by_graphs(recomputing=3, on_host=OnHost(blocks=2)) == []
    assert by_graphs(recomputing=3, on_host=OnHost(blocks=1)) == [0, 1]
    assert by_graphs(num_tokens=MOST_TOKENS) and not by_graphs(num_tokens=MOST_TOKENS + 1)
    # experts behind dense blocks
    for dense, expected in (([0], []), ([0, 1, 2], [0, 1, 2])):
        mixture = parts_of("qwen3_moe", mlp_only_layers=dense)
        assert blocks_by_graphs(mixture, STEP) == expected


def test_memory_with_graphs_is_that_without_of_filled_tokens_and_their_own():
    parts = parts_of()
    block = BlockBytes(
        kept=4100 * 500,
        backward=4100 * 900,
        recomputing=4100 * 800,
        forward=0,
        pool=4100 * 1000,
        arguments=4100 * 10,
    )

    def memory(**changes: Any) -> Memory:
        return estimate_memory(parts, [block] * 4, dataclasses.replace(STEP, **changes))

    plain = memory()
    with using_ways(Ways(blocks=GRAPHS)):
        by_graphs = memory()
    # Beside the graphs of the longest micro-batch, a shorter one runs without.
    for phase, tokens in (("backward", 4608), ("without graphs", 4096)):
        for name in ("block inputs", "hidden states at the head"):
            expected = plain.phases["backward"][name] * tokens // 4100
            assert by_graphs.phases[phase][name] == expected, (phase, name)
    at_work = by_graphs.phases["without graphs"]["block at work"]
    assert at_work == 4096 * 800 > by_graphs.phases["backward"]["block at work"]
    assert by_graphs.phases["capture"]["block at work"] == 4096 * 1000
    added = by_graphs.resident.keys() - plain.resident.keys()
    assert added == {
        "static tensors of graphs",
        "arguments of graphs",
        "graphs' pool",
        "workspaces of captures",
    }
    assert by_graphs.resident["graphs' pool"] == 4608 * 1000


def test_an_empty_buffer_of_an_operator_is_no_allocation():
    scores = torch.zeros(0, 4, device="meta")
    with CountedStorages([scores]) as counted:
        torch._softmax_backward_data(scores, scores, 1, torch.float32)
    assert reserved_bytes(counted.changes) == counted.most == 0
