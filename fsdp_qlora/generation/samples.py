"""Samples of a training run: the same prompts answered at each evaluation."""

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fsdp_qlora.distributed import Ranks, gather_texts
from fsdp_qlora.generation.generate import Answer, TextGenerator
from fsdp_qlora.generation.prompts import PromptFormat, Question
from fsdp_qlora.metrics.sinks import SAMPLES_FILE
from fsdp_qlora.redact import redact_values
from fsdp_qlora.storage.files import read_regular, staged_file

log = logging.getLogger("fsdp_qlora")

SAMPLE_TOKENS = 128  # of each answer, at most


class Samples:
    """Answers prompts with the model in training, and keeps the answers in a file of the run's folder.

    Args:
        averaged: within it the model has the weights that are evaluated.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        prompt_format: PromptFormat,
        generator: TextGenerator,
        ranks: Ranks,
        folder: Path,
        averaged: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._questions, self._generator, self._ranks, self._averaged = questions, generator, ranks, averaged
        self._prompts = [prompt_format.ids(asked) for asked in questions]
        self._path = folder / SAMPLES_FILE

    def write(self, step: int, beat: Callable[[], object]) -> list[dict[str, Any]]:
        """Answer all prompts after `step` steps; returns the records on rank 0. Called on every rank.

        Args:
            beat: called for each token.
        """
        mine = range(self._ranks.rank, len(self._prompts), self._ranks.world_size)
        most = -(-len(self._prompts) // self._ranks.world_size)
        answers = [Answer(number, self._prompts[number]) for number in mine]
        with self._averaged():
            for turn in range(most):  # one at a time: the memory is that of the training
                self._generator.generate(answers[turn : turn + 1], beat=beat)
        texts = json.dumps([[answer.number, self._generator.text_of(answer)] for answer in answers])
        everyone = [pair for part in gather_texts(texts, self._ranks.device) for pair in json.loads(part)]
        records = [
            {"step": step, "prompt": self._questions[number].messages[-1]["content"], "text": text}
            for number, text in sorted(everyone)
        ]
        records = redact_values({"rows": records})["rows"]
        if self._ranks.is_rank_0:
            self._keep(step, records)
        return records

    def _keep(self, step: int, records: list[dict[str, Any]]) -> None:
        """Write the records behind those of earlier steps: what a killed start wrote of later ones is gone."""
        earlier = []
        if self._path.exists():
            with contextlib.suppress(OSError, ValueError):
                found = read_regular(self._path).splitlines()  # of bytes, see sinks.read_records
                earlier = [line.decode() for line in found if line and json.loads(line)["step"] < step]
        try:
            with staged_file(self._path) as partial:
                lines = [*earlier, *(json.dumps(record, ensure_ascii=False) for record in records)]
                partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be written (%s).", self._path.name, error.strerror or error)
