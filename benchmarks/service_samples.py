"""Tokens of a service's samples per CPU second, beside an earlier commit's: `python -m
benchmarks.service_samples --model_name demo/model --before 0aef0280`.

One rank on a CPU, a 4-bit base with an adapter of rank 16, fp32: 16 samples of 64 tokens to one
prompt. Both services answer in turn. What counts are the tokens per CPU second of the service's
processes.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import tinker
import torch
from tinker import types

from benchmarks.answers import copy_of
from benchmarks.common import describe_machine, write_results
from benchmarks.service import KEY, RANK, cpu_seconds

PROMPT = list(range(100, 196))
SAMPLES = 16
TOKENS = 64


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name", required=True)
    parser.add_argument("--before", required=True, metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--output", default="")
    args = parser.parse_args(argv)
    found: dict[str, list[float]] = {"before": [], "now": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        services = {}
        try:
            for index, (side, commit) in enumerate((("before", args.before), ("now", "HEAD"))):
                code = copy_of(commit, folder / side)
                services[side] = start(args, code, folder / f"{side}_service", index)
            clients = {side: sampler(args, index) for index, side in enumerate(services)}
            for _ in range(args.rounds):
                for side, service in services.items():
                    found[side].append(sampled(clients[side], psutil.Process(service.pid)))
                print({side: round(speeds[-1], 1) for side, speeds in found.items()}, flush=True)
        finally:
            for service in services.values():
                for each in [*psutil.Process(service.pid).children(recursive=True), service]:
                    each.terminate()
                service.wait()
    ratio = statistics.median(found["now"]) / statistics.median(found["before"])
    print(f"tokens per CPU second: {ratio:.2f} times those of {args.before}")
    if args.output:
        result = {"machine": describe_machine(torch.device("cpu")), **found, "ratio": ratio}
        command = f"python -m benchmarks.service_samples {' '.join(argv)}"
        write_results(args.output, command, result)
    return 0


def address(args: argparse.Namespace, index: int) -> str:
    return f"http://127.0.0.1:{args.port + index}"


def start(
    args: argparse.Namespace, code: Path, folder: Path, index: int
) -> subprocess.Popen[bytes]:
    """A service by the code of a folder, that answers."""
    given = {
        "model_name": Path(args.model_name).resolve(),
        "train_type": "qlora",
        "precision": "fp32",
        "lora_rank": RANK,
        "context_length": 512,
        "quant_cache": "off",
        "folder": folder,
        "port": args.port + index,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "TINKER_API_KEY": KEY, "PYTHONPATH": str(code)}
    service = subprocess.Popen(
        [sys.executable, "-m", "fsdp_qlora", "serve", *words],
        stdout=subprocess.DEVNULL,
        env=environment | {"OMP_NUM_THREADS": "1"},
        cwd=code,
    )
    # tries again until it answers
    rest = tinker.RestClient(base_url=address(args, index), api_key=KEY)
    rest.get_server_capabilities().result()
    return service


def sampler(args: argparse.Namespace, index: int) -> Any:
    client = tinker.ServiceClient(base_url=address(args, index), api_key=KEY)
    name = str(Path(args.model_name).resolve())
    training = client.create_lora_training_client(name, rank=RANK).result()
    return training.save_weights_and_get_sampling_client("first")


def sampled(client: Any, service: psutil.Process) -> float:
    """Tokens of samples per CPU second of the service."""
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=1)
    before = cpu_seconds(service)
    answers = client.sample(prompt, SAMPLES, params).result().sequences
    tokens = sum(len(answer.tokens) for answer in answers)
    return tokens / (cpu_seconds(service) - before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
