"""JSON files that verify themselves, such as descriptions of other files."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_qlora.utils.files import read_named, write_hashed_json


def write_description(path: Path, description: Mapping[str, Any]) -> None:
    """Write and flush JSON with its own hash."""
    write_hashed_json(path, {**description, "sha256": description_hash(description)})


def read_description(path: Path) -> dict[str, Any]:
    """Read such a file. Raises ValueError or OSError if it has changed since it was written."""
    description = json.loads(read_named(path))
    if not isinstance(description, dict) or description.pop("sha256", None) != description_hash(
        description
    ):
        raise ValueError(f"{path} has changed")
    return description


def description_hash(description: Mapping[str, Any]) -> str:
    """The hash that verifies a description, whose checksums verify the tensors."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()
