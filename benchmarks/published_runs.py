"""The plan's seconds beside published runs: `python benchmarks/published_runs.py`. Needs no GPU and
no weights.

The plan is fitted to runs of the 2024 program: padded rows of equal length, rank 64, recompute of
all blocks. The share of its peak that a GPU achieves (`achieved` in fsdp_qlora/planning/gpus.yaml)
is fitted to its runs. Each row is planned with a share fitted to the other rows of its GPU alone;
the only row of a GPU with the default.

Runs of other programs are planned with the shares as they are. Their table is in docs/memory.md;
nothing is fitted to them but the host's time, to the two that FITTED names.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsdp_qlora.model.architecture.shapes import BlockShape
from fsdp_qlora.model.quantizers.bnb_4bit import Bnb4bitWeight
from fsdp_qlora.planning.gpus import ACHIEVED, GPUS
from fsdp_qlora.planning.program_speed import Program
from fsdp_qlora.planning.speed import MicroBatchSize, Size, count_work, seconds

RUNS = json.loads((Path(__file__).parent / "published_runs.json").read_text())
# hidden, inner, blocks, heads, groups, vocabulary
SHAPES = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000),
    "mistral-7b": (4096, 14336, 32, 32, 8, 32000),
    "yi-34b": (7168, 20480, 60, 56, 8, 64000),
    "llama-2-70b": (8192, 28672, 80, 64, 8, 32000),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": (8192, 28672, 80, 64, 8, 128256),
    "qwen-1.8b": (2048, 5504, 24, 16, 16, 151936),
    "qwen-7b": (4096, 11008, 32, 32, 32, 151936),
    "qwen-14b": (5120, 13696, 40, 40, 40, 152064),
    "qwen-72b": (8192, 24576, 80, 64, 64, 152064),
}
# The host's time for a block and pass in these programs, which launch less than ours by its plain
# ways (`this_program` in fsdp_qlora/planning/program_speed.py): 1.0 s for 8 micro-batches of 256 as
# of 512 tokens, with 24 blocks in three passes.
OLD_PROGRAM = Program(block_seconds=1.0 / (8 * 24 * 3))
FITTED = [("qwen-1.8b", 256), ("qwen-1.8b", 512)]
_BYTES = {"qlora": 0.52, "gptq": 0.52, "lora": 2.0, "full": 2.0}  # of a weight, with its statistics
# Per weight and product: AutoGPTQ's layer decodes with torch's functions, each of which reads and
# writes: a shift (0.5 + 4), to 8 bits (4 + 1), and (1 + 1), minus the zeros (1 + 1), times the
# scales (1 + 2).
_GPTQ_BYTES = 16.5
_SHARES = [share / 100 for share in range(15, 121)]


def size_of(row: dict[str, Any]) -> Size:
    hidden, inner, blocks, heads, groups, vocabulary = SHAPES[row["model"]]
    keys = groups * 128
    linear = blocks * (2 * hidden**2 + 2 * hidden * keys + 3 * hidden * inner)
    adapter = (
        blocks
        * row.get("lora_rank", RUNS["lora_rank"])
        * (4 * hidden + 2 * (hidden + keys) + 3 * (hidden + inner))
    )
    ends = 4 * vocabulary * hidden  # that program gathers embeddings and head with the blocks
    stored = int(linear * _BYTES[row["train_type"]]) + ends
    decoding = {"qlora": Bnb4bitWeight.decoding_bytes, "gptq": _GPTQ_BYTES}.get(
        row["train_type"], 0.0
    )
    shapes = (BlockShape(hidden, heads, groups, 128),) * blocks
    trains_all = row["train_type"] == "full"
    return Size(blocks, shapes, linear, vocabulary * hidden, adapter, stored, decoding, trains_all)


def planned(row: dict[str, Any], achieved: float) -> float:
    """Seconds of a row."""
    tokens = row["batch_size"] * row["context_length"]
    work = count_work(
        size_of(row),
        MicroBatchSize(tokens, tokens * row["context_length"], tokens),
        num_shards=1 if row["strategy"] == "ddp" else row["gpus"],
        recomputed_share=1.0,
        host_share=float(row["cpu_offload"]),
    )
    micro_batches = RUNS["samples"] / row["gpus"] / row["batch_size"]
    return micro_batches * seconds(work, GPUS[row["gpu"]]._replace(achieved=achieved), OLD_PROGRAM)


def other_programs() -> Iterator[tuple[dict[str, Any], dict[int, tuple[float, float]]]]:
    """Each row with its tokens/s, published and planned, by the rows' length."""
    for row in RUNS["other_programs"]:
        size = size_of(row)
        found = {}
        for written, published in (row.get("tokens_per_second") or row["seconds"]).items():
            length = int(written)
            tokens = row["batch_size"] * length
            turn = MicroBatchSize(tokens, tokens * length, row["gpus"] * tokens)
            work = count_work(
                size, turn, num_shards=row["gpus"], recomputed_share=1.0, host_share=0.0
            )
            rate = (
                published
                if "tokens_per_second" in row
                else row["micro_batches"] * turn.useful / published
            )
            found[length] = (rate, turn.useful / seconds(work, GPUS[row["gpu"]], OLD_PROGRAM))
        yield row, found


def table() -> Iterator[str]:
    """The runs of other programs in Markdown: published tokens/s, and the plan's deviation."""
    lengths = (256, 512, 1024, 2048, 4096, 8192)
    yield f"| run | {' | '.join(f'{length:,}' for length in lengths)} |"
    yield "|---" * (len(lengths) + 1) + "|"
    for row, found in other_programs():
        cells = []
        for length in lengths:
            rate, plan = found.get(length, (0, 0))
            mark = "*" if (row["model"], length) in FITTED else ""
            cells.append(f"{rate:,.0f}, {plan / rate - 1:+.0%}{mark}" if rate else "")
        kind = f"{row['model']} {row['train_type']}, {row['gpus']} x {row['gpu']} ({row['source']})"
        yield f"| {kind} | {' | '.join(cells)} |"


def fit(rows: list[dict[str, Any]]) -> float:
    """The share with which most rows are planned best."""

    def error(share: float) -> float:
        errors = [abs(math.log(planned(row, share) / row["seconds"])) for row in rows]
        return statistics.median(errors) + 0.2 * statistics.mean(errors)

    return min(_SHARES, key=error)


def left_out() -> list[tuple[dict[str, Any], float]]:
    """Each row, with the error of its plan by the others."""
    found = []
    for row in RUNS["rows"]:
        others = [
            other for other in RUNS["rows"] if other is not row and other["gpu"] == row["gpu"]
        ]
        found.append((row, planned(row, fit(others) if others else ACHIEVED) / row["seconds"] - 1))
    return found


def main() -> int:
    found = left_out()
    for row, error in found:
        offload = "offload" if row["cpu_offload"] else row["strategy"]
        name = f"{row['gpus']} x {row['gpu']}, {row['model']} {row['train_type']} {offload}"
        print(
            f"{name:48} {row['batch_size']:2} x {row['context_length']:5} {row['seconds']:6} s "
            f"{error:+.0%}"
        )
    errors = sorted(abs(error) for _, error in found)
    print(f"median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}, then {errors[-2]:.1%}")
    for name in dict.fromkeys(row["gpu"] for row in RUNS["rows"]):
        print(f"achieved by {name}: {fit([row for row in RUNS['rows'] if row['gpu'] == name]):.2f}")
    print("\n".join(table()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
