"""The folders of the cache of quantized weights: location, locks and descriptions."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fsdp_qlora.storage.files import cache_folder

CHECKSUMS = "checksums.json"


def cache_root(option: str) -> Path | None:
    """The cache's folder, None if off. option: off, a folder, or auto (see `cache_folder`)."""
    if option == "off":
        return None
    if option != "auto":
        return Path(option).expanduser()
    return cache_folder() / "quantized"


def read_description(folder: Path) -> dict[str, Any]:
    """The description of an entry, as its writer left it. Raises ValueError if it has changed."""
    description = json.loads((folder / CHECKSUMS).read_bytes())
    if not isinstance(description, dict) or description.pop("sha256", None) != description_hash(description):
        raise ValueError(f"{folder / CHECKSUMS} has changed")
    return description


def description_hash(description: Mapping[str, Any]) -> str:
    """The hash that verifies an entry's description, which in turn verifies all else."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def last_used(folder: Path) -> float:
    """When an entry was last written or read, in seconds since 1970."""
    description = folder / CHECKSUMS
    return (description if description.is_file() else folder).stat().st_mtime


def quarantine_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.damaged")


def try_lock(target: Path) -> FileLock | None:
    """The lock of an entry; None when another process has it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{target}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


def remove_leftovers(root: Path) -> None:
    """Remove entries that runs left unfinished."""
    for folder in root.glob("*.writing"):
        lock = try_lock(root / folder.stem)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()
