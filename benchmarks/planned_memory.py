"""Memory of QLoRA on 1, 2 and 4 cards of 24 GB, planned as `--dry_run` plans it: `python
benchmarks/planned_memory.py`.

No weight is read and no GPU is used. The models are built from their published shapes. Prints the
table of docs/memory.md and writes benchmarks/results/planned_memory.json. What CUDA and NCCL take
is not in it.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import AutoConfig

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.ranks import read_ranks
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.placement import place
from fsdp_qlora.planning.plan import plan_model

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "planned_memory.json"
GIB = 2**30
TOKENS = 2048
CARD_GIB = 24
# CUDA's context and NCCL's buffers (0.6 to 0.8 GiB), and the plan's error.
_BESIDE_GIB = 1.5
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "8B (Qwen3-8B)": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "14B (Qwen3-14B)": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "32B (Qwen3-32B)": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "70B (Llama-3.3-70B)": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def plan(folder: Path, cards: int, *, offload: bool) -> dict[str, Any]:
    """GiB of one rank: on the GPU without the blocks' inputs, these, on the host."""
    config = TrainConfig(
        model_name=str(folder),
        context_length=TOKENS,
        nproc_per_node=cards,
        sharding_strategy="full_shard",
        use_cpu_offload=offload,
        dry_run=True,
    )
    memory = place(config, plan_model(config, Machine.of(config, read_ranks()), None)).memory
    inputs = memory.phases[memory.peak].get("block inputs", 0)
    sizes = {
        "gpu": (memory.reserved - inputs) / GIB,
        "inputs": inputs / GIB,
        "host": sum(memory.host.values()) / GIB,
    }
    return {"cards": cards, "offload": offload, **sizes}


def main() -> int:
    from tests.helpers.tokenizers import make_tokenizer

    rows = []
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            AutoConfig.for_model(**shape, tie_word_embeddings=False).save_pretrained(folder)
            make_tokenizer(Path(folder))
            for cards in (1, 2, 4):
                rows += [
                    {"model": name, **plan(Path(folder), cards, offload=o)} for o in (False, True)
                ]
    RESULTS.write_text(json.dumps({"tokens": TOKENS, "rows": rows}, indent=1) + "\n")
    print("\n".join(table(rows)))
    return 0


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a Markdown table."""
    lines = [
        "| model | GPUs | `use_cpu_offload` | GPU memory | + block inputs | host memory | 24 GB "
        "GPU |",
        "|---|---|---|---|---|---|---|",
    ]
    roomy: set[tuple[str, int]] = set()
    for row in rows:
        if (row["model"], row["cards"]) in roomy:  # no offload is needed
            continue
        whole = row["gpu"] + row["inputs"]
        fits = (
            "fits"
            if whole + _BESIDE_GIB <= CARD_GIB
            else "tight"
            if whole + 1 <= CARD_GIB
            else "no"
        )
        if fits == "fits":
            roomy.add((row["model"], row["cards"]))
        lines.append(
            f"| {row['model']} | {row['cards']} | {str(row['offload']).lower()} | {row['gpu']:.1f} "
            f"| {whole:.1f} | {row['host']:.1f} | {fits} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
