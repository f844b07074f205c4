"""The plan's judge: reserved GPU memory of large models' steps, without a GPU, beside what the plan
says.

    python benchmarks/standin_memory.py [--cases 8b_ddp ...]     # measures, and adds rows to the
    file of results python benchmarks/standin_memory.py --plan                   # plans all rows of
    the file again, in a minute

Runs on the stand-in for CUDA (stand_in/README.md), where memory that no one touches costs nothing
and the caching allocator is torch's own, with expandable segments, as in a run. A case builds a
model from its config, shards it as train.py does, reads no weights, tries its longest rows and does
three steps of AdamW in bf16 on rows of 2,048 tokens, if it does not say otherwise. This process is
rank 0; the others are torch's fake process group.

`planned` are bytes by the plan (fsdp_qlora/planning), at its peak by what they are. `resident` is
what is allocated between two steps.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "standin_memory.json"
GIB = 2**30
CARD_GIB = 24
# So that a case that does not fit a card is measured as well.
SETTINGS: dict[str, object] = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "PHANTOM_GIB": 400,
    "OMP_NUM_THREADS": 1,
}


def _shape(
    kind: str,
    vocabulary: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    groups: int,
    **more: Any,
) -> Any:
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 128,
        "tie_word_embeddings": False,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "7b": _shape("llama", 32000, 4096, 11008, 32, 32, 32),  # Llama-2-7B
    "8b": _shape("llama", 151936, 4096, 12288, 36, 32, 8),  # Qwen3-8B's sizes
    "14b": _shape("qwen3", 151936, 5120, 17408, 40, 40, 8),
    "32b": _shape("qwen3", 151936, 5120, 25600, 64, 64, 8),
    "70b": _shape("llama", 32000, 8192, 28672, 80, 64, 8),  # Llama-2-70B
    # Qwen3-30B-A3B
    "moe": _shape(
        "qwen3_moe",
        151936,
        2048,
        6144,
        48,
        32,
        4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
}
SHARD: dict[str, Any] = {"sharding_strategy": "full_shard"}
OFFLOAD: dict[str, Any] = {**SHARD, "use_cpu_offload": True}
MIXED: dict[str, Any] = {"batch_size": 8, "is_mixed": True}
LONG: dict[str, Any] = {"batch_size": 1, "recompute": "offload", **SHARD}
# two answers that fill the context, half of it shared
PAIR: dict[str, Any] = {"batch_size": 1, "objective": "dpo"}
# Answers of 512 tokens to prompts of 1,536.
ANSWERS: dict[str, Any] = {
    "objective": "grpo",
    "rewards": "length",
    "batch_size": 8,
    "num_generations": 8,
    "context_length": 2048,
    "max_completion_length": 512,
}
MERGE_AWARE: dict[str, Any] = {"merge_aware": True}
CASES: dict[str, dict[str, Any]] = {
    "8b": {"shape": "8b", "ranks": 2, **SHARD},
    "8b_ddp": {"shape": "8b", "ranks": 2, "sharding_strategy": "ddp"},
    "8b_1_card": {"shape": "8b"},
    "70b_offload": {"shape": "70b", "ranks": 2, **OFFLOAD},
    "8b_1x32768": {"shape": "8b", "ranks": 2, "batch_size": 1, "context_length": 32768, **SHARD},
    "70b_activations": {
        "shape": "70b",
        "ranks": 2,
        "batch_size": 1,
        "recompute": "offload",
        **SHARD,
    },
    "70b_both": {"shape": "70b", "ranks": 2, "recompute": "offload", **OFFLOAD},
    "70b_1x2048": {"shape": "70b", "ranks": 2, "batch_size": 1, **SHARD},
    "70b_4_ranks": {"shape": "70b", "ranks": 4, **SHARD},
    "70b_8_ranks": {"shape": "70b", "ranks": 8, "batch_size": 4, **SHARD},
    "70b_1_card_offload": {"shape": "70b", "batch_size": 1, **OFFLOAD},
    "70b_40_blocks": {"shape": "70b", "ranks": 2, "batch_size": 1, **SHARD, "use_cpu_offload": 40},
    "70b_offload_4x512": {
        "shape": "70b",
        "ranks": 2,
        "batch_size": 4,
        "context_length": 512,
        **OFFLOAD,
    },
    "70b_offload_accumulates": {
        "shape": "70b",
        "ranks": 2,
        "gradient_accumulation_steps": 2,
        **OFFLOAD,
    },
    "70b_rank_64": {"shape": "70b", "ranks": 4, "lora_rank": 64, **SHARD},
    "8b_none": {"shape": "8b", "ranks": 2, "recompute": "none", **SHARD},
    "8b_12": {"shape": "8b", "ranks": 2, "recompute": 12, **SHARD},
    "8b_host": {"shape": "8b", "ranks": 2, "recompute": "host", **SHARD},
    "8b_host_accumulates": {
        "shape": "8b",
        "ranks": 2,
        "recompute": "host",
        "gradient_accumulation_steps": 2,
        **SHARD,
    },
    "8b_1_card_host": {"shape": "8b", "recompute": "host"},
    "8b_host_1x16384": {
        "shape": "8b",
        "ranks": 2,
        "batch_size": 1,
        "context_length": 16384,
        "recompute": "host",
        **SHARD,
    },
    "70b_host_4_ranks": {"shape": "70b", "ranks": 4, "recompute": "host", **SHARD},
    "8b_1_card_host_offload": {"shape": "8b", "recompute": "host", **OFFLOAD},
    "70b_host_offload": {"shape": "70b", "ranks": 2, "recompute": "host", **OFFLOAD},
    "8b_ddp_none": {"shape": "8b", "ranks": 4, "recompute": "none", "sharding_strategy": "ddp"},
    "8b_grad_op": {"shape": "8b", "ranks": 4, "sharding_strategy": "shard_grad_op"},
    "8b_hybrid": {"shape": "8b", "ranks": 8, "nodes": 2, "sharding_strategy": "hybrid_full_shard"},
    "8b_1_card_offload": {"shape": "8b", **OFFLOAD},
    "8b_1_card_12_blocks": {"shape": "8b", **SHARD, "use_cpu_offload": 12},
    "8b_8x512": {"shape": "8b", "ranks": 2, "batch_size": 8, "context_length": 512, **SHARD},
    "8b_1x512": {"shape": "8b", "ranks": 2, "batch_size": 1, "context_length": 512, **SHARD},
    "8b_padding": {"shape": "8b", "ranks": 2, "batching": "padded", **MIXED, **SHARD},
    "8b_padding_free": {"shape": "8b", "ranks": 2, **MIXED, **SHARD},
    "8b_packed": {
        "shape": "8b",
        "ranks": 2,
        "batching": "packed",
        **MIXED,
        "batch_size": 2,
        **SHARD,
    },
    "8b_8192": {"shape": "8b", "batch_size": 1, "context_length": 8192},
    "8b_1x20480": {"shape": "8b", "ranks": 2, "batch_size": 1, "context_length": 20480, **SHARD},
    "8b_activations_16384": {
        "shape": "8b",
        "ranks": 2,
        "batch_size": 1,
        "context_length": 16384,
        "recompute": "offload",
        **SHARD,
    },
    "8b_lora": {"shape": "8b", "ranks": 2, "train_type": "lora", **SHARD},
    "8b_dora": {"shape": "8b", "ranks": 2, "train_type": "bnb_dora", **SHARD},
    "8b_hqq": {"shape": "8b", "ranks": 2, "train_type": "hqq_lora", **SHARD},
    "8b_hqq_dora": {"shape": "8b", "ranks": 2, "train_type": "hqq_dora", "batch_size": 1, **SHARD},
    "8b_int8": {"shape": "8b", "ranks": 2, "train_type": "int8_lora", **SHARD},
    "8b_mxfp4": {"shape": "8b", "ranks": 2, "quant_type": "mxfp4", **SHARD},
    "8b_nvfp4": {"shape": "8b", "ranks": 2, "quant_type": "nvfp4", **SHARD},
    "8b_fp8": {"shape": "8b", "ranks": 2, "quant_type": "fp8", **SHARD},
    "moe_mxfp4": {"shape": "moe", "ranks": 2, "quant_type": "mxfp4", **SHARD},
    "8b_pro": {
        "shape": "8b",
        "ranks": 2,
        "train_type": "bnb_llama_pro",
        "new_blocks": [17, 35],
        **SHARD,
    },
    "8b_head": {"shape": "8b", "ranks": 2, "modules_to_save": ("lm_head",), **SHARD},
    "8b_accumulates": {
        "shape": "8b",
        "ranks": 2,
        "gradient_accumulation_steps": 4,
        "lora_rank": 64,
        **SHARD,
    },
    "7b": {"shape": "7b", "ranks": 2, "batch_size": 4, **SHARD},
    "7b_ddp": {"shape": "7b", "ranks": 2, "batch_size": 8, "sharding_strategy": "ddp"},
    "7b_full": {"shape": "7b", "ranks": 8, "train_type": "full", **SHARD},
    "7b_full_offload": {"shape": "7b", "ranks": 8, "train_type": "full", **OFFLOAD},
    "14b": {"shape": "14b", "ranks": 2, **SHARD},
    "14b_1_card": {"shape": "14b", "batch_size": 1},
    "32b": {"shape": "32b", "ranks": 2, **SHARD},
    "32b_4x4096": {
        "shape": "32b",
        "ranks": 4,
        "batch_size": 1,
        "context_length": 4096,
        "recompute": 48,
        **SHARD,
    },
    "8b_dpo": {"shape": "8b", "ranks": 2, **PAIR, **SHARD},
    "70b_dpo_offload": {"shape": "70b", "ranks": 2, **PAIR, **OFFLOAD},
    "8b_grpo": {"shape": "8b", "ranks": 2, **ANSWERS, **SHARD},
    "8b_grpo_parts_of_groups": {"shape": "8b", "ranks": 2, **ANSWERS, "batch_size": 4, **SHARD},
    "8b_1_card_78475": {
        "shape": "8b",
        "batch_size": 1,
        "context_length": 78475,
        "lora_rank": 32,
        "recompute": "offload",
    },
    "14b_1_card_49152": {
        "shape": "14b",
        "batch_size": 1,
        "context_length": 49152,
        "recompute": "offload",
    },
    "8b_2_share_131072": {
        "shape": "8b",
        "ranks": 2,
        "context_length": 131072,
        "context_parallel_size": 2,
        **LONG,
    },
    "8b_4_share_262144": {
        "shape": "8b",
        "ranks": 4,
        "context_length": 262144,
        "context_parallel_size": 4,
        **LONG,
    },
    "8b_2_of_4_share": {
        "shape": "8b",
        "ranks": 4,
        "context_length": 65536,
        "context_parallel_size": 2,
        **LONG,
    },
    "32b_2_share_32768": {
        "shape": "32b",
        "ranks": 2,
        "context_length": 32768,
        "context_parallel_size": 2,
        **LONG,
    },
    "8b_merge_aware_nf4": {"shape": "8b", "ranks": 2, **MERGE_AWARE, "base": "nf4", **SHARD},
    "8b_merge_aware_nvfp4": {"shape": "8b", "ranks": 2, **MERGE_AWARE, "base": "nvfp4", **SHARD},
    "8b_merge_aware_fp8": {"shape": "8b", "ranks": 2, **MERGE_AWARE, "base": "fp8", **SHARD},
    "moe": {"shape": "moe", "ranks": 2, **SHARD},
    "moe_1_card": {"shape": "moe", "batch_size": 1},
}
# How a base's files say that they are quantized.
FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    },
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
COMMON: dict[str, Any] = {
    "precision": "bf16",
    "batch_size": 2,
    "quant_cache": "off",
    "recompute": "all",
    "use_cpu_offload": False,
    "context_length": 2048,
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="JSON file to update; results of other cases stay",
    )
    parser.add_argument(
        "--plan", action="store_true", help="plan the cases of the output again, without measuring"
    )
    # by which the command calls itself
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        for name in args.inside:
            print(
                json.dumps({name: predict(**CASES[name]) if args.plan else measure(**CASES[name])}),
                flush=True,
            )
        return 0
    found = json.loads(args.output.read_text())["cases"] if args.output.exists() else {}
    if args.plan:
        names = [name for name in CASES if name in found]
        for name, planned in on_stand_in("--plan", "--inside", *names).items():
            found[name]["planned"] = planned
    else:
        for name in args.cases:
            found |= on_stand_in("--inside", name)
            write(args.output, found)
    write(args.output, found)
    if all("planned" in row for row in found.values()):
        print("\n".join(table(found)))
    return 0


def on_stand_in(*argv: str) -> dict[str, Any]:
    """The command's output there, name -> result."""
    from stand_in import environment

    if reason := environment.why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(environment.PYTHON), __file__, *argv]
        variables = environment.variables(Path(folder), SETTINGS)
        done = subprocess.run(
            command, env=variables, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: result for line in lines for name, result in line.items()}


def write(path: Path, found: dict[str, Any]) -> None:
    rows = [f'  "{name}": {json.dumps(found[name])}' for name in CASES if name in found]
    head = '{\n "command": "python benchmarks/standin_memory.py",\n "unit": "bytes",\n "cases": {\n'
    path.write_text(head + ",\n".join(rows) + "\n }\n}\n")


def measure(**case: Any) -> dict[str, Any]:
    """Bytes of one case; runs on the stand-in."""
    import torch

    from fsdp_qlora.data.batches.schedule import StepRows
    from fsdp_qlora.data.longest_rows import longest_of_table
    from stand_in.programs.with_routes import fix_routes

    fix_routes()
    trainer, _, rows = build(**case)
    loaded = torch.cuda.memory_allocated()
    trainer.try_longest(longest_of_table(rows, trainer.collator))
    for step in range(3):
        trainer.train_step(StepRows(step, *rows))
    return {
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
        "loaded": loaded,
        "resident": torch.cuda.memory_allocated(),
        "torch": torch.__version__,
    }


def predict(**case: Any) -> dict[str, Any]:
    """The plan of one case; runs on the stand-in, whose torch is another."""
    memory = plan_of(**case)[1].memory
    at_peak = {**memory.resident, **memory.phases[memory.peak], "allocator": memory.overhead}
    return {"reserved": memory.reserved, "peak": memory.peak, "at_peak": at_peak}


def plan_of(
    *,
    shape: str,
    ranks: int = 1,
    nodes: int = 1,
    is_mixed: bool = False,
    layers: int = 0,
    new_blocks: Any = None,
    base: str = "",
    **options: Any,
) -> tuple[Any, Any, Any]:
    """A case's options, plan and rows. base: the format of the base's files, one of FORMATS."""
    import numpy as np
    from transformers import AutoConfig

    from benchmarks.common import random_rows_of
    from fsdp_qlora.config.options import TrainConfig
    from fsdp_qlora.data.run_data import RunData
    from fsdp_qlora.distributed.ranks import read_ranks
    from fsdp_qlora.planning.long_attention import keeping_attention
    from fsdp_qlora.planning.machine import Machine
    from fsdp_qlora.planning.placement import place
    from fsdp_qlora.planning.plan import build_plan
    from fsdp_qlora.planning.run_rows import RunRows, make_schedule

    local = str(ranks // nodes)
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": local,
    }
    config = TrainConfig(**(COMMON | options))
    sizes = (
        SHAPES[shape]
        | ({"num_hidden_layers": layers} if layers else {})
        | ({"new_blocks": new_blocks} if new_blocks else {})
    )
    if base:
        sizes |= {"quantization_config": FORMATS[base]}
    sizes |= {"max_position_embeddings": config.longest_row}
    model_config = AutoConfig.for_model(**sizes)
    tokenizer: Any = SimpleNamespace(eos_token_id=0)
    machine = Machine.of(config, read_ranks(config.device))
    plan = build_plan(config, machine, Path("no weights"), model_config, tokenizer)
    number = config.batch_size * config.gradient_accumulation_steps * ranks
    # As of a dataset: the shortest rows have a sixteenth of the longest's tokens, most of them few.
    lengths = [
        config.longest_row // (1 + i % 16) if is_mixed else config.longest_row
        for i in range(number)
    ]
    if config.objective == "grpo":
        rows = prompts_of(config, number)
    else:
        is_pairs = config.objective != "sft"
        data = random_rows_of(lengths * (1 + is_pairs), model_config.vocab_size, masked=0, seed=0)
        rows = RunData(make_pairs(data) if is_pairs else data, np.arange(number))
    schedule = make_schedule(config, rows, machine.data_size(config.context_size))
    shares_tokens = plan.shares_tokens(config.context_size)
    longest = RunRows(config, rows, schedule, shares_tokens=shares_tokens).longest()
    placed = place(config, plan, longest)
    return config, keeping_attention(placed, CARD_GIB * GIB, math.inf), rows


def make_pairs(rows: Any) -> Any:
    """Make each two rows of equal lengths a pair of answers, whose first half is the prompt."""
    import numpy as np

    from fsdp_qlora.data.batches.rows import TokenizedRows

    length = int(rows.lengths[0])
    ids = rows.input_ids.reshape(-1, 2, length)
    learned = rows.learned.reshape(-1, 2, length)
    ids[:, 1, : length // 2] = ids[:, 0, : length // 2]
    learned[:, :, : length // 2] = False
    splits = np.full(len(ids), length)
    return TokenizedRows(
        ids.ravel(), learned.ravel(), rows.offsets[::2], rows.row_numbers[: len(ids)], splits
    )


def prompts_of(config: Any, num_answers: int) -> Any:
    """Prompts as long as leaves room for the longest answers of one step."""
    import numpy as np

    from fsdp_qlora.data.batches.rows import NO_ROWS
    from fsdp_qlora.data.prompts import Prompt, Prompts
    from fsdp_qlora.data.run_data import RunData

    length = config.longest_row - config.max_completion_length
    number = num_answers // config.num_generations
    prompts = Prompts.of([Prompt(row, [1] * length, "", {}) for row in range(number)])
    longest = config.max_completion_length
    return RunData(NO_ROWS, np.arange(number), prompts=prompts, completion_length=longest)


def rows_of(data: Any, num_generations: int) -> Any:
    """All rows of a step: those of the data, or its prompts with the longest answers."""
    import numpy as np

    from fsdp_qlora.data.batches.schedule import RowsInMemory
    from fsdp_qlora.data.prompts import rows_of_answers

    if not data.prompts:
        return RowsInMemory(data.train, data.train_rows)
    prompts = [prompt for prompt in data.prompts for _ in range(num_generations)]
    table = rows_of_answers(prompts, data.completion_length, has_teacher=False)
    return RowsInMemory(table, np.arange(len(table)))


def build(**case: Any) -> tuple[Any, Any, Any]:
    """The trainer of rank 0 of a model whose weights are whatever lies in memory, the plan, and all
    rows.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fsdp_qlora.distributed.shards import build_mesh
    from fsdp_qlora.planning.run_plan import Plan
    from fsdp_qlora.planning.run_rows import make_schedule
    from fsdp_qlora.run.build_trainer import build_trainer
    from fsdp_qlora.sharding.parallelize import materialize, shard_model
    from fsdp_qlora.sharding.recompute import set_keeps_attention, set_recompute, wrap_blocks

    config, placed, data = plan_of(**case)
    plan = placed.model
    ranks = placed.model.machine.ranks
    dist.init_process_group("fake", rank=0, world_size=ranks.world_size, store=FakeStore())
    step = placed.step
    wrap_blocks(plan.meta.model, num_blocks=step.recomputing, offload=step.on_host.inputs)
    set_recompute(plan.meta.model, step.recomputing, on_host=step.on_host.blocks)
    set_keeps_attention(plan.meta.model, step.on_host.attention)
    parts = plan.meta.parts
    strategy = placed.placement.sharding_strategy
    on_host = parts.on_host(placed.placement.offload)
    mesh = build_mesh(ranks, sharding_strategy=strategy)
    shard_model(parts, mesh, sharding_strategy=strategy, precision=plan.precision, on_host=on_host)
    materialize(parts, ranks.device, on_host=on_host)
    schedule = make_schedule(config, data, placed.layout.data_size)
    return (
        build_trainer(config, Plan(placed, data, schedule, warmup_steps=0), ranks),
        placed,
        rows_of(data, config.num_generations),
    )


def passes(shape: str, num_blocks: int, **options: Any) -> tuple[Any, Any]:
    """A model of `num_blocks` blocks on one rank, and a function that runs a micro-batch whose
    gradients are accumulated: the bytes that it returns were kept for its backward pass.

    options: of the run, and others than a case's.
    """
    import torch

    from fsdp_qlora.data.batches.schedule import StepRows

    sdpa = {"attn_implementation": "sdpa", "recompute": "none"}
    trainer, _, rows = build(shape=shape, layers=num_blocks, **sdpa, **options)
    trainer.train_step(StepRows(0, *rows))
    trainer.model.train()
    trainer._set_gradient_sync(False)
    batches = trainer.collator.lay_out_step(rows.table, rows.rows)
    [micro_batch] = batches

    def run() -> int:
        with trainer.forward.attending():
            before = torch.cuda.memory_allocated()
            loss = trainer._loss(micro_batch, trainer.objective.totals(batches))[0]
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
        return kept

    return trainer.model, run


def table(found: dict[str, Any]) -> list[str]:
    """The rows as a Markdown table, and the errors of the plan."""
    lines = ["| case | planned | reserved | error | allocated |", "|---|---|---|---|---|"]
    errors = []
    for name, row in found.items():
        errors.append(row["planned"]["reserved"] / row["reserved"] - 1)
        planned, reserved, allocated = (
            f"{number / GIB:.2f}"
            for number in (row["planned"]["reserved"], row["reserved"], row["allocated"])
        )
        lines.append(f"| {name} | {planned} | {reserved} | {errors[-1]:+.1%} | {allocated} |")
    sizes = [abs(error) for error in errors]
    lines.append(
        f"\n{len(errors)} rows: mean error {statistics.mean(sizes):.2%}, worst {max(sizes):.2%}"
    )
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
