"""Files that survive a power cut, folders that are there whole or not at all, and room on the disks."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdp_qlora.errors import UserError
from fsdp_qlora.redact import redact_values


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_disk(folder: Path) -> int:
    """Bytes that may still be written to a folder, which need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def new_folder(out: Path, option: str) -> Iterator[Path]:
    """A folder to fill, which becomes `out` (absent or empty) when the block has ended; else nothing of it is left.

    Args:
        option: the flag that gave `out`, for the message.
    Raises:
        UserError: it cannot be written.
    """
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise UserError(f"{option} {out} cannot be written ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file; a reader sees the old one or the new one. Secrets are taken out."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(redact_values(content), indent=2) + "\n")
    flush(partial)
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty where it is not there or cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
