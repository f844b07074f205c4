"""Merge-aware training beside plain LoRA that is merged late, in each format: held-out losses.

For each format, by the program's commands: `quantize` makes the base; plain LoRA and merge-aware
training start from it with the same options and rows; `merge` writes both in the base's format (of
a base in NF4 or FP4, plain LoRA's in 16 bits, which `quantize` rounds); `evaluate` measures them.
Rows are those of at most 300 characters, so that a CPU is enough. What `--folder` has already is
not made again.

    python -m benchmarks.merge_aware_table --model_name demo/model --dataset gsm8k_train.jsonl \
        --held_out gsm8k_test.jsonl --folder work --output results.json
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import describe_machine, write_results

FORMATS = ("nvfp4", "mxfp4", "nf4", "fp8")
MOST_CHARACTERS = 300
HELD_OUT = 100
EFFECT = re.compile(r"([\d.]+)% of the adapter's update is left")


def command(*words: object) -> str:
    """The output of a command of the program; exits with it if the command fails."""
    argv = [sys.executable, "-m", "fsdp_qlora", *map(str, words)]
    print(" ".join(argv[2:]), flush=True)
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} failed:\n{done.stdout[-3000:]}")
    return done.stdout


def once(log: Path, *words: object) -> str:
    """The output of a command, which is kept in a file."""
    if not log.exists():
        log.write_text(command(*words))
    return log.read_text()


def make(folder: Path, *words: object) -> str:
    return once(folder.with_name(f"{folder.name}.log"), *words, "--output_dir", folder)


def short_rows(source: Path, target: Path, most: int | None = None) -> Path:
    """The rows of at most 300 characters, the first `most` of them."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    short = [row for row in rows if sum(map(len, row.values())) <= MOST_CHARACTERS]
    target.write_text("".join(f"{json.dumps(row)}\n" for row in short[:most]))
    return target


class Table:
    """The runs of one format after the other, below a folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder: Path = args.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows = short_rows(args.dataset, self.folder / "rows.jsonl")
        self.held_out = short_rows(args.held_out, self.folder / "held_out.jsonl", HELD_OUT)
        self.computed = ["--device", "cpu", "--nproc_per_node", "1", "--precision", "bf16"]
        self.computed += ["--context_length", "192"]

    def measure(self, form: str) -> dict[str, Any]:
        """The losses of one format; the share is of a merge that rounds to it."""
        base = self.folder / form
        make(base, "quantize", self.args.model_name, "--format", form)
        plain = self.trained(base, "plain")
        late = base.with_name(f"{form}_plain_merged")
        kept = EFFECT.search(self.merged_late(plain, late, form))
        aware = self.trained(base, "aware", "--merge_aware", "true")
        merged = base.with_name(f"{form}_aware_merged")
        make(merged, "merge", aware)
        return {
            "base": self.evaluated(base),
            "plain, unmerged": self.evaluated(plain),
            "plain, merged late": self.evaluated(late),
            "merge-aware, merged": self.evaluated(merged),
            "update kept by merging late, %": float(kept[1]) if kept else None,
            "training losses, plain": trained_losses(plain),
            "training losses, merge-aware": trained_losses(aware),
        }

    def trained(self, base: Path, kind: str, *more: str) -> Path:
        out = base.with_name(f"{base.name}_{kind}")
        words = ["--max_steps", self.args.steps, "--lr", self.args.lr, "--lr_scheduler", "constant"]
        words += ["--lora_rank", "32", "--lora_alpha", "64", "--batch_size", "8", "--seed", "1"]
        words += ["--recompute", "none", *more]
        make(out, "train", "--model_name", base, "--dataset", self.rows, *self.computed, *words)
        return out

    def merged_late(self, plain: Path, out: Path, form: str) -> str:
        """Merge plain LoRA into the base's format, and return what the last command says."""
        if form not in ("nf4", "fp4"):
            return make(out, "merge", plain, "--format", "same")
        wide = out.with_name(f"{out.name}_in_16_bits")
        make(wide, "merge", plain, "--base", "dequantized")
        return make(out, "quantize", wide, "--format", form)

    def evaluated(self, model: Path) -> float:
        given = [*self.computed, "--batch_size", "50", "--dataset", self.held_out, "--json"]
        log = model.with_name(f"{model.name}_evaluated.log")
        output = once(log, "evaluate", model, "--train_type", "qlora", *given)
        [loss] = re.findall(r'"loss": ([\d.]+)', output)
        return float(loss)


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trained_losses(run: Path) -> list[float]:
    return [round(record["loss"], 4) for record in records(run) if "loss" in record]


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model_name", required=True)
    parser.add_argument("--dataset", type=Path, required=True, help="rows in JSON Lines")
    parser.add_argument("--held_out", type=Path, required=True, help="rows in JSON Lines")
    parser.add_argument("--folder", type=Path, required=True, help="folder of bases and runs")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--output", default="merge_aware.json")
    args = parser.parse_args(argv)
    table = Table(args)
    formats: dict[str, Any] = {}
    words = " ".join(sys.argv[1:] if argv is None else argv)
    for form in args.formats:
        formats[form] = table.measure(form)
        print(json.dumps({form: formats[form]}), flush=True)
        result = {"machine": describe_machine(torch.device("cpu")), "formats": formats}
        write_results(args.output, f"python -m benchmarks.merge_aware_table {words}", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
