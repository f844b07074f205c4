"""Prompts: the rows of a run that learns from its own answers, with all their columns for the reward functions."""

import dataclasses
import json
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.batches.data_report import NO_ROOM, DataReport
from fsdp_qlora.data.batches.rows import TokenizedRows, join_rows
from fsdp_qlora.data.batches.tokenization import check_vocabulary, context_for
from fsdp_qlora.data.content import BadRow, Row, SourceFile, unicode_of
from fsdp_qlora.data.prepare import DataOptions, RunData, check_report, describe_dataset
from fsdp_qlora.data.sources.source import DEFAULT_SAMPLES, DUMMY, find_source, parse_name
from fsdp_qlora.data.text.formats import IGNORE, parse_columns
from fsdp_qlora.data.text.rendering import CHAT, TEXT, prompt_record
from fsdp_qlora.data.text.templates import find_template
from fsdp_qlora.distributed.ranks import derive_seed
from fsdp_qlora.training.generation.questions import PromptFormat, question_of
from fsdp_qlora.training.rl.records import join_answers
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

# Columns that can be the prompt, the first that is filled -> its format in data/text/formats.py.
_COLUMNS = {"messages": "messages", "prompt": "", "question": "question_answer", "instruction": "alpaca", "text": ""}
_BESIDE = ("input", "context", "system")
_OURS = {"prompt", "completion", "completion_ids"}  # names that reward functions know for something else


@dataclass(frozen=True)
class Prompt:
    """number: of its row in the dataset. ids: the tokens before an answer. asked: as reward functions get it, text or
    messages. columns: all others.
    """

    number: int
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
    shown = tokenizer(".", add_special_tokens=False)["input_ids"]
    answer, unknown = options.max_completion_length, int([tokenizer.eos_token_id, *shown][-1])
    if options.context_length == "auto":  # as for other rows
        lengths = [len(prompt.ids) + answer for found, *_ in read for prompt in found]
        needed = int(np.quantile(lengths or [2], 0.99, method="inverted_cdf"))
        context = context_for(needed, longest)
        log.info("Context: %s tokens (auto: 99%% of the prompts need at most %s)", f"{context:,}", f"{needed:,}")
        options = dataclasses.replace(options, context_length=context)
    parts, prompts, length = list[TokenizedRows](), list[Prompt](), options.longest_row
    for found, report, _ in read:
        kept = [prompt for prompt in found if len(prompt.ids) + answer <= length]
        for number in sorted({prompt.number for prompt in found} - {prompt.number for prompt in kept}):
            report.reject(number, NO_ROOM)
        numbers = [prompt.number for prompt in kept]
        parts.append(
            join_answers([prompt.ids for prompt in kept], [np.full(answer, unknown, np.int32)] * len(kept), numbers)
        )
        prompts += kept
        check_vocabulary(parts[-1], vocab_size)
        report.count(parts[-1])
        report.length_of_99_percent = max([len(prompt.ids) + answer for prompt in found], default=0)
        check_report(report, options)
    table, reports = join_rows(parts, renumber=True), tuple(report for _, report, _ in read)
    data = [describe_dataset(*each, each[1].num_used) for each in zip(options.dataset, reports, strict=True)]
    about, rows = {"prompt": read[0][2], "data": data, "eval_data": []}, np.arange(len(table))
    return PromptData(table, rows, provenance=about, reports=reports, context_length=length, prompts=tuple(prompts))


def _read_dataset(
    dataset: str, tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> tuple[list[Prompt], DataReport, dict[str, Any]]:
    """The prompt of each row that has one, the report on them, and the record of the text around the first."""
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
            found.append(reader.read({key: named[key] for key in named if key != IGNORE}, offset + number))
        except BadRow as reason:
            report.reject(offset + number, str(reason))
    for prompt_format, _ in reader.formats.values():
        prompt_format.close()
    if report.num_rows and (missing := renames.keys() - columns):
        has = ", ".join(sorted(columns))
        raise UserError(f"columns: {source.origin} has no column {', '.join(sorted(missing))}. It has: {has}.")
    report.dataset_format = next(iter(reader.formats), "prompt")
    return found, report, next((record for _, record in reader.formats.values()), {"kind": TEXT})


class _Reader:
    """Reads the prompts of one dataset. formats: column -> the text around it, and the record of that."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> None:
        self.tokenizer, self.template = tokenizer, find_template(options.prompt_template)
        self.formats: dict[str, tuple[PromptFormat, dict[str, Any]]] = {}

    def read(self, row: Row, number: int) -> Prompt:
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
        if column not in self.formats:
            record = prompt_record(_COLUMNS[column], self.template) if _COLUMNS[column] else {"kind": TEXT}
            self.formats[column] = PromptFormat(self.tokenizer, record), record
        prompt_format, record = self.formats[column]
        try:
            ids = prompt_format.ids(asked)
        except UserError as error:
            raise BadRow(str(error)) from error
        if not ids:
            raise BadRow("the prompt has no tokens")
        shown = asked.messages if record["kind"] == CHAT else asked.messages[-1]["content"]
        return Prompt(number, ids, shown, {name: value for name, value in row.items() if name not in _OURS})
