"""Keeps the rows of an environment that has its own as a file, which is read as a dataset."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import cache_folder, staged_file


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The last process replaces the others' files with the same content.
        with staged_file(path) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise UserError(
            f"The rows of the environment cannot be kept in {path.parent} ({error.strerror}). The "
            "environment variable FSDP_QLORA_CACHE names another folder."
        ) from error
    return path
