"""The cache of tokenized rows: safetensors files, written atomically, read without being loaded."""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.batches.piece_folder import MakePieces, PieceFolder, num_made
from fsdp_qlora.data.batches.pieces import are_current
from fsdp_qlora.data.batches.report import DataReport, report_as_json, report_of_json
from fsdp_qlora.data.batches.rows import NO_ROWS, TokenizedRows, join_rows
from fsdp_qlora.data.batches.side_by_side import SideBySide
from fsdp_qlora.data.batches.whole_rows import (
    INDEX,
    ROWS,
    STAMP,
    read_index,
    read_whole,
    write_whole,
)
from fsdp_qlora.data.content import ENDED_WORKERS
from fsdp_qlora.distributed.process_group import gather_numbers
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.utils.files import cache_folder
from fsdp_qlora.utils.locks import locked
from fsdp_qlora.utils.text import format_bytes, warn_from_any_rank
from fsdp_qlora.utils.verified_files import Arrays, Damaged, Metadata, read_verified, write_verified
from fsdp_qlora.utils.verified_stamps import Stamp, is_of_this_start

log = logging.getLogger("fsdp_qlora")

# Raise it when the arrays, the templates or the rules of masking change. It is a part of each
# file's name, so files of another version are not found.
CACHE_VERSION = 17
_WAITING = "Another process tokenizes this dataset: waiting for it."


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
    with locked(path, waiting=_WAITING):
        cached = _read_current(path)
        if cached is not None:
            log.debug("Tokenized rows are read from %s", path)
            return cached
        return _kept(path, *make())


def through_pieces(key: Sequence[object], make: MakePieces) -> tuple[TokenizedRows, DataReport]:
    """Rows of a dataset and their report, from the cache, which keeps them piece by piece.

    As `through_cache`; rows that fit in one piece are in one file.

    Args:
        make: makes the pieces behind any of them.
    Raises:
        UserError: there is no room for several pieces, or as `make` does.
    """
    path = _path_of(key)
    folder = PieceFolder(path.with_suffix(""), make)
    with locked(path, waiting=_WAITING):
        cached = _read_current(path) or folder.read()
        if cached is not None:
            log.debug("Tokenized rows are read from %s", path.parent)
            return cached
        folder.remove_partial_files()
        pieces = folder.pieces()
        first = next(pieces)
        if first.after is not None:
            found = folder.finish(first, pieces)
            # Damaged, or with other images: this file would be found first.
            path.unlink(missing_ok=True)
            return found
        first.report.set_length_of_99_percent(first.lengths)
        return _kept(path, first.rows, first.report)


def describe_pieces(key: Sequence[object], rows: TokenizedRows, since: float) -> str:
    """One line on rows of `through_pieces`: their bytes, and how fast they were made, if they were.

    It is empty for rows that are not in several pieces.

    Args:
        key: as of `through_pieces`.
        since: when that was called, as of `time.time`.
    """
    if not isinstance(rows.input_ids, SideBySide):
        return ""
    seconds = time.time() - since
    num_bytes = sum(array.nbytes for array in rows.arrays.values())
    line = f"Tokens: {format_bytes(num_bytes)} in the cache"
    num_rows = num_made(_path_of(key).with_suffix(""), since)
    if num_rows:
        line += (
            f", {num_rows:,} rows prepared in {seconds:,.0f} s, "
            f"{num_rows / seconds:,.0f} rows a second"
        )
    return line


def _read_current(path: Path) -> tuple[TokenizedRows, DataReport] | None:
    """Map the rows of a file that is whole and current; otherwise None."""
    cached = read_cache(path)
    if cached is None:
        return None
    is_new = is_of_this_start(path.stat().st_mtime)
    return cached if are_current(*cached, are_of_this_start=is_new) else None


def _kept(path: Path, rows: TokenizedRows, report: DataReport) -> tuple[TokenizedRows, DataReport]:
    """The rows and their report, written to a file."""
    if any(reason.startswith(ENDED_WORKERS) for reason in report.rejected):
        return rows, report  # another start may not lose these rows
    _write(path, rows, report)
    # Read again: the mapped file is shared by all ranks of the machine, the arrays are not.
    return read_cache(path) or (rows, report)


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
    """The rows of several datasets, one after the other, whose tokens stay in their files.

    The arrays of rows are mapped from one file by all ranks of a machine.
    """
    if len(parts) == 1:
        return parts[0]
    path = _path_of(["joined", *(part.digest for part in parts)])
    folder = path.with_suffix("")
    with locked(path, waiting="Another process joins these datasets: waiting for it."):
        cached = read_cache(path)  # of earlier versions, with all tokens
        if cached is not None:
            return cached[0]
        found = _read_joined(folder, parts)
        if found is not None:
            return found
        rows = join_rows(parts, renumber=True, copies_tokens=False)
        with _without_cache(folder.parent):
            write_whole(folder, rows, DataReport(""), {})
        return _read_joined(folder, parts) or rows


def _read_joined(folder: Path, parts: Sequence[TokenizedRows]) -> TokenizedRows | None:
    """Map the rows of several datasets from a folder; None if there is none, or it is damaged."""
    try:
        index = read_index(folder)
        if index is None:
            return None
        stamp = Stamp(folder / STAMP, [folder / INDEX, folder / ROWS])
        is_hashed = not stamp.is_valid
        rows, _ = read_whole(folder, index, parts, is_hashed=is_hashed)
    except Damaged as error:
        warn_from_any_rank(
            f"The joined rows in {folder} are damaged ({error}): joining them again."
        )
        return None
    if is_hashed:
        stamp.write()
    return rows


def _write(path: Path, rows: TokenizedRows, report: DataReport) -> None:
    """Write a file atomically; a full or read-only folder disables the cache."""
    with _without_cache(path.parent):
        metadata = {"report": report_as_json(report), "learns": rows.learns}
        arrays = {name: array[:] for name, array in rows.arrays.items()}
        write_verified(path, arrays, rows, metadata)


@contextlib.contextmanager
def _without_cache(folder: Path) -> Iterator[None]:
    """Go on without what the block cannot write to a folder of the cache."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        log.warning(
            "Tokenized rows are not kept for the next start: %s cannot be written (%s). The "
            "environment variable FSDP_QLORA_CACHE names another folder.",
            folder,
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
    def build(cls, arrays: Arrays, metadata: Metadata, *, is_hashed: bool) -> "_CachedRows":
        digest = None if is_hashed else metadata["digest"]
        rows = TokenizedRows.from_arrays(arrays, metadata["learns"], digest)
        return cls(rows, report_of_json(metadata["report"]))


def read_cache(path: Path) -> tuple[TokenizedRows, DataReport] | None:
    """Map the rows of a file, read-only; None if there is no file or it is damaged.

    One process of a start hashes the file.
    """
    stamp = Stamp(path.with_suffix(".verified"), [path])
    is_hashed = not stamp.is_valid
    build = partial(_CachedRows.build, is_hashed=is_hashed)
    try:
        found = read_verified(path, build, is_hashed=is_hashed)
    except Damaged as error:
        warn_from_any_rank(
            f"The tokenized rows in {path} are damaged ({error}): making them again."
        )
        return None
    if found is not None and is_hashed:
        stamp.write()
    return found
