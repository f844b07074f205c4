"""The rows of a run: for training and held out, tokenized or from the cache, and checked."""

import contextlib
import dataclasses
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.config.options import MOST_OF_AUTO
from fsdp_qlora.data.batches import tokenization
from fsdp_qlora.data.batches.cache import join_cached
from fsdp_qlora.data.batches.report import DataReport, check_report
from fsdp_qlora.data.batches.rows import NO_ROWS, TokenizedRows
from fsdp_qlora.data.batches.schedule import Mixture, mix, split_eval, split_rows
from fsdp_qlora.data.dataset_text import DatasetText
from fsdp_qlora.data.duplicates import without_duplicates
from fsdp_qlora.data.options import DataOptions
from fsdp_qlora.data.pipeline import DatasetPipeline, DatasetRows
from fsdp_qlora.data.prompt_cache import join_prompts, seed_of_columns
from fsdp_qlora.data.prompts import NO_PROMPTS, Prompts
from fsdp_qlora.data.sources import source as sources
from fsdp_qlora.data.sources.dataset_name import (
    DatasetName,
    check_weights,
    parse_eval_names,
    parse_name,
)
from fsdp_qlora.data.sources.places import is_from_beginning
from fsdp_qlora.data.sources.source import Source
from fsdp_qlora.data.sources.spread import NUM_BLOCKS
from fsdp_qlora.data.taken_rows import (
    ALL,
    TAKEN,
    NeededRows,
    Taken,
    are_enough,
    choose_taken,
    taken_as_json,
)
from fsdp_qlora.data.text.chat_template import TemplateWorker
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.data.text.rendering import prompt_record
from fsdp_qlora.data.text.templates import find_template
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.redact import redact_values

log = logging.getLogger("fsdp_qlora")

_UNCUT = 2**31  # tokens, more than a row has
_ROWS_LOOKED_AT = 200  # for the tokens with which answers end
_OF_DUMMY = 512  # tokens of its rows, which fill whatever there is, with --context_length auto


@dataclass(frozen=True)
class RunData:
    """The rows of a run."""

    train: TokenizedRows
    """No rows where the run makes them."""
    train_rows: np.ndarray
    """Indices of the rows of `train`, or of the prompts, to train on, int64."""
    evaluation: TokenizedRows = NO_ROWS
    eval_sets: dict[str, np.ndarray] = field(default_factory=dict)
    """The name of each evaluation, the main one first -> indices of its rows of `evaluation`, or of
    the prompts, int64.
    """
    provenance: dict[str, Any] = field(default_factory=dict)
    """For the result's card, as JSON. data: name, format and number of rows of each dataset;
    eval_data: the same; learn: the words of --learn; prompt: as `prompt_record`, of the first
    dataset, and in a run's plan with `ends`; taken: a `Taken` of each dataset, if a part of one is
    taken.
    """
    reports: tuple[DataReport, ...] = ()
    """The reports on each dataset to train on."""
    eval_reports: tuple[DataReport, ...] = ()
    mixture: Mixture | None = None
    """The datasets' parts in an epoch, if they have weights."""
    context_length: int = 0
    """The maximum tokens per row, as asked for or decided."""
    image_processor: ImageProcessor | None = None
    """Makes the pixels of images, if the model has one."""
    prompts: Prompts = NO_PROMPTS
    """The prompts of a run that learns from completions that it makes, with those held out."""
    completion_length: int = 0
    """The maximum tokens per completion."""

    @property
    def known_rows(self) -> TokenizedRows:
        """The rows to train on as far as they are known before a step: `train`, or the prompts."""
        return self.prompts.rows if self.prompts else self.train

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row to train on, of a prompt with the longest completion, int64 [rows]."""
        return self.known_rows.lengths + self.completion_length

    @property
    def have_images(self) -> bool:
        """Whether rows have images."""
        tables = (self.train, self.evaluation, self.prompts.rows)
        return any(len(table.images) for table in tables)

    @property
    def eval_rows(self) -> np.ndarray:
        """Indices of the rows of `evaluation`, or of the prompts, to evaluate on, int64."""
        return np.concatenate([np.arange(0), *self.eval_sets.values()])

    @property
    def rows_per_epoch(self) -> int:
        """The rows to train on in an epoch."""
        return sum(self.mixture.rows_per_epoch) if self.mixture else len(self.train_rows)

    @cached_property
    def identity(self) -> list[object]:
        """Distinguishes the rows from others."""
        identity: list[object] = [
            self.known_rows.digest,
            self.evaluation.digest,
            len(self.eval_rows),
        ]
        if self.prompts:  # rewards read their other columns
            identity.append(seed_of_columns(self.prompts))
        return identity

    @property
    def rejected(self) -> list[tuple[str, str]]:
        """(place, reason) of every row that was left out."""
        return [place for report in self.reports + self.eval_reports for place in report.places()]

    def ends(self, tokenizer: PreTrainedTokenizerBase, after_answer: str) -> list[str]:
        """The tokens, besides the tokenizer's own, that end or follow answers of the first rows."""
        last = list[int]()
        for number in self.train_rows[:_ROWS_LOOKED_AT]:
            row = self.known_rows[int(number)]
            learned = np.flatnonzero(row.learned[:])
            # The last token that is learned, not of the row: a template may write on after an
            # answer.
            last += row.input_ids[learned[-1:]].tolist()
        last = last or tokenizer(after_answer, add_special_tokens=False)["input_ids"][:1]
        added = tokenizer.added_tokens_decoder
        usual = (tokenizer.eos_token_id, tokenizer.bos_token_id)
        # In a tenth of the rows at least: answers that were cut end with any token.
        often = [token for token, count in Counter(last).items() if 10 * count >= len(last)]
        return [str(added[token]) for token in often if token in added and token not in usual]

    def describe_left_out(self) -> list[str]:
        """A line for the end of a run that says how many rows were left out; empty if none were."""
        reports = self.reports + self.eval_reports
        left = sum(report.num_rejected for report in reports)
        total = sum(report.num_rows for report in reports)
        return [f"Rows left out: {left:,} of {total:,}"] if left else []

    def files(self) -> dict[str, str]:
        """Files for the run's folder, name -> text: rejected.jsonl, if rows were left out."""
        lines = [
            json.dumps(redact_values({"row": place, "reason": reason})) + "\n"
            for place, reason in self.rejected
        ]
        return {"rejected.jsonl": "".join(lines)} if lines else {}


def read_rows(
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    *,
    vocab_size: int,
    longest: int | None = None,
    needed: NeededRows | None = None,
) -> RunData:
    """Tokenize the datasets or take them from the cache, hold rows out, or read prompts.

    Args:
        vocab_size: the number of embeddings of the model.
        longest: the maximum tokens per row that it supports, if known.
        needed: rows that the run's steps take, if a part of much larger datasets is enough.
    Raises:
        UserError: a dataset cannot be used, or has a token that the model does not have.
    """
    eval_names = parse_eval_names(options.eval_dataset)
    names = [parse_name(dataset) for dataset in options.dataset]
    shares = check_weights(names)
    if shares and not options.shuffle:
        raise UserError(
            "--shuffle false takes all rows in their own order, and weights of datasets mix some "
            "of each. Leave out one of them."
        )
    if options.text.makes_rows:
        _refuse_without_prompts([*names, *map(parse_name, eval_names.values())])
    texts = [name for name in options.dataset if parse_name(name).name != sources.DUMMY]
    known_sources = {name: sources.find_source(name) for name in texts}
    if options.context_length == "auto":
        chosen = _choose_context_length(tokenizer, options, known_sources, longest)
        options = dataclasses.replace(options, context_length=chosen)
    reader = _Reader(tokenizer, options, vocab_size, known_sources, shares)
    taken = choose_taken(needed, options, known_sources, shares)
    data = reader.read(taken)
    if needed is None or reader.are_enough(data, taken, needed):
        return data
    few = (
        f"{len(data.train_rows):,} of the rows that were taken are left to train on, too few for "
        f"--max_steps ({needed.count:,} rows)"
    )
    if needed.taken is not None:
        # Not of the run that took them: with its rows per step they are enough.
        log.warning("%s: a run that begins anew on these ranks would end earlier.", few)
        return data
    log.warning("%s: all rows are read.", few)
    return reader.read([ALL for _ in taken])


class _Reader:
    """Reads the datasets of a run.

    Args:
        options: with a length of the rows that is decided.
        vocab_size: the number of embeddings of the model.
        known_sources: of the datasets that have one, by their names.
        shares: of the datasets in a mixture.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        vocab_size: int,
        known_sources: Mapping[str, Source],
        shares: Sequence[float] | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._vocab_size = vocab_size
        self._known_sources = known_sources
        self._shares = shares

    def read(self, taken: Sequence[Taken]) -> RunData:
        """Read what is taken of each dataset, and the datasets to evaluate on."""
        options = self._options
        datasets = [
            self._dataset(dataset, options, each)
            for dataset, each in zip(options.dataset, taken, strict=True)
        ]
        data = _joined(datasets, options)
        eval_names = parse_eval_names(options.eval_dataset)
        if eval_names:
            whole = dataclasses.replace(options, dataset_samples=None)
            eval_datasets = [self._dataset(name, whole, ALL) for name in eval_names.values()]
            data = _with_evaluation(data, eval_datasets, eval_names)
        data = _compared(data, drop=options.drop_duplicates)
        if self._shares:
            parts = [dataset.rows for dataset in datasets]
            mixture = _mixture(options.dataset, self._shares, parts, data.train_rows)
            data = dataclasses.replace(data, mixture=mixture)
        return dataclasses.replace(
            data,
            provenance=_provenance(data, options, eval_names.values(), taken),
            context_length=options.longest_row,
            image_processor=options.text.image_processor,
        )

    def _dataset(self, dataset: str, options: DataOptions, taken: Taken) -> DatasetRows:
        source = self._known_sources.get(dataset)
        return read_dataset(
            dataset,
            self._tokenizer,
            options,
            vocab_size=self._vocab_size,
            source=taken.of(source) if source else None,
        )

    def are_enough(self, data: RunData, taken: Sequence[Taken], needed: NeededRows) -> bool:
        """Whether the steps of the run have all rows that they take."""
        ends = np.cumsum([report.num_used for report in data.reports]).tolist()
        return are_enough(needed.count, taken, data.train_rows, ends, self._shares)


def _refuse_without_prompts(names: Iterable[DatasetName]) -> None:
    """Raise UserError for a dataset that a run cannot take prompts from."""
    for name in names:
        if name.name == sources.DUMMY or name.weight is not None:
            problem = "no prompts" if name.name == sources.DUMMY else "a weight: leave it out"
            raise UserError(f"dataset: {name.name} has {problem}.")


def _provenance(
    data: RunData, options: DataOptions, eval_datasets: Iterable[str], taken: Sequence[Taken]
) -> dict[str, Any]:
    """The datasets and their prompts; see `RunData.provenance`."""
    first = data.reports[0]
    template = find_template(options.text.prompt_template)
    parts = taken_as_json(taken)
    record = {TAKEN: parts} if parts else {}
    return record | {
        "prompt": prompt_record(
            first.dataset_format, template, is_chat=first.is_chat, is_filled=first.is_filled
        ),
        "learn": options.text.learn,
        "data": list(map(describe_dataset, options.dataset, data.reports)),
        "eval_data": list(map(describe_dataset, eval_datasets, data.eval_reports)),
    }


def _joined(datasets: Sequence[DatasetRows], options: DataOptions) -> RunData:
    """The rows or prompts of all datasets. Some rows may be held out."""
    parts = [dataset.rows for dataset in datasets]
    num_rows = sum(dataset.report.num_used for dataset in datasets)
    train_rows, held_out = split_eval(num_rows, fraction=options.eval_fraction, seed=options.seed)
    reports = tuple(dataset.report for dataset in datasets)
    eval_sets = {"": held_out} if len(held_out) else {}
    if options.text.makes_rows:
        return RunData(
            NO_ROWS,
            train_rows,
            eval_sets=eval_sets,
            reports=reports,
            prompts=join_prompts([dataset.prompts for dataset in datasets], renumber=True),
            completion_length=options.text.max_completion_length,
        )
    train = join_cached(parts)
    return RunData(train, train_rows, train, eval_sets, reports=reports)


def _with_evaluation(
    data: RunData, datasets: Sequence[DatasetRows], names: Iterable[str]
) -> RunData:
    """The same run with the rows of other datasets to evaluate on, in the order of their names."""
    reports = tuple(dataset.report for dataset in datasets)
    first = len(data.prompts)
    ends = np.cumsum([first, *(report.num_used for report in reports)])
    rows = np.split(np.arange(first, ends[-1]), ends[1:-1] - first)
    data = dataclasses.replace(
        data, eval_sets=dict(zip(names, rows, strict=True)), eval_reports=reports
    )
    if data.prompts:
        parts = [data.prompts, *(dataset.prompts for dataset in datasets)]
        return dataclasses.replace(data, prompts=join_prompts(parts, renumber=False))
    return dataclasses.replace(data, evaluation=join_cached([dataset.rows for dataset in datasets]))


def _compared(data: RunData, *, drop: bool) -> RunData:
    """The same run, without rows to train on that equal others if `drop` says so."""
    held_out = data.known_rows if data.prompts else data.evaluation
    train_rows = without_duplicates(
        data.known_rows,
        data.train_rows,
        (held_out, data.eval_rows),
        data.reports,
        drop=drop,
        beside=data.prompts.beside if data.prompts else None,
    )
    return dataclasses.replace(data, train_rows=train_rows)


def _choose_context_length(
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    known_sources: Mapping[str, Source],
    longest: int | None,
) -> int:
    """The smallest power of two that keeps 99% of the rows of each dataset whole.

    It is at most 4,096 and `longest`.

    All rows decide; of a larger dataset about 10,000 at even distances. The same rows give the same
    number on every rank.
    """
    reports = []
    for dataset, source in known_sources.items():
        uncut = dataclasses.replace(options, context_length=_UNCUT)
        with _template_workers() as workers:
            text = DatasetText(tokenizer, uncut, workers)
            reports.append(DatasetPipeline(dataset, text, source).measured())
    needed = max([report.length_of_99_percent for report in reports], default=_OF_DUMMY)
    power_of_two = 2 ** max(1, (needed - 1).bit_length())
    chosen = min(power_of_two, MOST_OF_AUTO, longest or MOST_OF_AUTO)
    used = sum(report.num_used for report in reports)
    total = sum(report.num_rows for report in reports)
    which = f"{used:,} rows"
    if used < total:
        where = f"at {NUM_BLOCKS} places of about {total:,}"
        if any(map(is_from_beginning, known_sources.values())):
            where = "from the beginning of files"
        which = f"{which}, {where},"
    log.info(
        "Context: %s tokens (auto: 99%% of %s have at most %s)", f"{chosen:,}", which, f"{needed:,}"
    )
    return chosen


def describe_dataset(dataset: str, report: DataReport) -> dict[str, Any]:
    """A dataset for the result's card: by its name alone if it is a local path."""
    path = Path(parse_name(dataset).name).expanduser()
    name = path.resolve().name if path.exists() else dataset
    return {"name": name, "format": report.dataset_format, "rows": report.num_used}


def _mixture(
    datasets: Sequence[str],
    shares: Sequence[float],
    parts: Sequence[TokenizedRows],
    train_rows: np.ndarray,
) -> Mixture:
    """The datasets in their shares, which are logged."""
    ends = tuple(int(end) for end in np.cumsum([len(part) for part in parts]))
    sizes = [len(group) for group in split_rows(train_rows, ends)]
    if 0 in sizes:
        raise UserError(
            f"dataset {datasets[sizes.index(0)]}: none of its rows is left to train on: all are "
            "held out, or equal others and --drop_duplicates leaves them out. Leave out the "
            "dataset or the option."
        )
    mixture = Mixture(ends, mix(shares, sizes))
    for dataset, share, count, size in zip(
        datasets, shares, mixture.rows_per_epoch, sizes, strict=True
    ):
        log.info(
            "%s: %.1f%% of the rows, %d of its %d in each epoch", dataset, 100 * share, count, size
        )
    return mixture


def read_dataset(
    dataset: str,
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    *,
    vocab_size: int,
    source: Source | None = None,
    chosen_prompts: Collection[int] | None = None,
) -> DatasetRows:
    """Read one of the datasets. All ranks of a machine call it, and one does the work.

    Args:
        source: of the dataset, if it is known already.
        chosen_prompts: where prompts are read, the numbers of the rows to read; None for all.
    Raises:
        UserError: the dataset is missing, malformed, empty or has too many unusable rows, or a
            token that the model does not have.
    """
    if parse_name(dataset).name == sources.DUMMY:
        dataset_rows = _dummy_rows(tokenizer, options)
    else:
        with _template_workers() as workers:
            text = DatasetText(tokenizer, options, workers)
            pipeline = DatasetPipeline(dataset, text, source)
            if chosen_prompts is None:
                dataset_rows = pipeline.all_rows()
            else:
                dataset_rows = pipeline.prompts_of(chosen_prompts)
    check_report(
        dataset_rows.report, allowed=options.max_bad_rows, context_length=options.longest_row
    )
    if dataset_rows.described:
        log.info("%s", dataset_rows.described)
    samples = options.dataset_samples
    num_rows = dataset_rows.report.num_rows
    if samples is not None and num_rows < samples and chosen_prompts is None:
        log.warning("dataset_samples is %d, but there are only %d rows.", samples, num_rows)
    rows = dataset_rows.prompts.rows if dataset_rows.prompts else dataset_rows.rows
    tokenization.check_vocabulary(rows, vocab_size)
    return dataset_rows


def _dummy_rows(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> DatasetRows:
    rows, report = tokenization.dummy_rows(
        options.dataset_samples or sources.DEFAULT_SAMPLES[sources.DUMMY],
        len(tokenizer),
        options.text.row_kind,
        context_length=options.longest_row,
        seed=options.seed,
    )
    return DatasetRows(rows, report)


@contextlib.contextmanager
def _template_workers() -> Iterator[list[TemplateWorker]]:
    """Processes for the chat template of one dataset."""
    # The other ranks of the machine wait meanwhile, so their cores are free.
    num_workers = min(8, max(1, (os.cpu_count() or 1) // 2))
    workers = [TemplateWorker() for _ in range(num_workers)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()
