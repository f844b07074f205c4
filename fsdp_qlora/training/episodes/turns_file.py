"""The file episodes.jsonl: the turns of a generation's episodes.

Each line is on the disk before its episode goes on. A run that was stopped plays the episodes of
its generation from there, and their environments get the same calls once more.
"""

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
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
    first turn has the first and the last. Others have a `round`, the places of episodes.
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
        self._append({"step": step, "place": place} | record)

    def append_round(self, step: int, places: Sequence[int]) -> None:
        """Write that the next turns of these episodes are sampled together. Raises as `append`."""
        self._append({"step": step, "round": [*places]})

    def _append(self, content: Mapping[str, Any]) -> None:
        line = (json.dumps(content) + "\n").encode()
        with self._writing:
            error = append_with_room(self.path, line)
        if error:
            reason = getattr(error, "strerror", None) or error
            raise RolloutError(f"{self.path} cannot be written: {reason}.") from error

    def read(self, step: int) -> dict[int, Transcript]:
        """The episodes of a step by their places, as far as they had come.

        They end before the first damaged line, and before a round of which turns are missing: its
        turns are sampled together again, with the bits that they had. The file is cut there.
        """
        transcripts = dict[int, Transcript]()
        with (
            contextlib.suppress(FileNotFoundError),
            open_named(self.path, "r+b", follow=False) as file,
        ):
            lines = file.readlines()
            records = _whole_records(lines)
            num_known = 0
            with contextlib.suppress(KeyError, TypeError, ValueError):
                for record in records[: _start_of_open_round(records)]:
                    if record["step"] == step and "round" not in record:
                        _add(transcripts, record)
                    num_known += 1
            file.truncate(sum(map(len, lines[:num_known])))
        return transcripts

    def clear(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def _whole_records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The records of lines up to the first damaged one."""
    records = []
    for line in lines:
        record = parse_record(line) if line.endswith(b"\n") else None
        if not record:
            break
        records.append(record)
    return records


def _start_of_open_round(records: Sequence[Mapping[str, Any]]) -> int:
    """The place of the last round's record if a turn of it is missing; else behind all records."""
    missing = set[int]()
    start = len(records)
    for place, record in enumerate(records):
        if "round" in record:
            missing = set(record["round"])
            start = place
        elif "turn" in record or "end" in record:
            missing.discard(record.get("place", -1))
    return start if missing else len(records)


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
