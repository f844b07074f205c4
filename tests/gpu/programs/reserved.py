"""GPU memory of rank 0 of a run of a large model; the last line is {reserved, allocated, loaded,
planned: bytes}.

The model has its full depth, and no values: nothing is read or quantized. The other ranks are
torch's fake process group, which sends nothing; so FSDP2 takes what it would take beside them.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig

from benchmarks.common import random_rows
from benchmarks.gpu_steps import SHAPES
from benchmarks.one_rank import keep_own_part, limit_memory, rank_0_of, start_alone
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import StepRows
from fsdp_qlora.data.batches.target_values import number_targets
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.distributed.shards import build_mesh, local_part
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.placement import place
from fsdp_qlora.planning.plan import build_plan
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.planning.run_rows import make_schedule
from fsdp_qlora.run.build_trainer import build_forward, build_trainer
from fsdp_qlora.sharding.parallelize import materialize, shard_model
from fsdp_qlora.sharding.recompute import wrap_blocks
from fsdp_qlora.training.forward import top_tokens_of_rows
from fsdp_qlora.training.top_tokens import TopTokens


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument(
        "--layers", type=int, default=0, help="decoder blocks, if not the shape's own number"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="full_shard")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--memory_gib", type=float, default=24.0)
    parser.add_argument(
        "--distill",
        choices=["teacher", "student"],
        help="a teacher's pass alone, or a step on one's",
    )
    return parser.parse_args(argv)


def told(table: TokenizedRows, rows: np.ndarray) -> dict[str, torch.Tensor]:
    """What a teacher may say of the tokens of rows."""
    count = len(number_targets(table, rows)["numbers"])
    k = TrainConfig.top_k
    return {
        "teacher_ids": torch.arange(k).repeat(count, 1),
        "teacher_logps": torch.zeros(count, k + 1),
    }


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    ranks = rank_0_of(args.ranks)
    limit_memory(args.memory_gib)
    start_alone(ranks)
    options = TrainConfig(
        precision="bf16",
        attn_implementation="sdpa",
        sharding_strategy=args.strategy,
        use_cpu_offload=args.offload,
        batch_size=args.batch_size,
        context_length=args.length,
        quant_cache="off",
        # as teacher.teacher_config
        **({"lora_rank": 1, "optimizer": ""} if args.distill == "teacher" else {}),
        **({"objective": "distill", "teacher": "another"} if args.distill == "student" else {}),
    )
    shape = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    config = LlamaConfig(**shape, max_position_embeddings=args.length, tie_word_embeddings=False)
    tokenizer: Any = SimpleNamespace(eos_token_id=0)
    machine = Machine.of(options, ranks)
    plan = build_plan(options, machine, Path("no weights"), config, tokenizer)
    placed = place(options, plan)
    model = plan.meta.model
    wrap_blocks(model, offload=False)
    mesh = build_mesh(ranks, sharding_strategy=args.strategy)
    parts = plan.meta.parts
    on_host = plan.meta.parts.on_host(placed.placement.offload)
    shard_model(
        parts, mesh, sharding_strategy=args.strategy, precision=plan.precision, on_host=on_host
    )
    materialize(parts, ranks.device, on_host=on_host)
    keep_own_part(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if (local := local_part(parameter)).is_cuda:
                local.zero_()
    rows = args.batch_size * ranks.world_size
    data = random_rows(rows, args.length, config.vocab_size, masked=0, seed=0)
    run_data = RunData(data, np.arange(rows))
    schedule = make_schedule(options, run_data, ranks.world_size)
    run_plan = Plan(placed, run_data, schedule, warmup_steps=0)
    if args.distill == "teacher":
        forward = build_forward(options, run_plan, ranks, Control())
    else:
        trainer = build_trainer(
            options, run_plan, ranks, target_values=told if args.distill else None
        )
    torch._C._cuda_clearCublasWorkspaces()  # the head's probe needed one: 8 MiB, on Hopper 32
    loaded = torch.cuda.memory_allocated()
    for step in range(3):
        if args.distill == "teacher":
            top_tokens_of_rows(
                forward, data, np.arange(rows), TopTokens(options.top_k, config.vocab_size)
            )
        else:
            trainer.train_step(StepRows(step, data, np.arange(rows)))
    found = {
        "planned": placed.memory.reserved,
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
        "loaded": loaded,
    }
    dist.destroy_process_group()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
