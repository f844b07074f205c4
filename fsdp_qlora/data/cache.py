"""The cache of tokenized rows: safetensors files, written atomically, read without being loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fsdp_qlora.data.rows import DataReport, SourceFile, TokenizedRows
from fsdp_qlora.messages import warn_from_any_rank
from fsdp_qlora.redact import redact_values
from fsdp_qlora.storage.files import staged_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("fsdp_qlora")

CACHE_VERSION = 3  # raise it when the arrays, the templates or the rules of masking change


class DamagedFile(ValueError):
    """The file was not written by `write_arrays`, or is damaged."""


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


def cache_path(cache_dir: Path, key: list[object]) -> Path:
    """The file for rows made from this input; the folder is made where that is possible."""
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


def write_cache(path: Path, tokenized: TokenizedRows, report: DataReport) -> None:
    """Keep rows and their report in one file; a folder that is full or may only be read is gone without."""
    arrays = {field.name: getattr(tokenized, field.name) for field in dataclasses.fields(tokenized)}
    about = redact_values({**dataclasses.asdict(report), "digest": tokenized.digest})
    try:
        write_arrays(path, arrays, {"report": json.dumps(about)})
    except (OSError, SafetensorError) as error:
        log.warning(
            "Tokenized rows are not kept for the next start: %s cannot be written (%s). The environment variable "
            "FSDP_QLORA_CACHE names another folder.", path.parent, error,
        )  # fmt: skip


def read_cache(path: Path) -> tuple[TokenizedRows, DataReport] | None:
    """The rows that `write_cache` saved, mapped; None if there is no file or it is damaged."""
    try:
        arrays, metadata = map_arrays(path)
        tokenized = TokenizedRows(**arrays)
        fields = json.loads(metadata["report"])
        digest = fields.pop("digest")
        parts = [SourceFile(**part) for part in fields.pop("parts")]
        report = DataReport(**fields, parts=parts)
        _check_cached(tokenized, report)
        if tokenized.digest != digest:
            raise DamagedFile("its content has changed since it was written")
    except FileNotFoundError:
        return None
    except (DamagedFile, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        warn_from_any_rank(f"The tokenized rows in {path} are damaged ({error}): making them anew.")
        return None
    return tokenized, report


def _check_cached(tokenized: TokenizedRows, report: DataReport) -> None:
    sizes = (len(tokenized), len(tokenized.offsets) - 1, len(tokenized.input_ids), len(tokenized.learned))
    if sizes != (report.num_used, report.num_used, report.num_tokens, report.num_tokens):
        raise DamagedFile(f"array sizes {sizes} do not match the report")
    if tokenized.offsets[0] != 0 or tokenized.offsets[-1] != report.num_tokens:
        raise DamagedFile("the offsets do not match the tokens")


def write_arrays(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write a file atomically: it is complete or absent, whenever the process or machine stops."""
    with staged_file(path) as partial:
        save_file(arrays, partial, metadata)


def map_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Map the arrays of a file, read-only, and read its metadata.

    All processes of a machine share the mapped pages: a second rank costs no memory.

    Raises:
        DamagedFile: it is cut short or no safetensors file.
        FileNotFoundError: it is not there.
    """
    if path.exists() and not path.is_file():  # reading a pipe or a device might never end
        raise DamagedFile("it is no regular file")
    try:
        # Through torch because safetensors' numpy side copies: 240 MB for 240 MB against none, measured.
        with safe_open(path, framework="pt") as file:
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise DamagedFile(str(error)) from error
    for array in arrays.values():
        array.flags.writeable = False
    return arrays, metadata
