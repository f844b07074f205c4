"""A run's checkpoints on disk: folders that are complete or absent, with a hash of every file.

CHECKPOINTS/step_NNNNNN holds state.json, safetensors files and manifest.json, which has the size
and SHA-256 of the others and is written last. A folder is written as .step_NNNNNN.writing, flushed,
and then renamed, so a reader never sees a partial checkpoint. A damaged one is quarantined: renamed
to step_NNNNNN.set_aside.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import (
    FileRecord,
    files_difference,
    publish_folder,
    read_named,
    write_hashed_json,
)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
_STEP_NAME = re.compile(r"step_(\d{6,})")
_SET_ASIDE = ".set_aside"
_REPLACED = ".replaced"


class DamagedCheckpoint(ValueError):
    """A checkpoint has changed since it was written."""


# --- the folders ---


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint's name; None if it was renamed."""
    match = _STEP_NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def published(root: Path) -> dict[int, Path]:
    """Step -> folder of every published checkpoint, oldest first."""
    folders: dict[int, Path] = {}
    for path in root.glob("step_*"):
        # A quarantined one has a longer name, and no step.
        step = step_of(path)
        if step is not None and path.is_dir():
            folders[step] = path
    return dict(sorted(folders.items()))


def quarantined(root: Path) -> list[Path]:
    """The quarantined checkpoints, oldest first."""
    return sorted(root.glob(f"step_*{_SET_ASIDE}"))


def quarantine(folder: Path) -> Path:
    """Rename a checkpoint so that it is no longer used; its files stay."""
    target = folder.with_name(folder.name + _SET_ASIDE)
    # An earlier one of the same step: a rename does not replace a folder with files in it.
    shutil.rmtree(target, ignore_errors=True)
    os.rename(folder, target)
    return target


def remove(folder: Path) -> None:
    """Delete a checkpoint; a reader sees all of it or nothing."""
    # Renamed first: a kill in the middle of deleting would leave the name with some of the files.
    # `remove_leftovers` finds the other name by its beginning.
    removing = folder.with_name(f".{folder.name}.removing")
    shutil.rmtree(removing, ignore_errors=True)
    os.rename(folder, removing)
    shutil.rmtree(removing, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Delete incomplete checkpoints of a killed run. The caller holds the run folder's lock.

    One that was about to be replaced is put back.
    """
    for path in root.glob(f".step_*{_REPLACED}"):
        folder = root / path.name.removeprefix(".").removesuffix(_REPLACED)
        if not folder.exists():
            os.rename(path, folder)
    for path in root.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


# --- writing ---


def staging_folder(root: Path, step: int, action: str = "writing") -> Path:
    """The folder of a checkpoint until it is published.

    action: writing, or fetching (from a mirror).
    """
    return root / f".step_{step:06d}.{action}"


def publish_checkpoint(
    staging: Path, target: Path, files: Mapping[str, FileRecord], *, replaces: bool = False
) -> None:
    """Make a written checkpoint visible, complete and durable.

    Args:
        replaces: the step is published already, and this one takes its place.
    Raises:
        OSError: a file is missing, the disk is full, or the step is published already and is not
            to be replaced.
    """
    # As the file system has them: an incomplete file must not get a manifest.
    for name, record in files.items():
        if (staging / name).stat().st_size != record.size:
            raise OSError(errno.EIO, "the file is incomplete", str(staging / name))
    manifest = {
        "format": FORMAT_VERSION,
        "files": {name: record._asdict() for name, record in files.items()},
    }
    # Last of the files, which are flushed: whatever has a manifest is whole, also on a mirror,
    # where no rename helps. A kill before the rename leaves a staging folder, which the next start
    # deletes; a kill after it, a checkpoint.
    write_hashed_json(staging / MANIFEST, manifest | {"sha256": _manifest_hash(manifest)})
    if replaces:
        _replace(staging, target)
    else:
        publish_folder(staging, target)


def _replace(staging: Path, target: Path) -> None:
    """Publish a checkpoint in place of an earlier one of its step."""
    # No rename replaces a folder with files in it. After a kill between the two renames the next
    # start puts the earlier one back.
    replaced = target.with_name(f".{target.name}{_REPLACED}")
    shutil.rmtree(replaced, ignore_errors=True)
    os.rename(target, replaced)
    try:
        publish_folder(staging, target)
    except OSError:
        if not target.exists():
            os.rename(replaced, target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _manifest_hash(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# --- reading ---


def verify(folder: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint; returns its state.json.

    Raises:
        DamagedCheckpoint: names the file that has changed.
        UserError: a later version of this program saved it.
        OSError: a file cannot be read at present, such as on a network disk that is away; it may be
            undamaged.
    """
    check_files(folder, _read_manifest(folder))
    # Read after its hash was checked, so it is valid JSON.
    state: dict[str, Any] = json.loads(read_named(folder / STATE))
    return state


def _read_manifest(folder: Path) -> dict[str, FileRecord]:
    path = folder / MANIFEST
    if not path.is_file():
        raise DamagedCheckpoint(f"{path.name} {'is not a file' if path.exists() else 'is missing'}")
    try:
        manifest = json.loads(read_named(path))
        # The hash first: what a changed file calls its format means nothing.
        if manifest.pop("sha256") != _manifest_hash(manifest):
            raise ValueError("its hash differs")
        version = manifest["format"]
        files = {name: FileRecord(**record) for name, record in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path.name} has changed ({error})") from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{folder} has checkpoint format {version}, and this version of fsdp_qlora reads "
            f"{FORMAT_VERSION}. Resume with the version that saved it, or start from zero with "
            "--resume off:replace."
        )
    return files


def check_files(folder: Path, expected: Mapping[str, FileRecord]) -> None:
    """Raise DamagedCheckpoint if a file of a folder is missing, or its size or content differs."""
    difference = files_difference(folder, expected)
    if difference is not None:
        raise DamagedCheckpoint(difference)
