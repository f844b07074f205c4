"""Saves a result where the disk may be full: old checkpoints make room for it."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from fsdp_qlora.checkpoint.saving import delete_oldest, is_full
from fsdp_qlora.utils.errors import TrainingError
from fsdp_qlora.utils.files import open_named
from fsdp_qlora.utils.result_files import STAGING, publish_files
from fsdp_qlora.utils.run_files import CHECKPOINTS

log = logging.getLogger("fsdp_qlora")


def publish_with_room(output_dir: Path, write: Callable[[Path], object]) -> None:
    """Publish the files that `write` puts into a folder, as `publish_files` does.

    If the disk is full, the oldest checkpoints are deleted.

    Raises:
        TrainingError: the files could not be written.
    """
    error = write_with_room(output_dir, lambda: publish_files(output_dir, write))
    if error:
        shutil.rmtree(output_dir / STAGING, ignore_errors=True)
        raise cannot_save(output_dir, error) from error


def write_with_room(output_dir: Path, write: Callable[[], object]) -> Exception | None:
    """Call `write`; on a full disk, delete a checkpoint and call it again.

    Returns the last error, None on success.
    """
    # It ends: each round deletes a checkpoint, and the newest one is never deleted.
    while True:
        try:
            write()
            return None
        except (OSError, SafetensorError) as error:
            freed = delete_oldest(output_dir / CHECKPOINTS) if is_full(error) else None
            if freed is None:
                return error
            log.warning("The disk is full (%s). %s was deleted to make room.", error, freed)


def append_with_room(path: Path, content: bytes) -> Exception | None:
    """Append to a file of a run's folder, and return when it is on the disk.

    On a full disk the oldest checkpoints are deleted for it.

    Returns the last error, None on success.
    """
    size = path.stat().st_size if path.exists() else 0

    def write() -> None:
        with open_named(path, "ab", follow=False) as file:
            # An attempt on a full disk may have left a part.
            file.truncate(size)
            file.write(content)
            file.flush()
            # Without fsync a power loss could take lines of which a later checkpoint has learned.
            os.fsync(file.fileno())

    return write_with_room(path.parent, write)


def cannot_save(output_dir: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"The result cannot be saved in {output_dir} ({error}). The last checkpoint contains it: "
        "free disk space, and the same command saves it without training again."
    )
