"""Answers to the same prompts at each evaluation of a training run."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp_qlora.data.content import PromptContent, prompt_text
from fsdp_qlora.training.generation.answering import Answering
from fsdp_qlora.training.generation.prompt_format import PromptFormat
from fsdp_qlora.utils.files import staged_file
from fsdp_qlora.utils.records import read_records
from fsdp_qlora.utils.redact import redact_values
from fsdp_qlora.utils.run_files import SAMPLES_FILE

log = logging.getLogger("fsdp_qlora")

# The most tokens of an answer: samples are to be read, and each token is a forward pass of the run.
SAMPLE_TOKENS = 128


class Samples:
    """Answers the same prompts at each evaluation of a training run.

    The answers are kept in a file of the run's folder.
    """

    def __init__(
        self,
        questions: Sequence[PromptContent],
        prompt_format: PromptFormat,
        answering: Answering,
        folder: Path,
    ) -> None:
        self._questions = questions
        self._answering = answering
        self._prompts = [prompt_format.ids(question) for question in questions]
        self._path = folder / SAMPLES_FILE

    def write(self, step: int, beat: Callable[[], object]) -> None:
        """Answer all prompts after `step` steps.

        Called on every rank. beat: called for each token.
        """
        completions = self._answering.answers_to(self._prompts, beat)
        records = []
        for question, completion in zip(self._questions, completions, strict=True):
            text = self._answering.text_of(completion.token_ids)
            records.append({"step": step, "prompt": prompt_text(question), "text": text})
        if self._answering.ranks.is_rank_0:
            self._keep(step, redact_values(records))

    def _keep(self, step: int, records: list[dict[str, Any]]) -> None:
        """Write the records after those of earlier steps.

        Records of this step and later ones, which a killed start has written, go.
        """
        try:
            earlier = [record for record in read_records(self._path) if record["step"] < step]
            lines = [
                json.dumps(record, ensure_ascii=False) + "\n" for record in (*earlier, *records)
            ]
            # Written beside the file and renamed: a kill in between leaves the old samples.
            with staged_file(self._path) as partial:
                partial.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            # Samples are for reading alone: without them the run goes on.
            log.warning("%s cannot be written (%s).", self._path.name, error.strerror or error)
