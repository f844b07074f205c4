"""Reads the held-out rows of a run as prompts, to which the model answers at evaluations."""

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.config.objectives import PROMPTS
from fsdp_qlora.data.options import DataOptions
from fsdp_qlora.data.prompt_cache import join_prompts
from fsdp_qlora.data.prompts import Prompts
from fsdp_qlora.data.run_data import RunData, read_dataset
from fsdp_qlora.data.sources.dataset_name import parse_eval_names, parse_name
from fsdp_qlora.data.sources.source import DUMMY, find_source
from fsdp_qlora.data.taken_rows import TAKEN, Taken, taken_of_json
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.utils.errors import UserError

PromptSets = dict[str, Prompts]
"""The name of an evaluation, the main one first -> its prompts."""


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    data: RunData,
    *,
    vocab_size: int,
    longest: int | None,
) -> PromptSets:
    """Read the held-out rows once more, as prompts with all of their columns.

    They are the same rows as those of the held-out loss.

    Args:
        options: of the run's rows, with the length that `data` has.
        data: the rows of the run; if they are prompts, the held-out ones are among them.
        vocab_size: the number of embeddings of the model.
        longest: the maximum tokens per row that the model supports, if known.
    Raises:
        UserError: too many of the rows have no prompt.
    """
    if data.prompts:
        return {name: data.prompts.chosen(rows) for name, rows in data.eval_sets.items()}
    options = _as_prompts(options, data.context_length, longest)
    if options.eval_dataset:
        whole = dataclasses.replace(options, dataset_samples=None)
        return {
            name: _read(dataset, tokenizer, whole, vocab_size)
            for name, dataset in parse_eval_names(options.eval_dataset).items()
        }
    parts = list[Prompts]()
    taken = taken_of_json(data.provenance.get(TAKEN), len(options.dataset))
    for dataset, numbers, each in zip(options.dataset, _held_out_numbers(data), taken, strict=True):
        if len(numbers):
            parts.append(_read(dataset, tokenizer, options, vocab_size, Chosen(numbers, each)))
    return {"": join_prompts(parts, renumber=False)}


def _as_prompts(options: DataOptions, context_length: int, longest: int | None) -> DataOptions:
    """The options by which the same rows are read as prompts."""
    text = options.text
    dataset_format = text.dataset_format
    # Formats of answers alone, such as pairs, have their prompt in a column that is recognized.
    if dataset_format != "auto" and not FORMATS[dataset_format].asks:
        dataset_format = "auto"
    text = dataclasses.replace(
        text, row_kind=PROMPTS, objective=PROMPTS.objective, dataset_format=dataset_format
    )
    # The longest row of the training is a prompt with the right answer, which may be shorter than
    # the model's.
    room = context_length + text.max_completion_length
    return dataclasses.replace(options, text=text, context_length=min(room, longest or room))


def _held_out_numbers(data: RunData) -> list[set[int]]:
    """The numbers of the held-out rows in each of the datasets to train on."""
    counts = [report.num_used for report in data.reports]
    ends = np.cumsum(counts)
    numbers = data.train.row_numbers
    parts = []
    for first, end in zip(ends - counts, ends, strict=True):
        rows = data.eval_rows
        rows = rows[(rows >= first) & (rows < end)]
        # The numbers of several datasets continue after the highest one before.
        offset = int(numbers[:first].max(initial=0))
        parts.append({int(number) - offset for number in numbers[rows]})
    return parts


class Chosen(NamedTuple):
    """Some rows of a dataset: their numbers among those that the run takes."""

    numbers: Collection[int]
    taken: Taken


def _read(
    dataset: str,
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    vocab_size: int,
    chosen: Chosen | None = None,
) -> Prompts:
    """The prompts of a dataset. chosen: the rows to read; None for all."""
    if parse_name(dataset).name == DUMMY:
        raise UserError(f"--eval_rewards scores answers to prompts, and {DUMMY} has none.")
    try:
        dataset_rows = read_dataset(
            dataset,
            tokenizer,
            options,
            vocab_size=vocab_size,
            source=chosen.taken.of(find_source(dataset)) if chosen else None,
            chosen_prompts=chosen.numbers if chosen else None,
        )
    except UserError as error:
        raise UserError(
            "--eval_rewards reads the held-out rows as prompts, with room for answers of "
            f"--max_completion_length {options.text.max_completion_length}, which may be lowered: "
            f"{error}"
        ) from error
    return dataset_rows.prompts
