"""Prompts: the rows of a run that learns from its own answers, with all their columns for the reward functions."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.config.options import MOST_OF_AUTO
from fsdp_qlora.data.formats import IGNORE, parse_columns
from fsdp_qlora.data.prepare import DataOptions, RunData, check_report, describe_dataset
from fsdp_qlora.data.prompts import find_template
from fsdp_qlora.data.rendering import CHAT, TEXT, prompt_record
from fsdp_qlora.data.rows import (
    NO_ROOM,
    NO_ROWS,
    BadRow,
    DataReport,
    Row,
    SourceFile,
    TokenizedRows,
    join_rows,
    unicode_of,
)
from fsdp_qlora.data.sources import DEFAULT_SAMPLES, DUMMY, find_source, parse_name
from fsdp_qlora.data.tokenization import check_vocabulary
from fsdp_qlora.errors import UserError
from fsdp_qlora.generation.prompts import PromptFormat, question_of
from fsdp_qlora.ranks.ranks import derive_seed

log = logging.getLogger("fsdp_qlora")

# Columns that can be the prompt, the first that is filled -> the format of data/formats.py that has such questions.
_COLUMNS = {"messages": "messages", "prompt": "", "question": "question_answer", "instruction": "alpaca", "text": ""}
_BESIDE = ("input", "context", "system")
_OURS = {"prompt", "completion", "completion_ids"}  # names that reward functions know for something else


@dataclass(frozen=True)
class Prompt:
    """ids: the tokens before an answer. asked: as reward functions get it, text or messages. columns: all others."""

    ids: list[int]
    asked: Any
    columns: Row


@dataclass(frozen=True)
class PromptData(RunData):
    """The prompts of a run. Row i of `train` is the longest that an answer to prompt i can make."""

    prompts: tuple[Prompt, ...] = ()

    @property
    def identity(self) -> list[object]:
        return [*super().identity, derive_seed([prompt.columns for prompt in self.prompts])]


def read_prompts(
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, *, vocab_size: int, longest: int | None = None
) -> PromptData:
    """Read the prompts of all datasets: text, messages, or questions that a template is filled with.

    Args:
        vocab_size, longest: as for `prepare_data`.
    Raises:
        UserError: a dataset cannot be used, or too many of its rows.
    """
    read = [_read_dataset(dataset, tokenizer, options) for dataset in options.dataset]
    answer = options.max_completion_length
    lengths = [len(prompt.ids) + answer for found, _, _ in read for _, prompt in found]
    asked = options.context_length
    context = _choose_context(lengths, longest or MOST_OF_AUTO) if isinstance(asked, str) else asked
    prompts, parts, provenance = list[Prompt](), list[TokenizedRows](), list[dict[str, Any]]()
    for dataset, (found, report, _) in zip(options.dataset, read, strict=True):
        kept = [each for each in found if len(each[1].ids) + answer <= context]
        for number in {number for number, _ in found} - {number for number, _ in kept}:
            report.reject(number, NO_ROOM)
        report.length_of_99_percent = max([len(prompt.ids) + answer for _, prompt in found], default=0)
        rows = _longest_rows(kept, answer, tokenizer(".", add_special_tokens=False)["input_ids"][-1])
        check_vocabulary(rows, vocab_size)
        report.count(rows)
        check_report(report, dataclasses.replace(options, context_length=context))
        parts.append(rows)
        prompts += [prompt for _, prompt in kept]
        provenance.append(describe_dataset(dataset, report, len(kept)))
    about = {"prompt": read[0][2], "data": provenance, "eval_data": []}
    table, reports = join_rows(parts, renumber=True), tuple(report for _, report, _ in read)
    return PromptData(
        table, np.arange(len(table)), provenance=about, reports=reports, context_length=context, prompts=tuple(prompts)
    )


def _choose_context(lengths: Sequence[int], longest: int) -> int:
    """For auto, as for other rows: the smallest power of two that has room for 99% of the prompts with an answer."""
    needed = int(np.quantile(lengths or [2], 0.99, method="inverted_cdf"))
    chosen = min(2 ** max(1, (needed - 1).bit_length()), MOST_OF_AUTO, longest)
    log.info("Context: %s tokens (auto: 99%% of the prompts need at most %s)", f"{chosen:,}", f"{needed:,}")
    return chosen


def _read_dataset(
    dataset: str, tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> tuple[list[tuple[int, Prompt]], DataReport, dict[str, Any]]:
    """(number, prompt) of each row that has one, the report on them, and the record of the text around the first."""
    name = parse_name(dataset)
    if name.name == DUMMY or name.weight is not None:
        raise UserError(f"dataset: {dataset} has {'no prompts' if name.name == DUMMY else 'a weight: leave it out'}.")
    source, renames = find_source(dataset), parse_columns(options.columns)
    samples = DEFAULT_SAMPLES.get(name.name) if options.dataset_samples is None else options.dataset_samples
    reader, report, found, columns = _Reader(tokenizer, options), DataReport(source.origin), [], set[str]()
    for part, offset, number, row in source.entries(samples):
        if not report.parts or report.parts[-1].offset != offset:
            report.parts.append(SourceFile(source.parts[part].name, source.parts[part].unit, offset))
        report.num_rows += 1
        try:
            if isinstance(row, BadRow):
                raise row
            columns |= row.keys()
            named = {renames.get(column, column): value for column, value in row.items()}
            found.append((offset + number, reader.read({key: named[key] for key in named if key != IGNORE})))
        except BadRow as reason:
            report.reject(offset + number, str(reason))
    reader.close()
    if report.num_rows and (missing := renames.keys() - columns):
        has = ", ".join(sorted(columns))
        raise UserError(f"columns: {source.origin} has no column {', '.join(sorted(missing))}. It has: {has}.")
    report.dataset_format = next(iter(reader.formats), "prompt")
    return found, report, reader.record


class _Reader:
    """Reads the prompts of one dataset. record: of the text around the first, as of data/rendering.py."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> None:
        self.tokenizer, self.template = tokenizer, find_template(options.prompt_template)
        self.formats: dict[str, tuple[PromptFormat, dict[str, Any]]] = {}
        self.record: dict[str, Any] = {"kind": TEXT}

    def read(self, row: Row) -> Prompt:
        """Raises BadRow."""
        if isinstance(row.get("prompt"), list):
            row = {**row, "messages": row["prompt"]}
        column = next((name for name in _COLUMNS if row.get(name)), None)
        if column is None:
            raise BadRow(f"no prompt in a column {', '.join(_COLUMNS)}")
        if row.get("images") or row.get("image"):
            raise BadRow("images: answers are generated to text alone")
        beside = () if column == "prompt" else _BESIDE
        asked = question_of({name: row[name] for name in (column, *beside) if name in row})
        if asked is None:
            raise BadRow(f"{column} is not a question: give text, or messages that end with the user's")
        unicode_of(json.dumps(asked, ensure_ascii=False), column)
        prompt_format, record = self._format(column)
        try:
            ids = prompt_format.ids(asked)
        except UserError as error:
            raise BadRow(str(error)) from error
        as_messages = record["kind"] == CHAT
        shown = asked.messages if as_messages else asked.messages[-1]["content"]
        return Prompt(ids, shown, {name: value for name, value in row.items() if name not in _OURS})

    def _format(self, column: str) -> tuple[PromptFormat, dict[str, Any]]:
        if column not in self.formats:
            record = prompt_record(_COLUMNS[column], self.template) if _COLUMNS[column] else {"kind": TEXT}
            self.record = self.record if self.formats else record
            self.formats[column] = PromptFormat(self.tokenizer, record), record
        return self.formats[column]

    def close(self) -> None:
        for prompt_format, _ in self.formats.values():
            prompt_format.close()


def _longest_rows(prompts: Sequence[tuple[int, Prompt]], length: int, unknown: int) -> TokenizedRows:
    """Each prompt with an answer of `length` tokens, which are not known yet: all are `unknown`."""
    if not prompts:
        return NO_ROWS
    offsets = np.cumsum([0, *(len(prompt.ids) + length for _, prompt in prompts)], dtype=np.int64)
    ids, learned = np.full(offsets[-1], unknown, np.int32), np.ones(offsets[-1], np.bool_)
    for start, (_, prompt) in zip(offsets, prompts, strict=False):
        asked = slice(start, start + len(prompt.ids))
        ids[asked], learned[asked] = prompt.ids, False
    return TokenizedRows(ids, learned, offsets, np.array([number for number, _ in prompts], np.int64))
