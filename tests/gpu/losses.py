"""Losses of many cases, for the tests on a GPU and for the reference from the CPU."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.cases import COMMON, Case
from tests.gpu.runs import started
from tests.tiny import _free_port, flags, read_metrics


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
    seconds: float = 900,
) -> dict[str, Result]:
    """The losses of all cases, each with so many ranks on one card."""
    runs = {name: {**inputs(case.model), **COMMON, **case.options} for name, case in cases.items()}
    failures = run_all(runs, folder, ranks=ranks, backend=backend, seconds=seconds)
    return {
        name: Result(failure=failure) if failure else Result(read_metrics(output_of(folder, name)))
        for name, failure in failures.items()
    }


def run_all(
    runs: Mapping[str, Mapping[str, object]], folder: Path, *, ranks: int = 1, backend: str = "", seconds: float = 900
) -> dict[str, str]:
    """Train with each run's options in as few processes as possible: a run that fails or takes longer ends its process,
    and the next takes the rest.

    Returns:
        name -> the end of the process's output, empty where the run finished; its result is in `output_of`.
    """
    left, failures = list(runs), {}
    while left:
        lines = [flags(**{**runs[name], "output_dir": output_of(folder, name)}) for name in left]
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"runs{len(left)}.json"
        file.write_text(json.dumps([{"port": _free_port(), "options": line} for line in lines]))
        program = ["-m", "tests.gpu.programs.many_runs", file, "--backend", backend]
        with started(program, folder / f"logs{len(left)}", ranks=ranks) as process:
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
