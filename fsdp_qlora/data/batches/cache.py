"""The cache of tokenized rows: safetensors files, written atomically, read without being loaded."""

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.batches.report import DataReport
from fsdp_qlora.data.batches.rows import NO_ROWS, TokenizedRows, join_rows
from fsdp_qlora.data.content import ENDED_WORKERS, SourceFile
from fsdp_qlora.data.text.image_store import UNREADABLE, are_as_kept
from fsdp_qlora.distributed.process_group import gather_numbers
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.utils.files import cache_folder
from fsdp_qlora.utils.redact import redact_values
from fsdp_qlora.utils.text import warn_from_any_rank
from fsdp_qlora.utils.verified_files import (
    Arrays,
    Damaged,
    Metadata,
    locked,
    read_verified,
    write_verified,
)

log = logging.getLogger("fsdp_qlora")

# Raise it when the arrays, the templates or the rules of masking change. It is a part of each
# file's name, so files of another version are not found.
CACHE_VERSION = 16


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that determines how text becomes ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        # A tokenizer in Python is known by its vocabulary and, below, its class.
        state = tokenizer.get_vocab()
    else:
        state = json.loads(backend.to_str())
        # Left over from the last call, whatever it was; ours set both.
        state["truncation"] = state["padding"] = None
    parts = [
        type(tokenizer).__name__,
        {k: str(v) for k, v in tokenizer.special_tokens_map.items()},
        state,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def through_cache(
    key: Sequence[object], make: Callable[[], tuple[TokenizedRows, DataReport]]
) -> tuple[TokenizedRows, DataReport]:
    """Rows and their report, from the cache.

    What is not there yet is made by one process of a machine at a time, and kept.

    Args:
        key: all that the rows depend on, as JSON.
    """
    path = _path_of(key)
    with locked(path, waiting="Another process tokenizes this dataset: waiting for it."):
        cached = read_cache(path)
        if cached is not None and _is_current(path, *cached):
            log.debug("Tokenized rows are read from %s", path)
            return cached
        rows, report = make()
        if any(reason.startswith(ENDED_WORKERS) for reason in report.rejected):
            return rows, report  # another start may not lose these rows
        _write(path, rows, report)
        # Read again: the mapped file is shared by all ranks of the machine, the arrays are not.
        return read_cache(path) or (rows, report)


def _is_current(path: Path, rows: TokenizedRows, report: DataReport) -> bool:
    """Whether images are as they were when the rows were made.

    Images that could not be read are tried again in another start.
    """
    lacks_some = any(reason.startswith(UNREADABLE) for reason in report.rejected)
    # Other ranks of this start must agree with the one that made the file.
    is_of_this_start = path.stat().st_mtime >= psutil.Process().create_time()
    return (is_of_this_start or not lacks_some) and are_as_kept(map(bytes, rows.images.names))


def _path_of(key: Sequence[object]) -> Path:
    folder = cache_folder() / "tokenized"
    digest = hashlib.sha256(json.dumps([CACHE_VERSION, *key]).encode()).hexdigest()
    with contextlib.suppress(OSError):  # said when the rows are written
        folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{digest[:40]}.safetensors"


def add_reference(
    rows: TokenizedRows, key: Sequence[object], compute: Callable[[], np.ndarray], ranks: Ranks
) -> TokenizedRows:
    """Add the reference's log-probabilities, from each machine's cache or computed by all ranks.

    Args:
        key: all that they depend on besides the rows, as JSON.
    """
    path = _path_of(["reference", rows.digest, *key])
    cached = read_cache(path)
    # All ranks take the same way: `compute` has collectives, and machines have caches of their own.
    if gather_numbers([cached is not None], ranks.device).all():
        log.info("The reference's log-probabilities are read from %s", path)
    else:
        cached = NO_ROWS.with_columns("document", reference=compute()), DataReport("")
        if ranks.local_rank == 0:
            _write(path, *cached)
    assert cached is not None
    return rows.with_columns("document", reference=cached[0].columns["reference"].values)


def join_cached(parts: Sequence[TokenizedRows]) -> TokenizedRows:
    """The rows of several datasets, one after the other.

    They are mapped from one file by all ranks of a machine.
    """
    if len(parts) == 1:
        return parts[0]
    key = ["joined", *(part.digest for part in parts)]
    return through_cache(key, lambda: (join_rows(parts, renumber=True), DataReport("")))[0]


def _write(path: Path, rows: TokenizedRows, report: DataReport) -> None:
    """Write a file atomically; a full or read-only folder disables the cache."""
    metadata = {
        "report": json.dumps(redact_values(dataclasses.asdict(report))),
        "learns": rows.learns,
    }
    try:
        write_verified(path, rows.arrays, rows, metadata)
    except (OSError, SafetensorError) as error:
        log.warning(
            "Tokenized rows are not kept for the next start: %s cannot be written (%s). The "
            "environment variable FSDP_QLORA_CACHE names another folder.",
            path.parent,
            error,
        )


class _CachedRows(NamedTuple):
    """The content of a file of the cache."""

    rows: TokenizedRows
    report: DataReport

    @property
    def digest(self) -> str:
        return self.rows.digest

    @classmethod
    def build(cls, arrays: Arrays, metadata: Metadata) -> "_CachedRows":
        rows = TokenizedRows.from_arrays(arrays, metadata["learns"])
        fields = json.loads(metadata["report"])
        fields["parts"] = [SourceFile(**part) for part in fields["parts"]]
        return cls(rows, DataReport(**fields))


def read_cache(path: Path) -> tuple[TokenizedRows, DataReport] | None:
    """Map the rows of a file, read-only; None if there is no file or it is damaged."""
    try:
        return read_verified(path, _CachedRows.build)
    except Damaged as error:
        warn_from_any_rank(
            f"The tokenized rows in {path} are damaged ({error}): making them again."
        )
        return None
