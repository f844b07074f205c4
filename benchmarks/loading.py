"""Seconds and peak memory of loading a model, first and second start and transformers: `python
benchmarks/loading.py`.

Makes a random bf16 llama in several files, then loads it in fresh processes. The files are dropped
from the page cache before each:

- off: ours without a cache of quantized weights;
- first: ours, which writes the cache;
- second: ours from the cache;
- transformers: AutoModelForCausalLM.from_pretrained with bitsandbytes 4-bit, in one process.

Memory is the growth of a rank's peak resident memory while loading; on a CPU it includes the shards
themselves. Exits with 1 if the second start does not load at least 3 times faster than the first,
or if a rank's memory grows by more than its shard of the quantized bytes and 350 MB.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

MIN_SPEEDUP = 3.0
MAX_MIB_BESIDE_SHARD = 350e6 / 2**20


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size of the model")
    parser.add_argument(
        "--layers",
        type=int,
        default=14,
        help="number of layers, of 51M parameters each at hidden size 2048",
    )
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument(
        "--file_mb", type=int, default=215, help="largest size of a file of the model, in MB"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="repetitions of each kind of start; the medians are compared",
    )
    parser.add_argument(
        "--model", default="", help="folder of a model to load instead of a random one"
    )
    parser.add_argument(
        "--folder",
        default="",
        help="folder for the model and the cache (default: a temporary one)",
    )
    parser.add_argument("--output", default="", help="JSON file to write")
    # a process of the benchmark itself
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def make_checkpoint(folder: Path, args: argparse.Namespace) -> None:
    """Save a random llama in bf16, in several files."""
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=f"{args.file_mb}MB")


def measured(load: Callable[[], None]) -> dict[str, float]:
    """Seconds, and growth of the peak resident memory in MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    load()
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def measure_ours(folder: Path, quant_cache: str) -> None:
    """One rank: build, shard and load as train.py does; rank 0 prints what all ranks measured."""
    import torch.distributed as dist

    from fsdp_qlora.config.options import TrainConfig
    from fsdp_qlora.distributed.process_group import (
        gather_numbers,
        start_process_group,
        stop_process_group,
    )
    from fsdp_qlora.distributed.ranks import read_ranks
    from fsdp_qlora.model import model_parts
    from fsdp_qlora.planning.machine import Machine
    from fsdp_qlora.planning.placement import place
    from fsdp_qlora.planning.plan import build_plan
    from fsdp_qlora.run.load_model import load_model
    from fsdp_qlora.sharding.loading.load_weights import match_tensors
    from fsdp_qlora.sharding.loading.weight_files import WeightFiles

    ranks = read_ranks()
    config = TrainConfig(precision="bf16", attn_implementation="sdpa", quant_cache=quant_cache)
    model_config = AutoConfig.from_pretrained(folder)
    tokenizer = None
    plan = build_plan(config, Machine.of(config, ranks), folder, model_config, tokenizer)
    meta = plan.meta
    weight_files = WeightFiles(folder)
    weights = match_tensors(meta.model, weight_files)
    start_process_group(ranks)
    dist.barrier()

    def start() -> None:
        load_model(config, place(config, plan), weights, ranks)
        dist.barrier()

    result = measured(start)
    counts = model_parts.count_bytes(model_parts.kinds_of(meta.model), ranks.world_size)
    shard = counts["codes"].largest_shard + counts["statistics"].largest_shard
    read = weight_files.bytes_read / sum(
        path.stat().st_size for path in folder.glob("*.safetensors")
    )
    everyone = gather_numbers([result["seconds"], result["mib"], read], ranks.device)
    if ranks.is_rank_0:
        seconds, mib, read = everyone.max(dim=0).values.tolist()
        print(
            json.dumps(
                {"seconds": seconds, "mib": mib, "shard_mib": shard / 2**20, "read_share": read}
            )
        )
    stop_process_group()


def measure_transformers(folder: Path) -> None:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )

    def load() -> None:
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=quantization, device_map="cpu"
        )

    print(json.dumps(measured(load)))


def forget(*folders: Path) -> None:
    """Drop files from the page cache, so that the next reader reads them from disk."""
    os.sync()
    for path in (
        path
        for folder in folders
        if folder.is_dir()
        for path in folder.rglob("*")
        if path.is_file()
    ):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_fresh_processes(kind: str, folder: Path, cache: Path, ranks: int) -> dict[str, float]:
    forget(folder, cache)
    launcher = [sys.executable]
    if kind != "transformers":
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [*launcher, str(Path(__file__).resolve()), "--measure", kind, "--folder", str(folder)]
    environment = {**os.environ, "FSDP_QLORA_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def run_benchmark(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from benchmarks.common import describe_machine

    model = Path(args.model or folder / "model")
    cache = folder / "cache"
    if not model.is_dir():
        make_checkpoint(model, args)
    starts: dict[str, list[dict[str, float]]] = {
        "off": [],
        "first": [],
        "second": [],
        "transformers": [],
    }
    for _ in range(args.repeats):
        shutil.rmtree(cache, ignore_errors=True)
        for kind, results in starts.items():
            results.append(in_fresh_processes(kind, model, cache, args.ranks))
    table = {
        kind: {
            name: statistics.median(result[name] for result in results)
            for name in ("seconds", "mib")
        }
        for kind, results in starts.items()
    }
    files = {path.name: path.stat().st_size for path in model.glob("*.safetensors")}
    return {
        "machine": describe_machine(torch.device("cpu")),
        "options": {
            name: value
            for name, value in vars(args).items()
            if name not in ("output", "measure", "folder")
        },
        "model_gb": sum(files.values()) / 1e9,
        "files": len(files),
        "cache_gb": sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) / 1e9,
        "speedup": table["first"]["seconds"] / table["second"]["seconds"],
        "speedup_over_no_cache": table["off"]["seconds"] / table["second"]["seconds"],
        "quantized_shard_mib": starts["off"][0]["shard_mib"],
        "share_of_the_files_that_a_rank_reads": starts["off"][0]["read_share"],
        "starts": table,
    }


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    if args.measure == "transformers":
        measure_transformers(Path(args.folder))
        return 0
    if args.measure:
        measure_ours(Path(args.folder), "off" if args.measure == "off" else "auto")
        return 0
    from benchmarks.common import write_results

    with tempfile.TemporaryDirectory() as temporary:
        result = run_benchmark(args, Path(args.folder or temporary))
    print(
        f"{result['model_gb']:.2f} GB of bf16 weights in {result['files']} files, {args.ranks} "
        "ranks;"
    )
    print(f"the cache holds {result['cache_gb']:.2f} GB.")
    for kind, row in result["starts"].items():
        print(
            f"{kind:14}{row['seconds']:8.2f} s{row['mib']:10.0f} MiB more per process at the peak"
        )
    print(f"second start: {result['speedup']:.1f} times faster than the first")
    if args.output:
        write_results(args.output, " ".join(["python benchmarks/loading.py", *argv]), result)
    limit = result["quantized_shard_mib"] + MAX_MIB_BESIDE_SHARD
    most = max(row["mib"] for kind, row in result["starts"].items() if kind != "transformers")
    print(
        f"a rank's shard of the quantized bytes: {result['quantized_shard_mib']:.0f} MiB; limit "
        f"{limit:.0f} MiB"
    )
    print(
        f"a rank reads {100 * result['share_of_the_files_that_a_rank_reads']:.2f}% of the model's "
        "files"
    )
    if result["speedup"] < MIN_SPEEDUP or most > limit:
        print(f"FAILED: less than {MIN_SPEEDUP} times faster, or more memory than the limit.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
