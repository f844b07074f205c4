"""The cache of tokenized rows: safetensors files, written atomically, read without being loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fsdp_qlora.data.rows import DataReport, SourceFile, TokenizedRows, join_rows
from fsdp_qlora.output.redact import redact_values
from fsdp_qlora.output.text import warn_from_any_rank
from fsdp_qlora.storage.files import cache_folder, staged_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("fsdp_qlora")

Found = TypeVar("Found")

CACHE_VERSION = 6  # raise it when the arrays, the templates or the rules of masking change


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that determines how text becomes ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state = tokenizer.get_vocab()
    else:
        state = json.loads(backend.to_str())
        # Left over from the last call, whatever it was; ours set both.
        state["truncation"] = state["padding"] = None
    parts = [type(tokenizer).__name__, {k: str(v) for k, v in tokenizer.special_tokens_map.items()}, state]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def cache_path(key: list[object]) -> Path:
    """The file for rows made from this input; its folder is made if that is possible."""
    cache_dir = cache_folder() / "tokenized"
    digest = hashlib.sha256(json.dumps([CACHE_VERSION, *key]).encode()).hexdigest()
    with contextlib.suppress(OSError):  # said when the rows are written
        cache_dir.mkdir(parents=True, exist_ok=True)
    return cache_dir / f"{digest[:40]}.safetensors"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a cache file. The system frees it when its holder dies, however that happens.

    Where no lock can be had, as in a folder that may only be read, each process works for itself.
    """
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("Another process tokenizes this dataset: waiting for it.")
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        log.debug("No lock on %s: %s", path, error)
    try:
        yield
    finally:
        lock.release()


def write_cache(path: Path, rows: TokenizedRows, report: DataReport) -> None:
    """Keep rows and their report in one file; a full or read-only folder disables the cache."""
    _keep(path, rows, {"report": json.dumps(redact_values(dataclasses.asdict(report)))})


def read_cache(path: Path) -> tuple[TokenizedRows, DataReport] | None:
    """The rows that `write_cache` saved, mapped; None if there is no file or it is damaged."""

    def checked() -> tuple[TokenizedRows, DataReport]:
        tokenized, metadata = _map_rows(path)
        fields = json.loads(metadata["report"])
        parts = [SourceFile(**part) for part in fields.pop("parts")]
        return tokenized, DataReport(**fields, parts=parts)

    return _unless_damaged(path, checked)


def join_cached(parts: Sequence[TokenizedRows]) -> TokenizedRows:
    """The rows of several datasets, one after the other, mapped from one file by all ranks of a machine."""
    if len(parts) == 1:
        return parts[0]
    path = cache_path(["joined", *(part.digest for part in parts)])
    with locked(path):
        found = _unless_damaged(path, lambda: _map_rows(path)[0])
        if found is None:
            joined = join_rows(parts, renumber=True)
            _keep(path, joined, {})
            found = _unless_damaged(path, lambda: _map_rows(path)[0]) or joined
    return found


def _keep(path: Path, rows: TokenizedRows, metadata: dict[str, str]) -> None:
    """Write a file atomically: it is complete or absent, whenever the process or machine stops."""
    try:
        with staged_file(path) as partial:
            save_file(rows.arrays, partial, {**metadata, "digest": rows.digest})
    except (OSError, SafetensorError) as error:
        log.warning(
            "Tokenized rows are not kept for the next start: %s cannot be written (%s). The environment variable "
            "FSDP_QLORA_CACHE names another folder.", path.parent, error,
        )  # fmt: skip


def _map_rows(path: Path) -> tuple[TokenizedRows, dict[str, str]]:
    """Map the rows of a file, read-only, and read its metadata.

    All processes of a machine share the mapped pages: a second rank costs no memory.
    """
    # Through torch because safetensors' numpy side copies: 240 MB for 240 MB against none, measured.
    with safe_open(path, framework="pt") as file:
        arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    for array in arrays.values():
        array.flags.writeable = False
    tokenized = TokenizedRows(**arrays)
    if tokenized.digest != metadata["digest"]:
        raise ValueError("its content has changed since it was written")
    return tokenized, metadata


def _unless_damaged(path: Path, read: Callable[[], Found]) -> Found | None:
    try:
        return read()
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        warn_from_any_rank(f"The tokenized rows in {path} are damaged ({error}): making them again.")
        return None
