"""Copies of checkpoints in a second folder, off the box that may vanish: made beside training, read by a new box.

A mirror holds what a run folder holds of them: run.json, status.json, metrics.jsonl and checkpoints/. A checkpoint is
copied under another name, flushed and renamed, as it was made.
"""

import logging
import queue
import shutil
import threading
from pathlib import Path

from fsdp_qlora import checkpoint
from fsdp_qlora.flush import flush
from fsdp_qlora.run_folder import CHECKPOINTS, RUN, STATUS, read_json, write_atomically
from fsdp_qlora.sinks import METRICS_FILE

log = logging.getLogger("fsdp_qlora")


class Mirror:
    """Copies each published checkpoint in a thread of its own; without a target it does nothing.

    A mirror that is full or out of reach is reported once, and tried again with the next checkpoint.
    """

    def __init__(self, output_dir: Path, target: Path | None) -> None:
        self.output_dir, self.target = output_dir, target
        self._queue: queue.Queue[bool] = queue.Queue()
        self._is_failing = False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def copy_later(self, folder: Path) -> None:
        """Take note that a checkpoint has been published."""
        self._queue.put(True)

    def close(self) -> None:
        """Wait until all is copied."""
        self._queue.put(False)
        self._thread.join()

    def _work(self) -> None:
        while self._queue.get():
            try:
                if self.target is not None:
                    copy_run(self.output_dir, self.target)
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    log.warning(
                        "The mirror %s has no copy of the last checkpoint: %s. Training goes on; the next is tried.",
                        self.target,
                        error,
                    )
                self._is_failing = True


def open_mirror(output_dir: Path, target: str | None) -> Mirror:
    return Mirror(output_dir, Path(target).expanduser() if target else None)


def copy_run(source: Path, target: Path) -> None:
    """Bring the checkpoints in `target`, and what goes with them, up to those in `source`.

    Raises:
        OSError: a copy could not be made; those that are there stay.
    """
    root = target / CHECKPOINTS
    root.mkdir(parents=True, exist_ok=True)
    if (source / RUN).is_file():
        write_atomically(target / RUN, read_json(source / RUN))
    wanted = checkpoint.published(source / CHECKPOINTS)
    for step, folder in reversed(wanted.items()):
        if step not in checkpoint.published(root):
            _copy_checkpoint(folder, root, step)
    if (source / METRICS_FILE).is_file():
        partial = target / f".{METRICS_FILE}.partial"
        shutil.copyfile(source / METRICS_FILE, partial)
        partial.replace(target / METRICS_FILE)
    # A new box has none of the results, so there the run is never finished.
    write_atomically(target / STATUS, {**read_json(source / STATUS), "state": "running"})
    for step, folder in checkpoint.published(root).items():
        if step not in wanted:
            checkpoint.remove(folder)


def _copy_checkpoint(folder: Path, root: Path, step: int) -> None:
    staging = checkpoint.staging_folder(root, step)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        for path in sorted(folder.iterdir()):
            shutil.copyfile(path, staging / path.name)
            flush(staging / path.name)
        flush(staging)
        staging.rename(checkpoint.step_folder(root, step))
        flush(root)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        if folder.exists():
            raise
        # The run has deleted it meanwhile, as too old; a newer one is copied.
