"""The records in metrics.jsonl and other logs of a run: one JSON object per line. Damaged lines are
skipped.
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
    # numpy and torch, scalars and arrays
    if not isinstance(value, float) and hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value)


def numbers_in(value: object, name: str = "") -> dict[str, float]:
    """The numbers in a nested value by path: {"memory_gib": {"reserved": [1.5]}} ->
    memory_gib/reserved/0.
    """
    if not isinstance(value, (Mapping, list)):
        return {name: value} if isinstance(value, (int, float)) else {}
    values: dict[str, float] = {}
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        values |= numbers_in(item, f"{name}/{key}" if name else str(key))
    return values


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl or samples.jsonl without damaged lines; none if the file cannot
    be read.
    """
    try:
        # bytes.splitlines(): that of str also splits at U+2028 and others, which may be in JSON's
        # strings.
        lines = read_named(path).splitlines()
    except OSError:
        return []
    return [record for line in lines if (record := parse_record(line)) is not None]


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if the line is damaged."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int
    return record if is_record else None
