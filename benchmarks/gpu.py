"""Speed and memory of qlora training on one GPU, without a checkpoint: `python benchmarks/gpu.py --output gpu.json`.

One command, under nine minutes: each part runs in a process of its own for a limited time, and one that fails or
takes too long is an `error` in the JSON and does not stop the others. What is measured stands in benchmarks/README.md.
--report writes one file for people, to be sent to the project: figures beside what is aimed at, what failed, versions;
without paths and names of the machine and its user.

Exits with 1 if a part fails or a loss does not fall; that a card is too small for a batch, a missed aim, and a part for
which no time was left are no failures. Without a GPU it says so and exits with 0; --tiny runs the same code on a tiny
shape in one process, on the CPU where there is no GPU. On the stand-in for CUDA there are no values to look at.
"""

import argparse
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import is_stand_in, write_results
from benchmarks.gpu_parts import PARTS
from benchmarks.gpu_report import command, describe_row, report
from benchmarks.gpu_rows import note
from benchmarks.gpu_steps import GIB
from fsdp_qlora.model.precision import PRECISIONS
from fsdp_qlora.ranks import distributed

MAX_SECONDS = 535.0


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, also on the CPU: tests this program")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    parser.add_argument("--layers", type=int, default=0, help="decoder blocks, if not the shape's own number")
    parser.add_argument("--precision", default="auto", choices=["auto", *PRECISIONS])
    parser.add_argument("--memory_gib", type=float, default=24.0, help="of the card that the 70B part pretends to have")
    parser.add_argument("--max_seconds", type=float, default=MAX_SECONDS, help="of all parts together")
    parser.add_argument("--output", default="", help="JSON file to write")
    parser.add_argument("--report", default="", help="Markdown file to write")
    parser.add_argument("--one_part", default="", help=argparse.SUPPRESS)  # by which the command calls itself
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run_here(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A part's results, from this process."""
    try:
        return PARTS[name].measure(args, distributed.read_ranks())
    except Exception as error:  # whatever it is, the other parts go on
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def variables_of_a_part() -> dict[str, str]:
    """The allocator as train.py sets it, and one card: TRL refuses to train in a process that sees several."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ, "CUDA_VISIBLE_DEVICES": first}


def run_apart(name: str, argv: list[str], seconds: float) -> dict[str, Any]:
    """A part's results, from a process of its own that is ended after `seconds`."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        command = [sys.executable, str(Path(__file__).resolve()), *argv, "--output", str(result)]
        command += ["--one_part", name, "--seconds", str(seconds)]
        with open(log, "w") as output:
            variables = variables_of_a_part()
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=variables)
            try:
                process.wait(max(seconds, 0.1))
                ending = f"exit status {process.returncode}"
            except subprocess.TimeoutExpired:
                ending = f"not done after {seconds:.0f} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        tail = log.read_text()[-1500:]
        found = json.loads(result.read_text()) if result.exists() else {"error": ending, "output": tail}
        if not ending.endswith("status 0"):  # what is there is what was known by then
            found |= {"error": ending}
    return {**found, "part_seconds": time.perf_counter() - started}


def run_parts(args: argparse.Namespace, argv: list[str]) -> dict[str, dict[str, Any]]:
    """All parts in their order, while there is time."""
    end = time.perf_counter() + args.max_seconds
    results = {}
    for name in args.parts:
        print(f"{name} ...", flush=True)
        if args.tiny:
            args.seconds, started = PARTS[name].seconds, time.perf_counter()
            results[name] = run_here(name, args)
            results[name]["part_seconds"] = time.perf_counter() - started
            gc.collect()
        else:
            left = end - time.perf_counter()
            results[name] = (
                run_apart(name, argv, min(PARTS[name].seconds, left)) if left > 15 else {"left_out": "no time left"}
            )
        for each in results[name].get("rows", []) if args.tiny or is_stand_in() else []:
            each["holds"] = None  # of a shape too small to measure anything, or of kernels that compute nothing
        for line in describe(results[name]):
            print(f"  {line}", flush=True)
    return results


def describe(result: dict[str, Any]) -> list[str]:
    """A part's results in a few lines, for people."""
    if "left_out" in result:
        return [f"left out: {result['left_out']}"]
    lines = [f"FAILED: {result['error']}"] if "error" in result else []
    lines += [describe_row(each) for each in result.get("rows", [])]
    lines += [f"{name} {value:.1f} GB/s" for name, value in result.get("gb_per_second", {}).items()]
    lines += [
        f"{name} decoded at {100 * row['of_bandwidth']:.0f}% of that"
        for name, row in result.get("decoding", {}).items()
    ]
    for name in ("blocks", "full_depth"):
        if name in result:
            lines += [f"{name}: {line}" for line in describe(result[name]) or [str(result[name])]]
    lines += [f"{name}: {row}" for name, row in result.get("peers", {}).items()]
    for batch, row in result.get("batches", {}).items():
        if "out_of_memory" in row:
            lines.append(f"{batch}: out of memory")
            continue
        memory = result["memory_bytes"].get(batch, {})
        reserved = f", {memory['peak_reserved'] / GIB:.1f} GiB reserved" if "peak_reserved" in memory else ""
        share = f", MFU {100 * row['mfu']:.0f}%" if row["mfu"] else ""
        losses = f", loss {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}"
        speed = f"{row['tokens_per_second']:.0f} tokens/s, {row['median_step_seconds']:.2f} s"
        lines.append(f"{batch}: {speed}{share}{reserved}{losses}")
    if "host_seconds_per_step" in result:
        lines.append(f"host: {1e3 * result['host_seconds_per_step']:.0f} ms a step")
    return lines


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    if args.one_part:
        found = run_here(args.one_part, args)
        note(args, (json.loads(Path(args.output).read_text()) if Path(args.output).exists() else {}) | found)
        return 0
    if not torch.cuda.is_available() and not args.tiny:
        print("No GPU is visible, so nothing was measured (--tiny runs the same code on the CPU).")
        return 0
    started = time.perf_counter()
    results = run_parts(args, argv)
    has_values = not is_stand_in()
    record = {"options": {**vars(args), "output": "", "report": ""}, "has_values": has_values, "parts": results}
    if args.output:
        write_results(args.output, " ".join(["python benchmarks/gpu.py", *argv]), record)
    if args.report:
        Path(args.report).parent.mkdir(parents=True, exist_ok=True)
        Path(args.report).write_text(report(record, command(argv)))
        print(f"Written: {args.report}: a file to send, without paths and names of this machine")
    print(f"{time.perf_counter() - started:.0f} s in all")
    if not has_values:
        print("On the stand-in for CUDA: kernels compute nothing, so no figure of time or loss means anything.")
    bad = [
        name
        for name, result in results.items()
        if "error" in result or (has_values and not result.get("loss_falls", True))
    ]
    for name in bad:
        print(f"FAILED: {name}: see its error above, or its loss did not fall.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
