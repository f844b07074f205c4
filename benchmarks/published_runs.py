"""The plan's seconds beside published runs: `python benchmarks/published_runs.py`. Needs no GPU and no weights.

The runs are of the 2024 program: padded rows of equal length, rank 64, recompute of all blocks. The share of its peak
that a GPU achieves is fitted to its runs (`achieved` in fsdp_qlora/planning/gpus.py). Each row is planned with a share
fitted to the other rows of its GPU alone; the only row of a GPU with the default.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsdp_qlora.planning.gpus import ACHIEVED, GPUS
from fsdp_qlora.planning.speed import Size, Turn, count_work, seconds

RUNS = json.loads((Path(__file__).parent / "published_runs.json").read_text())
# hidden, inner, blocks, heads, groups, vocabulary
SHAPES = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000),
    "mistral-7b": (4096, 14336, 32, 32, 8, 32000),
    "yi-34b": (7168, 20480, 60, 56, 8, 64000),
    "llama-2-70b": (8192, 28672, 80, 64, 8, 32000),
}
_BYTES = {"qlora": 0.52, "lora": 2.0}  # of a weight, with its statistics
_SHARES = [share / 100 for share in range(15, 121)]


def size_of(row: dict[str, Any]) -> Size:
    hidden, inner, blocks, heads, groups, vocabulary = SHAPES[row["model"]]
    keys = groups * 128
    linear = blocks * (2 * hidden**2 + 2 * hidden * keys + 3 * hidden * inner)
    adapter = blocks * RUNS["lora_rank"] * (4 * hidden + 2 * (hidden + keys) + 3 * (hidden + inner))
    ends = 4 * vocabulary * hidden  # that program gathers embeddings and head with the blocks
    stored = int(linear * _BYTES[row["train_type"]]) + ends
    is_decoded = row["train_type"] == "qlora"
    return Size(blocks, hidden, heads * 128, linear, vocabulary * hidden, adapter, stored, is_decoded)


def planned(row: dict[str, Any], achieved: float) -> float:
    """Seconds of a row."""
    tokens = row["batch_size"] * row["context_length"]
    work = count_work(
        size_of(row),
        Turn(tokens, tokens * row["context_length"], tokens),
        num_shards=1 if row["strategy"] == "ddp" else row["gpus"],
        recomputed_share=1.0,
        host_share=float(row["cpu_offload"]),
    )
    micro_batches = RUNS["samples"] / row["gpus"] / row["batch_size"]
    return micro_batches * seconds(work, GPUS[row["gpu"]]._replace(achieved=achieved))


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
        others = [other for other in RUNS["rows"] if other is not row and other["gpu"] == row["gpu"]]
        found.append((row, planned(row, fit(others) if others else ACHIEVED) / row["seconds"] - 1))
    return found


def main() -> int:
    found = left_out()
    for row, error in found:
        offload = "offload" if row["cpu_offload"] else row["strategy"]
        name = f"{row['gpus']} x {row['gpu']}, {row['model']} {row['train_type']} {offload}"
        print(f"{name:48} {row['batch_size']:2} x {row['context_length']:5} {row['seconds']:6} s {error:+.0%}")
    errors = sorted(abs(error) for _, error in found)
    print(f"median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}, then {errors[-2]:.1%}")
    for name in dict.fromkeys(row["gpu"] for row in RUNS["rows"]):
        print(f"achieved by {name}: {fit([row for row in RUNS['rows'] if row['gpu'] == name]):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
