"""Speed of a training loop of one's own against a service, beside a run of `train` on the same
rows.

    python -m benchmarks.service --model_name MODEL --dataset ROWS --output
    benchmarks/results/service.json

One rank on a CPU, fp32, LoRA of rank 16. The loop is the cookbook's sl_loop: forward_backward,
optim_step, wait for both. The two take turns: in each round the run trains on all rows, then the
loop does in steps as large. What counts are the tokens per CPU second of all steps after the first,
of every process that takes part (the run's, or the service's and the loop's), which other programs
on the machine disturb least; tokens per second are there too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import tinker
import torch
from tinker import types
from transformers import AutoTokenizer

from benchmarks.common import describe_machine, write_results
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.run_data import read_rows
from fsdp_qlora.planning.reading import pick_data

KEY = "tml-benchmark"
RANK = 16
LR = 1e-4


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--context_length", type=int, default=512)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--output", default="")
    return parser.parse_args(argv)


def training_rows(args: argparse.Namespace) -> TokenizedRows:
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    config = TrainConfig(
        dataset=(args.dataset,), context_length=args.context_length, dataset_samples=args.rows
    )
    return read_rows(tokenizer, pick_data(config), vocab_size=len(tokenizer)).train


def as_datum(rows: TokenizedRows, number: int) -> types.Datum:
    part = slice(*rows.offsets[number : number + 2])
    ids = rows.input_ids[part]
    learned = rows.learned[part]
    given: Any = {
        "target_tokens": ids[1:].astype("int64"),
        "weights": learned[1:].astype("float32"),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=given
    )


def options(args: argparse.Namespace) -> list[str]:
    given = {
        "model_name": args.model_name,
        "train_type": "lora",
        "precision": "fp32",
        "lora_rank": RANK,
    }
    given |= {
        "context_length": args.context_length,
        "batch_size": args.batch_size,
        "quant_cache": "off",
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def cpu_seconds(*processes: psutil.Process) -> float:
    """The CPU seconds of processes and all that they have started."""
    every = [each for process in processes for each in (process, *process.children(recursive=True))]
    return sum(sum(each.cpu_times()[:2]) for each in {each.pid: each for each in every}.values())


def speeds(tokens: list[int], seconds: float, cpu: float) -> dict[str, float]:
    """The speeds of steps; the first is left out."""
    own = sum(tokens[1:])
    return {
        "tokens": sum(tokens),
        "tokens_per_second": own / seconds,
        "tokens_per_cpu_second": own / cpu,
    }


def run(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Train on the rows by the command `train`."""
    more = {
        "dataset": args.dataset,
        "dataset_samples": args.rows,
        "output_dir": folder,
        "num_epochs": 1,
        "lr": LR,
    }
    more |= {
        "save_every": "none",
        "log_to": "jsonl",
        "lr_scheduler": "constant",
        "gradient_accumulation_steps": 1,
    }
    command = [sys.executable, "-m", "fsdp_qlora", "train", *options(args)]
    command += [word for name, value in more.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    marks = []
    records = list[dict[str, Any]]()
    path = folder / "metrics.jsonl"
    steps = -(-args.rows // args.batch_size)
    while len(records) < steps and process.poll() is None:
        time.sleep(0.01)
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        found = [record for record in found if "num_tokens" in record]
        if len(found) > len(records):
            records = found
            marks.append((time.perf_counter(), cpu_seconds(psutil.Process(process.pid))))
    assert process.wait() == 0 and len(marks) > steps // 2
    (started, cpu_started) = marks[0]
    (ended, cpu_ended) = marks[-1]
    return speeds(
        [record["num_tokens"] for record in records], ended - started, cpu_ended - cpu_started
    )


def loop(
    args: argparse.Namespace, data: list[types.Datum], service: psutil.Process
) -> dict[str, float]:
    """Train on the rows against the service."""
    client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{args.port}", api_key=KEY)
    model = client.create_lora_training_client(args.model_name, rank=RANK).result()
    tokens = list[int]()
    started = 0.0
    cpu_started = 0.0
    for first in range(0, len(data), args.batch_size):
        batch = data[first : first + args.batch_size]
        passed = model.forward_backward(batch, "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=LR))
        passed.result(), stepped.result()
        tokens.append(sum(datum.model_input.length + 1 for datum in batch))
        if not first:
            started = time.perf_counter()
            cpu_started = cpu_seconds(service, psutil.Process())
    return speeds(
        tokens, time.perf_counter() - started, cpu_seconds(service, psutil.Process()) - cpu_started
    )


def start_service(args: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fsdp_qlora", "serve", *options(args), "--folder", str(folder)]
    environment = {**os.environ, "TINKER_API_KEY": KEY}
    service = subprocess.Popen(
        [*command, "--port", str(args.port)], stdout=subprocess.DEVNULL, env=environment
    )
    # tries again until it answers
    rest = tinker.RestClient(base_url=f"http://127.0.0.1:{args.port}", api_key=KEY)
    rest.get_server_capabilities().result()
    return service


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    rows = training_rows(args)
    data = [as_datum(rows, number) for number in range(len(rows))]
    found: dict[str, list[dict[str, float]]] = {"train": [], "loop": []}
    with tempfile.TemporaryDirectory() as name:
        service = start_service(args, Path(name) / "service")
        try:
            loop(args, data[: 2 * args.batch_size], psutil.Process(service.pid))  # warms up
            for number in range(args.rounds):
                found["train"].append(run(args, Path(name) / f"run{number}"))
                found["loop"].append(loop(args, data, psutil.Process(service.pid)))
                print(number, found["train"][-1], found["loop"][-1], flush=True)
        finally:
            for each in [*psutil.Process(service.pid).children(recursive=True), service]:
                each.terminate()
            service.wait()
    ratios = [
        own["tokens_per_cpu_second"] / other["tokens_per_cpu_second"]
        for own, other in zip(found["loop"], found["train"], strict=True)
    ]
    result = {"machine": describe_machine(torch.device("cpu")), **found, "ratios": ratios}
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(
        f"tokens per CPU second, the loop's to those of train: {statistics.median(ratios):.2f} "
        f"({shown})"
    )
    if args.output:
        write_results(args.output, f"python -m benchmarks.service {' '.join(argv)}", result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
