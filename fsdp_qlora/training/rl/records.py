"""rollouts.jsonl: a line for each answer of a run, from which a step's rows are made, fresh or read back."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.prompts import join_completions
from fsdp_qlora.utils.errors import TrainingError
from fsdp_qlora.utils.records import parse_record
from fsdp_qlora.utils.run_files import ROLLOUTS_FILE

Answer = dict[str, Any]
"""A line. step: the first that learns from it, from 1. version: optimizer steps of the weights that gave it. row: the
number of its prompt in the dataset. prompt, completion: text, or messages. finish: stop, or length if it was cut.
rewards: by function; reward: their sum, None where no function applies. advantage. prompt_ids, token_ids. old_logps,
sampled_logps: of token_ids, where they are used."""


class RolloutFile:
    """The file of a run's folder, which rank 0 writes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ROLLOUTS_FILE

    def append(self, answers: Sequence[Answer]) -> None:
        """Write a generation, on the disk before the first update by it. Raises TrainingError if that fails."""
        lines = "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
        try:
            with self._path.open("ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TrainingError(f"{self._path} cannot be written: {error.strerror or error}.") from error

    def truncate(self, step: int) -> list[Answer]:
        """Remove the answers of steps after a checkpoint, and what a kill has left of a line; returns the last ones."""
        last, end = list[Answer](), 0
        with contextlib.suppress(FileNotFoundError), self._path.open("r+b") as file:
            for line in file:
                answer = parse_record(line) if line.endswith(b"\n") else None
                if answer is None or answer["step"] > step:
                    break
                last = [*(last if last and last[0]["step"] == answer["step"] else ()), answer]
                end += len(line)
            file.truncate(end)
        return last


def table_of(answers: Sequence[Answer]) -> TokenizedRows:
    """The rows of a step."""
    prompts, tokens = ([each[name] for each in answers] for name in ("prompt_ids", "token_ids"))
    return dataclasses.replace(
        join_completions(prompts, tokens, [each["row"] for each in answers]),
        advantages=np.array([each["advantage"] for each in answers], np.float32),
        **{name: _of_tokens(answers, name) for name in ("old_logps", "sampled_logps") if name in answers[0]},
    )


def _of_tokens(answers: Sequence[Answer], name: str) -> np.ndarray:
    """A number for each token, 0 for those of prompts."""
    return np.concatenate([np.pad(np.array(each[name], np.float32), (len(each["prompt_ids"]), 0)) for each in answers])
