"""status.json: the state of a run, and how it ended."""

import contextlib
import time
from pathlib import Path
from typing import Any

from fsdp_qlora.errors import ENDINGS
from fsdp_qlora.storage.files import write_json

STATUS = "status.json"
_SECONDS_BETWEEN = 10.0


class Status:
    """Writes status.json: state, step, saved_step, reason, exit_code, seconds. Does nothing on ranks other than 0.

    Errors are ignored: a full or missing disk is no reason to stop a run.
    """

    def __init__(self, output_dir: Path, *, is_rank_0: bool, **values: Any) -> None:
        self._path = output_dir / STATUS if is_rank_0 else None
        self.values = values
        self._written_at = 0.0

    def update(self, **values: Any) -> None:
        self.values |= values
        self._written_at = time.monotonic()
        if self._path is not None:
            with contextlib.suppress(OSError):
                write_json(self._path, self.values)

    def end(self, state: str, reason: str | None) -> None:
        """Record how the run has ended. state: a key of errors.ENDINGS."""
        self.update(state=state, reason=reason, exit_code=ENDINGS[state].exit_code)

    def keep(self, **values: Any) -> None:
        """Set values that change in every step; they are written every few seconds, and with the next update."""
        self.values |= values
        if time.monotonic() - self._written_at > _SECONDS_BETWEEN:
            self.update()
