"""Chats of a real model, end to end: `python -m benchmarks.chats --model_name DIR --dataset rows.json --folder DIR`.

Alpaca rows become chats, as `messages` and as ShareGPT's `conversations`, which must give the same token ids. Then two
parts, each on 2 ranks with the model's own chat template:

- learns: a run on the chats, whose held-out loss must fall.
- early_stopping: few rows and a high learning rate, an evaluation with samples every 20 steps, until the held-out loss
  rises. A second run is killed (SIGKILL, all its processes) in the middle and started again: it must have the same
  steps, evaluations, samples, end and bytes, and its best/ must be the best of metrics.jsonl.

Exits with 1 if one of these does not hold.
"""

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer

from benchmarks.common import describe_machine, write_results
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.prepare import DataOptions, prepare_rows

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
HELD_OUT = 12
PROMPTS = ("What colour is the sky? One word.", "What is 7 plus 5?")
COMMON: dict[str, object] = {
    "nproc_per_node": RANKS,
    "device": "cpu",
    "context_length": 96,
    "lora_rank": 16,
    "log_to": "stdout",
}
PARTS: dict[str, dict[str, object]] = {
    "early_stopping": {
        "batch_size": 1,
        "num_epochs": 30,
        "lr": 1e-3,
        "lr_scheduler": "constant",
        "eval_steps": 20,
        "early_stopping": 2,
        "save_steps": 15,
        "save_total_limit": 2,
        "dataset_samples": 16,
    },
    "learns": {"batch_size": 2, "max_steps": 20, "lr": 1e-3, "eval_steps": 10},
}
KILLED_AFTER = 34  # steps: behind the last checkpoint, and between two evaluations
_TIMES = {"tokens_per_second", "step_seconds", "memory_gib"}


def as_messages(row: Mapping[str, str]) -> dict[str, Any]:
    """An Alpaca row as a chat."""
    question = row["instruction"] + (f"\n\n{row['input']}" if row["input"] else "")
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    return {"messages": turns}


def as_conversations(chat: Mapping[str, Any]) -> dict[str, Any]:
    """A chat in ShareGPT's columns."""
    names = {"user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in chat["messages"]]}


def write_chats(rows: Sequence[Mapping[str, str]], folder: Path) -> None:
    """Write messages.jsonl and sharegpt.jsonl without the last rows, and these as held_out.jsonl."""
    chats = [as_messages(row) for row in rows]
    files = {
        "messages": chats[:-HELD_OUT],
        "sharegpt": [as_conversations(chat) for chat in chats[:-HELD_OUT]],
        "held_out": chats[-HELD_OUT:],
    }
    for name, content in files.items():
        lines = [json.dumps(chat, ensure_ascii=False) + "\n" for chat in content]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")


def token_ids(model_name: str, path: Path) -> dict[str, Any]:
    """How a file of chats is tokenized: number of rows and tokens, a hash of ids and masks."""
    config = TrainConfig(model_name=model_name, dataset=(str(path),), context_length=512)
    rows, report = prepare_rows(AutoTokenizer.from_pretrained(model_name), config.pick(DataOptions))
    return {"rows": report.num_used, "tokens": len(rows.input_ids), "digest": rows.digest}


def command(options: Mapping[str, object]) -> list[str]:
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "fsdp_qlora", "train", *words]


def run(options: Mapping[str, object], log: Path, *, kill_after: int | None = None) -> float:
    """Train, and return the seconds that it took; with `kill_after` all its processes die behind that step."""
    started = time.perf_counter()
    metrics = Path(str(options["output_dir"])) / "metrics.jsonl"
    with (
        log.open("a") as file,
        subprocess.Popen(command(options), stdout=file, stderr=file, cwd=ROOT) as process,
    ):
        while process.poll() is None and kill_after is not None:
            if metrics.exists() and metrics.read_text().count('"loss"') >= kill_after:
                # The workers are in sessions of their own; told of their launcher's death, they would save and end.
                processes = [*psutil.Process(process.pid).children(recursive=True), process]
                for each in processes:
                    each.kill()
                psutil.wait_procs(processes[:-1])
                break
            time.sleep(0.05)
        status = process.wait()
    if status != (0 if kill_after is None else -signal.SIGKILL):
        raise SystemExit(f"chats: the run ended with status {status}: {log.read_text()[-3000:]}")
    return time.perf_counter() - started


def records(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in _TIMES} for line in lines]


def evaluations(folder: Path) -> dict[int, float]:
    return {record["step"]: record["eval_loss"] for record in records(folder) if "eval_loss" in record}


def sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


def learns(options: Mapping[str, object], folder: Path) -> tuple[dict[str, Any], dict[str, bool]]:
    """Returns what was found, and for each claim whether it holds."""
    out = folder / "learns"
    seconds = run({**options, "output_dir": out}, folder / "learns.log")
    losses = evaluations(out)
    found = {"eval_loss": losses, "seconds": round(seconds)}
    return found, {"held-out loss falls": losses[max(losses)] < losses[0] - 0.1}


def early_stopping(options: Mapping[str, object], folder: Path) -> tuple[dict[str, Any], dict[str, bool]]:
    """Returns what was found, and for each claim whether it holds."""
    whole, killed = folder / "whole", folder / "killed"
    options = {**options, "sample_prompts": folder / "prompts.txt"}
    run({**options, "output_dir": whole}, folder / "whole.log")
    log = folder / "killed.log"
    run({**options, "output_dir": killed}, log, kill_after=KILLED_AFTER)
    done = [record["step"] for record in records(killed) if "loss" in record]
    run({**options, "output_dir": killed}, log)
    losses = evaluations(whole)
    lowest = min(set(losses) - {0}, key=losses.__getitem__)
    best = json.loads((killed / "best" / "training.json").read_text())
    found = {
        "eval_loss": losses,
        "killed_after_step": max(done),
        "resumed_at_step": _said(log, "Resuming at step "),
        "adapter_sha256": sha256(whole),
        "best": {"step": best["step"], "eval_loss": best["losses"]["eval_loss"], "sha256": sha256(whole / "best")},
    }
    return found, {
        "early stopping fires": any("Stopped early" in line for line in (folder / "whole.log").read_text().split("\n")),
        "same records": records(whole) == records(killed),
        "same samples": (whole / "samples.jsonl").read_bytes() == (killed / "samples.jsonl").read_bytes(),
        "goes on from before the kill": int(found["resumed_at_step"]) < found["killed_after_step"],
        "same adapter": sha256(whole) == sha256(killed) != sha256(whole / "best"),
        "same best adapter": sha256(whole / "best") == sha256(killed / "best"),
        "best is the best of metrics.jsonl": (best["step"], best["losses"]["eval_loss"]) == (lowest, losses[lowest]),
    }


def _said(log: Path, words: str) -> str:
    return log.read_text().partition(words)[2][:12].split(".")[0].split()[0]


def measure(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], dict[str, bool]]]:
    """(part, what was found, which claims hold) of each part."""
    folder: Path = args.folder
    same, theirs = (token_ids(args.model_name, folder / f"{name}.jsonl") for name in ("messages", "sharegpt"))
    yield "token_ids", same, {"ShareGPT's rows give the same token ids": same == theirs}
    for part in args.parts:
        files = {"dataset": folder / "messages.jsonl", "eval_dataset": folder / "held_out.jsonl"}
        options = {"model_name": args.model_name, **files, **COMMON, **PARTS[part]}
        found, holds = {"learns": learns, "early_stopping": early_stopping}[part](options, folder)
        yield part, {"options": {**COMMON, **PARTS[part]}, **found}, holds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name", required=True, help="a model with a chat template")
    parser.add_argument("--dataset", type=Path, required=True, help="JSON array of Alpaca rows")
    parser.add_argument("--folder", type=Path, required=True, help="new folder for the files and runs")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--output", help="JSON file to write")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True)
    write_chats(json.loads(args.dataset.read_text(encoding="utf-8")), args.folder)
    result: dict[str, Any] = {}
    for part, found, holds in measure(args):
        result[part] = {**found, "holds": holds}
        print(json.dumps({part: result[part]}, indent=2), flush=True)
    if args.output:
        words = f"python -m benchmarks.chats --model_name {Path(args.model_name).name} --dataset {args.dataset.name}"
        machine = describe_machine(torch.device("cpu"))
        write_results(args.output, words, {"machine": machine, "parts": result})
    return int(not all(ok for part in result.values() for ok in part["holds"].values()))


if __name__ == "__main__":
    sys.exit(main())
