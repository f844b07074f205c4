"""Twenty steps of every combination of recompute, placement, offload and activation offload against the plain run.

    python -m tests.parity.all_combinations --output benchmarks/results/all_combinations.json

Some twenty minutes on two cores, so it is no test; test_combinations.py trains a few of them. The plain run shards
fully, recomputes every block and offloads nothing. Compared are the losses and gradient norms of all steps, and the
adapter after them: to the bit, or by the largest difference relative to the plain run's (of the adapter: of a tensor,
by norm).

Exits with 1 if a run fails or differs by more than TOLERANCE.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from tests.tiny import _free_port, flags, make_model, make_rows, on_ranks, read_metrics, write_rows

TOLERANCE = 1e-6
STEPS, BLOCKS, AT_ONCE = 20, 3, 12
COMMON = {"num_epochs": STEPS, "batch_size": 2, "gradient_accumulation_steps": 2, "lr": 1e-3, "precision": "fp32"}
COMMON |= {"quant_cache": "off", "log_to": "jsonl", "save_minutes": 0}

# What is trained. The mixture's experts have adapters too, which takes no dropout.
CASES: dict[str, dict[str, Any]] = {
    "qlora": {"train_type": "qlora", "lora_dropout": 0.2},
    "lora": {"train_type": "lora", "lora_dropout": 0.2},
    "bnb_dora": {"train_type": "bnb_dora"},
    "hqq_lora": {"train_type": "hqq_lora"},
    "mixture": {"train_type": "qlora", "lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj"},
}

Combination = Mapping[str, Any]  # options of train.py

PLAIN: Combination = {
    "recompute": "all",
    "sharding_strategy": "full_shard",
    "use_cpu_offload": False,
    "use_activation_cpu_offload": False,
}
_CHOICES: dict[str, Sequence[Any]] = {
    "recompute": ("all", 1, "none"),
    "sharding_strategy": ("full_shard", "ddp", "shard_grad_op"),
    "use_cpu_offload": (False, True, 2),
    "use_activation_cpu_offload": (False, True),
}


def combinations() -> Iterator[Combination]:
    """All but those that train.py refuses: without recompute no activations are offloaded."""
    for values in itertools.product(*_CHOICES.values()):
        chosen = dict(zip(_CHOICES, values, strict=True))
        if not (chosen["recompute"] == "none" and chosen["use_activation_cpu_offload"]):
            yield chosen


def pairwise() -> list[Combination]:
    """A few of them in which every two choices of two options occur together, if they may."""

    def pairs(chosen: Combination) -> set[Any]:
        return set(itertools.combinations(chosen.items(), 2))

    everything = list(combinations())
    found: list[Combination] = []
    left = set().union(*map(pairs, everything))
    while left:
        found.append(max(everything, key=lambda chosen: len(left & pairs(chosen))))
        left -= pairs(found[-1])
    return found


class Result(NamedTuple):
    """What a run did."""

    losses: list[float]
    grad_norms: list[float]
    adapter: dict[str, torch.Tensor]


class Difference(NamedTuple):
    """Of a run from the plain one, relative; 0 where all bits are the same."""

    losses: float
    grad_norms: float
    adapter: float

    @property
    def most(self) -> float:
        return max(self)


def make_folder(folder: Path, case: str, **shape: Any) -> dict[str, Any]:
    """A tiny model, of this shape, and rows; the options to train them."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    kind, shape = ("mixtral", experts) if case == "mixture" else ("llama", shape)
    model = make_model(folder / "model", kind, num_hidden_layers=BLOCKS, **shape)
    rows = write_rows(folder / "rows.jsonl", make_rows(16))
    return COMMON | CASES[case] | {"model_name": model, "dataset": rows}


def train_each(commands: list[list[str]], ports: list[int]) -> int:
    """Train one after the other in this rank."""
    import train

    for argv, port in zip(commands, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)  # another one, so that no rank meets those of the run before
        if status := train.main(argv):
            return status
    return 0


def train_combinations(
    case: str, ranks: int, chosen: Sequence[Combination], folder: Path, *, steps: int = STEPS, **shape: Any
) -> Iterator[tuple[Combination, Difference]]:
    """Train the plain run and each of `chosen`, some in a process; gives each one's difference from the plain run.

    Raises:
        RuntimeError: a run failed.
    """
    options = {**make_folder(folder, case, **shape), "max_steps": steps}
    runs, plain = [PLAIN, *chosen], None
    for first in range(0, len(runs), AT_ONCE):
        now = runs[first : first + AT_ONCE]
        outputs = [folder / str(first + number) for number in range(len(now))]
        commands = [flags(output_dir=output, **options, **each) for output, each in zip(outputs, now, strict=True)]
        ports = [_free_port() for _ in commands]
        statuses, output = on_ranks(ranks, train_each, (commands, ports), folder / f"{first}-logs")
        if any(statuses):
            raise RuntimeError(f"{case} on {ranks}: a run failed:\n{output[-5000:]}")
        found = [read_result(path) for path in outputs]
        if plain is None:
            plain, *found = found
            now = now[1:]
        for each, result in zip(now, found, strict=True):
            yield each, compare(plain, result)


def read_result(output_dir: Path) -> Result:
    adapter = load_file(output_dir / "adapter_model.safetensors")
    return Result(read_metrics(output_dir), read_metrics(output_dir, "grad_norm"), adapter)


def compare(plain: Result, other: Result) -> Difference:
    assert len(plain.losses) == len(plain.grad_norms) == len(other.losses) == len(other.grad_norms)
    assert plain.adapter.keys() == other.adapter.keys()
    assert len(set(plain.losses)) > len(plain.losses) // 2 and all(value.any() for value in plain.adapter.values())

    def of_numbers(one: list[float], another: list[float]) -> float:
        return max(abs(b - a) / abs(a) for a, b in zip(one, another, strict=True))

    adapters = (
        0.0 if torch.equal(value, other.adapter[name]) else float((other.adapter[name] - value).norm() / value.norm())
        for name, value in plain.adapter.items()
    )
    return Difference(
        of_numbers(plain.losses, other.losses), of_numbers(plain.grad_norms, other.grad_norms), max(adapters)
    )


def measure(case: str, ranks: int, chosen: Sequence[Combination]) -> dict[str, Any]:
    """Combinations of a case: how many are the plain run to the bit, and by how much the others differ."""
    counts: Counter[str] = Counter()
    worst = Difference(0.0, 0.0, 0.0)
    differing = []
    with tempfile.TemporaryDirectory() as folder:
        for each, difference in train_combinations(case, ranks, chosen, Path(folder)):
            counts["runs"] += 1
            counts["bit-equal"] += difference.most == 0.0
            worst = Difference(*map(max, zip(worst, difference, strict=True)))
            if difference.most > 0:
                differing.append({**each, **difference._asdict()})
            if difference.most > TOLERANCE:
                print(f"{case} on {ranks}: {each} differs: {difference}", flush=True)
    return {**counts, "largest_difference": worst._asdict(), "not_bit_equal": differing}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--pairwise", action="store_true", help="so many that every two choices occur together")
    parser.add_argument("--output", default="", help="JSON file to write; what it has of other cases stays")
    args = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    failed = False
    for case, ranks in itertools.product(args.cases, args.ranks):
        started = time.monotonic()
        result = measure(case, ranks, pairwise() if args.pairwise else list(combinations()))
        worst = max(result["largest_difference"].values())
        failed |= worst > TOLERANCE
        took = time.monotonic() - started
        print(
            f"{case} on {ranks}: {result['runs']} runs, {result['bit-equal']} bit-equal, "
            f"largest difference {worst:.1e}, {took:.0f} s",
            flush=True,
        )
        if args.output:
            write(Path(args.output), argv, f"{case}, {ranks} ranks", result)
    return int(failed)


def write(path: Path, argv: list[str], name: str, result: dict[str, Any]) -> None:
    before = json.loads(path.read_text())["cases"] if path.exists() else {}
    command = " ".join(["python -m tests.parity.all_combinations", *argv])
    record = {"command": command, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    record |= {"steps": STEPS, "tolerance": TOLERANCE, "cases": {**before, name: result}}
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
