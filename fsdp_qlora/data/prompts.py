"""Reads prompts: the rows of a run that learns from its own completions, with their columns for reward functions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.batches.data_report import NO_ROOM, DataReport
from fsdp_qlora.data.batches.rows import Numbers, TokenizedRows
from fsdp_qlora.data.batches.tokenization import encode_prompt
from fsdp_qlora.data.content import Asked, BadRow, Fields, Rendered, Row, asked_text
from fsdp_qlora.data.pipeline import DatasetPipeline
from fsdp_qlora.data.run_data import Prompt, Prompts
from fsdp_qlora.data.text.chat_template import TemplateWorker
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.recognition import IGNORE
from fsdp_qlora.data.text.rendering import Renderer, spread
from fsdp_qlora.data.text.templates import as_chat

_OURS = {"prompt", "completion", "completion_ids"}  # names that reward functions know for something else


class PromptPipeline(DatasetPipeline):
    """Collects the prompts of a dataset, whose rows may lack answers, each with all columns."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.used = tuple

    def all_rows(self) -> tuple[TokenizedRows, DataReport]:
        return self._tokenize(self.source, self.source.entries(self.samples))

    def _tokenize_batch(
        self, rows: Sequence[tuple[int, Row, str]], origin: str, report: DataReport
    ) -> tuple[TokenizedRows, list[int]]:
        if not self._columns:
            self.asked.check(list(dict.fromkeys(column for _, row, _ in rows for column in row)), origin)
        self._columns.update(dict.fromkeys(column for _, row, _ in rows for column in row))
        renderers: dict[str, Renderer] = {}

        def read(row: Row, worker: TemplateWorker) -> tuple[str, Asked, Rendered]:
            name, asked = self.asked.prompt(row)
            if name not in renderers:
                of_format = FORMATS[name].template
                renderers[name] = Renderer(self.tokenizer, self.template, "assistant", of_format, self.workers)
            return name, asked, renderers[name].prompt(asked, worker)

        kept, lengths = list[Prompt](), list[int]()
        for (number, row, _), found in zip(
            rows, spread([row for _, row, _ in rows], read, self.workers[:1]), strict=True
        ):
            if isinstance(found, BadRow):
                report.reject(number, str(found))
                continue
            name, asked, rendered = found
            report.dataset_format = report.dataset_format or name
            report.is_chat |= rendered.kind == "chat"
            report.is_filled |= rendered.kind == "template"
            prompt = Prompt(number, encode_prompt(rendered, self.tokenizer), _shown(asked, rendered), self._beside(row))
            length = len(prompt.ids) + self.options.text.max_completion_length
            lengths.append(length)
            if not prompt.ids:
                report.reject(number, "the prompt has no tokens")
            elif length > self.options.longest_row:
                report.reject(number, NO_ROOM)
            else:
                kept.append(prompt)
        self.prompts += kept
        return prompt_rows(kept), lengths

    def _beside(self, row: Row) -> Row:
        """The columns for reward functions, under the names that --columns gives."""
        columns = {self.asked.renames.get(name, name): value for name, value in row.items()}
        if isinstance(columns.get("prompt"), list):
            columns["messages"] = columns["prompt"]
        return {name: value for name, value in columns.items() if name not in {*_OURS, IGNORE}}


def _shown(asked: Asked, rendered: Rendered) -> Any:
    """The prompt as reward functions get it: messages where it is a chat, else text."""
    if rendered.kind != "chat":
        return asked_text(asked)
    if isinstance(asked, Fields):
        asked = as_chat(dataclasses.replace(asked, context=""))
    assert not isinstance(asked, Rendered)
    return asked.messages


def prompt_rows(prompts: Sequence[Prompt]) -> TokenizedRows:
    """The prompts as rows of which nothing is learned."""
    return join_completions([prompt.ids for prompt in prompts], [()] * len(prompts), [each.number for each in prompts])


def join_completions(prompts: Sequence[Numbers], completions: Sequence[Numbers], numbers: Numbers) -> TokenizedRows:
    """A row of each prompt and its completion, which is learned. numbers: of the prompts' rows in the dataset."""
    parts = [np.asarray(part, np.int32) for pair in zip(prompts, completions, strict=True) for part in pair]
    ends, learned = np.cumsum([0, *map(len, parts)], dtype=np.int64), np.tile([False, True], len(prompts))
    ids = np.concatenate([np.zeros(0, np.int32), *parts])
    return TokenizedRows(ids, np.repeat(learned, np.diff(ends)), ends[::2], np.array(numbers, np.int64))


def prompts_of(
    table: TokenizedRows, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, max_completion_length: int
) -> Prompts:
    """The prompts of a run, and the hash by which it is recognized when it continues.

    The hash is that of 831b14e, whose table had a completion of dots after each prompt.
    """
    shown = tokenizer(".", add_special_tokens=False)["input_ids"]
    dots = [np.full(max_completion_length, [tokenizer.eos_token_id, *shown][-1], np.int32)] * len(prompts)
    digest = join_completions([prompt.ids for prompt in prompts], dots, table.row_numbers).digest
    return Prompts(tuple(prompts), max_completion_length, digest)
