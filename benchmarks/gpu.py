"""Measures and tests this program on one GPU, without a checkpoint: `python benchmarks/gpu.py
--report report.md`.

Each part runs in a process of its own for a limited time, and one that fails or takes too long is
an `error` in the JSON and does not stop the others. Some parts measure (gpu_parts.py,
gpu_models.py), others are tests of tests/gpu; tests next to each other run side by side.
benchmarks/README.md has a table of the parts. --report writes one Markdown file to send to the
project, after each part: figures with their aims and plans, what failed, versions; without paths
and names of the machine and its user.

Exits with 1 if a part fails or a loss does not fall; that a card is too small for a batch, a missed
aim, and a part for which no time was left are no failures. Without a GPU it says so and exits with
0; --tiny runs the measured parts on a tiny shape in one process, on the CPU where there is no GPU.
On the stand-in for CUDA there are no values to look at.
"""

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# So that it runs from a clone that is not installed. Nothing here imports torch, which takes
# seconds.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_report import command, count_tests, describe, report, scrub

ROOT = Path(__file__).resolve().parent.parent


class Part(NamedTuple):
    """seconds: after which its processes are ended, imports included. tests: pytest's words, if it
    is of tests.
    """

    seconds: float
    tests: tuple[str, ...] = ()


PARTS: dict[str, Part] = {
    "box": Part(40),
    "kernels": Part(60, ("tests/gpu/test_kernels.py",)),
    "ways": Part(90),
    "rounding": Part(60),
    "attention": Part(60),
    "graphs": Part(90),
    "speed": Part(150),
    "values": Part(115, ("tests/gpu/test_values.py",)),
    "ranks": Part(115, ("tests/gpu/test_two_ranks.py", "-k", "losses and not nccl")),
    "nccl": Part(115, ("tests/gpu/test_two_ranks.py", "-k", "losses and nccl")),
    "gathers": Part(115, ("tests/gpu/test_two_ranks.py", "-k", "patterns")),
    "resume": Part(115, ("tests/gpu/test_resume.py",)),
    "answers": Part(115, ("tests/gpu/test_answers.py",)),
    "offload": Part(65),
    "host_activations": Part(60),
    "decode": Part(90),
    "types": Part(130),
    "context": Part(110),
    "batches": Part(60),
    "formats": Part(60),
    "experts": Part(60),
    "whole": Part(150),
    "alternatives": Part(45),
    "padding": Part(60),
}
# What is run in one go where a card is lent for minutes: most information first.
SETS = {
    "first": [
        "box",
        "kernels",
        "speed",
        "values",
        "ranks",
        "nccl",
        "gathers",
        "resume",
        "answers",
        "offload",
        "decode",
    ],
    "second": ["types", "context"],
    "third": ["formats", "experts", "whole", "batches", "alternatives"],
}


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny shape, also on the CPU: tests this program"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=[*SETS, *PARTS],
        default=list(SETS),
        help="parts to run, in this order",
    )
    parser.add_argument(
        "--layers", type=int, default=0, help="decoder blocks, if not the shape's own number"
    )
    parser.add_argument("--precision", default="auto", help="precision of the measured parts")
    parser.add_argument(
        "--memory_gib",
        type=float,
        default=24.0,
        help="memory of the card that some parts pretend to have",
    )
    parser.add_argument(
        "--ways",
        default="",
        help="of the part speed: ways to compare, of plain,lean,lean+kernels,auto; the last one is "
        "beside the peers",
    )
    parser.add_argument(
        "--fa4", action="store_true", help="of the part attention: FlashAttention 4, 80,000 tokens"
    )
    parser.add_argument(
        "--max_seconds", type=float, default=0.0, help="maximum seconds of all parts together"
    )
    parser.add_argument(
        "--patience",
        type=float,
        help="factor for the seconds of each part (default: 3, and 1 with --max_seconds)",
    )
    parser.add_argument("--output", default="", help="JSON file to write")
    parser.add_argument("--report", default="", help="Markdown file to write")
    parser.add_argument("--log", default="", help="file for the output of the parts")
    # by which the command calls itself
    parser.add_argument("--one_part", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.patience = args.patience or (1.0 if args.max_seconds else 3.0)
    args.parts = [part for name in args.parts for part in SETS.get(name, [name])]
    return args


def has_gpu() -> bool:
    """Whether the driver has a device for this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    number = ctypes.c_int()
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(number)) == 0
        and number.value > 0
    )


def variables_of_a_part() -> dict[str, str]:
    """The allocator as train.py sets it, one card (TRL refuses to train in a process that sees
    several), and pytest without plugins that happen to be installed, and with long lines for
    failures.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    given = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1", **os.environ}
    paths = os.pathsep.join([str(ROOT), *filter(None, [given.get("PYTHONPATH")])])
    return given | {
        "CUDA_VISIBLE_DEVICES": first,
        "PYTHONPATH": paths,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "COLUMNS": "240",
    }


def command_of(name: str, argv: list[str], output: Path) -> list[str]:
    """The command line of a part, which writes its results to that file if it measures."""
    if tests := PARTS[name].tests:
        pytest = [
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-vv",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "--durations=5",
        ]
        return [sys.executable, *pytest, *tests]
    return [
        sys.executable,
        str(Path(__file__).resolve()),
        *argv,
        "--output",
        str(output),
        "--one_part",
        name,
    ]


def run_apart(name: str, argv: list[str], seconds: float, folder: Path) -> dict[str, Any]:
    """A part's results, from a process of its own that is ended after `seconds`; its output is in
    folder/NAME.log.
    """
    started = time.perf_counter()
    result = folder / f"{name}.json"
    log = folder / f"{name}.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            command_of(name, argv, result),
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=variables_of_a_part(),
            start_new_session=True,
        )
        ending, cpu_seconds = _wait(process, started + max(seconds, 0.1))
    text = log.read_text(errors="replace")
    found = (
        json.loads(result.read_text())
        if result.exists()
        else count_tests(text)
        if PARTS[name].tests
        else {}
    )
    if ending:  # what is there is what was known by then
        found |= {"error": ending} | (
            {} if found.get("tests") or found.get("rows") else {"output": text[-1500:]}
        )
    return {**found, "part_seconds": time.perf_counter() - started, "part_cpu_seconds": cpu_seconds}


def _wait(process: "subprocess.Popen[bytes]", end: float) -> tuple[str, float]:
    """How a process ended that is given until then, "" if well, and the CPU seconds of it and of
    those it waited for; none of its group is left.
    """
    started = time.perf_counter()
    done = 0
    while not done and time.perf_counter() < end:
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    ending = "" if done else f"not done after {time.perf_counter() - started:.0f} s"
    if not done:
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if done and process.returncode:
        ending = f"exit status {process.returncode}"
    return ending, usage.ru_utime + usage.ru_stime


def run_here(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A measured part's results, from this process."""
    from benchmarks.gpu_models import measure_part

    started = time.perf_counter()
    found = measure_part(name, args)
    gc.collect()
    return {**found, "part_seconds": time.perf_counter() - started}


def run_parts(
    args: argparse.Namespace, argv: list[str], folder: Path
) -> Iterator[dict[str, dict[str, Any]]]:
    """The results of one part after another, or of tests side by side, while there is time."""
    end = time.perf_counter() + args.max_seconds if args.max_seconds else float("inf")
    numbered = enumerate(args.parts)
    for _, group in itertools.groupby(
        numbered, key=lambda each: -1 if PARTS[each[1]].tests else each[0]
    ):
        names = [name for _, name in group]
        print(f"{', '.join(names)} ...", flush=True)
        if args.tiny and not PARTS[names[0]].tests:
            yield {name: run_here(name, args) for name in names}
            continue
        most = max(PARTS[name].seconds for name in names) * args.patience
        left = end - time.perf_counter()
        if left <= 15:
            yield {name: {"left_out": "no time left"} for name in names}
            continue
        run = partial(run_apart, argv=argv, seconds=min(most, left), folder=folder)
        with ThreadPoolExecutor(len(names)) as pool:
            yield dict(zip(names, pool.map(run, names), strict=True))


def write(
    args: argparse.Namespace, argv: list[str], results: dict[str, dict[str, Any]], folder: Path
) -> bool:
    """Write what is known by now; returns whether what was measured are values, and not those of
    the stand-in.
    """
    has_values = all(result.get("has_values", True) for result in results.values())
    for each in itertools.chain(*(result.get("rows", []) for result in results.values())):
        # too small to measure, or not computed
        each["holds"] = each["holds"] if has_values and not args.tiny else None
    record = {
        "command": command(argv),
        "date": time.strftime("%Y-%m-%d"),
        "has_values": has_values,
        "parts": results,
    }
    logs = (
        f"=== {name}\n{path.read_text(errors='replace')}"
        for name in results
        if (path := folder / f"{name}.log").exists()
    )
    for file, text in (
        (args.output, lambda: scrub(json.dumps(record, indent=2)) + "\n"),
        (args.report, lambda: report(record, command(argv))),
        (args.log, lambda: scrub("\n".join(logs))),
    ):
        if file:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(text())
    return has_values


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    if args.one_part:
        run_here(args.one_part, args)
        return 0
    if not args.tiny and not has_gpu():
        print("No GPU is visible, so nothing was measured (--tiny runs the same code on the CPU).")
        return 0
    results: dict[str, dict[str, Any]] = {}
    started = time.perf_counter()
    has_values = True
    with tempfile.TemporaryDirectory() as name:
        for found in run_parts(args, argv, Path(name)):
            results |= found
            has_values = write(args, argv, results, Path(name))
            for part, result in found.items():
                print(f"  {part}, {result.get('part_seconds', 0):.0f} s", flush=True)
                for line in describe(result):
                    print(f"    {line}", flush=True)
    if args.report:
        print(f"Written: {args.report}: a file to send, without paths and names of this machine")
    print(f"{time.perf_counter() - started:.0f} s in all")
    if not has_values:
        print(
            "On the stand-in for CUDA: kernels compute nothing, so no figure of time or loss "
            "means anything."
        )
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
