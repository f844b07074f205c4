"""Losses of many cases, for the tests on a GPU and for the reference from the CPU."""

import itertools
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from stand_in.environment import free_port
from tests.gpu.cases import COMMON, Case
from tests.gpu.runs import started
from tests.helpers.metrics import read_metrics
from tests.helpers.run import flags


@dataclass
class Result:
    """What came of a case: the losses of its steps, or the end of its process's output."""

    losses: list[float] = field(default_factory=list)
    failure: str = ""


def run_cases(
    cases: Mapping[str, Case],
    inputs: Callable[..., dict[str, object]],
    folder: Path,
    *,
    ranks: int = 1,
    backend: str = "",
    apart: bool = False,
) -> dict[str, Result]:
    """The losses of all cases, each with so many ranks on one card."""
    runs = {name: {**inputs(case.model), **COMMON, **case.options} for name, case in cases.items()}
    # Imports take as long as ten of these runs: a process for each only where cores are many.
    share = -(-len(runs) // max(1, len(os.sched_getaffinity(0)) // (4 * ranks)))
    shares = [
        dict(itertools.islice(runs.items(), first, first + share))
        for first in range(0, len(runs), share)
    ]
    with ThreadPoolExecutor(max(1, len(shares))) as pool:
        run = partial(run_all, ranks=ranks, backend=backend, apart=apart)
        folders = [folder / str(number) for number in range(len(shares))]
        failures = {
            name: (failure, part)
            for part, found in zip(folders, pool.map(run, shares, folders), strict=True)
            for name, failure in found.items()
        }
    return {
        name: Result(failure=failure) if failure else Result(read_metrics(output_of(part, name)))
        for name, (failure, part) in failures.items()
    }


def run_all(
    runs: Mapping[str, Mapping[str, object]],
    folder: Path,
    *,
    ranks: int = 1,
    backend: str = "",
    apart: bool = False,
    seconds: float = 900,
) -> dict[str, str]:
    """Train with each run's options in as few processes as possible: a run that fails or takes
    longer ends its process, and the next takes the rest.

    Returns:
        name -> the end of the process's output, empty where the run finished; its result is in
        `output_of`.
    """
    left = list(runs)
    failures = {}
    while left:
        lines = [flags(**{**runs[name], "output_dir": output_of(folder, name)}) for name in left]
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"runs{len(left)}.json"
        file.write_text(json.dumps([{"port": free_port(), "options": line} for line in lines]))
        program = ["-m", "tests.gpu.programs.many_runs", file, "--backend", backend]
        with started(program, folder / f"logs{len(left)}", ranks=ranks, apart=apart) as process:
            process.end_after(seconds)
            output = process.output()
        assert not backend or f"connected by {backend}" in output, output[-4000:]
        while left and _is_finished(output_of(folder, left[0])):
            failures[left.pop(0)] = ""
        if left:
            failures[left.pop(0)] = output[-4000:]
    return failures


def output_of(folder: Path, name: str) -> Path:
    return folder / name.replace(",", "").replace(" ", "_")


def _is_finished(output_dir: Path) -> bool:
    status = output_dir / "status.json"
    return status.exists() and json.loads(status.read_text())["state"] == "finished"
