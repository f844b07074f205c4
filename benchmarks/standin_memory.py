"""GPU memory of large models' steps, without a GPU: `python benchmarks/standin_memory.py [--cases 8b_2_ranks ...]`.

Runs on the stand-in for CUDA (tests/phantom/README.md), where memory that no one touches costs nothing and the caching
allocator is torch's own. A case builds a model from its config, shards it as train.py does, reads no weights, and does
three steps of QLoRA (rank 16 on all linear layers, bf16, AdamW, checkpointing). Where there are more ranks, this
is rank 0 and the others are torch's fake process group.

Each case is printed and written beside the byte account. `resident` is what lies there between two steps: the shards
and the optimizer's state. `at_peak` is what the third step had on top of it when it had most, by the Python line that
asked for it; the expected bytes of both come from the shapes. What is reserved and not allocated is the allocator's.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
SHAPES = {
    # Qwen3-8B's sizes; Llama-2-70B's
    "8b": dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
               num_attention_heads=32, num_key_value_heads=8),
    "70b": dict(vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                num_attention_heads=64, num_key_value_heads=8),
    "tiny": dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                 num_attention_heads=4, num_key_value_heads=2),
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "8b_2_ranks": {"shape": "8b", "ranks": 2, "sharding_strategy": "full_shard"},
    "8b_2_ranks_ddp": {"shape": "8b", "ranks": 2, "sharding_strategy": "ddp"},
    "8b_1_card": {"shape": "8b", "ranks": 1},
    "70b_2_ranks_offloaded": {"shape": "70b", "ranks": 2, "sharding_strategy": "full_shard", "use_cpu_offload": True},
    "8b_2_ranks_1x32768": {
        "shape": "8b", "ranks": 2, "batch_size": 1, "length": 32768, "sharding_strategy": "full_shard",
    },
    "70b_2_ranks_activations_offloaded": {
        "shape": "70b", "ranks": 2, "batch_size": 1, "sharding_strategy": "full_shard",
        "use_activation_cpu_offload": True,
    },
}  # fmt: skip
HIDDEN = "hidden states: block inputs, and of the block at work"
COMMON: dict[str, Any] = {
    "precision": "bf16", "attn_implementation": "sdpa", "batch_size": 2, "quant_cache": "off", "recompute": "all",
    "use_cpu_offload": False,
}  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--segments", nargs="+", choices=("expandable", "fixed"), default=["expandable"])
    parser.add_argument("--layers", type=int, default=0, help="decoder blocks, if not the shape's own number")
    parser.add_argument("--output", default="", help="JSON file to write; what it has of other cases stays")
    parser.add_argument("--table", action="store_true", help="print what --output has as the table of docs/gpu.md")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)  # by which the command calls itself
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(**CASES[args.one] | {"layers": args.layers})))
        return 0
    if args.table:
        print_table(json.loads(Path(args.output).read_text())["cases"])
        return 0
    found = {}
    for name in args.cases:
        for segments in args.segments:
            found[f"{name}, {segments} segments"] = result = _in_the_environment(name, segments, args.layers)
            print(f"{name}, {segments} segments\n{describe(result)}", flush=True)
            if args.output:
                write(Path(args.output), f"python benchmarks/standin_memory.py {' '.join(argv)}", found)
    return 0


def _in_the_environment(name: str, segments: str, layers: int) -> dict[str, Any]:
    from tests.phantom import environment

    if reason := environment.why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, object] = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{segments == 'expandable'}"}
        settings |= {"PHANTOM_GIB": 24, "OMP_NUM_THREADS": 1}
        command = [str(environment.PYTHON), __file__, "--one", name, "--layers", str(layers)]
        variables = environment.variables(Path(folder), settings)
        done = subprocess.run(command, env=variables, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def write(path: Path, command: str, found: dict[str, Any]) -> None:
    before = json.loads(path.read_text())["cases"] if path.exists() else {}
    path.write_text(json.dumps({"command": command, "unit": "bytes", "cases": {**before, **found}}, indent=2) + "\n")


def measure(*, shape: str, ranks: int, length: int = 2048, layers: int = 0, **options: Any) -> dict[str, Any]:
    """Bytes of one case; runs on the stand-in."""
    import torch

    sizes = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    options = COMMON | options
    trainer, plan, mesh, rows = build(sizes, ranks, length, options)
    loaded = torch.cuda.memory_allocated()
    for step in range(2):
        trainer.train_step(step, rows)
    resident = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=10**7)
    trainer.train_step(2, rows)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    model, tokens = plan.meta.model, options["batch_size"] * length
    return {
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
        "loaded": loaded,
        "resident": resident,
        "at_peak": at_peak(trace, tokens * model.config.hidden_size * 2),
        "expected": expect(model, mesh, options),
        "expected_at_peak": expect_at_peak(model, mesh, tokens, options),
        "torch": torch.__version__,
    }


def build(shape: dict[str, int], num_ranks: int, length: int, options: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """The trainer of rank 0 of a model whose weights are whatever lies in memory."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig

    from benchmarks.common import random_rows
    from fsdp_qlora.config.options import TrainConfig
    from fsdp_qlora.data.prepare import RunData
    from fsdp_qlora.data.schedule import Schedule
    from fsdp_qlora.planning.plan import Plan, build_plan
    from fsdp_qlora.ranks import distributed
    from fsdp_qlora.run.load_model import build_trainer
    from fsdp_qlora.sharding.parallelize import materialize, shard_model
    from fsdp_qlora.sharding.recompute import wrap_blocks

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    ranks = distributed.read_ranks()
    torch.cuda.set_device(ranks.device)
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    config = TrainConfig(**options)
    model_config = LlamaConfig(**shape, head_dim=128, max_position_embeddings=length, tie_word_embeddings=False)
    tokenizer: Any = SimpleNamespace(eos_token_id=0)
    plan = build_plan(config, ranks, Path("no weights"), model_config, tokenizer, world_size=num_ranks)
    wrap_blocks(plan.meta.model, offload=config.use_activation_cpu_offload)
    parts, strategy = plan.meta.parts, plan.placement.sharding_strategy
    on_host = parts.on_host(plan.placement.cpu_offload)
    mesh = distributed.build_mesh(ranks, sharding_strategy=strategy)
    shard_model(parts, mesh, sharding_strategy=strategy, precision=plan.precision, on_host=on_host)
    materialize(parts, ranks.device, on_host=on_host)
    data = random_rows(config.batch_size * num_ranks, length, model_config.vocab_size, masked=0, seed=0)
    rows = np.arange(len(data))
    schedule = config.pick(Schedule, num_rows=len(data), world_size=num_ranks, rows_per_step=None, mixture=None)
    run_data = RunData(data, rows)
    trainer = build_trainer(config, Plan(plan, run_data, schedule, warmup_steps=0), ranks)
    return trainer, plan, mesh, rows


def passes(shape: str, num_blocks: int) -> tuple[Any, Any]:
    """A model of so many blocks on one rank, and what runs a micro-batch whose gradients are accumulated: the bytes
    that it returns were kept for its backward pass."""
    import torch

    sizes, options = SHAPES[shape] | {"num_hidden_layers": num_blocks}, COMMON | {"recompute": "none"}
    trainer, _, _, rows = build(sizes, 1, 2048, options)
    trainer.train_step(0, rows)
    trainer.model.train()
    trainer._set_gradient_sync(False)
    [micro_batch] = trainer._micro_batches([rows])

    def run() -> int:
        with trainer._attention():
            before = torch.cuda.memory_allocated()
            loss = trainer._loss(micro_batch)
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
        return kept

    return trainer.model, run


def expect(model: Any, mesh: Any, options: dict[str, Any]) -> dict[str, int]:
    """Bytes of what lies there between steps, by category, from the shapes alone."""
    from fsdp_qlora.optimizers.sharded import OPTIMIZER_STATES
    from fsdp_qlora.ranks import distributed
    from fsdp_qlora.sharding.model_parts import count_bytes

    account = count_bytes(model, distributed.shard_size(mesh))
    offload = options["use_cpu_offload"]
    here = {name: 0 if offload and name != "trainable" else part.largest_shard for name, part in account.items()}
    states = int(account["trainable"].largest_shard * OPTIMIZER_STATES["adamw"])
    return {**here, "optimizer state": states}


def expect_at_peak(model: Any, mesh: Any, tokens: int, options: dict[str, Any]) -> dict[str, int]:
    """Bytes of what a step of a llama in bf16 adds at its peak, by the categories of `at_peak`, from the shapes alone.

    That is in the backward pass of the last block, where the gradients of its gate are computed: logits and what ranks
    exchange for them come in chunks that are smaller.
    """
    from fsdp_qlora.model.fused import PIECE
    from fsdp_qlora.model.models import find_blocks
    from fsdp_qlora.ranks import distributed
    from fsdp_qlora.sharding.model_parts import count_bytes

    config, blocks = model.config, find_blocks(model)
    hidden, wide = tokens * config.hidden_size * 2, tokens * config.intermediate_size * 2
    keys = tokens * config.num_key_value_heads * config.head_dim * 2
    kept = hidden * (1 if options.get("use_activation_cpu_offload") else len(blocks))
    adapters = count_bytes(model, 1)["trainable"].total // 2  # in bf16, from forward to backward
    of_block = count_bytes(blocks[0], 1)
    block = sum(part.total for name, part in of_block.items() if name != "trainable")
    gathered = adapters + (2 * block if distributed.shard_size(mesh) > 1 else 0)
    decoded = config.hidden_size * config.intermediate_size * 2
    # Of the MLP gate, up, SiLU of gate, the product's gradient, and those of gate and up; with few tokens, before
    # these, gate, up and the product's gradient beside the decoded weight. Norms' inputs, queries, gradients.
    # With many tokens the others come in pieces.
    places = [(6 * hidden, 6 * wide), (7 * hidden, 3 * wide + decoded)]
    if wide > 2 * PIECE:
        places = [(6 * hidden, 3 * wide + 3 * 2 * PIECE), (6 * hidden, 3 * wide + decoded)]
    more, work = max(places, key=sum)
    return {
        "gathered by FSDP2": gathered,
        HIDDEN: kept + more,
        "block at work": 2 * keys + work,
    }


def at_peak(trace: list[dict[str, Any]], hidden_bytes: int) -> dict[str, int]:
    """What a step had allocated, and not freed, when that was most: bytes by category."""
    live: dict[int, tuple[int, str]] = {}
    now = most = 0
    largest: dict[int, tuple[int, str]] = {}
    is_growing = False
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = (event["size"], category(event, hidden_bytes))
            now += event["size"]
            is_growing = now > most
            most = max(now, most)
        elif event["action"] == "free_completed" and event["addr"] in live:
            if is_growing:
                largest, is_growing = dict(live), False
            now -= live.pop(event["addr"])[0]
    found: collections.Counter[str] = collections.Counter()
    for size, name in (largest or live).values():
        found[name] += size
    return {"in all": most, **dict(found.most_common())}


def category(event: dict[str, Any], hidden_bytes: int) -> str:
    """Of an allocation: by the Python that asked for it, or by its size where autograd asked."""
    frames, size = event["frames"], event["size"]
    # `wrapped_method` is around the whole forward pass.
    if any("_fully_shard/" in frame["filename"] and frame["name"] != "wrapped_method" for frame in frames):
        reduces = any(frame["name"] in ("foreach_reduce", "post_backward") for frame in frames)
        return "gradients" if reduces else "gathered by FSDP2"
    if any(frame["name"] in ("_sum_over_chunks", "_loss_of_chunk", "logits") for frame in frames):
        return "a chunk of logits"
    if size == hidden_bytes:
        return HIDDEN
    return "block at work"


def describe(result: dict[str, Any]) -> str:
    """For the screen, in GiB."""
    lines = [f"  {key}: {result[key] / GIB:.3f} GiB" for key in ("reserved", "allocated", "loaded", "resident")]
    for part in ("expected", "at_peak", "expected_at_peak"):
        lines.append(f"  {part}: " + ", ".join(f"{name} {value / GIB:.3f}" for name, value in result[part].items()))
    return "\n".join(lines)


def print_table(cases: dict[str, dict[str, Any]]) -> None:
    """The table of docs/gpu.md: GiB measured, and in brackets what the shapes say."""
    names = [name for name in CASES if f"{name}, expandable segments" in cases]
    results = [cases[f"{name}, expandable segments"] for name in names]
    print("| | " + " | ".join(name.replace("_", " ") for name in names) + " |\n|---|" + "---|" * len(names))
    for title, measured, expected in [
        ("reserved, the peak of three steps", [found["reserved"] for found in results], None),
        ("allocated, its peak", [found["allocated"] for found in results], None),
        ("loaded", [found["loaded"] for found in results], [_loaded(found["expected"]) for found in results]),
        ("between steps", [found["resident"] for found in results], [sum(f["expected"].values()) for f in results]),
        *(
            (
                title,
                [found["at_peak"].get(name, 0) for found in results],
                [found["expected_at_peak"].get(name, sum(found["expected_at_peak"].values())) for found in results],
            )
            for title, name in [
                ("on top of that at the step's peak", "in all"),
                *((f"... {name}", name) for name in results[0]["expected_at_peak"]),
            ]
        ),
    ]:
        cells = [f"{value / GIB:.3f}" for value in measured]
        if expected:
            cells = [f"{cell} ({value / GIB:.3f})" for cell, value in zip(cells, expected, strict=True)]
        print(f"| {title} | {' | '.join(cells)} |")


def _loaded(expected: dict[str, int]) -> int:
    return sum(value for name, value in expected.items() if name != "optimizer state")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
