"""What a run has written about its steps and evaluations."""

from pathlib import Path
from typing import Any

from tests.helpers.rows import read_rows


def metrics_of(output_dir: Path) -> list[dict[str, Any]]:
    """All records of a run's metrics.jsonl; every line must be whole."""
    return read_rows(output_dir / "metrics.jsonl")


def read_metrics(output_dir: Path, key: str = "loss") -> list[float]:
    """The values of one key, in the order of the records that have it."""
    return [record[key] for record in metrics_of(output_dir) if key in record]
