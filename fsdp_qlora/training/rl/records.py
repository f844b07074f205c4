"""rollouts.jsonl: a line for each answer of a run, from which a step's rows are made, fresh or read back."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_qlora.data.batches.rows import TokenizedRows, join_completions
from fsdp_qlora.training.generation.generate import Completion
from fsdp_qlora.utils.errors import TrainingError
from fsdp_qlora.utils.records import parse_record
from fsdp_qlora.utils.run_files import ROLLOUTS_FILE


@dataclass(frozen=True)
class Rollout:
    """A completion that a run learns from: a line of rollouts.jsonl.

    step: the first that learns from it, from 1. version: optimizer steps of the weights that made it. row: the number
    of its prompt in the dataset. prompt: text or messages. rewards: by function; reward: their sum, None where no
    function applies. old_logps: of the tokens under these weights, where they are used.
    """

    step: int
    version: int
    row: int
    prompt: Any
    text: str
    completion: Completion
    reward: float | None
    rewards: dict[str, float | None]
    advantage: float
    prompt_ids: list[int]
    old_logps: list[float] | None = None

    def to_json(self) -> dict[str, Any]:
        made = self.completion
        record = {name: getattr(self, name) for name in ("step", "version", "row", "prompt")}
        record |= {"completion": self.text, "finish": made.finish}
        record |= {name: getattr(self, name) for name in ("reward", "rewards", "advantage", "prompt_ids")}
        record["token_ids"] = made.token_ids
        logps = {"sampled_logps": made.logps, "old_logps": self.old_logps}
        return record | {name: values for name, values in logps.items() if values is not None}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Rollout":
        made = Completion(record["token_ids"], record["finish"] == "stop", record.get("sampled_logps"))
        given = {name: record[name] for name in ("step", "version", "row", "prompt", "reward", "rewards", "advantage")}
        texts = {"text": record["completion"], "prompt_ids": record["prompt_ids"]}
        return cls(**given, **texts, completion=made, old_logps=record.get("old_logps"))


class RolloutFile:
    """The file of a run's folder, which rank 0 writes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ROLLOUTS_FILE

    def append(self, rollouts: Sequence[Rollout]) -> None:
        """Write a generation, on the disk before the first update by it. Raises TrainingError if that fails."""
        lines = "".join(json.dumps(rollout.to_json(), ensure_ascii=False) + "\n" for rollout in rollouts)
        try:
            with self._path.open("ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TrainingError(f"{self._path} cannot be written: {error.strerror or error}.") from error

    def truncate(self, step: int) -> list[dict[str, Any]]:
        """Remove the lines of steps after a checkpoint, and what a kill has left of one; returns the last step's."""
        last, end = list[dict[str, Any]](), 0
        with contextlib.suppress(FileNotFoundError), self._path.open("r+b") as file:
            for line in file:
                record = parse_record(line) if line.endswith(b"\n") else None
                if record is None or record["step"] > step:
                    break
                last = [*(last if last and last[0]["step"] == record["step"] else ()), record]
                end += len(line)
            file.truncate(end)
        return last


def table_of(rollouts: Sequence[Rollout]) -> TokenizedRows:
    """The rows of a step."""
    prompts, token_ids = [each.prompt_ids for each in rollouts], [each.completion.token_ids for each in rollouts]
    logps = {
        "old_logps": [each.old_logps for each in rollouts],
        "sampled_logps": [each.completion.logps for each in rollouts],
    }
    return dataclasses.replace(
        join_completions(prompts, token_ids, [each.row for each in rollouts]),
        advantages=np.array([each.advantage for each in rollouts], np.float32),
        **{name: _of_tokens(prompts, values) for name, values in logps.items() if values[0] is not None},
    )


def _of_tokens(prompts: Sequence[Sequence[int]], values: Sequence[Any]) -> np.ndarray:
    """A number for each token, 0 for those of prompts."""
    pairs = zip(prompts, values, strict=True)
    return np.concatenate([np.pad(np.array(own, np.float32), (len(prompt), 0)) for prompt, own in pairs])
