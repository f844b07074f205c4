"""Copies of checkpoints off the box that may vanish, made beside training: see stores.py for where."""

import logging
import queue
import threading
from pathlib import Path

from fsdp_qlora.checkpointing.stores import Store

log = logging.getLogger("fsdp_qlora")


class Mirror:
    """Copies each published checkpoint in a thread of its own; without a target it does nothing.

    A mirror that is full or out of reach is reported once, and tried again with the next checkpoint.
    """

    def __init__(self, output_dir: Path, target: Store | None) -> None:
        self.output_dir, self.target = output_dir, target
        self._queue: queue.Queue[bool] = queue.Queue()
        self._is_failing = False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def copy_later(self) -> None:
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
                    self.target.update(self.output_dir)
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    log.warning(
                        "The mirror %s has no copy of the last checkpoint: %s. Training goes on; the next is tried.",
                        self.target and self.target.name,
                        error,
                    )
                self._is_failing = True
