"""Instructions that the host runs for a decoder block in a micro-batch: `python benchmarks/host_work.py`.

They are what keeps a fast GPU waiting at few tokens, and unlike times they are the same on a busy machine. Counted by
valgrind's callgrind in a forward and a backward pass of qlora on the stand-in for CUDA (tests/phantom/README.md), where
a kernel costs nothing but its launch: a model of three blocks less a model of one. Two minutes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROOT = Path(__file__).resolve().parent.parent
BLOCKS, FEWER, PASSES = 3, 1, 3


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=("8b", "70b"))
    parser.add_argument("--output", default="", help="JSON file to write")
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)  # by which the command calls itself
    args = parser.parse_args(argv)
    if args.run:
        run_passes(args.shape, args.run)
        return 0
    found = {recompute: count(args.shape, recompute) for recompute in ("all", "none")}
    for recompute, instructions in found.items():
        print(f"recompute {recompute}: {instructions / 1e6:.2f} million instructions per block and micro-batch")
    if args.output:
        command = f"python benchmarks/host_work.py {' '.join(argv)}"
        Path(args.output).write_text(json.dumps({"command": command, "shape": args.shape, **found}, indent=2) + "\n")
    return 0


def count(shape: str, recompute: str) -> float:
    """Instructions of one block."""
    from tests.phantom import environment

    reason = environment.why_not() or ("" if shutil.which("valgrind") else "valgrind is not installed")
    if reason:
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        variables = environment.variables(Path(folder), {"PHANTOM_GIB": 40, "OMP_NUM_THREADS": 1, "PYTHONHASHSEED": 0})
        counter = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counts"]
        command = [*counter, str(environment.PYTHON), __file__, "--shape", shape, "--run", recompute]
        done = subprocess.run(command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            sys.exit(done.stdout.decode(errors="replace"))
        most, fewer = (_total(Path(folder) / f"counts.{number}") for number in (1, 2))
    return (most - fewer) / (BLOCKS - FEWER) / PASSES


def _total(counts: Path) -> int:
    [line] = [line for line in counts.read_text().splitlines() if line.startswith("totals:")]
    return int(line.split()[1])


def run_passes(shape: str, recompute: str) -> None:
    """Forward and backward passes, of which callgrind counts those of BLOCKS blocks, and then those of FEWER."""
    import gc

    from benchmarks.standin_memory import passes
    from fsdp_qlora.model.models import find_blocks
    from fsdp_qlora.sharding.recompute import set_recompute

    model, run = passes(shape, BLOCKS)
    gc.collect()
    gc.freeze()  # as the training loop does
    for number in (BLOCKS, FEWER):
        del find_blocks(model)[number:]
        set_recompute(model, number if recompute == "all" else 0)
        for index in range(2 + PASSES):
            if index == 2:
                _callgrind("--instr=on")
                _callgrind("--zero")
            run()
        _callgrind("--dump")
        _callgrind("--instr=off")


def _callgrind(*arguments: Any) -> None:
    subprocess.run(["callgrind_control", *arguments, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
