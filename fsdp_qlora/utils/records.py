"""The records in metrics.jsonl and other logs of a run: one JSON object per line.

Damaged lines are skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_qlora.utils.files import read_named

Record = Mapping[str, Any]


def plain(value: Any) -> Any:
    """Convert a record to JSON types: NaN and infinities become None, 0-d arrays become numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    # Of numpy and torch, scalars and arrays; numpy's float64 is a float, too.
    if not isinstance(value, float) and hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value)


def is_evaluation(record: Record) -> bool:
    """Whether a record is of an evaluation, and not of a step."""
    return "eval_loss" in record or "eval_reward" in record


def numbers_in(value: object, name: str = "") -> dict[str, float]:
    """The numbers in a nested value by path.

    {"memory_gib": {"reserved": [1.5]}} -> {"memory_gib/reserved/0": 1.5}
    """
    if isinstance(value, (int, float)):
        return {name: value}
    if not isinstance(value, (Mapping, list)):
        return {}
    numbers: dict[str, float] = {}
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        numbers |= numbers_in(item, f"{name}/{key}" if name else str(key))
    return numbers


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl or samples.jsonl; none if the file cannot be read."""
    try:
        # bytes.splitlines(): that of str also splits at U+2028 and others, which may be in JSON's
        # strings.
        lines = read_named(path).splitlines()
    except OSError:
        return []
    records = map(parse_record, lines)
    return [record for record in records if record is not None]


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if the line is damaged."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    # A line that a crash has cut may still be JSON, such as a number. isinstance takes True for an
    # int.
    is_record = isinstance(record, dict) and type(record.get("step")) is int
    return record if is_record else None
