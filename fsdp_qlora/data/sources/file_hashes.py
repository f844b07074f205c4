"""Hashes of local files, computed once a machine: the cache's folder keeps those of large files."""

import hashlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from fsdp_qlora.utils.descriptions import read_description, write_description
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import cache_folder, record_of, staged_file
from fsdp_qlora.utils.locks import locked

log = logging.getLogger("fsdp_qlora")

# Smaller files are hashed in less time than a record takes.
_LARGE = 2**24
# Some file systems count time in such steps: a younger file may change without a trace.
_YOUNG_NS = 2 * 10**9


def hash_files(folder: Path, files: Iterable[Path]) -> str:
    """A hash of the files' content and names.

    Names select the reader, and messages and the cached report show them.
    """
    identity = hashlib.sha256()
    for file in files:
        identity.update(f"{file.relative_to(folder).as_posix()}\0{hash_file(file)}\0".encode())
    return identity.hexdigest()


def states_of(files: Iterable[Path]) -> list[list[int]]:
    """The sizes, inodes and times of files: one that is written or replaced has others."""
    states = list[list[int]]()
    for file in files:
        try:
            status = file.stat()
        except OSError:
            states.append([])
            continue
        times = [status.st_mtime_ns, status.st_ctime_ns]
        states.append([status.st_size, status.st_ino, *times])
    return states


def hash_file(path: Path) -> str:
    """SHA-256 of the content.

    That of a large file is kept. It is computed again if the file's size, times or inode differ.
    """
    try:
        # Names go into the key of the cache, which is JSON: Linux allows any bytes in them.
        str(path).encode()
        if path.stat().st_size < _LARGE:
            return record_of(path).sha256
        return _kept_hash(path.resolve())
    except UnicodeEncodeError as error:
        raise UserError(
            f"dataset: the name of {str(path)!a} is not UTF-8 text. Rename the file."
        ) from error
    except OSError as error:
        raise UserError(f"dataset: {path} cannot be read ({error.strerror}).") from error


def _kept_hash(path: Path) -> str:
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:40]
    record = cache_folder() / "hashes" / f"{name}.json"
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return record_of(path).sha256
    with locked(record, waiting=f"Another process hashes {path}: waiting for it."):
        state = _state_of(path)
        kept = _read_record(record)
        if kept.get("file") == state:
            return str(kept["content"])
        content = record_of(path).sha256
        age = time.time_ns() - _last_change(path)
        if age > _YOUNG_NS and state == _state_of(path):
            _write_record(record, {"file": state, "content": content})
        return content


def _state_of(path: Path) -> list[object]:
    """The path, size, inode and times of a file: one that changes differs in some of them."""
    status = path.stat()
    times = [status.st_mtime_ns, status.st_ctime_ns]
    return [str(path), status.st_size, status.st_dev, status.st_ino, *times]


def _last_change(path: Path) -> int:
    status = path.stat()
    return max(status.st_mtime_ns, status.st_ctime_ns)


def _read_record(path: Path) -> dict[str, object]:
    try:
        return read_description(path)
    except (OSError, ValueError, RecursionError):
        return {}


def _write_record(path: Path, record: dict[str, object]) -> None:
    try:
        with staged_file(path) as partial:
            write_description(partial, record)
    except OSError as error:
        log.debug("The hash of a file is not kept in %s: %s", path, error)
