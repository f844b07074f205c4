"""The work of the host for a decoder block in a step of QLoRA: launches, operators, views, time.

    python benchmarks/host.py --before a0495af4 --output benchmarks/results/host.json

Runs on the stand-in for CUDA (stand_in/README.md), whose kernels return at once: time goes to
Python, autograd and torch's dispatch. The difference between steps with 12 and with 4 blocks of an
8B's shape belongs to 8 blocks; 4,096 tokens on one rank in bf16, with all blocks recomputed and
with none. "before" is the code of a commit, computed in the plain ways; "after" is this code, with
linear layers computed together and one launch in the place of each kernel in Triton
(stand_in/kernels.py); "graphs" is the same with blocks that recompute as CUDA graphs, whose
replay costs the host nothing here, and about 10 us on a GPU.

All run at once, in a process each, and wait for each other after each step: whatever slows the
machine for a while slows all. Times are CPU seconds of the process, the median of the steps; a
turn starts them anew, and the median turn counts. Counts are the same in all steps.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
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
# They return their input's memory, and are not declared to.
OTHER_VIEWS = ("_unsafe_view",)
# A side that is compared with "before" -> the name of its ratios.
RATIOS = {"after": "ratio", "graphs": "graphs' ratio"}
# What a process prints before each result.
RESULT = "result: "


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


def measure(ways: str, rounds: int) -> Iterator[Any]:
    """Yields, for each number of blocks and each of RECOMPUTE, a step's counts, and then the
    microseconds of the host in each of `rounds` steps.
    """
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
    if ways == "graphs":
        use_graphs(trainer.model)
    data = StepRows(0, *rows)
    for number in (MORE, FEWER):
        del find_blocks(trainer.model)[number:]
        for recompute in RECOMPUTE:
            set_recompute(trainer.model, number if recompute == "all" else 0)
            yield counts_of_step(trainer, data)
            for _ in range(rounds):
                started = time.process_time()
                trainer.train_step(data)
                yield 1e6 * (time.process_time() - started)


def use_graphs(model: Any) -> None:
    """Have blocks that recompute run as graphs."""
    from fsdp_qlora.sharding.graphed import GraphedBlocks
    from fsdp_qlora.sharding.recompute import set_graphs

    set_graphs(model, GraphedBlocks(4096))


def counts_of_step(trainer: Any, data: Any) -> dict[str, int]:
    """Launches, operators, views and waits of a step, after some that warm up."""
    from stand_in.counts import recording

    for _ in range(3):
        trainer.train_step(data)
    with recording() as counts:
        trainer.train_step(data)
    with Operators() as operators:
        trainer.train_step(data)
    return {
        "launches": counts.kernels,
        "operators": operators.calls.total(),
        "views": operators.views(),
        "waits": counts.syncs.total(),
    }


class Side:
    """The code of a folder, measured in a process that goes on to its next result when asked."""

    def __init__(self, tree: Path, ways: str, rounds: int, folder: Path) -> None:
        from stand_in.environment import PYTHON, variables

        folder.mkdir()
        environment = variables(folder, {"PHANTOM_GIB": 80, "OMP_NUM_THREADS": 1})
        environment["PYTHONPATH"] = str(tree)
        self.process = subprocess.Popen(
            [str(PYTHON), __file__, "--measure", ways, "--rounds", str(rounds)],
            env=environment,
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def next(self) -> Any:
        """The next result of `measure`. Raises RuntimeError if the process ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith(RESULT):
                return json.loads(line.removeprefix(RESULT))
        raise RuntimeError(f"the process of {self.process.args!r} ended with {self.process.wait()}")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def take_turns(sides: dict[str, Side], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """A block's part of a step, by recomputation and side: counts, and the host's microseconds."""
    steps: dict[tuple[str, int, str], dict[str, float]] = {}
    for number in (MORE, FEWER):
        for recompute in RECOMPUTE:
            counts = {name: side.next() for name, side in sides.items()}
            times = [{name: side.next() for name, side in sides.items()} for _ in range(rounds)]
            for name in sides:
                host = statistics.median(by_side[name] for by_side in times)
                steps[recompute, number, name] = {**counts[name], "host_us": host}
    return {
        recompute: {
            name: _of_a_block(steps[recompute, MORE, name], steps[recompute, FEWER, name])
            for name in sides
        }
        for recompute in RECOMPUTE
    }


def _of_a_block(many: dict[str, float], few: dict[str, float]) -> dict[str, float]:
    return {name: (many[name] - few[name]) / (MORE - FEWER) for name in many}


def summary(turns: list[dict[str, dict[str, dict[str, float]]]]) -> dict[str, Any]:
    """For each recomputation, the turn whose ratio of host time is the median, its ratios, and
    the ratios of host time of all turns.
    """
    found: dict[str, Any] = {}
    for recompute in RECOMPUTE:
        of_turns = sorted(
            (_with_ratios(turn[recompute]) for turn in turns),
            key=lambda by_name: by_name["ratio"]["host_us"],
        )
        found[recompute] = of_turns[len(of_turns) // 2]
        for ratio in RATIOS.values():
            of_all = [by_name[ratio]["host_us"] for by_name in of_turns]
            found[recompute][f"{ratio}s of host_us"] = sorted(of_all)
    return found


def _with_ratios(by_name: dict[str, Any]) -> dict[str, Any]:
    before = by_name["before"]
    found = dict(by_name)
    for side, ratio in RATIOS.items():
        after = by_name[side]
        found[ratio] = {name: after[name] / value for name, value in before.items() if value}
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default="HEAD", help="the commit to compare with")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30, help="steps that are timed in a turn")
    parser.add_argument("--measure", choices=["plain", "chosen", "graphs"], help=argparse.SUPPRESS)
    parser.add_argument("--output")
    args = parser.parse_args(argv)
    if args.measure:
        results = measure(args.measure, args.rounds)
        for _ in sys.stdin:
            print(RESULT, json.dumps(next(results)), flush=True)
        return 0
    from benchmarks.answers import copy_of
    from benchmarks.common import describe_machine, write_results

    turns = []
    with tempfile.TemporaryDirectory() as folder:
        before = copy_of(args.before, Path(folder) / "before")
        for turn in range(args.turns):
            homes = Path(folder) / str(turn)
            homes.mkdir()
            with contextlib.ExitStack() as stack:
                sides = {
                    "before": Side(before, "plain", args.rounds, homes / "before"),
                    "after": Side(ROOT, "chosen", args.rounds, homes / "after"),
                    "graphs": Side(ROOT, "graphs", args.rounds, homes / "graphs"),
                }
                for side in sides.values():
                    stack.callback(side.close)
                turns.append(take_turns(sides, args.rounds))
    found = summary(turns)
    for recompute, by_name in found.items():
        print(f"recompute {recompute}")
        for name, values in by_name.items():
            print(f"  {name}: {values}")
    if args.output:
        command = " ".join(["python benchmarks/host.py", *argv])
        machine = describe_machine(torch.device("cpu"))
        result = {"machine": machine, "before": args.before, "of a block's step": found}
        write_results(args.output, command, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
