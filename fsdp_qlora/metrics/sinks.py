"""What every sink is made of: its base class, what it is told about the run, and how numbers are put."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

METRICS_FILE = "metrics.jsonl"
METRICS_SET_ASIDE = "metrics.jsonl.set_aside"  # lines of it that are no records


@dataclass(frozen=True)
class SinkOptions:
    """What a sink may need to know about the run; all of it is written out, so it must hold no secrets.

    output_dir: gets metrics.jsonl (appended to) and wandb's files in `wandb/`. total_steps: optimizer steps of the
    whole run. config: the resolved options, shown in wandb. project_name, name, group, entity: wandb's; None leaves
    each to wandb and its environment variables. run_id: the same for every start of a run, which wandb then continues.
    """

    output_dir: Path
    total_steps: int
    config: Mapping[str, object]
    project_name: str | None
    name: str | None
    group: str | None
    entity: str | None
    run_id: str | None = None


class Sink:
    """A place where numbers go. A sink overrides what it has a use for."""

    def step(self, record: Record, eta_seconds: float | None) -> None:
        """Take one optimizer step's record; `eta_seconds` is None until the pace is known."""

    def evaluation(self, record: Record) -> None:
        """Take one evaluation's record."""

    def flush(self) -> None:
        """Make what was taken so far survive a power cut, where that is in the sink's hands."""

    def summary(self, values: Record) -> None:
        """Take the run's final values."""

    def close(self, exit_code: int) -> None:
        """Let go of everything; 0 marks the run as finished, anything else as failed."""


def plain(value: Any) -> Any:
    """Turn a record into what JSON holds: NaN and infinities become None, 0-d arrays become numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if not isinstance(value, float) and hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value)


def numbers_in(value: object, name: str = "") -> dict[str, float]:
    """The numbers in a nested value by path: {"memory_gib": {"reserved": [1.5]}} -> memory_gib/reserved/0."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {name: value} if isinstance(value, (int, float)) else {}
    return {
        path: number
        for key, item in items
        for path, number in numbers_in(item, f"{name}/{key}" if name else key).items()
    }
