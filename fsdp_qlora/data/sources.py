"""Sources: where the rows of a dataset come from, by name, path or folder."""

import difflib
import hashlib
import importlib.resources
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_qlora.data.files import FILE_KINDS, find_files, hash_file, read_files
from fsdp_qlora.data.rows import Rows, SourceFile
from fsdp_qlora.errors import UserError
from fsdp_qlora.loading.hub import ask_hub, first_line, hub_reason, is_hub_name

log = logging.getLogger("fsdp_qlora")

DUMMY = "dummy"  # random tokens, made without text: see tokenization.dummy_rows
DEFAULT_SAMPLES = {"alpaca_sample": 128, DUMMY: 512}


@dataclass(frozen=True)
class Source:
    """A dataset that was found. Its rows are parsed when `read` is called."""

    origin: str
    """Its path or name, for people."""
    identity: str
    """Changes when the content does."""
    read: Callable[[int | None], Rows]
    """Reads the first N rows, or all. Raises UserError if they are malformed."""


def find_source(dataset: str) -> Source:
    """Find a dataset by name or path.

    Args:
        dataset: a key of DATASETS, a .json, .jsonl, .csv or .parquet file, a folder of such files, or
            owner/name on the hub.
    Raises:
        UserError: there is no such name, file or folder, or the hub cannot be reached.
    """
    if dataset in DATASETS:
        return DATASETS[dataset]()
    if "://" in dataset:
        raise UserError(f"dataset: {dataset} is a URL. Download it and give the path. {_choices()}")
    if _looks_local(dataset):
        return local_source(Path(dataset).expanduser())
    if is_hub_name(dataset):
        return hub_source(dataset)
    close = difflib.get_close_matches(dataset, dataset_names(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UserError(f"dataset: unknown name {dataset!r}.{hint} {_choices()}")


def dataset_names() -> list[str]:
    """The names that `--dataset` accepts besides paths."""
    return [*DATASETS, DUMMY]


def demo_source() -> Source:
    """The rows that ship with the package. They need no network."""
    return local_source(Path(str(importlib.resources.files("fsdp_qlora.data") / "alpaca_demo.jsonl")))


def local_source(path: Path) -> Source:
    """A file, or all files of the known kinds in a folder, sorted by name.

    Raises:
        UserError: the path does not exist, or has no file of a known kind.
    """
    if not path.exists():
        raise UserError(f"dataset: no such file or folder: {path}. {_choices()}")
    files = find_files(path)
    identity = hashlib.sha256()
    for file in files:
        # The name is part of it: it selects the reader, and messages and the cached report show it.
        identity.update(f"{file.name}\0{hash_file(file)}\0".encode())
    return Source(origin=str(path), identity=identity.hexdigest(), read=partial(read_files, path, files))


def hub_source(name: str) -> Source:
    """The train split of a dataset on the Hugging Face hub, or of its copy on this machine.

    Raises:
        UserError: neither the hub nor a copy can be read. The message names what works without a network.
    """
    import datasets  # slow to import and not needed for local files

    refusal = ask_hub(name, "dataset")
    if refusal is not None:
        reason = hub_reason(refusal)
        if not (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir():
            raise UserError(
                f"dataset {name}: there is no such file or folder, and {reason}. Without the hub, use "
                "--dataset alpaca_demo, which ships with the package, or the path of a local "
                f"{', '.join(FILE_KINDS)} file."
            ) from refusal
        log.warning(
            "%s is read from the copies on this machine: %s. HF_HUB_OFFLINE=1 does so without delay.",
            name,
            reason,
        )
    try:
        table = datasets.load_dataset(name, split="train")
    except Exception as error:  # what it raises is not documented
        raise UserError(
            f"dataset {name}: its train split cannot be read from the hub ({first_line(error)}). Download the "
            "dataset and give the path of its file or folder."
        ) from error
    # The fingerprint is a hash of the repository's commit and the split. The library has no public name for it.
    return Source(origin=name, identity=table._fingerprint, read=partial(_read_hub_table, table, name))


def _read_hub_table(table: Any, name: str, limit: int | None) -> Rows:
    size = len(table) if limit is None else min(limit, len(table))
    rows = table.select(range(size)).to_list()
    if not rows:
        raise UserError(f"{name}: the dataset is empty.")
    return Rows(rows, list(range(1, size + 1)), list(table.column_names), [SourceFile(name, "row")])


DATASETS: dict[str, Callable[[], Source]] = {
    "alpaca": partial(hub_source, "yahma/alpaca-cleaned"),
    "alpaca_sample": partial(hub_source, "yahma/alpaca-cleaned"),
    "alpaca_demo": demo_source,
}


def _looks_local(dataset: str) -> bool:
    path = Path(dataset).expanduser()
    if path.suffix.lower() in FILE_KINDS or path.exists():
        return True
    return path.name != dataset and not is_hub_name(dataset)


def _choices() -> str:
    return (
        f"Datasets by name: {', '.join(dataset_names())}. "
        f"Or give the path of a {', '.join(FILE_KINDS)} file or of a folder of them, or owner/name on the hub."
    )
