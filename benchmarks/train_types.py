"""Every train type on a real model and real rows: held-out loss before and after, compared with the
unquantized base.

Each row is a run of train.py on two ranks from the same weights, rows and seed. An adapter starts
at zero, so the loss before the first step is the stored base's, and its difference from the first
row's is the cost of quantization.

    python benchmarks/train_types.py --model_name demo/model --dataset rows.jsonl --output
    results.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common import describe_machine

ROOT = Path(__file__).resolve().parent.parent

# name -> options of train.py. The first is the base without quantization.
RUNS: dict[str, dict[str, object]] = {
    "lora": {"train_type": "lora"},
    "qlora": {"train_type": "qlora"},
    "hqq_lora": {"train_type": "hqq_lora"},
    "int8_lora": {"train_type": "int8_lora"},
    "dora": {"train_type": "dora"},
    "bnb_dora": {"train_type": "bnb_dora"},
    "hqq_dora": {"train_type": "hqq_dora"},
    "full": {"train_type": "full", "lr": 5e-5},
    "bnb_llama_pro": {"train_type": "bnb_llama_pro", "lr": 5e-5},
    "hqq_llama_pro": {"train_type": "hqq_llama_pro", "lr": 5e-5},
    # For what quantization costs; one step, since training is the same.
    "qlora, nf4 without double quantization": {
        "train_type": "qlora",
        "double_quant": "false",
        "max_steps": 1,
    },
    "qlora, fp4": {"train_type": "qlora", "quant_type": "fp4", "max_steps": 1},
    "qlora, mxfp4": {"train_type": "qlora", "quant_type": "mxfp4", "max_steps": 1},
    "qlora, nvfp4": {"train_type": "qlora", "quant_type": "nvfp4", "max_steps": 1},
    "qlora, fp8": {"train_type": "qlora", "quant_type": "fp8", "max_steps": 1},
    "hqq_lora, 8 bits": {"train_type": "hqq_lora", "n_bits": 8, "max_steps": 1},
    "hqq_lora, 3 bits": {"train_type": "hqq_lora", "n_bits": 3, "max_steps": 1},
    "hqq_lora, 2 bits in groups of 32": {
        "train_type": "hqq_lora",
        "n_bits": 2,
        "group_size": 32,
        "max_steps": 1,
    },
}


def measure(
    options: dict[str, object], arguments: argparse.Namespace, folder: Path
) -> dict[str, object]:
    """One run: its losses. Exits with the run's output if it fails."""
    common = {
        "model_name": arguments.model_name,
        "dataset": arguments.dataset,
        "dataset_samples": arguments.samples,
        "eval_fraction": arguments.eval_fraction,
        "context_length": arguments.context_length,
        "batch_size": arguments.batch_size,
        "max_steps": arguments.steps,
        "lr": arguments.lr,
        "seed": 1,
        "save_model": "false",
        "log_to": "jsonl",
        "output_dir": folder / "output",
        "precision": arguments.precision,
    }
    if "llama_pro" in str(options["train_type"]):
        common["llama_pro_path"] = common.pop("model_name")
        common["llama_pro_path"] = expanded(arguments, folder)
    words = [f"--{name}={value}" for name, value in {**common, **options}.items()]
    started = time.perf_counter()
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            "train.py",
            *words,
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if run.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{run.stdout[-3000:]}")
    records = [
        json.loads(line) for line in (folder / "output" / "metrics.jsonl").read_text().splitlines()
    ]
    held_out = [record["eval_loss"] for record in records if "eval_loss" in record]
    trained = [record["loss"] for record in records if "loss" in record]
    return {
        "held_out_before": held_out[0],
        "held_out_after": held_out[-1],
        "training_first": trained[0],
        "training_last": trained[-1],
        "steps": len(trained),
        "seconds": round(time.perf_counter() - started, 1),
    }


def expanded(arguments: argparse.Namespace, folder: Path) -> Path:
    """The model with new blocks, made by scripts/block_expansion.py."""
    target = folder / "expanded"
    options = [
        "--model_name",
        arguments.model_name,
        "--output_dir",
        str(target),
        "--expansion_rate",
        "0.1",
    ]
    subprocess.run([sys.executable, "scripts/block_expansion.py", *options], cwd=ROOT, check=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model_name", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--samples", type=int, default=76, help="number of rows")
    parser.add_argument("--eval_fraction", type=float, default=16 / 76)
    parser.add_argument("--context_length", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of the adapters")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--output", type=Path, help="JSON file; runs in it are not repeated")
    arguments = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    if arguments.output and arguments.output.exists():
        results = json.loads(arguments.output.read_text())["runs"]
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(RUNS[name], arguments, Path(folder))
        base = results.get("lora", {}).get("held_out_before")
        row = results[name]
        cost = f"{row['held_out_before'] - base:+.4f}" if base is not None else ""  # type: ignore[operator]
        print(
            f"{name:36} {row['held_out_before']:.4f} ({cost}) -> {row['held_out_after']:.4f}  "
            f"{row['seconds']} s"
        )
        if arguments.output:
            settings = {
                key: str(value)
                for key, value in vars(arguments).items()
                if key not in ("output", "only")
            }
            settings["dataset"] = Path(settings["dataset"]).name
            settings["model_name"] = Path(settings["model_name"]).name
            about = {
                "machine": describe_machine(torch.device("cpu")),
                "settings": settings,
                "runs": results,
            }
            arguments.output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
