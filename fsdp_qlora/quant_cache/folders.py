"""The folders of the cache of quantized weights: where they are, who writes them, what they say of themselves."""

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
    """The cache's folder. option: off, a folder, or auto (see `cache_folder`)."""
    if option == "off":
        return None
    if option != "auto":
        return Path(option).expanduser()
    return cache_folder() / "quantized"


def read_about(folder: Path) -> dict[str, Any]:
    """What the writer of an entry says of it. Raises ValueError where that has changed."""
    about: dict[str, Any] = json.loads((folder / CHECKSUMS).read_text())
    if about.pop("sha256") != own_hash(about):
        raise ValueError(f"{folder / CHECKSUMS} has changed")
    return about


def own_hash(about: Mapping[str, Any]) -> str:
    """The hash by which an entry's description, from which all else is checked, is itself checked."""
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def last_used(folder: Path) -> float:
    """When an entry was last written or read, in seconds since 1970."""
    about = folder / CHECKSUMS
    return (about if about.is_file() else folder).stat().st_mtime


def damaged(target: Path) -> Path:
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
    """Remove what runs were writing when they ended before its end."""
    for folder in root.glob("*.writing"):
        lock = try_lock(root / folder.stem)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()
