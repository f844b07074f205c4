"""What all sinks share: the base class, their options, and conversion of numbers."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

log = logging.getLogger("fsdp_qlora")

Record = Mapping[str, Any]

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
METRICS_SET_ASIDE = "metrics.jsonl.set_aside"  # lines of it that are no records


@dataclass(frozen=True)
class SinkOptions:
    """Facts about the run for its sinks, which publish them, so they must contain no secrets.

    output_dir: for metrics.jsonl (appended to) and wandb's files in `wandb/`. total_steps: optimizer steps of the
    whole run. config: the resolved options, shown in wandb. project_name, name, group, entity: wandb's; None leaves
    each to wandb and its environment variables. run_id: the same for every start of a run, so that wandb resumes it.
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
    """A destination of the run's numbers. A sink overrides the methods it needs."""

    def __init__(self, options: SinkOptions) -> None:
        """Open it. The folder is there, and metrics.jsonl holds what earlier starts of the run have logged."""

    @classmethod
    def problem(cls) -> str | None:
        """Why it cannot be used here, and the command that helps; found out without a slow import."""
        return None

    def step(self, record: Record, eta_seconds: float | None) -> None:
        """Log one optimizer step's record; `eta_seconds` is None until the pace is known."""

    def evaluation(self, record: Record) -> None:
        """Log one evaluation's record."""

    def samples(self, records: Sequence[Record]) -> None:
        """Log texts that were generated: each with step, prompt and text."""

    def flush(self) -> None:
        """Make all records so far survive a power cut, as far as the sink can."""

    def summary(self, values: Record) -> None:
        """Log the run's final values."""

    def close(self, exit_code: int) -> None:
        """Close the sink; exit code 0 marks the run as finished, any other as failed."""


class GuardedSink(Sink):
    """A sink of a library whose failure is told once; nothing more is given to it then.

    Attributes:
        name: as --log_to gives it.
        client: the library's object, None where there is none (any more); it is called within `guard` only.
    """

    name: ClassVar[str]

    def __init__(self, options: SinkOptions) -> None:
        self.client: Any = None

    def guard(self, call: Callable[[], object]) -> None:
        """Call the library."""
        if self.client is not None:
            self.attempt(call)

    def attempt(self, call: Callable[[], object]) -> None:
        """The same, where there need not be a client yet."""
        try:
            call()
        except Exception as error:
            self.client = None
            log.info("%s: no more is sent there (%s). All numbers are in %s.", self.name, error, METRICS_FILE)


def plain(value: Any) -> Any:
    """Convert a record to JSON types: NaN and infinities become None, 0-d arrays become numbers."""
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


def named_numbers(record: Record) -> dict[str, float]:
    """The numbers of a record by path. Those of an evaluation have names of their own: they share a step's row."""
    numbers = numbers_in(record)
    if "eval_loss" not in record:
        return numbers
    return {name if name.startswith("eval_") else f"eval_{name}": number for name, number in numbers.items()}


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file that the run itself keeps; none without a file."""
    if not path.is_file():
        return []
    # Of bytes: a text's splitlines() also splits at U+2028 and others, which JSON may have within its strings.
    return [json.loads(line) for line in path.read_bytes().splitlines()]
