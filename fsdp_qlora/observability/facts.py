"""Facts of a run, written to facts.json while it trains; its report shows them."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdp_qlora.distributed.supervision import clock
from fsdp_qlora.utils.files import read_json, write_json

log = logging.getLogger("fsdp_qlora")

FACTS_FILE = "facts.json"


class Facts:
    """Collects facts of one start of a run, and writes them to facts.json; on rank 0 only.

    Time is counted without gaps: `mark` gives all of it since the mark before to one phase. A
    failure to write is no reason to stop a run.

    Args:
        started: when this start began, by control.clock.
        step: where it begins.
    """

    def __init__(self, folder: Path, *, is_rank_0: bool, started: float, step: int) -> None:
        self._path = folder / FACTS_FILE if is_rank_0 else None
        self._marked = started
        self._start: dict[str, Any] = {
            "step": step,
            "at": time.strftime("%Y-%m-%d %H:%M:%S"),
            "seconds": {},
        }
        self._starts: list[dict[str, Any]] | None = None
        self._about: dict[str, Any] = {}

    def describe(self, about: Callable[[], Mapping[str, Any]]) -> None:
        """Add facts about the run by heading: environment, data, memory.

        The file keeps the facts of the last start.
        """
        if self._path is None:
            return
        try:
            self._about |= about()
        except Exception as error:  # such as a driver's program that has gone wrong
            log.debug("The report lacks some facts, which cannot be read: %s", error)

    def mark(self, phase: str) -> None:
        """Count the time since the last mark for this phase."""
        now = clock.elapsed()
        seconds = self._start["seconds"]
        seconds[phase] = seconds.get(phase, 0.0) + now - self._marked
        self._marked = now

    def write(self) -> None:
        if self._path is None:
            return
        if self._starts is None:  # the folder may have been another run's until training began
            self._starts = read_json(self._path).get("starts", [])
        with contextlib.suppress(OSError):
            write_json(self._path, self._about | {"starts": [*self._starts, self._start]})
