"""A run on the stand-in with values, and the same run on the CPU, where gloo connects the ranks:
their numbers.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from stand_in.environment import Rank
from tests.helpers.metrics import read_metrics

CPU = {"CUDA_VISIBLE_DEVICES": ""}


class Differences(NamedTuple):
    """The largest relative ones from the CPU's numbers, of all steps and of all tensors that were
    trained.
    """

    loss: float
    grad_norm: float
    weights: float  # of each tensor's change since it was random or zero


class Beside(NamedTuple):
    """The run on the stand-in, and how it differs. strays, noted: operators, as the report of the
    values names them.
    """

    on_device: list[Rank]
    differences: Differences
    strays: dict[str, int]
    noted: dict[str, int]


def run_both(
    start: Callable[[Path, dict[str, object]], list[Rank]], folder: Path, base: Path
) -> Beside:
    """Call start(folder, settings) -> ranks for the runs on both, which write their output into
    `folder`/output.

    Args:
        base: the model that is trained, whose weights are those before the first step.
    """
    device = folder / "device"
    cpu = folder / "cpu"
    values = {
        "PHANTOM_VALUES": 1,
        "PHANTOM_POISON": 1,
        "PHANTOM_VALUES_REPORT": device / "values{rank}.json",
    }
    with ThreadPoolExecutor() as both:
        on_device, _ = both.map(start, (device, cpu), (values, dict(CPU)))
    reports = [json.loads(path.read_text()) for path in device.glob("values*.json")]
    assert len(reports) == len(on_device)
    found = (merged(report[kind] for report in reports) for kind in ("strays", "noted"))
    return Beside(on_device, differences(device / "output", cpu / "output", base), *found)


def merged(counts: Any) -> dict[str, int]:
    return {name: number for each in counts for name, number in each.items()}


def differences(found: Path, expected: Path, base: Path) -> Differences:
    """Between what two runs have written."""
    steps = (
        relative(read_metrics(found, key), read_metrics(expected, key))
        for key in ("loss", "grad_norm")
    )
    own, wanted, before = map(weights_in, (found, expected, base))
    assert own.keys() == wanted.keys() and own
    return Differences(
        *steps, max(of_change(own[name], wanted[name], before.get(name)) for name in own)
    )


def relative(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected) > 0, (found, expected)
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True))


def of_change(found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor | None) -> float:
    """Of the norm of what a tensor has changed by. LoRA's A is random before, and its B zero."""
    change = expected.double() - (0 if before is None else before.double())
    return ((found.double() - expected.double()).norm() / change.norm().clamp(min=1e-12)).item()


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of a saved adapter or model."""
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
