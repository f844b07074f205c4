"""Finds the files of a folder.

They are those of its training split, if files or subfolders are named after splits.
"""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from fsdp_qlora.data.sources.files import FILE_KINDS, kind_of
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

# Words in the names of files and folders -> the split they mean.
SPLITS = (
    dict.fromkeys(("train", "training"), "train")
    | dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation")
    | dict.fromkeys(("test", "testing"), "test")
)
# Files that datasets.save_to_disk leaves, for one table and for one per split.
SAVED_TABLE = "state.json"
SAVED_SPLITS = "dataset_dict.json"


def split_of(path: Path) -> str | None:
    """The split that a file's or folder's name means: "train" for train-00000-of-00002.parquet."""
    words = re.split(r"[^a-z]+", path.name.split(".")[0].lower())
    for word in words:
        if word in SPLITS:
            return SPLITS[word]
    return None


def is_saved(path: Path) -> bool:
    """Whether datasets.save_to_disk made the folder."""
    return (path / SAVED_SPLITS).is_file() or (
        (path / SAVED_TABLE).is_file() and any(path.glob("*.arrow"))
    )


def find_files(path: Path, split: str | None = None) -> list[Path]:
    """The file itself, or files of known kinds in the folder, sorted by name. Hidden files are
    ignored.

    Args:
        split: whose files; without it, in a folder with held-out files (test, validation) only the
            others.
    Raises:
        UserError: there is no file of a known kind, or none of the split.
    """
    kinds = ", ".join(FILE_KINDS)
    if not path.is_dir():
        if kind_of(path) is None:
            raise UserError(
                f"dataset: {path} is not of a known kind. Kinds: {kinds}, each also "
                "with .gz or .zst."
            )
        if not path.is_file():  # reading a pipe or a device might never end
            raise UserError(
                f"dataset: {path} is not a regular file. Write the rows to a file and give its "
                "path."
            )
        if split is not None:
            raise UserError(
                f"dataset: {path} is a file, which has no split {split!r}. Leave out [{split}]."
            )
        return [path]
    files = _data_files(path)
    if not files:
        files = [file for folder in _subfolders(path) for file in _data_files(folder)]
        is_in_data = all(file.parent.name == "data" for file in files)
        # Names of subfolders that mean nothing may be anything: better asked than guessed.
        if not any(map(_split_below, files)) and not is_in_data:
            files = []
    if not files:
        below = ", ".join(folder.name for folder in _subfolders(path))
        hint = f" Subfolders are not searched ({below}): give the path of one." if below else ""
        raise UserError(
            f"dataset: the folder {path} has no file of a known kind. Kinds: {kinds}.{hint}"
        )
    return _choose(sorted(files, key=lambda file: file.relative_to(path).as_posix()), path, split)


def _choose(files: list[Path], folder: Path, split: str | None) -> list[Path]:
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_below(file), []).append(file)
    if split is not None:
        split_name = SPLITS.get(split, split)
        if split_name not in by_split:
            names = ", ".join(sorted(filter(None, by_split))) or "none"
            raise UserError(
                f"dataset: no file in {folder} belongs to the split {split!r}. Its splits: {names}."
            )
        return by_split[split_name]
    held_out = sorted(filter(None, by_split.keys() - {"train"}))
    # Files whose names say no split are for training, if others are held out.
    chosen = by_split.get("train") or by_split.get(None)
    if not held_out or not chosen:
        return files
    log.info(
        "%s: %s trained on, and not %s. To evaluate on the held-out rows: --eval_dataset '%s[%s]'.",
        folder,
        _names(chosen, folder) + (" is" if len(chosen) == 1 else " are"),
        _names(
            [file for group in by_split.values() if group is not chosen for file in group], folder
        ),
        folder,
        held_out[-1],
    )
    return chosen


def _split_below(file: Path) -> str | None:
    split = split_of(file)
    if split is None and file.parent.name in SPLITS:
        split = split_of(file.parent)
    return split


def _names(files: Iterable[Path], folder: Path) -> str:
    names = [file.relative_to(folder).as_posix() for file in files]
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text


def _data_files(folder: Path) -> list[Path]:
    try:
        files = [
            file
            for file in folder.iterdir()
            if kind_of(file) and file.name[0] != "." and file.is_file()
        ]
    except OSError as error:
        raise UserError(
            f"dataset: {folder} cannot be listed ({error.strerror or error})."
        ) from error
    texts = [file for file in files if kind_of(file) is FILE_KINDS[".txt"]]
    if texts and len(texts) < len(files):  # a licence or notes
        log.info(
            "%s: text files in a folder of rows are not read: %s.", folder, _names(texts, folder)
        )
        return [file for file in files if kind_of(file) is not FILE_KINDS[".txt"]]
    return files


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
