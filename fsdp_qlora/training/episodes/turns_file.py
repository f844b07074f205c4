"""The file episodes.jsonl: the turns of a generation's episodes.

Each line is on the disk before its episode goes on. A run that was stopped plays the episodes of
its generation from there, and their environments get the same calls once more.
"""

import contextlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_qlora.checkpoint.result import append_with_room
from fsdp_qlora.training.episodes.transcript import Transcript, Turn
from fsdp_qlora.utils.errors import RolloutError
from fsdp_qlora.utils.files import open_named
from fsdp_qlora.utils.records import parse_record


class TurnsFile:
    """Appends lines to the file, and reads them back.

    A line has the step and the place of its episode, and `begun` (prompt, its tokens and tools), a
    `turn`, or `end` (why, how the environment failed, and its reward); one that ends before its
    first turn has the first and the last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing = threading.Lock()

    def append(self, step: int, place: int, **record: Any) -> None:
        """Write a line, and return when it is on the disk; any thread may call it.

        On a full disk the oldest checkpoints are deleted for it.

        Raises:
            RolloutError: that fails.
        """
        content = {"step": step, "place": place} | record
        line = (json.dumps(content) + "\n").encode()
        with self._writing:
            error = append_with_room(self.path, line)
        if error:
            reason = getattr(error, "strerror", None) or error
            raise RolloutError(f"{self.path} cannot be written: {reason}.") from error

    def read(self, step: int) -> dict[int, Transcript]:
        """The episodes of a step by their places, as far as they had come.

        They end before the first damaged line, behind which the file is cut.
        """
        transcripts = dict[int, Transcript]()
        whole = 0
        with (
            contextlib.suppress(FileNotFoundError),
            open_named(self.path, "r+b", follow=False) as file,
        ):
            for line in file:
                record = parse_record(line) if line.endswith(b"\n") else None
                try:
                    if record and record["step"] == step:
                        _add(transcripts, record)
                except (KeyError, TypeError, ValueError):
                    record = None
                if not record:
                    break
                whole += len(line)
            file.truncate(whole)
        return transcripts

    def clear(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def _add(transcripts: dict[int, Transcript], record: Mapping[str, Any]) -> None:
    """Add what a line tells to the episodes."""
    place = record["place"]
    if "begun" in record:
        transcripts[place] = Transcript(**record["begun"])
    if "turn" in record:
        transcripts[place].turns.append(Turn.from_json(record["turn"]))
    if "end" in record:
        transcript = transcripts[place]
        transcript.end = record["end"]
        transcript.problem = record["problem"]
        transcript.reward = record["reward"]
