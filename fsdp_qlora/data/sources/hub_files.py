"""Reads a large dataset of the hub file by file: each is downloaded when its rows are needed.

`datasets` would download all of them first and convert them, which takes twice their size.
"""

import atexit
import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

from fsdp_qlora.data.sources.files import FILE_KINDS, kind_of
from fsdp_qlora.data.sources.reading import NeededRows, Part, Reading
from fsdp_qlora.utils.descriptions import read_description, write_description
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import cache_folder, staged_file
from fsdp_qlora.utils.hub import HUB_TIMEOUT_SECONDS
from fsdp_qlora.utils.locks import try_lock
from fsdp_qlora.utils.machine import free_disk
from fsdp_qlora.utils.text import first_line, format_bytes

log = logging.getLogger("fsdp_qlora")

# Smaller datasets are downloaded as a whole by `datasets`.
LARGE = 2**30  # bytes
_KINDS = (FILE_KINDS[".parquet"], FILE_KINDS[".jsonl"])


@dataclass(frozen=True)
class HubFiles:
    """The files of a split of a dataset on the hub."""

    name: str
    split: str
    commit: str
    sizes: dict[str, int]
    """The files' names within the repository, in order -> their bytes."""

    @property
    def identity(self) -> str:
        """A hash that distinguishes the rows from others."""
        parts = ["hub files", self.name, self.commit, self.split, *self.sizes]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def parts(self) -> list[Part]:
        """Parts that download their files when they are read."""
        downloads = _Downloads(self)
        return [downloads.part(name, size) for name, size in self.sizes.items()]


def large_split(
    name: str, config: str | None, split: str, *, is_reachable: bool
) -> HubFiles | None:
    """The files of a split if they are read one by one.

    They are if they are of parquet or lines of JSON, larger than 1 GiB together, and not prepared
    by `datasets` yet.

    Args:
        is_reachable: whether the hub is; if not, what it said last is used.
    """
    key = hashlib.sha256(json.dumps([name, config, split]).encode()).hexdigest()[:40]
    record = cache_folder() / "hub_files" / f"{key}.json"
    if not is_reachable:
        with contextlib.suppress(OSError, ValueError, RecursionError, TypeError):
            return HubFiles(**read_description(record))
        return None
    files = _ask_for_files(name, config, split)
    if files is not None:
        try:
            record.parent.mkdir(parents=True, exist_ok=True)
            with staged_file(record) as partial:
                write_description(partial, dataclasses.asdict(files))
        except OSError as error:
            log.debug("The files of %s are not kept in %s: %s", name, record, error)
    return files


def _ask_for_files(name: str, config: str | None, split: str) -> HubFiles | None:
    sizes = _sizes_of_large(name)
    if not sizes:
        return None
    import datasets

    try:
        builder = datasets.load_dataset_builder(name, *([config] if config else []))
    except Exception:  # load_dataset says why
        return None
    if (Path(builder.cache_dir) / "dataset_info.json").exists():
        return None
    urls = (builder.config.data_files or {}).get(split) or []
    found = [_repository_file(str(url), name) for url in urls]
    files = [file for file in found if file is not None]
    commits = {commit for commit, _ in files}
    chosen = {path: sizes.get(path, 0) for _, path in files}
    is_readable = all(kind_of(Path(path)) in _KINDS for path in chosen)
    total = sum(chosen.values())
    if len(files) < len(urls) or len(commits) != 1 or not is_readable or total <= LARGE:
        return None
    log.info(
        "%s is read file by file: %d files of the split %s, %s in all.",
        name,
        len(chosen),
        split,
        format_bytes(total),
    )
    return HubFiles(name, split, commits.pop(), chosen)


def _sizes_of_large(name: str) -> dict[str, int]:
    """The sizes of a dataset's files, if they are large together; else nothing."""
    try:
        info: Any = HfApi().dataset_info(name, files_metadata=True, timeout=HUB_TIMEOUT_SECONDS)
    except Exception:  # load_dataset says why
        return {}
    siblings = getattr(info, "siblings", None) or []
    sizes = {file.rfilename: file.size or 0 for file in siblings}
    return sizes if sum(sizes.values()) > LARGE else {}


def _repository_file(url: str, name: str) -> tuple[str, str] | None:
    """hf://datasets/OWNER/NAME@COMMIT/PATH -> (commit, path); None for another place."""
    prefix = f"hf://datasets/{name}@"
    if not url.startswith(prefix):
        return None
    commit, _, path = url.removeprefix(prefix).partition("/")
    return commit, path


def _no_room(dataset: str, name: str, needed: int) -> UserError:
    return UserError(
        f"dataset {dataset}: {name} has {format_bytes(needed)}, and {cache_folder()} has "
        f"{format_bytes(free_disk(cache_folder()))} free. Free some space, or set FSDP_QLORA_CACHE "
        "to a folder on a larger disk."
    )


class _Downloads:
    """Files of a dataset, of which one at a time is on the disk."""

    def __init__(self, files: HubFiles) -> None:
        self._files = files
        self._folder: Path | None = None
        self._lock: FileLock | None = None
        self._current: tuple[str, Path] | None = None

    def part(self, name: str, size: int) -> Part:
        """A part that downloads its file."""
        kind = kind_of(Path(name))
        assert kind is not None

        def read(reading: Reading) -> NeededRows:
            assert kind is not None
            yield from kind.read(self._fetch(name), reading)
            if name == [*self._files.sizes][-1]:
                self._delete()

        return Part(name, kind.unit, read, size, is_remote=True)

    def _fetch(self, name: str) -> Path:
        """The path of a file, downloaded if need be. The one before is deleted.

        Raises UserError: it cannot be downloaded, or the disk has no room for it.
        """
        if self._current and self._current[0] == name and self._current[1].exists():
            return self._current[1]
        self._delete()
        files = self._files
        kept = try_to_load_from_cache(files.name, name, revision=files.commit, repo_type="dataset")
        if isinstance(kept, str):
            return Path(kept)
        size = files.sizes[name]
        if size > free_disk(cache_folder()):
            raise _no_room(files.name, name, size)
        try:
            path = hf_hub_download(
                files.name,
                name,
                repo_type="dataset",
                revision=files.commit,
                local_dir=self._own_folder(),
            )
        except Exception as error:  # the hub's client or its HTTP library
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_room(files.name, name, size) from error
            raise UserError(
                f"dataset {files.name}: {name} cannot be downloaded ({first_line(error)}). Start "
                "again when the hub can be reached."
            ) from error
        self._current = (name, Path(path))
        return Path(path)

    def _delete(self) -> None:
        if self._current:
            self._current[1].unlink(missing_ok=True)
            self._current = None

    def _own_folder(self) -> Path:
        """A folder of this process, which is deleted at its end, or by a later one."""
        if self._folder is None:
            parent = cache_folder() / "downloads"
            with contextlib.suppress(OSError):
                for folder in parent.iterdir():
                    _delete_if_left(folder)
            self._folder = parent / secrets.token_hex(8)
            self._lock = try_lock(self._folder)
            self._folder.mkdir(parents=True)
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder


def _delete_if_left(folder: Path) -> None:
    """Delete a folder of a process that was killed."""
    if not folder.is_dir():
        return
    lock = try_lock(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)
