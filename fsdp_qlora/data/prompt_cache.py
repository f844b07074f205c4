"""The cache of prompts: one process of a machine reads a dataset, and all map its prompts."""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdp_qlora.data.batches.cache import CACHE_VERSION, through_cache
from fsdp_qlora.data.batches.pieces import are_current
from fsdp_qlora.data.batches.report import DataReport
from fsdp_qlora.data.batches.rows import join_rows
from fsdp_qlora.data.content import ENDED_WORKERS
from fsdp_qlora.data.prompt_file import KeptPrompts, PromptFile, read_prompts
from fsdp_qlora.data.prompt_texts import NotEncodable
from fsdp_qlora.data.prompts import NO_PROMPTS, JoinedTables, Prompt, Prompts
from fsdp_qlora.distributed.ranks import derive_seed_of_list
from fsdp_qlora.utils.descriptions import read_description, write_description
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import cache_folder, staged_file
from fsdp_qlora.utils.locks import locked
from fsdp_qlora.utils.text import warn_from_any_rank
from fsdp_qlora.utils.verified_files import Damaged
from fsdp_qlora.utils.verified_stamps import is_of_this_start

log = logging.getLogger("fsdp_qlora")

# Raise it when the arrays or the texts of the file change, or what is read of a row.
_VERSION = 1

Keep = Callable[[Sequence[Prompt]], None]
"""Takes prompts in the order of the dataset, a batch at a time."""


class _NotKept(Exception):
    """Prompts that may not be kept. The message is the reason."""


class _NotWritten(Exception):
    """A file of prompts that cannot be written. The message is the reason."""


def prompts_through_cache(
    key: Sequence[object], read: Callable[[Keep], DataReport]
) -> tuple[Prompts, DataReport]:
    """Prompts and their report, from the cache.

    What is not there yet is read by one process of a machine at a time, and kept. Prompts that
    cannot be kept are read by each process into its memory.

    Args:
        key: all that the prompts depend on, as JSON.
        read: reads the dataset, gives its prompts away and returns the report on it.
    """
    path = _path_of("prompts", key)
    with locked(path, waiting="Another process reads these prompts: waiting for it."):
        kept = _read_current(path) or _make(path, read)
    if kept:
        return kept.prompts, kept.report
    found: list[Prompt] = []
    report = read(found.extend)
    return Prompts.of(found), report


def _path_of(what: str, key: Sequence[object]) -> Path:
    folder = cache_folder() / "prompts"
    # The templates and rules of tokenized rows are those of prompts, too.
    text = json.dumps([what, _VERSION, CACHE_VERSION, *key])
    with contextlib.suppress(OSError):  # said when the prompts are written
        folder.mkdir(parents=True, exist_ok=True)
    return folder / hashlib.sha256(text.encode()).hexdigest()[:40]


def _read_current(path: Path) -> KeptPrompts | None:
    """Map the prompts of a file that is whole, and whose images are as they were."""
    kept = _read(path)
    if kept is None:
        return None
    is_new = is_of_this_start(path.stat().st_mtime)
    rows = kept.prompts.rows
    return kept if are_current(rows, kept.report, are_of_this_start=is_new) else None


def _read(path: Path) -> KeptPrompts | None:
    try:
        kept = read_prompts(path)
    except Damaged as error:
        warn_from_any_rank(f"The prompts in {path} are damaged ({error}): making them again.")
        return None
    if kept:
        log.debug("Prompts are read from %s", path)
    return kept


def _make(path: Path, read: Callable[[Keep], DataReport]) -> KeptPrompts | None:
    """Read a dataset into a file; None if that cannot be kept."""
    try:
        with staged_file(path) as partial, PromptFile(partial) as file:
            report = _read_into(file, read)
            if any(reason.startswith(ENDED_WORKERS) for reason in report.rejected):
                raise _NotKept("another start may be able to use rows that this one has left out")
            file.finish(report)
    except (NotEncodable, _NotKept) as reason:
        log.debug("The prompts are in memory, and not in the cache: %s", reason)
        return None
    except (OSError, _NotWritten) as error:
        log.warning(
            "Prompts are not kept for the next start: %s cannot be written (%s). The environment "
            "variable FSDP_QLORA_CACHE names another folder.",
            path.parent,
            error,
        )
        return None
    # The mapped file is shared by all ranks of the machine.
    return _read(path)


def _read_into(file: PromptFile, read: Callable[[Keep], DataReport]) -> DataReport:
    """Read a dataset into a file.

    Raises:
        UserError: the dataset cannot be read.
        _NotWritten: the file cannot be written.
    """

    def keep(prompts: Sequence[Prompt]) -> None:
        try:
            file.add(prompts)
        except OSError as error:
            raise _NotWritten(str(error)) from error

    try:
        return read(keep)
    except OSError as error:
        raise UserError(f"dataset: its rows cannot be read ({error}).") from error


def join_prompts(parts: Sequence[Prompts], *, renumber: bool) -> Prompts:
    """The prompts of several datasets, one after the other.

    parts: with all prompts of their tables. renumber: whether row numbers continue from one to the
    next.
    """
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return parts[0] if parts else NO_PROMPTS
    tables = [part.rows for part in parts]
    key = ["joined prompts", renumber, *(table.digest for table in tables)]
    rows, _ = through_cache(key, lambda: (join_rows(tables, renumber=renumber), DataReport("")))
    digests = [part.digest for part in parts]
    digest = json.dumps([renumber, *digests]) if all(digests) else ""
    return Prompts.whole(rows, JoinedTables([part.beside for part in parts]), digest)


def seed_of_columns(prompts: Prompts) -> int:
    """`derive_seed` of the list of all prompts' columns.

    It is computed once for prompts that are in the cache: each of them is looked at for it.
    """
    if not prompts.digest:
        return derive_seed_of_list(prompts.columns())
    path = _path_of("columns", [prompts.digest])
    with locked(path, waiting="Another process hashes the columns: waiting for it."):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(read_description(path)["seed"])
        seed = derive_seed_of_list(prompts.columns())
        with contextlib.suppress(OSError):
            write_description(path, {"seed": seed})
    return seed
