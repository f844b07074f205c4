"""What one optimizer step asks of the GPU and of the other ranks, counted on the stand-in: the few
numbers that matter.

Of collectives how many and the bytes (counts.py), of copies the bytes: "at work" where the device
computes, "beside" it on another stream. What a number should be:

- FSDP2 gathers each block's frozen weights twice in a micro-batch, with recompute, and its adapters
  once in a step. What fills a rank's part up to 16 bytes is 4 bytes for each block here.
- Embedding and head are not gathered: rows of tokens and hidden states are exchanged
  (sharding/vocabulary.py).
- Offloaded weights, of one rank, come beside the computation once forward and once backward, but
  for the two modules that are there where the passes turn; inputs of blocks go once and come back
  once, but for the last.
- Activations on the host go once and come back once, but for those of the last block.
- The host waits once, for all ranks' numbers.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from fsdp_qlora.distributed.layout import Layout
from stand_in.environment import run, subtract
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags

OFFLOAD = {"use_cpu_offload": True}


class Step(NamedTuple):
    """A step of rank 0 with these options, and its numbers."""

    ranks: int
    options: Mapping[str, object]
    numbers: Mapping[str, int | tuple[int, int]]
    machines: int = 1
    model: Mapping[str, object] = {}
    program: Sequence[str] = ("train.py",)


ROUTED = ("stand_in/programs/with_routes.py", "train")  # in which tokens reach experts
MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
EXPERTS = {"lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj"}
# Gates and queries of which go to host memory, and nothing else.
WIDE = {"intermediate_size": 2048, "hidden_size": 512}
STEPS = {
    "1 rank, both offloads": Step(
        1,
        {**OFFLOAD, "recompute": "offload"},
        {
            "syncs": 1,
            "all_gather": (1, 64),
            "host_to_device beside": 308_608,
            "host_to_device at work": 18_432,
            "device_to_host beside": 198_656,
            "device_to_host at work": 64,
        },
    ),
    "full_shard, host activations": Step(
        2,
        {"recompute": "host", "gradient_accumulation_steps": 2},
        {
            "syncs": 1,
            "all_gather": (27, 28_163_328),
            "send": (4, 131_072),
            "recv": (4, 126_976),
            "all_reduce": (4, 960),
            "reduce_scatter": (6, 2_621_440),
            "host_to_device beside": 23_838_720,
            "host_to_device at work": 98_944,
            "device_to_host beside": 23_838_720,
            "device_to_host at work": 128,
        },
        model=WIDE,
    ),
    "full_shard, 2 micro-batches": Step(
        2,
        {"gradient_accumulation_steps": 2},
        {
            "syncs": 1,
            "all_gather": (27, 451_584),
            "send": (4, 16_384),
            "recv": (4, 15_872),
            "all_reduce": (4, 960),
            "reduce_scatter": (6, 272_384),
            "host_to_device at work": 42_080,
            "device_to_host at work": 128,
        },
    ),
    "full_shard, offload": Step(
        2,
        OFFLOAD,
        {
            "syncs": 1,
            "all_gather": (16, 291_392),
            "send": (2, 8_192),
            "recv": (2, 7_936),
            "all_reduce": (2, 480),
            "reduce_scatter": (5, 267_264),
            "host_to_device beside": 97_856,
            "host_to_device at work": 32_048,
            "device_to_host at work": 128,
        },
    ),
    "ddp": Step(
        2,
        {"sharding_strategy": "ddp"},
        {
            "syncs": 1,
            "all_reduce": (4, 262_144),
            "all_gather": (1, 128),
            "host_to_device at work": 10_624,
            "device_to_host at work": 128,
        },
    ),
    "hybrid": Step(
        4,
        {"sharding_strategy": "hybrid_full_shard"},
        {
            "syncs": 1,
            "all_gather": (16, 291_520),
            "send": (2, 8_192),
            "recv": (2, 7_936),
            "all_reduce": (6, 131_552),
            "reduce_scatter": (5, 267_264),
            "host_to_device at work": 23_856,
            "device_to_host at work": 256,
        },
        machines=2,
    ),
    # Queries, keys, values and outputs of four blocks, forward, recomputed and backward.
    "context parallelism": Step(
        2,
        {"context_parallel_size": 2},
        {
            "syncs": 1,
            "all_gather": (16, 288_672),
            "send": (2, 8_192),
            "recv": (2, 7_936),
            "all_reduce": (2, 240),
            "all_to_all": (48, 893_952),
            "reduce_scatter": (5, 264_704),
            "host_to_device at work": 19_120,
            "device_to_host at work": 128,
        },
    ),
    # The host also waits for each of four layers' counts, forward and recomputed.
    "experts": Step(
        2,
        EXPERTS,
        {
            "syncs": 9,
            "all_gather": (16, 858_176),
            "send": (2, 8_192),
            "recv": (2, 7_936),
            "all_reduce": (2, 480),
            "reduce_scatter": (5, 775_168),
            "host_to_device at work": 25_296,
            "device_to_host at work": 384,
        },
        model=MIXTURE,
        program=ROUTED,
    ),
    "experts, offload": Step(
        2,
        {**EXPERTS, **OFFLOAD},
        {
            "syncs": 9,
            "all_gather": (16, 858_176),
            "send": (2, 8_192),
            "recv": (2, 7_936),
            "all_reduce": (2, 480),
            "reduce_scatter": (5, 775_168),
            "host_to_device beside": 254_272,
            "host_to_device at work": 33_488,
            "device_to_host at work": 384,
        },
        model=MIXTURE,
        program=ROUTED,
    ),
}
NIGHTLY = ("full_shard, offload", "hybrid", "experts, offload")


@pytest.fixture(scope="module")
def step(models, tmp_path_factory):
    """step(row of STEPS) -> summary of one optimizer step on rank 0."""
    # All rows are equal, so that each micro-batch has as many tokens and targets.
    dataset = write_rows(tmp_path_factory.mktemp("steps") / "rows.jsonl", make_rows(1) * 64)

    def summary(row, max_steps):
        folder = tmp_path_factory.mktemp("run")
        options = {
            "train_type": "qlora",
            "batch_size": 2,
            "context_length": 256,
            "lr_scheduler": "constant",
        }
        options |= {
            "quant_cache": "off",
            "log_to": "jsonl",
            "precision": "bf16",
            "save_every": "none",
            "warmup": 0,
        }
        # A trial of graphs gives memory back, and waits for each stream that its threads have left.
        options |= {"kernels": "plain"}
        options |= {"sharding_strategy": "full_shard", "recompute": "all", "dataset": dataset}
        options |= {"model_name": models(num_hidden_layers=4, **row.model), **row.options}
        words = flags(output_dir=folder / "out", max_steps=max_steps, **options)
        machine = {
            rank: {"GROUP_RANK": rank * row.machines // row.ranks} for rank in range(row.ranks)
        }
        settings = {"LOCAL_WORLD_SIZE": row.ranks // row.machines}
        ended = run(
            [*row.program, *words],
            folder,
            ranks=row.ranks,
            settings=settings,
            settings_of_rank=machine,
            summary=True,
        )
        assert [rank.status for rank in ended] == [0] * row.ranks, ended[0].output[-4000:]
        assert (folder / "out/adapter_model.safetensors").exists()
        return ended[0].summary

    def start(row):
        with ThreadPoolExecutor() as both:
            more, less = both.map(lambda steps: summary(row, steps), (3, 2))
        return subtract(more, less)

    return start


def numbers(step):
    found = {"syncs": sum(each["count"] for each in step["syncs"])}
    for each in step["collectives"]:
        count, size = found.get(each["kind"], (0, 0))
        found[each["kind"]] = count + each["count"], size + each["count"] * each["bytes"]
    for each in step["copies"]:
        if each["kind"] in ("host_to_device", "device_to_host"):
            name = f"{each['kind']} {'beside' if each['stream'] else 'at work'}"
            found[name] = found.get(name, 0) + each["count"] * each["bytes"]
    return {name: number for name, number in found.items() if number not in (0, (0, 0))}


@pytest.mark.parametrize(
    "name", all_slow_but("full_shard, 2 micro-batches", STEPS, nightly=NIGHTLY)
)
def test_cuda_calls_of_a_step_match_the_table(name, step):
    counts = step(STEPS[name])
    assert numbers(counts) == STEPS[name].numbers
    ranks = STEPS[name].ranks
    machines = STEPS[name].machines
    options = STEPS[name].options
    strategy = options.get("sharding_strategy", "full_shard")
    size = options.get("context_parallel_size", 1)
    used = {each["group"] for each in counts["collectives"]}
    # On one rank torch makes one, too, which needs no buffers.
    assert len(used) == max(1, len(Layout(ranks, ranks // machines, strategy, size).communicators))
    assert counts["mallocs"] == counts["pinned_allocations"] == 0
    assert all(sync["line"].startswith("fsdp_qlora/") for sync in counts["syncs"])
    assert all(copied["pinned"] for copied in counts["copies"] if copied["stream"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"), [(1, {"use_cpu_offload": True}), (2, {"batching": "padded"})]
)
def test_long_rows_are_copied_from_pinned_memory_alone(step, models, tmp_path, ranks, options):
    row = {"instruction": "write", "input": "", "output": "water river " * 6000}
    inputs = {
        "dataset": write_rows(tmp_path / "rows.jsonl", [row] * 8),
        "batch_size": 1,
        "context_length": 16384,
    }
    counts = step(
        Step(ranks, {**inputs, "model_name": models(max_position_embeddings=16384), **options}, {})
    )
    batch = [
        each
        for each in counts["copies"]
        if each["kind"] == "host_to_device" and each["bytes"] > 65536
    ]
    assert batch and all(each["pinned"] for each in batch), counts["copies"]
