"""Files of a run's folder that a reader sees whole or not at all; on a full disk the oldest checkpoints make room."""

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


def publish(output_dir: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary folder, flush it to disk, then move its files into `output_dir`.

    A reader sees each file whole or not at all. Where the disk is full, the oldest checkpoints make room.

    Raises:
        TrainingError: it could not be written even so.
    """
    error = write_with_room(output_dir, lambda: _move_in(output_dir, write))
    if error:
        shutil.rmtree(output_dir / ".saving", ignore_errors=True)
        raise cannot_save(output_dir, error) from error


def write_with_room(output_dir: Path, write: Callable[[], object]) -> Exception | None:
    """Call `write`, and again with each checkpoint that makes room on a full disk; returns what stops it even so."""
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
        f"The result cannot be saved in {output_dir} ({error}). The last checkpoint holds all of it: make room there, "
        "and the same command saves it without training again."
    )


def _move_in(output_dir: Path, write: Callable[[Path], object]) -> None:
    staging = output_dir / ".saving"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    write(staging)
    flush_files(staging)
    for path in sorted(staging.iterdir(), key=_publishing_order):
        target = output_dir / path.name
        if target.is_dir():  # a folder (of chat templates) cannot be replaced while it is there
            shutil.rmtree(target)
        path.replace(target)
    staging.rmdir()
    flush(output_dir)


def _publishing_order(path: Path) -> tuple[bool, bool, str]:
    """Configurations last: they are what readers look for. What vouches for all, after all."""
    return path.name == RESULT, path.suffix == ".json", path.name
