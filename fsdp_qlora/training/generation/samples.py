"""Answers to the same prompts at each evaluation of a training run."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_qlora.data.content import prompt_text
from fsdp_qlora.training.generation.answering import Answering
from fsdp_qlora.training.generation.prompt_format import EncodedPrompt, PromptFormat, Question
from fsdp_qlora.utils.files import staged_file
from fsdp_qlora.utils.records import read_records
from fsdp_qlora.utils.redact import redact_values
from fsdp_qlora.utils.run_files import SAMPLES_FILE

log = logging.getLogger("fsdp_qlora")

# The most tokens of an answer: samples are to be read, and each token is a forward pass of the run.
SAMPLE_TOKENS = 128


class SamplePrompts(NamedTuple):
    """The prompts of a run's samples."""

    texts: tuple[str, ...] = ()
    """The texts of the questions."""
    encoded: tuple[EncodedPrompt, ...] = ()
    stop_text: str = ""
    """The text that ends an answer, from `PromptFormat`."""

    @classmethod
    def of(cls, questions: Sequence[Question], prompt_format: PromptFormat) -> "SamplePrompts":
        """Write questions in the format of a run. Raises UserError as `PromptFormat.encode`."""
        return cls(
            tuple(prompt_text(question.content) for question in questions),
            tuple(prompt_format.encode(each.content, each.origin) for each in questions),
            prompt_format.stop_text,
        )


class Samples:
    """Answers the same prompts at each evaluation of a training run.

    The answers are kept in a file of the run's folder.
    """

    def __init__(self, prompts: SamplePrompts, answering: Answering, folder: Path) -> None:
        self._prompts = prompts
        self._answering = answering
        self._path = folder / SAMPLES_FILE

    def write(self, step: int, beat: Callable[[], object]) -> None:
        """Answer all prompts after `step` steps.

        Called on every rank. beat: called for each token.
        """
        ids = [prompt.ids for prompt in self._prompts.encoded]
        images = [prompt.images for prompt in self._prompts.encoded]
        completions = self._answering.answers_to(ids, images, beat)
        records = []
        for asked, completion in zip(self._prompts.texts, completions, strict=True):
            text = self._answering.text_of(completion.token_ids)
            records.append({"step": step, "prompt": asked, "text": text})
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
