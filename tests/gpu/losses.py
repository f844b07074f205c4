"""Losses of many cases, for the tests on a GPU and for the reference from the CPU."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.cases import COMMON, Case
from tests.gpu.runs import started
from tests.tiny import flags, read_metrics


@dataclass
class Result:
    """What came of a case: the losses of its steps, or the end of its process's output."""

    losses: list[float] = field(default_factory=list)
    failure: str = ""


def run_cases(
    cases: Mapping[str, Case], inputs: Callable[..., dict[str, object]], folder: Path, *, seconds: float = 900
) -> dict[str, Result]:
    """Run all cases in as few processes as possible: one that fails ends its process, and the next takes the rest."""
    left = list(cases)
    results: dict[str, Result] = {}
    while left:
        arguments = [
            flags(**{**inputs(cases[name].model), **COMMON, **cases[name].options, "output_dir": _output(folder, name)})
            for name in left
        ]
        file = folder / f"runs{len(left)}.json"
        file.write_text(json.dumps(arguments))
        with started(["-m", "tests.gpu.programs.many_runs", file], folder / f"logs{len(left)}") as program:
            program.wait(seconds)
            output = program.output()
        while left and _is_finished(_output(folder, left[0])):
            results[left[0]] = Result(read_metrics(_output(folder, left[0])))
            del left[0]
        if left:
            results[left[0]] = Result(failure=output[-4000:])
            del left[0]
    return results


def _output(folder: Path, name: str) -> Path:
    return folder / name.replace(",", "").replace(" ", "_")


def _is_finished(output_dir: Path) -> bool:
    status = output_dir / "status.json"
    return status.exists() and json.loads(status.read_text())["state"] == "finished"
