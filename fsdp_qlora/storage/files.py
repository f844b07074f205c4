"""Files and folders written atomically, also across a power cut; free disk space; the user's cache folder."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_qlora.errors import UserError
from fsdp_qlora.output.redact import redact_values

PARTIAL = ".partial"


class FileRecord(NamedTuple):
    """A file's expected size in bytes and SHA-256."""

    size: int
    sha256: str


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_files(folder: Path) -> None:
    """Flush every file below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            flush(path)


@contextlib.contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """A path to write to. When the block has ended it replaces `path`: a reader sees the old file or the new one.

    After a failure nothing of it is left; what a kill has left its next writer removes. The last of several writers
    wins: each has a name of its own.
    """
    for leftover in _leftovers(path):
        with contextlib.suppress(OSError):
            leftover.unlink()
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        yield partial
        flush(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _leftovers(path: Path) -> Iterator[Path]:
    """What killed writers of a file have left; earlier versions gave it one fixed name."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(path.parent):
            if is_partial(name, path.name):
                yield path.with_name(name)


def is_partial(name: str, of: str) -> bool:
    """Whether a name is that of a file `of` that was not written to its end."""
    return re.fullmatch(rf"\.{re.escape(of)}(\.[0-9a-f]{{16}})?{re.escape(PARTIAL)}", name) is not None


@contextlib.contextmanager
def staged_folder(target: Path, staging: Path) -> Iterator[Path]:
    """An empty folder to fill. At the end of the block it becomes `target`; after a failure nothing of it remains.

    Args:
        target: absent or empty.
        staging: its path until then, in the same folder as `target`; an existing one is removed.
    """
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
        flush_files(staging)
        publish_folder(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def publish_folder(staging: Path, target: Path) -> None:
    """Rename a folder, whose files have been flushed, to its final name, durably."""
    flush(staging)
    os.rename(staging, target)
    flush(target.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically; secrets are removed."""
    with staged_file(path) as partial:
        partial.write_text(json.dumps(redact_values(content), indent=2) + "\n")


def write_hashed_json(path: Path, content: Mapping[str, Any]) -> FileRecord:
    """Write and flush a JSON file of one line; returns its size and hash."""
    text = json.dumps(content, allow_nan=False).encode()
    path.write_bytes(text)
    flush(path)
    return FileRecord(len(text), hashlib.sha256(text).hexdigest())


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if it does not exist or cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def free_disk(folder: Path) -> int:
    """Bytes that may still be written to a folder, which need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def why_not_writable(folder: Path) -> str | None:
    """Why a folder, which need not exist yet, cannot be written to; None where it can. Nothing is made."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"


def cache_folder() -> Path:
    """Where anything is kept between runs: FSDP_QLORA_CACHE, or fsdp_qlora in the user's cache folder."""
    if given := os.environ.get("FSDP_QLORA_CACHE"):
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp_qlora"
    except RuntimeError as error:  # a user without a home, as in some containers
        raise UserError("No cache folder: this user has no home. Name one in FSDP_QLORA_CACHE.") from error
