"""Blocks that run as graphs train to the same bits as without. On a CPU captured functions are
called again, on the same static memory.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.graphs import graphed_rank, plain_rank
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks
from tests.preferences.pairs import make_pairs
from tests.rollouts.runs import inputs

COMMON: dict[str, Any] = {
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "recompute": "all",
    "context_length": 512,
    "lr": 1e-2,
    "quant_cache": "off",
    "log_to": "stdout",
}
BASES: dict[str, dict[str, Any]] = {
    "nf4": {"train_type": "qlora"},
    "mxfp4": {"train_type": "qlora", "quant_type": "mxfp4"},
    "hqq": {"train_type": "hqq_lora"},
    "int8": {"train_type": "int8_lora", "int8_threshold": 0},
    "not quantized": {"train_type": "lora"},
}


def results_of(out: Path) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    records = [read_metrics(out), read_metrics(out, "grad_norm")]
    return records, load_file(out / "adapter_model.safetensors")


def assert_trains_to_the_same_bits(
    folder: Path, world_size: int, *, is_graphed: bool = True, **options: Any
) -> str:
    """Compare losses, gradient norms and adapters of a run without graphs and of one with them.

    Returns the latter's output.
    """
    argv = flags(**{**COMMON, "dataset": folder / "rows.jsonl", **options})
    runs: dict[str, tuple[Callable[..., int], list[Any]]] = {
        "plain": (plain_rank, []),
        "graphs": (graphed_rank, [folder / "notes"]),
    }
    for name, (target, args) in runs.items():
        out = flags(output_dir=folder / name)
        statuses, output = on_ranks(
            world_size, target, ([*argv, *out], *args), folder / f"{name}_logs"
        )
        assert statuses == [0] * world_size, output
    plain_records, plain = results_of(folder / "plain")
    records, adapter = results_of(folder / "graphs")
    assert records == plain_records and len(records[0]) == COMMON["max_steps"]
    assert all(torch.equal(values, adapter[name]) for name, values in plain.items())
    for rank in range(world_size):
        staged = json.loads((folder / f"notes.{rank}").read_text())
        # for each block and micro-batch, forward and backward
        assert sum(staged) > 2 * 2 * 2 * COMMON["max_steps"] if is_graphed else not staged
    assert ("Graphs: not for" in output) != is_graphed
    return output


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("base", BASES)
def test_graphed_blocks_train_to_the_same_bits(base, precision, models, tmp_path):
    write_rows(tmp_path / "rows.jsonl", make_rows(32))
    assert_trains_to_the_same_bits(
        tmp_path, 1, model_name=models(), precision=precision, **BASES[base]
    )


@pytest.mark.parametrize(
    "options",
    [
        {"sharding_strategy": "full_shard"},
        {"sharding_strategy": "ddp"},
        {"use_cpu_offload": True},
        {"recompute": "offload", "precision": "fp32"},
        {"precision": "bf16_autocast"},
        # adds up three micro-batches in a step
        pytest.param(
            {"precision": "fp16", "gradient_accumulation_steps": 3}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_graphed_blocks_of_two_ranks_train_to_the_same_bits(options, models, tmp_path):
    write_rows(tmp_path / "rows.jsonl", make_rows(48))
    options = {"model_name": models("qwen2"), "precision": "bf16", "train_type": "qlora"} | options
    assert_trains_to_the_same_bits(tmp_path, 2, **options)


@pytest.mark.parametrize("world_size", [1, 2])
def test_graphs_leave_a_reference_beside_the_policy_alone(world_size, models, tmp_path):
    write_rows(tmp_path / "rows.jsonl", make_pairs(16 * world_size))
    options = {"objective": "dpo", "train_type": "qlora", "precision": "fp32"}
    assert_trains_to_the_same_bits(tmp_path, world_size, model_name=models(), **options)


@pytest.mark.parametrize("world_size", [1, 2])
def test_graphs_train_on_own_answers_to_the_same_bits(world_size, models, tmp_path):
    options = inputs(models, tmp_path, prompts=8 * world_size, beta=0.1, batch_size=4)
    del options["save_every"]
    assert_trains_to_the_same_bits(tmp_path, world_size, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora_dropout": 0.1}, "dropout"),
        ({"train_type": "bnb_dora"}, "DoRA"),
        ({"train_type": "int8_lora"}, "outliers of LLM.int8, which the host counts"),
        ({"use_cpu_offload": True}, "weights that are copied from the host"),
        ({"context_parallel_size": 2}, "an argument of type ContextGroup"),
        ({"family": "qwen3_moe"}, "experts, whose tokens the host counts"),
    ],
    ids=lambda each: "" if isinstance(each, dict) else each,
)
def test_blocks_without_graphs_are_named_and_train_as_before(options, reason, models, tmp_path):
    write_rows(tmp_path / "rows.jsonl", make_rows(32))
    options = {"precision": "fp32", "train_type": "qlora"} | options
    family = options.pop("family", "llama")
    output = assert_trains_to_the_same_bits(
        tmp_path,
        options.get("context_parallel_size", 1),
        is_graphed=False,
        model_name=models(family),
        **options,
    )
    block = {"llama": "LlamaDecoderLayer", "qwen3_moe": "Qwen3MoeDecoderLayer"}[family]
    said = re.findall(r"Graphs: not for .*", output)
    assert said == [f"Graphs: not for blocks {block}: {reason}"]
