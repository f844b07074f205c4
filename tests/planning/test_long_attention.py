"""Attention's output of long documents: where it is kept, what it takes and what it saves."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.architecture import kept_attention
from fsdp_qlora.model.architecture.attention import EAGER, FLASH, VARLEN
from fsdp_qlora.model.architecture.kept_attention import LONG
from fsdp_qlora.model.kernels.in_use import Ways
from fsdp_qlora.model.model_parts import Offload
from fsdp_qlora.planning import placement
from fsdp_qlora.planning.activations import Activations, OnHost
from fsdp_qlora.planning.blocks import measure_blocks
from fsdp_qlora.planning.estimate import estimate_memory
from fsdp_qlora.planning.fit import MemoryWatch, Placement, fit_recompute, with_margin
from fsdp_qlora.planning.gpus import find_gpu
from fsdp_qlora.planning.long_attention import (
    describe_attention,
    keeping_attention,
    keeping_attention_here,
)
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.speed import MicroBatchSize, size_of, tokens_per_second
from fsdp_qlora.sharding.recompute import keeps_attention, set_keeps_attention
from tests.helpers.models import SIZES
from tests.layers.test_probes import BLOCKS, EACH, FakeMemory, _model
from tests.planning.test_graph_memory import STEP, parts_of

pytestmark = pytest.mark.quick

TOKENS = 3 * LONG
HEADS = SIZES["num_attention_heads"]
# of a block in bf16: outputs, and logarithms in float32 (in units of 512 bytes)
OUTPUT = TOKENS * HEADS * (2 * SIZES["head_dim"] + 4)
PARTS = parts_of()


def placed(**changes: Any) -> PlacedModel:
    step = dataclasses.replace(STEP, num_tokens=TOKENS, **changes)
    blocks = measure_blocks(PARTS, step.precision, Lengths([TOKENS]), VARLEN)
    model: Any = SimpleNamespace(meta=SimpleNamespace(parts=PARTS), machine=None)
    memory = estimate_memory(PARTS, blocks, step)
    return PlacedModel(model, step.placement, step.layout, memory, step, blocks)


def outputs(run: PlacedModel) -> dict[str, int]:
    """Bytes of attention's outputs on the GPU in each phase."""
    phases = {name: run.memory.phases[name] for name in ("loss", "backward")}
    return {name: sizes["attention's outputs"] for name, sizes in phases.items()}


@pytest.mark.parametrize(
    ("lengths", "is_long"),
    [
        ([TOKENS], True),
        ([LONG], False),
        ([LONG // 2] * 6, False),
        # half of the tokens see 12,288 on average
        ([TOKENS, *[64] * (TOKENS // 64)], True),
    ],
)
def test_output_of_long_documents_alone_is_measured(lengths, is_long):
    blocks = measure_blocks(PARTS, STEP.precision, Lengths(lengths), VARLEN)
    for block in blocks:
        expected = OUTPUT * sum(lengths) / TOKENS * is_long
        assert expected <= block.attention <= expected + 1024


def test_windows_make_documents_short():
    assert kept_attention.are_long([TOKENS], window=TOKENS)
    assert not kept_attention.are_long([TOKENS], window=LONG // 2)


def test_it_is_kept_where_it_fits_and_then_planned():
    plain = placed()
    kept = keeping_attention(plain, math.inf, math.inf)
    size = plain.blocks[0].attention
    # In a backward pass the block's own is there in any case.
    assert outputs(kept) == {"loss": 4 * size, "backward": 3 * size}
    assert kept.memory.reserved > plain.memory.reserved + 2 * size
    assert "not computed again: its output is kept, 144 B" in " ".join(describe_attention(kept))
    least = with_margin(kept.memory.reserved)
    assert keeping_attention(plain, least, math.inf).step.on_host.attention
    for gpu in (least - 1, None):
        assert keeping_attention(plain, gpu, math.inf) is plain
    said = " ".join(describe_attention(plain))
    assert "is computed again: its output would take 144 B a token" in said
    # On the host beside inputs: the GPU has that of two blocks.
    offloaded = placed(on_host=OnHost(inputs=True))
    kept = keeping_attention(offloaded, math.inf, math.inf)
    assert outputs(kept) == {"loss": size, "backward": size}
    host = sum(kept.memory.host.values())
    assert host - sum(offloaded.memory.host.values()) == 4 * size
    assert keeping_attention(offloaded, math.inf, host).step.on_host.attention
    assert keeping_attention(offloaded, math.inf, host - 1) is offloaded
    # What takes none of the host's memory is kept, however little there is.
    weights = placed(placement=Placement("full_shard", Offload(len(PARTS.blocks), embeddings=True)))
    assert sum(weights.memory.host.values())
    assert keeping_attention(weights, math.inf, 0).step.on_host.attention
    # Nothing is computed again, and nobody says so.
    every = placed(recomputing=0)
    assert keeping_attention(every, math.inf, math.inf) is every
    assert [*describe_attention(every)] == []


def test_all_ranks_keep_it_by_the_least_memory_of_one(monkeypatch):
    ranks = Ranks(0, 0, 2, 2, torch.device("cpu"))
    monkeypatch.setattr(placement, "host_memory_free", lambda _: 2**60)

    def keeps(device: str, of_gpu: int, of_host: int, **changes: Any) -> bool:
        """Whether rank 0 does so, which has memory enough, beside another rank."""
        store = dist.HashStore()
        store.set("the GPU memory for attention's output/1", str(of_gpu))
        store.set("the host's for attention's output/1", str(of_host))
        plan: Any = SimpleNamespace(
            meta=SimpleNamespace(parts=PARTS),
            machine=Machine(torch.device(device), 2, ranks, free=2**60),
        )
        run = dataclasses.replace(placed(**changes), model=plan)
        return keeping_attention_here(run, store).step.on_host.attention

    assert keeps("cuda", 2**60, 0) and not keeps("cuda", 2**20, 0)
    on_host = OnHost(inputs=True)
    assert keeps("cpu", 2**60, 2**60, on_host=on_host)
    assert not keeps("cpu", 2**60, 2**20, on_host=on_host)


@pytest.mark.parametrize("keeps", [True, False])
def test_ranks_with_and_without_it_compare_their_memory_as_often(keeps):
    model = _model()
    set_keeps_attention(model, keeps)
    memory = FakeMemory(model, total=150, head=50, block=0)
    asked: list[float] = []

    def least(value: float) -> float:
        asked.append(value)
        return value

    fit_recompute(model, memory.try_step, least, block_bytes=EACH)
    assert len(asked) == 2


@pytest.mark.parametrize("documents", [None, FLASH, EAGER])
def test_rows_of_other_kernels_keep_none_of_it(documents):
    blocks = measure_blocks(PARTS, STEP.precision, Lengths([TOKENS]), documents)
    assert {block.attention for block in blocks} == {0}


def test_blocks_that_keep_all_have_no_output_beside():
    activations = Activations([7] * 4, 1, 0, 3, OnHost(blocks=1), [5] * 4)
    # The third goes to the host, and the last keeps all.
    assert activations.moved == [2]
    assert [activations.in_backward(index).attention for index in range(4)] == [0, 5, 10, 10]
    assert activations.at_loss().attention == 10


def test_planned_time_has_no_second_forward_pass_of_attention():
    plain = placed()
    kept = keeping_attention(plain, math.inf, math.inf)
    size = size_of(PARTS)
    gpu = find_gpu("RTX 4090")

    def seconds(run: PlacedModel, tokens: int) -> float:
        one = MicroBatchSize(tokens, tokens**2, tokens)
        return tokens / tokens_per_second(run, size, one, gpu, Ways())

    # Of long rows attention takes nearly all of the time: 1 + 2.5 of 1 + 1 + 2.5.
    assert seconds(kept, 10**7) == pytest.approx(3.5 / 4.5 * seconds(plain, 10**7), rel=0.01)
    assert seconds(kept, LONG) == seconds(plain, LONG)


def test_a_probe_without_room_has_attention_computed_again():
    class Memory(FakeMemory):
        def room(self) -> int:
            return super().room() - 40 * keeps_attention(self.model)

    for total, is_kept in ((200, True), (170, False)):
        model = _model()
        set_keeps_attention(model, True)
        memory = Memory(model, total=total, head=20, block=60)
        assert fit_recompute(model, memory.try_step, lambda value: value, block_bytes=EACH) >= 0
        assert keeps_attention(model) == is_kept and memory.room() >= 0


def test_near_the_limit_attention_is_computed_again_after_all_blocks():
    model: nn.Module = _model()
    set_keeps_attention(model, True)
    watch = MemoryWatch(model, BLOCKS - 1, most=20.0)
    found = [(watch.stepped(reserved), keeps_attention(model)) for reserved in (20.1, 20.2, 20.3)]
    assert found == [(BLOCKS, True), (BLOCKS, False), (BLOCKS, False)]
