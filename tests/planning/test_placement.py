"""Where auto puts a model: by the sizes, and alike on all ranks."""

import copy
import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.data.batches.shared_tokens import SharedTokens
from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.adapters.insert import LoraOptions
from fsdp_qlora.model.architecture.attention import EAGER
from fsdp_qlora.model.architecture.attention import choose as choose_attention
from fsdp_qlora.model.architecture.precision import PRECISIONS
from fsdp_qlora.model.build_model import LayerOptions, build_model
from fsdp_qlora.model.model_parts import ModelParts, Offload
from fsdp_qlora.model.quantizers import routed
from fsdp_qlora.planning.allocator import FACTORS
from fsdp_qlora.planning.blocks import BlockBytes, CountedStorages, measure_blocks
from fsdp_qlora.planning.estimate import estimate_memory
from fsdp_qlora.planning.fit import (
    Placement,
    choose,
    describe_choice,
    describe_reduction,
)
from fsdp_qlora.planning.gpus import GPUS
from fsdp_qlora.planning.image_memory import image_bytes
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.memory import Memory, Step
from fsdp_qlora.planning.placement import candidates, least_free
from fsdp_qlora.planning.program_speed import Program
from fsdp_qlora.planning.speed import Experts, MicroBatchSize, Work, count_work, seconds, size_of
from tests.helpers.models import SIZES

pytestmark = pytest.mark.quick

BLOCKS = 36
ALL = Offload(BLOCKS, embeddings=True)
DDP = Placement("ddp")
SHARDED = Placement("full_shard")
OFFLOADED = Placement("full_shard", ALL)
HYBRID = [Placement("hybrid_full_shard"), Placement("hybrid_full_shard", ALL)]
GIB = 2**30
NONE = Experts(0, 1, 0, 0)
MIXTURE = Qwen3MoeConfig(
    hidden_size=256,
    moe_intermediate_size=128,
    num_experts=16,
    num_experts_per_tok=4,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=320,
    head_dim=64,
)


def _candidates(
    strategy: str,
    offload: Any,
    ranks: int,
    *,
    device: str = "cuda",
    accumulation: int = 1,
    **about_model: Any,
) -> list[Placement]:
    """The candidates for two GPUs per machine and a model of BLOCKS blocks."""
    config = TrainConfig(
        sharding_strategy=strategy,
        use_cpu_offload=offload,
        gradient_accumulation_steps=accumulation,
    )
    here = SimpleNamespace(device=torch.device("cpu"))
    machine = SimpleNamespace(
        device=torch.device(device), world_size=ranks, per_node=min(ranks, 2), ranks=here
    )
    meta = SimpleNamespace(parts=SimpleNamespace(blocks=[None] * BLOCKS))
    plan: Any = SimpleNamespace(
        machine=machine, meta=meta, **{"trains_whole_modules": False, **about_model}
    )
    return candidates(config, plan)


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
        (("ddp", True), 2, [Placement("ddp", ALL)]),
        (("auto", 5), 1, [Placement("full_shard", Offload(5))]),
    ],
)
def test_placement_auto_leaves_unset_options_open(given, ranks, expected):
    strategy, offload = given
    found = _candidates(strategy, offload, ranks)
    assert found == expected
    # Its options ask for what was chosen; where auto puts nothing on the host it is not left open
    # again.
    assert found[-1].options["use_cpu_offload"] == (True if offload == "auto" else offload)
    # On a CPU nothing is left open.
    here = "full_shard" if strategy == "auto" else strategy
    first = found[0].offload
    assert _candidates(strategy, offload, ranks, device="cpu") == [Placement(here, first)]
    # What is known of no GPU is what was asked for, shared by the most ranks.
    unknown = choose(dict.fromkeys(found, GIB), None)
    assert unknown.sharding_strategy == found[-1].sharding_strategy and unknown.offload == first


def test_fastest_placement_that_fits_is_chosen_and_logged():
    needs = {DDP: 13 * GIB, SHARDED: 10 * GIB, OFFLOADED: 4 * GIB}
    for free, expected in ((13, DDP), (12, SHARDED), (9, OFFLOADED), (1, OFFLOADED)):
        assert choose(needs, free * GIB) == expected
    line = str(describe_choice(needs, 23 * GIB))
    assert line.startswith(
        "Placement: ddp. On each GPU, with a margin, ddp needs 13.0 GiB, full_shard needs "
    )
    assert (
        "; 23.0 GiB are free. The base is not sharded, since it fits: --sharding_strategy" in line
    )
    assert "not sharded" not in str(describe_choice(needs, 11 * GIB))
    assert describe_choice(needs, None) == (
        "Each GPU: ddp needs 13.0 GiB free, full_shard needs 10.0 GiB free; otherwise "
        "full_shard with the base in host memory (4.0 GiB)."
    )


def test_gradients_that_do_not_fit_are_reduced_in_each_micro_batch():
    found = _candidates("auto", "auto", 2, accumulation=2)
    # A rank with a whole model has whole gradients in any case.
    reducing = [each._replace(accumulates=False) for each in (SHARDED, OFFLOADED)]
    assert found == [DDP, SHARDED, reducing[0], OFFLOADED, reducing[1]]
    assert _candidates("auto", False, 1, accumulation=2) == [SHARDED]
    needs = {each: size * GIB for each, size in zip(found, (15, 12, 10, 6, 4), strict=True)}
    for free, accumulates in ((15, True), (12, True), (11, False), (6, True), (1, False)):
        assert choose(needs, free * GIB).accumulates == accumulates
    assert str(describe_choice(needs, 13 * GIB)).startswith(
        "Placement: full_shard. On each GPU, with a margin, ddp needs 15.0 GiB, "
    )
    assert describe_reduction(needs, 12 * GIB) is None
    assert describe_reduction(needs, 11 * GIB) == (
        "Gradients are reduced in each micro-batch: accumulating them on each GPU needs 12.0 GiB "
        "with a margin, and 11.0 GiB are free."
    )
    # Where the rest is asked for, and where whole modules train.
    asked = {each: needs[each] for each in found[1:3]}
    assert describe_choice(asked, 11 * GIB) is None and choose(asked, None) == SHARDED
    whole = _candidates("auto", "auto", 2, accumulation=2, trains_whole_modules=True)
    needs = dict.fromkeys(whole, 9 * GIB)
    assert len(whole) == 3 and choose(needs, None) == SHARDED._replace(accumulates=False)
    assert describe_reduction(needs, 1 * GIB) is None and describe_choice(needs, 1 * GIB)


def test_all_ranks_choose_the_placement_of_the_smallest_gpu():
    store = dist.HashStore()
    ranks = [Ranks(rank, rank, 3, 3, torch.device("cpu")) for rank in range(3)]
    for rank, free in zip(ranks[1:], (30, 20), strict=True):
        store.set(f"free/{rank.rank}", str(free))
    machine = Machine(torch.device("cuda"), 3, ranks[0], free=25)
    assert least_free(machine, "free", store) == 20 and least_free(machine, "free", None) == 25


LLAMA = LlamaConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
BF16 = PRECISIONS["bf16"]
# Before torch 2.13 a block keeps a head of keys and of values for each head of queries.
REPEATS_KEYS = "enable_gqa" not in inspect.signature(varlen_attn).parameters


def _parts(train_type: str = "qlora", config: PretrainedConfig = LLAMA) -> ModelParts:
    options = {
        "qlora": {"quant_type": "nf4", "double_quant": True},
        "hqq_lora": {"n_bits": 4, "group_size": 64},
    }
    layers = LayerOptions(lora=LoraOptions(), quantizer=options.get(train_type, {}))
    cpu = torch.device("cpu")
    meta = build_model(
        config, TRAIN_TYPES[train_type], BF16, cpu, layers, attn_implementation="sdpa"
    )
    choose_attention(meta.model.config, BF16.compute_dtype, cpu, requested="auto")
    return meta.parts


class CountedOperators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_block_on_the_meta_device_keeps_what_its_shapes_say():
    tokens = 1024
    hidden = 4096
    inner = 12288
    heads = 32 * 128
    groups = heads if REPEATS_KEYS else 8 * 128
    [block] = {*measure_blocks(_parts(), BF16, Lengths([tokens]), None)}
    # The second norm's input; queries, keys, values and what attention makes of them; gate and up:
    # in 16 bits.
    expected = 2 * tokens * (hidden + 2 * heads + 2 * groups + 2 * inner)
    assert block.kept == pytest.approx(expected, rel=0.02)
    # In the backward pass at least gate, up and their gradients; with recompute also the first
    # norm's output.
    assert block.kept < block.backward < block.recomputing < 4 * block.kept
    # Twice the tokens keep twice as much, however they are split into rows.
    [twice] = {*measure_blocks(_parts(), BF16, Lengths([tokens, 600, 424]), None)}
    assert twice.kept == pytest.approx(2 * block.kept, rel=1e-3)
    # What two documents share is kept once, but for its keys and values.
    halves = SharedTokens([0, 512], [0, 0])
    [shared] = {*measure_blocks(_parts(), BF16, Lengths([tokens, tokens], halves), None)}
    saved = 2 * 512 * (hidden + 2 * inner + 2 * heads)
    assert shared.kept == pytest.approx(twice.kept - saved, rel=0.02)


def test_scores_of_eager_attention_and_all_experts_are_counted():
    def kept(documents: str | None, tokens: int) -> int:
        return measure_blocks(_parts(), BF16, Lengths([tokens]), documents)[0].kept

    scores = kept(EAGER, 2048) - kept(None, 2048)
    of_half = kept(EAGER, 1024) - kept(None, 1024)
    assert scores == pytest.approx(4 * of_half, rel=0.05) and scores > 0
    [block] = {*measure_blocks(_parts("qlora", MIXTURE), BF16, Lengths([512]), None)}
    # Of each token's four experts gate and up, and what the activation and its product with up make
    # of them.
    repeated = 2 * 128 if REPEATS_KEYS else 0
    assert block.kept == pytest.approx(
        2 * 512 * (4 * 4 * 128 + 4 * 256 + 2 * 256 + 128 + repeated), rel=0.1
    )


@pytest.mark.parametrize("train_type", ["lora", "qlora"])
def test_experts_of_equal_sizes_are_measured_once(train_type, monkeypatch):
    monkeypatch.setitem(routed.GROUP_BYTES, "cpu", 0)  # an expert at a time, as large ones are

    def measured(num_experts: int) -> tuple[list[BlockBytes], int]:
        mixture = copy.deepcopy(MIXTURE)
        mixture.num_experts = num_experts
        parts = _parts(train_type, mixture)
        with CountedOperators() as operators:
            blocks = measure_blocks(parts, BF16, Lengths([15 * 47]), None)
        return blocks, operators.count

    measured(16)  # makes what a process makes once
    found, counts = zip(*map(measured, (16, 48)), strict=True)
    assert counts[0] == counts[1]
    with monkeypatch.context() as patched:
        patched.setattr(routed, "_without_repeats", lambda groups: groups)
        assert measured(48)[0] == found[1]


def test_a_plan_counts_decoded_experts_and_the_hosts_launches():
    size = size_of(_parts("qlora", MIXTURE))
    assert size.experts == (16, 4, 2 * 2, 2 * 4 * 3 * 128 * 256)
    for tokens, hit in ((1, 4), (2, 8), (512, 16)):
        options = {"num_shards": 1, "recomputed_share": 1.0, "host_share": 0.0}
        turn = MicroBatchSize(tokens, 0, tokens)
        work, dense = (
            count_work(each, turn, **options) for each in (size, size._replace(experts=NONE))
        )
        assert work.decoding - dense.decoding == pytest.approx(
            3 * 4 * 2 * (hit - 4) * 3 * 128 * 256
        )
        assert work.products == 3 * 2 * 2 * hit and work.operations == dense.operations
    assert seconds(Work(products=1000), GPUS["H100 SXM"], Program()) > 0.01


def test_planned_speed_counts_the_bytes_of_each_quantizer():
    expected = {"lora": (0, 0), "qlora": (4.0, 2.52), "hqq_lora": (15.3, 2.56)}
    for kind, (by_operators, by_kernel) in expected.items():
        size = size_of(_parts(kind))
        assert size.decoding == by_operators
        assert size.decoding * size.kernel_share == pytest.approx(by_kernel, abs=0.02)


STEP = Step(
    precision=BF16,
    optimizer="adamw",
    layout=Layout(2, 2, "full_shard"),
    placement=SHARDED,
    num_tokens=4096,
    recomputing=36,
)


def test_planned_memory_of_a_step_follows_its_placement():
    def sizes(train_type: str = "qlora", **changed: Any) -> dict[str, int]:
        parts = _parts(train_type)
        block = BlockBytes(kept=5, backward=11, recomputing=13, forward=7)
        memory = estimate_memory(parts, [block] * 36, replace(STEP, **changed))
        kind = "host" if memory.host else "gathered" if "layout" not in changed else "device"
        if train_type == "qlora":
            assert memory.overhead == int(FACTORS[kind] * 4096 * 12288 * 2)
        in_other_phases = {
            name: count for phase in memory.phases.values() for name, count in phase.items()
        }
        return in_other_phases | memory.phases["backward"]

    found = sizes()
    # No rank has the whole head: 384 tokens of each rank, 4,096 wide, and their gradients.
    assert "head's weights" not in found
    assert found["hidden states exchanged for it"] == 2 * 2 * 384 * 4096 * 2
    assert sizes(placement=OFFLOADED)["head's weights"] / GIB == pytest.approx(1.159 / 2, abs=1e-3)
    assert sizes("full")["head's weights"] / GIB == pytest.approx(1.159, abs=1e-3)
    assert found["adapters as gathered"] / GIB == pytest.approx(0.081, abs=1e-3)
    assert found["gathered blocks"] / GIB == pytest.approx(2 * 0.093, abs=2e-3)
    whole = sizes(layout=Layout(1, 1, "ddp"))
    adapters = found["adapters as gathered"]
    assert "gathered blocks" not in whole and whole["adapters as gathered"] == adapters
    assert sizes(has_micro_batches=True)["accumulated gradients"] == 2 * adapters
    # Of a forward pass alone nothing is kept: another block's input is freed behind it.
    alone = estimate_memory(_parts(), [BlockBytes(5, 11, 13, 7)] * 36, replace(STEP, optimizer=""))
    assert alone.phases["forward"]["block at work"] == 7
    assert alone.phases["forward"]["block inputs"] == 4096 * 4096 * 2
    assert not {"their gradients", "optimizer state"} & alone.resident.keys()
    # All weights in float32, and their copies in bf16: a whole copy beside the parameters.
    full = sizes("full", layout=Layout(1, 1, "ddp"))
    assert full["gathered blocks"] == pytest.approx(
        2 * 2 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288), rel=1e-3
    )


def test_frozen_blocks_before_the_first_trained_keep_no_activations():
    block = BlockBytes(kept=5, backward=11, recomputing=13, forward=7)

    def memory(trained: tuple[int, ...], **changed: Any) -> Memory:
        parts = _parts()
        for index, each in enumerate(parts.blocks):
            each.requires_grad_(False)
            if index in trained:
                each.input_layernorm.weight.requires_grad_(True)
        return estimate_memory(parts, [block] * 36, replace(STEP, **changed))

    hidden = 4096 * 4096 * 2
    assert memory((0, 35)).phases["backward"]["block inputs"] == 36 * hidden
    some = memory((17, 35))
    assert some.phases["backward"]["block inputs"] == 19 * hidden
    assert some.phases["loss"]["block inputs"] == 19 * hidden
    gradients = 2 * 4096 * 2 // 2  # of two norms, stored in 16 bits here, over two ranks
    assert some.resident["their gradients"] == gradients
    assert "their gradients" not in some.phases["backward"]
    assert some.reserved == sum(
        (*some.resident.values(), *some.phases[some.peak].values(), some.overhead)
    )
    # From the host blocks come in memory of a stream too, with a rank's own part of the next one.
    one = some.phases["backward"]["gathered blocks"] / 2
    from_host = memory((17, 35), placement=OFFLOADED)
    assert from_host.resident["gathered blocks"] == pytest.approx(2.5 * one, rel=1e-3)
    assert "gathered blocks" not in from_host.phases["backward"]


def test_vision_tower_is_planned_as_it_runs():
    vision = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
    }
    config = Gemma3Config(
        vision_config=vision | {"image_size": 448, "patch_size": 14}, text_config=SIZES
    )
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
        pixels = torch.empty(2, 3, 448, 448, dtype=torch.bfloat16)
    parts = ModelParts(model)
    images = image_bytes(parts.towers.values(), pixels.numel(), keeps_inputs_only=True)
    step = replace(STEP, num_tokens=64, recomputing=2, images=images)
    planned = estimate_memory(parts, [BlockBytes(1, 1, 1, 1)] * 2, step).phases["images"]
    weights = [parameter for tower in parts.towers.values() for parameter in tower.parameters()]
    assert planned["gathered parts for images"] == sum(parameter.nbytes for parameter in weights)
    assert planned["pixels"] == 4 * pixels.numel()
    # An MLP at work beside its input, the residual and what was normed. On the meta device
    # attention has no kernel.
    hidden = torch.empty(2, 1024, 1152, dtype=torch.bfloat16, device="meta")
    [mlp, *_] = [
        module
        for module in parts.towers["model.vision_tower"].modules()
        if type(module).__name__.endswith("MLP")
    ]
    with torch.no_grad(), CountedStorages([*mlp.parameters(), hidden]) as count:
        mlp(hidden)
    most = count.most + 3 * hidden.nbytes
    assert most <= planned["images at work"] <= 1.3 * most
