"""Copies checkpoints to another place in the background, in case this machine is lost; see stores.py."""

import logging
import queue
import threading
from pathlib import Path

from fsdp_qlora.checkpointing.stores import Store

log = logging.getLogger("fsdp_qlora")


class Mirror:
    """Copies each published checkpoint in a background thread; without a target it does nothing.

    A mirror that is full or unreachable is reported once, and tried again with the next checkpoint.
    """

    def __init__(self, output_dir: Path, target: Store | None) -> None:
        self.output_dir, self.target = output_dir, target
        self._queue: queue.Queue[bool] = queue.Queue()
        self._is_failing = False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def copy_later(self) -> None:
        """Copy new checkpoints in the background."""
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
                        "The mirror %s has no copy of the last checkpoint: %s. Training continues, and the mirror is "
                        "tried again at the next checkpoint.",
                        self.target and self.target.name,
                        error,
                    )
                self._is_failing = True
