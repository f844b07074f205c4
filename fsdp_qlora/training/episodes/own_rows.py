"""Keeps the rows of an environment that has its own as a file, which is read as a dataset."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import cache_folder


def keep_rows(rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows into the cache folder, under a name that their content gives.

    Called on every rank: each machine has its own file.

    Returns:
        The path of a .jsonl file.
    Raises:
        UserError: it cannot be written.
    """
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    name = hashlib.sha256(content).hexdigest()[:32]
    path = cache_folder() / "environments" / f"{name}.jsonl"
    # Each process has a draft of its own, and the last replaces the others with the same content.
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        raise UserError(
            f"The rows of the environment cannot be kept in {path.parent} ({error.strerror}). The "
            "environment variable FSDP_QLORA_CACHE names another folder."
        ) from error
    return path
