"""The work of the host for a decoder block in a step of QLoRA: launches, operators, views, time.

    python benchmarks/host.py --before a0495af4 --output benchmarks/results/host.json

Runs on the stand-in for CUDA (stand_in/README.md), whose kernels return at once: time goes to
Python, autograd and torch's dispatch. The difference between steps with 12 and with 4 blocks of an
8B's shape belongs to 8 blocks; 4,096 tokens on one rank in bf16, with all blocks recomputed and
with none. "before" is the code of a commit, computed in the plain ways; "after" is this code, with
linear layers computed together and one launch in the place of each kernel in Triton
(stand_in/kernels.py).

Both take turns, in processes of their own. Times are CPU seconds of the process, the shortest step;
counts are the same in all steps.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# A folder that is measured comes first, so that its code is run and not this one's.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
MORE = 12
FEWER = 4
RECOMPUTE = ("all", "none")
COUNTED = ("launches", "operators", "views", "waits")
# They return their input's memory, and are not declared to.
OTHER_VIEWS = ("_unsafe_view",)


class Operators(TorchDispatchMode):
    """Counts torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))

    def views(self) -> int:
        return sum(count for func, count in self.calls.items() if _is_view(func))


def _is_view(func: Any) -> bool:
    infos = [each.alias_info for each in func._schema.returns]
    reads = [info is not None and not info.is_write for info in infos]
    return (bool(reads) and all(reads)) or func._schema.name.endswith(OTHER_VIEWS)


def measure(ways: str, rounds: int) -> dict[str, dict[str, float]]:
    """A block's part of a step, for each of RECOMPUTE: counts, and microseconds of the host."""
    from benchmarks.standin_memory import build
    from fsdp_qlora.data.batches.schedule import StepRows
    from fsdp_qlora.model.architecture.decoder import find_blocks
    from fsdp_qlora.sharding.recompute import set_recompute

    if ways != "plain":
        from fsdp_qlora.model.kernels.in_use import use_ways
        from stand_in.kernels import chosen_ways

        use_ways(chosen_ways())
    options = {"attn_implementation": "sdpa", "recompute": "none"}
    trainer, _, rows = build(shape="8b", layers=MORE, **options)
    found: dict[str, list[dict[str, float]]] = {recompute: [] for recompute in RECOMPUTE}
    for number in (MORE, FEWER):
        del find_blocks(trainer.model)[number:]
        for recompute, measured in found.items():
            set_recompute(trainer.model, number if recompute == "all" else 0)
            measured.append(measure_step(trainer, StepRows(0, *rows), rounds))
    return {
        recompute: {name: (many[name] - few[name]) / (MORE - FEWER) for name in many}
        for recompute, (many, few) in found.items()
    }


def measure_step(trainer: Any, data: Any, rounds: int) -> dict[str, float]:
    from stand_in.counts import recording

    for _ in range(3):
        trainer.train_step(data)
    with recording() as counts:
        trainer.train_step(data)
    with Operators() as operators:
        trainer.train_step(data)
    times = []
    for _ in range(rounds):
        started = time.process_time()
        trainer.train_step(data)
        times.append(1e6 * (time.process_time() - started))
    return {
        "launches": counts.kernels,
        "operators": operators.calls.total(),
        "views": operators.views(),
        "waits": counts.syncs.total(),
        "host_us": min(times),
    }


def in_process(tree: Path, ways: str, rounds: int) -> dict[str, dict[str, float]]:
    """`measure` of the code in a folder, in a process of its own."""
    from stand_in.environment import PYTHON, variables

    with tempfile.TemporaryDirectory() as folder:
        environment = variables(Path(folder), {"PHANTOM_GIB": 80, "OMP_NUM_THREADS": 1})
        environment["PYTHONPATH"] = str(tree)
        command = [str(PYTHON), __file__, "--measure", ways, "--rounds", str(rounds)]
        done = subprocess.run(
            command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True
        )
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def take_turns(trees: dict[str, tuple[Path, str]], turns: int, rounds: int) -> dict[str, Any]:
    """Counts and least times by recomputation and tree, and the ratio of the two trees."""
    found: dict[str, Any] = {}
    for _ in range(turns):
        for name, (tree, ways) in trees.items():
            measured = in_process(tree, ways, rounds)
            for recompute, now in measured.items():
                known = found.setdefault(recompute, {}).setdefault(name, now)
                assert [known[count] for count in COUNTED] == [now[count] for count in COUNTED]
                known["host_us"] = min(known["host_us"], now["host_us"])
    first, last = trees
    for by_name in found.values():
        by_name["ratio"] = {
            name: by_name[last][name] / value for name, value in by_name[first].items() if value
        }
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default="HEAD", help="the commit to compare with")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9, help="steps that are timed in a turn")
    parser.add_argument("--measure", choices=["plain", "chosen"], help="only this, as JSON")
    parser.add_argument("--output")
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(measure(args.measure, args.rounds)))
        return 0
    from benchmarks.answers import copy_of
    from benchmarks.common import describe_machine, write_results

    with tempfile.TemporaryDirectory() as folder:
        before = copy_of(args.before, Path(folder) / "before")
        trees = {"before": (before, "plain"), "after": (ROOT, "chosen")}
        found = take_turns(trees, args.turns, args.rounds)
    for recompute, by_name in found.items():
        for name, values in by_name.items():
            figures = ", ".join(f"{value:.3g} {what}" for what, value in values.items())
            print(f"recompute {recompute}, {name}: {figures}")
    if args.output:
        command = " ".join(["python benchmarks/host.py", *argv])
        machine = describe_machine(torch.device("cpu"))
        result = {"machine": machine, "before": args.before, "of a block's step": found}
        write_results(args.output, command, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
