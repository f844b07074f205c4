"""Sources: where the rows of a dataset come from, by name, path or folder."""

import dataclasses
import difflib
import importlib.resources
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fsdp_qlora.data.content import BadRow, Row, SourceFile
from fsdp_qlora.data.sources.dataset_name import DatasetName, parse_name
from fsdp_qlora.data.sources.file_content import is_packed
from fsdp_qlora.data.sources.file_hashes import hash_files, states_of
from fsdp_qlora.data.sources.files import FILE_KINDS, FileKind, kind_of, look_into
from fsdp_qlora.data.sources.folders import SAVED_SPLITS, find_files, is_saved
from fsdp_qlora.data.sources.hub_files import LARGE, large_split
from fsdp_qlora.data.sources.reading import (
    ChooseColumns,
    NeededRows,
    NumberedRows,
    Part,
    Progress,
    Ranges,
    Reading,
    Skipped,
)
from fsdp_qlora.data.sources.tables import BATCH_ROWS, number_rows, skip_rows
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import ROWS_IN_MEMORY, cache_folder, refuse_pipes
from fsdp_qlora.utils.hub import ask_hub, hub_reason, is_hub_name
from fsdp_qlora.utils.text import first_line

log = logging.getLogger("fsdp_qlora")

DEMO = "alpaca_demo"
DUMMY = "dummy"  # random tokens, made without text: see tokenization.dummy_rows
# Rows that tell the format of all.
ROWS_LOOKED_AT = 100
# Rows at a time: enough to keep the threads of a fast tokenizer busy.
ROWS_PER_BATCH = 1000
DEFAULT_SAMPLES = {"alpaca_sample": 128, "orca_math": 512, DUMMY: 512}


class Entry(NamedTuple):
    """A row of a dataset: its file, its number there, its content."""

    file: SourceFile
    row_number: int
    row: Row | BadRow
    part: int = 0
    """The index of its file among the source's parts."""


class Place(NamedTuple):
    """Where the reading of a source goes on: behind an entry."""

    num_entries: int
    """Entries that were read before."""
    part: int
    """The index of the last one's part."""
    row_number: int
    """The number of this entry in the part."""
    offset: int
    """The number in the whole dataset before the part's first row."""


BEGINNING = Place(0, 0, 0, 0)


def place_after(entry: Entry, num_entries: int) -> Place:
    """The place behind an entry, up to which `num_entries` were read."""
    return Place(num_entries, entry.part, entry.row_number, entry.file.offset)


def _read_entries(
    parts: Sequence[Part], used: ChooseColumns, after: Place, start: int, progress: Progress
) -> Iterator[Entry]:
    """Yield the entries behind a place, but for the first `start`."""
    offset = after.offset
    for index in range(after.part, len(parts)):
        part = parts[index]
        file = SourceFile(part.name, part.unit, offset)
        reading = Reading(used, after.row_number if index == after.part else 0, start)
        progress.begin_part(index, reading)
        last = 0
        for row_number, row in part.read(reading):
            # The number of the last row, not the count: blank lines have numbers, too.
            last = row_number
            if isinstance(row, Skipped):
                start -= row.count
                progress.skip()
            else:
                yield Entry(file, row_number, row, index)
        offset += last


class SourceChanged(UserError):
    """A dataset was changed while it was read, so what was read is not of one content."""


@dataclass(frozen=True)
class Source:
    """A dataset that was found. Its rows are parsed when they are read."""

    origin: str
    """Path or name of the source, for messages."""
    fingerprint: Callable[[], str]
    """A hash of the content as it is now."""
    parts: list[Part]
    start: int = 0
    """The rows from this one on are used, up to `stop`."""
    stop: int | None = None
    file_states: Callable[[], list[list[int]]] = list
    """The sizes, inodes and times of the local files as they are now."""
    varies: bool = False
    """Whether another machine may read it in other parts, by what it has of the dataset."""
    _progress: Progress = field(default_factory=Progress, init=False, compare=False, repr=False)

    @property
    def identity(self) -> str:
        """A hash of the content as it was when this was first asked."""
        return self._identified[0]

    def check_untouched(self) -> None:
        """Raise SourceChanged if a local file was written since `identity` was first asked.

        Its former content may come back, so `check_unchanged` would not tell.
        """
        if self.file_states() != self._identified[1]:
            self._refuse_change()

    def check_unchanged(self) -> None:
        """Raise SourceChanged if the content has changed since `identity` was first asked."""
        if self.fingerprint() != self.identity:
            self._refuse_change()

    def _refuse_change(self) -> NoReturn:
        raise SourceChanged(
            f"{self.origin} was changed while it was read. Start again when it is complete."
        )

    @cached_property
    def _identified(self) -> tuple[str, list[list[int]]]:
        """The hash of the content, and the states of the files before they were hashed."""
        states = self.file_states()
        return self.fingerprint(), states

    def slice(self, start: int, stop: int | None) -> "Source":
        """These of its rows, counted from its first."""
        stop = self.stop if stop is None else self.start + stop
        return dataclasses.replace(self, start=self.start + start, stop=stop)

    def folder_of(self, name: str) -> str:
        """The folder of a part's file, for relative paths in its rows."""
        path = self.origin
        folder = os.path.dirname(path if path.endswith(name) else os.path.join(path, name))
        # Rows from memory were written there by the program: their paths are the caller's.
        if folder == str(cache_folder().resolve() / ROWS_IN_MEMORY):
            return os.getcwd()
        return folder

    def entries(
        self,
        limit: int | None = None,
        *,
        used: ChooseColumns = tuple,
        after: Place = BEGINNING,
    ) -> Iterator[Entry]:
        """Up to `limit` entries, malformed ones included.

        The rest is not read, nor columns that are not `used`.

        Args:
            after: reading goes on there, with what is left of the limit.
        Raises:
            UserError: a file cannot be read at all; the message names the place.
        """
        counts = [] if limit is None else [limit]
        if self.stop is not None:
            counts.append(self.stop - self.start)
        most = min(counts, default=None)
        num_left = None if most is None else max(0, most - after.num_entries)
        # Entries before the first one of a slice are none of `num_entries`.
        start = self.start if after == BEGINNING else 0
        progress = self._progress
        progress.begin(self.parts, start=self.start, before=after.num_entries, most=most)
        entries = _read_entries(self.parts, used, after, start, progress)
        for entry in islice(entries, num_left):
            progress.count()
            yield entry
        progress.end()

    def share_read(self) -> float | None:
        """An estimate of the share that the last `entries` call has read, 0 to 1.

        It is of all rows that count by limits and slices, those before the call's `after` included;
        None before the first row.
        """
        return self._progress.share()

    def estimate_rows(self) -> int:
        """The rows of the dataset without its slice, by what an `entries` call has read so far."""
        return self._progress.rows_in_all()


def find_source(dataset: str | DatasetName) -> Source:
    """Find a dataset by name or path.

    Args:
        dataset: a key of DATASETS, a file of FILE_KINDS, a folder of such files or of
            datasets.save_to_disk, or owner/name on the hub; with a configuration, split and slice,
            see `parse_name`.
    Raises:
        UserError: there is no such name, file, folder, configuration or split, or the hub cannot be
            reached.
    """
    parsed = parse_name(dataset) if isinstance(dataset, str) else dataset
    name = parsed.name
    if "://" in name:
        raise UserError(f"dataset: {name} is a URL. Download it and give the path. {_choices()}")
    if name == DEMO or (name not in DATASETS and _looks_local(name)):
        if parsed.config is not None:
            raise UserError(
                f"dataset: {name} is a path, and only datasets of the hub have configurations."
            )
        source = local_source(_existing(name), parsed.split)
    elif name in DATASETS:
        named = parse_name(DATASETS[name])
        # The rows that a short name leaves out are of its own split; another split is used whole.
        split = named.split or "train"
        start = named.start
        if parsed.split:
            split = parsed.split
            start = 0
        source = hub_source(
            named.name, config=parsed.config, split=split, shuffled=name in SHUFFLED
        ).slice(start, None)
    elif is_hub_name(name):
        source = hub_source(name, config=parsed.config, split=parsed.split or "train")
    else:
        close = difflib.get_close_matches(name, [*DATASETS, DEMO, DUMMY], n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UserError(f"dataset: unknown name {name!r}.{hint} {_choices()}")
    return source.slice(parsed.start, parsed.stop)


def _existing(name: str) -> Path:
    if name == DEMO:  # the rows that ship with the package
        return Path(str(importlib.resources.files("fsdp_qlora.data") / "alpaca_demo.jsonl"))
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(f"dataset: no such file or folder: {path}. {_choices()}")
    return path


def local_source(path: Path, split: str | None = None) -> Source:
    """A file, or the files of a folder that `find_files` finds."""
    if is_saved(path):
        return saved_source(path, split)
    files: dict[Path, FileKind] = {}
    for file in find_files(path, split):
        kind = look_into(file)
        if kind is not None:
            files[file] = kind
    folder = path if path.is_dir() else path.parent
    parts = [_file_part(file, kind, folder) for file, kind in files.items()]
    fingerprint = partial(hash_files, folder, files)
    return Source(str(path), fingerprint, parts, file_states=partial(states_of, files))


def _file_part(file: Path, kind: FileKind, folder: Path) -> Part:
    name = file.relative_to(folder).as_posix()
    return Part(
        name,
        kind.unit,
        partial(kind.read, file),
        file.stat().st_size,
        partial(kind.num_rows, file) if kind.num_rows else None,
        partial(kind.read_ranges, file) if kind.read_ranges and not is_packed(file) else None,
    )


def saved_source(path: Path, split: str | None) -> Source:
    """A folder that datasets.save_to_disk made, of one table or of one per split."""
    import datasets

    if (path / SAVED_SPLITS).is_file():
        splits = sorted(folder.name for folder in path.iterdir() if is_saved(folder))
        name = split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
        if name not in splits:
            raise UserError(
                f"dataset: {path} has no split {name!r}. Its splits: {', '.join(splits)}."
            )
        if split is None and len(splits) > 1:
            log.info(
                "%s: the split %s is trained on, and not %s.",
                path,
                name,
                ", ".join(s for s in splits if s != name),
            )
        path = path / name
    elif split is not None:
        raise UserError(
            f"dataset: {path} is one table, which has no split {split!r}. Leave out [{split}]."
        )
    # The library would open one, and wait for it forever.
    refuse_pipes(path, "dataset")
    try:
        table = datasets.load_from_disk(str(path))
    except Exception as error:  # what it raises is not documented
        raise UserError(
            f"dataset: {path} cannot be read as a saved dataset ({first_line(error)})."
        ) from error
    files = sorted(path.glob("*.arrow"))
    return Source(
        str(path),
        partial(hash_files, path, files),
        [_table_part(table, str(path))],
        file_states=partial(states_of, files),
    )


def hub_source(
    name: str, *, config: str | None = None, split: str = "train", shuffled: bool = False
) -> Source:
    """A split of a dataset on the Hugging Face hub, or of its copy on this machine.

    Args:
        config: one of the dataset's configurations, for one that has several.
        shuffled: in the order in which the 2024 program took the rows.
    Raises:
        UserError: neither the hub nor a copy can be read. The message names what works without a
            network.
    """
    import datasets  # slow to import and not needed for local files

    refusal = ask_hub(name, "dataset")
    files = None
    if not shuffled:
        files = large_split(name, config, split, is_reachable=refusal is None)
    if files is not None:
        identity = files.identity
        return Source(name, lambda: identity, files.parts())
    if refusal is not None:
        reason = hub_reason(refusal)
        if not (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir():
            raise UserError(
                f"dataset {name}: there is no such file or folder, and {reason}. Without the hub, "
                "use --dataset alpaca_demo, which ships with the package, or the path of a local "
                f"{', '.join(FILE_KINDS)} file."
            ) from refusal
        log.warning(
            "%s is read from the copies on this machine: %s. HF_HUB_OFFLINE=1 does so without "
            "delay.",
            name,
            reason,
        )
    try:
        table = datasets.load_dataset(name, *([config] if config else []), split=split)
    except Exception as error:  # what it raises is not documented
        advice = f" Name one of them: {name}:CONFIG." if "config name" in str(error).lower() else ""
        reason = " ".join(str(error).split())[:300] if advice else first_line(error)
        raise UserError(
            f"dataset {name}: its {split} split cannot be read from the hub ({reason}).{advice} Or "
            "download the dataset and give the path of its file or folder."
        ) from error
    if shuffled:
        table = table.shuffle(seed=_SEED_OF_2024)
    # The fingerprint is a hash of the repository's commit and the split. The library has no public
    # name for it.
    # Where the machine had no table, one that large may have been read file by file.
    varies = table.download_size is None or table.download_size > LARGE
    return Source(name, lambda: str(table._fingerprint), [_table_part(table, name)], varies=varies)


def _table_part(table: Any, name: str) -> Part:
    """A table of `datasets`."""

    def rows_between(used: ChooseColumns, start: int, stop: int) -> NumberedRows:
        if start >= stop:
            return
        used_columns = used(table.column_names)
        chosen = [column for column in table.column_names if column in used_columns]
        needed = table.select_columns(chosen)
        if stop - start < len(table):
            needed = needed.select(range(start, stop))
        yield from number_tables(needed, name, table.column_names, first=start + 1)

    def read(reading: Reading) -> NeededRows:
        last, skipped = skip_rows(len(table), reading)
        reading.share = lambda: last / max(1, len(table))
        yield last, skipped
        for row_number, row in rows_between(reading.used, last, len(table)):
            last = row_number
            yield row_number, row

    def read_ranges(used: ChooseColumns, ranges: Ranges) -> NumberedRows:
        for start, stop in ranges:
            yield from rows_between(used, math.ceil(start), math.ceil(stop))

    return Part(name, "row", read, len(table), lambda: len(table), read_ranges, is_file=False)


def number_tables(
    dataset: Any, name: str, columns: Sequence[str] = (), *, first: int = 1
) -> NumberedRows:
    """The rows of a dataset of `datasets`, as its tables have them, numbered from `first` on."""
    for table in dataset.with_format("arrow").iter(batch_size=BATCH_ROWS):
        yield from number_rows(table, name, first, columns)
        first += len(table)


# Short names of datasets on the hub. guanaco, sql and orca_math take the rows that
# AnswerDotAI/fsdp_qlora took under these names in 2024: it shuffled some before it left out those
# for evaluation.
DATASETS = {
    "alpaca": "yahma/alpaca-cleaned",
    "alpaca_sample": "yahma/alpaca-cleaned",
    "guanaco": "timdettmers/openassistant-guanaco",
    "sql": "knowrohit07/know_sql[validation][1000:]",
    "orca_math": "microsoft/orca-math-word-problems-200k",
}
SHUFFLED = ("sql", "orca_math")
# The default of the 2024 program's --seed.
_SEED_OF_2024 = 42


def _looks_local(dataset: str) -> bool:
    path = Path(dataset).expanduser()
    is_path = path.name != dataset and not is_hub_name(dataset)
    return kind_of(path) is not None or path.exists() or is_path


def _choices() -> str:
    return (
        f"Datasets by name: {', '.join([*DATASETS, DEMO, DUMMY])}. Or give the path of a "
        f"{', '.join(FILE_KINDS)} file or of a folder of them, or owner/name on the hub. Separate "
        "several datasets by spaces."
    )
