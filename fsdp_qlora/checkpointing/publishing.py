"""Writes a result atomically into a run's folder; on a full disk the oldest checkpoints are deleted to make room."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from fsdp_qlora.checkpointing.layout import CHECKPOINTS, RESULT
from fsdp_qlora.checkpointing.saving import delete_oldest, is_full
from fsdp_qlora.errors import TrainingError
from fsdp_qlora.storage.files import flush, flush_files

log = logging.getLogger("fsdp_qlora")


def publish_files(output_dir: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary folder, flush it to disk, then move its files into `output_dir`.

    A reader sees each file complete or not at all. If the disk is full, the oldest checkpoints are deleted.

    Raises:
        TrainingError: it could not be written.
    """
    error = write_with_room(output_dir, lambda: _move_in(output_dir, write))
    if error:
        shutil.rmtree(output_dir / ".saving", ignore_errors=True)
        raise cannot_save(output_dir, error) from error


def write_with_room(output_dir: Path, write: Callable[[], object]) -> Exception | None:
    """Call `write`, again after each checkpoint deleted from a full disk; returns the error that remains, if any."""
    while True:
        try:
            write()
            return None
        except (OSError, SafetensorError) as error:
            freed = delete_oldest(output_dir / CHECKPOINTS) if is_full(error) else None
            if freed is None:
                return error
            log.warning("The disk is full (%s). To make room for the result, %s was deleted.", error, freed)


def cannot_save(output_dir: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"The result cannot be saved in {output_dir} ({error}). The last checkpoint contains it: make room there, and "
        "the same command saves it without training again."
    )


def _move_in(output_dir: Path, write: Callable[[Path], object]) -> None:
    staging = output_dir / ".saving"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    write(staging)
    flush_files(staging)
    for path in sorted(staging.iterdir(), key=_publishing_order):
        target = output_dir / path.name
        if target.is_dir():  # an existing folder (of chat templates) cannot be replaced by a rename
            shutil.rmtree(target)
        path.replace(target)
    staging.rmdir()
    flush(output_dir)


def _publishing_order(path: Path) -> tuple[bool, bool, str]:
    """Configurations after the weights: readers look for them. result.json, which verifies the others, last."""
    return path.name == RESULT, path.suffix == ".json", path.name
