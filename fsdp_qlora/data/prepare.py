"""The run's rows: training and held-out, tokenized or taken from the cache, checked and described."""

import contextlib
import dataclasses
import json
import logging
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.config.objectives import LABELS, PAIRS, TEXTS, RowKind
from fsdp_qlora.data.batches import tokenization
from fsdp_qlora.data.batches.cache import join_cached, through_cache, tokenizer_identity
from fsdp_qlora.data.batches.data_report import NUMBERS_SHOWN, DataReport
from fsdp_qlora.data.batches.rows import NO_ROWS, TokenizedRows, join_rows
from fsdp_qlora.data.batches.schedule import Mixture, RowsInMemory, RowSource, mix, split_eval, split_rows
from fsdp_qlora.data.batches.streaming import RowStream, StreamPosition, spread
from fsdp_qlora.data.content import FOLDER, BadRow, Row, SourceFile
from fsdp_qlora.data.sources import source as sources
from fsdp_qlora.data.sources.source import Entry, Source
from fsdp_qlora.data.text import formats, preferences
from fsdp_qlora.data.text.chat_template import TemplateWorker
from fsdp_qlora.data.text.formats import FORMATS, AskedFormat, Reading, parse_columns
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.data.text.rendering import Renderer, prompt_record
from fsdp_qlora.data.text.templates import find_template
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.redact import redact_values

log = logging.getLogger("fsdp_qlora")

_FIRST_ROWS = 1000  # of a stream, which are checked before training
_MOST_MEASURED = 10_000  # rows of a dataset that decide on --context_length auto
_UNCUT = 2**31  # tokens, more than a row has
_OF_DUMMY = 512  # tokens of its rows, which fill whatever there is, with --context_length auto


@dataclass(frozen=True)
class DataOptions:
    """The options that decide a run's rows. Each is the option of the same name, and its help says what it means."""

    dataset: tuple[str, ...]
    eval_dataset: tuple[str, ...]
    eval_fraction: float
    context_length: Literal["auto"] | int
    dataset_format: str
    columns: tuple[str, ...]
    prompt_template: str | None
    learn: str
    dataset_samples: int | None
    max_bad_rows: float
    seed: int
    streaming: bool = False
    shuffle_buffer: int = 10_000
    max_steps: int = -1
    objective: str = "sft"
    row_kind: RowKind = TEXTS
    """The kind of rows that the objective learns from."""
    rating_threshold: float | None = None
    max_completion_length: int = 0
    image_processor: ImageProcessor | None = None
    """The model's, if it has one; no option."""

    @property
    def longest_row(self) -> int:
        """`context_length`, once it is decided."""
        assert isinstance(self.context_length, int)
        return self.context_length

    @property
    def asked_format(self) -> str:
        """The format that the options ask for; rows with a label or ratings are told by the objective and threshold."""
        told = {(LABELS, False): "label", (LABELS, True): "rating", (PAIRS, True): "ratings"}
        found = told.get((self.row_kind, self.rating_threshold is not None), "auto")
        return found if self.dataset_format == "auto" else self.dataset_format


@dataclass(frozen=True)
class RunData:
    """The rows of a run."""

    train: TokenizedRows
    """All rows; the first ones of a stream, to look at."""
    train_rows: np.ndarray
    """Indices of the rows of `train` to train on, int64."""
    evaluation: TokenizedRows = NO_ROWS
    eval_sets: dict[str, np.ndarray] = field(default_factory=dict)
    """The name of each evaluation, the main one first -> indices of its rows of `evaluation`, int64."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """For the result's card, as JSON. data: name, format and number of rows of each dataset; eval_data: the same;
    prompt: as `prompt_record`, of the first dataset."""
    reports: tuple[DataReport, ...] = ()
    """The reports on each dataset to train on; on the first rows of a stream."""
    eval_reports: tuple[DataReport, ...] = ()
    mixture: Mixture | None = None
    """The datasets' parts in an epoch, if they have weights."""
    stream: RowStream | None = None
    """Reads the rows to train on, if they are streamed."""
    context_length: int = 0
    """The most tokens of a row, as asked for or decided."""
    image_processor: ImageProcessor | None = None
    """Makes the pixels of the rows' images, if the model has one."""

    @property
    def have_images(self) -> bool:
        """Whether rows have images; of a stream the first ones."""
        return len(self.train.images) + len(self.evaluation.images) > 0

    @property
    def source(self) -> RowSource:
        """Gives the rows to train on."""
        return self.stream or RowsInMemory(self.train, self.train_rows)

    @property
    def eval_rows(self) -> np.ndarray:
        """Indices of the rows of `evaluation` to evaluate on, int64."""
        return np.concatenate([np.arange(0), *self.eval_sets.values()])

    @property
    def rows_per_epoch(self) -> int | None:
        """None if it is unknown."""
        if self.stream is not None:
            return self.stream.num_rows
        return sum(self.mixture.rows_per_epoch) if self.mixture else len(self.train_rows)

    @property
    def identity(self) -> list[object]:
        """Distinguishes the rows from others."""
        streamed = [self.stream.source.identity] if self.stream is not None else []
        return [self.train.digest, self.evaluation.digest, len(self.eval_rows), *streamed]

    @property
    def rejected(self) -> list[tuple[str, str]]:
        """(place, reason) of every row that was left out; a stream logs them as they come."""
        reports = self.eval_reports if self.stream is not None else self.reports + self.eval_reports
        return [place for report in reports for place in report.places()]

    def describe_left_out(self) -> list[str]:
        """A line for the end, if rows were left out: how many of those that were read before training."""
        reports = self.reports + self.eval_reports
        left, total = sum(each.num_rejected for each in reports), sum(each.num_rows for each in reports)
        return [f"Rows left out: {left:,} of {total:,}"] if left else []

    def files(self) -> dict[str, str]:
        """Files for the run's folder, name -> text: rejected.jsonl, if rows were left out."""
        lines = [json.dumps(redact_values({"row": place, "reason": reason})) + "\n" for place, reason in self.rejected]
        return {"rejected.jsonl": "".join(lines)} if lines else {}


def prepare_data(
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, *, vocab_size: int, longest: int | None = None
) -> RunData:
    """Tokenize the datasets, or take them from the cache, and hold rows out for evaluation.

    Args:
        vocab_size: the number of embeddings of the model. longest: the most tokens of a row that it supports, if known.
    Raises:
        UserError: a dataset cannot be used, or has a token that the model does not have.
    """
    eval_names = sources.parse_eval_names(options.eval_dataset)
    shares = sources.check_weights([sources.parse_name(dataset) for dataset in options.dataset])
    stream = mixture = None
    texts = [name for name in options.dataset if options.streaming or sources.parse_name(name).name != sources.DUMMY]
    found = {name: sources.find_source(name, streamed=options.streaming) for name in texts}
    if options.context_length == "auto":
        chosen = _choose_context_length(tokenizer, options, found, longest)
        options = dataclasses.replace(options, context_length=chosen)
    if options.streaming:
        pipeline = DatasetPipeline(tokenizer, options, [TemplateWorker()], found[options.dataset[0]])
        train, report, stream = pipeline.open_stream(vocab_size)
        reports, train_rows, held_out = [report], np.arange(len(train)), np.arange(0)
        counts: list[int | None] = [stream.num_rows]
    else:
        parts, reports = _prepare_each(options.dataset, tokenizer, options, vocab_size, found)
        train_rows, held_out = split_eval(sum(map(len, parts)), fraction=options.eval_fraction, seed=options.seed)
        mixture = _mixture(options.dataset, shares, parts, train_rows) if shares else None
        train, counts = join_cached(parts), [report.num_used for report in reports]
    evaluation, eval_sets = train, {"": held_out} if len(held_out) else {}
    eval_reports: list[DataReport] = []
    if eval_names:
        whole = dataclasses.replace(options, dataset_samples=None)
        eval_parts, eval_reports = _prepare_each(list(eval_names.values()), tokenizer, whole, vocab_size)
        evaluation = join_cached(eval_parts)
        ends = np.cumsum([len(part) for part in eval_parts])
        eval_sets = dict(zip(eval_names, np.split(np.arange(len(evaluation)), ends[:-1]), strict=True))
    provenance = {
        "prompt": record_of(reports[0], options),
        "data": list(map(describe_dataset, options.dataset, reports, counts)),
        "eval_data": list(
            map(describe_dataset, eval_names.values(), eval_reports, [each.num_used for each in eval_reports])
        ),
    }
    all_reports = tuple(reports), tuple(eval_reports)
    length, images = options.longest_row, options.image_processor
    return RunData(train, train_rows, evaluation, eval_sets, provenance, *all_reports, mixture, stream, length, images)


def _choose_context_length(
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, found: Mapping[str, Source], longest: int | None
) -> int:
    """The smallest power of two that keeps 99% of the rows of each dataset whole, at most 4,096 and `longest`.

    All rows decide; of a dataset of more than 10,000 some at even distances, of a stream the first ones. The same rows
    give the same number on every rank.
    """
    reports = []
    for dataset, source in found.items():
        one = dataclasses.replace(options, dataset=(dataset,), context_length=_UNCUT)
        with _opened(tokenizer, one, source) as pipeline:
            reports.append(pipeline.measured())
    needed = max([report.length_of_99_percent for report in reports], default=_OF_DUMMY)
    chosen = tokenization.context_for(needed, longest)
    used, total = sum(report.num_used for report in reports), sum(report.num_rows for report in reports)
    which = f"the first {used:,}" if options.streaming else f"{used:,} of {total:,}" if used < total else f"{used:,}"
    log.info("Context: %s tokens (auto: 99%% of %s rows have at most %s)", f"{chosen:,}", which, f"{needed:,}")
    return chosen


def record_of(report: DataReport, options: DataOptions) -> dict[str, Any]:
    """How the rows of a dataset became text, as `prompt_record`."""
    chosen = find_template(options.prompt_template)
    return prompt_record(report.dataset_format, chosen, is_chat=report.is_chat, is_filled=report.is_filled)


def _prepare_each(
    datasets: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    vocab_size: int,
    found: Mapping[str, Source] = {},
) -> tuple[list[TokenizedRows], list[DataReport]]:
    """The rows of each dataset, and what became of them. found: the sources that are known."""
    parts, reports, samples = [], [], options.dataset_samples
    for dataset in datasets:
        one = dataclasses.replace(options, dataset=(dataset,))
        rows, report = prepare_rows(tokenizer, one, found.get(dataset))
        if samples is not None and report.num_rows < samples:
            log.warning("dataset_samples is %d, but there are only %d rows.", samples, report.num_rows)
        tokenization.check_vocabulary(rows, vocab_size)
        parts.append(rows)
        reports.append(report)
    return parts, reports


def describe_dataset(dataset: str, report: DataReport, num_rows: int | None) -> dict[str, Any]:
    """A dataset for the result's card: by its name alone if it is a local path."""
    path = Path(sources.parse_name(dataset).name).expanduser()
    name = path.resolve().name if path.exists() else dataset
    return {"name": name, "format": report.dataset_format, "rows": num_rows}


def _mixture(
    datasets: Sequence[str], shares: Sequence[float], parts: Sequence[TokenizedRows], train_rows: np.ndarray
) -> Mixture:
    """The datasets in their shares, which are logged."""
    ends = tuple(int(end) for end in np.cumsum([len(part) for part in parts]))
    sizes = [len(group) for group in split_rows(train_rows, ends)]
    mixture = Mixture(ends, mix(shares, sizes))
    for dataset, share, count, size in zip(datasets, shares, mixture.rows_per_epoch, sizes, strict=True):
        log.info("%s: %.1f%% of the rows, %d of its %d in each epoch", dataset, 100 * share, count, size)
    return mixture


def prepare_rows(
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, source: Source | None = None
) -> tuple[TokenizedRows, DataReport]:
    """Tokenize the one `options.dataset`. Of a machine's ranks, which all call it, one does the work.

    Raises:
        UserError: the dataset is missing, malformed, empty or has too many unusable rows.
    """
    if sources.parse_name(options.dataset[0]).name == sources.DUMMY:
        samples = options.dataset_samples or sources.DEFAULT_SAMPLES[sources.DUMMY]
        size, context, kind = len(tokenizer), options.longest_row, options.row_kind
        rows, report = tokenization.dummy_rows(samples, size, kind, context_length=context, seed=options.seed)
    else:
        with _opened(tokenizer, options, source) as pipeline:
            rows, report = pipeline.all_rows()
    check_report(report, options)
    return rows, report


@contextlib.contextmanager
def _opened(
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, source: Source | None
) -> Iterator["DatasetPipeline"]:
    """The pipeline of the one `options.dataset`, with processes of its own for the chat template."""
    num_workers = min(8, max(1, (os.cpu_count() or 1) // 2))  # the other ranks of the machine wait
    pipeline = DatasetPipeline(tokenizer, options, [TemplateWorker() for _ in range(num_workers)], source)
    try:
        yield pipeline
    finally:
        for worker in pipeline.workers:
            worker.close()


class DatasetPipeline:
    """Turns the rows of the one `options.dataset` into tokens, whole or as a stream. source: if it is known already."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        workers: Sequence[TemplateWorker],
        source: Source | None = None,
    ) -> None:
        self.tokenizer, self.options, self.workers = tokenizer, options, workers
        [self.dataset] = map(sources.parse_name, options.dataset)
        self.template = find_template(options.prompt_template)
        self.asked = AskedFormat(options.asked_format, parse_columns(options.columns))
        self.source = source or sources.find_source(self.dataset, streamed=options.streaming)
        named = sources.DEFAULT_SAMPLES.get(self.dataset.name)
        self.samples = named if options.dataset_samples is None else options.dataset_samples
        self._columns: dict[str, None] = {}  # of all rows so far: those of one batch may lack one that others have
        self._reading: Reading | None = None  # known from the first rows on

    def all_rows(self) -> tuple[TokenizedRows, DataReport]:
        """The rows as a whole: mapped from the cache, or tokenized by one process at a time and kept there."""
        source = self.source

        def make() -> tuple[TokenizedRows, DataReport]:
            made = self._tokenize(source, source.entries(self.samples, used=self.asked.used), show_progress=True)
            if source.fingerprint() != source.identity:
                raise UserError(f"{source.origin} was changed while it was read. Start again when it is complete.")
            return made

        rows, report = through_cache(self._key, make)
        return rows, dataclasses.replace(report, origin=source.origin)  # the same content may be at another path now

    @property
    def _key(self) -> list[object]:
        """All that the rows depend on."""
        options, kind, source = self.options, self.options.row_kind, self.source
        key: list[object] = [source.identity, source.start, source.stop, self.samples, self.asked.renames]
        key += [dataclasses.astuple(self.template), options.dataset_format, options.context_length, options.learn]
        key += [tokenizer_identity(self.tokenizer), self.tokenizer.chat_template]
        key += options.image_processor.identity if options.image_processor else []
        key += [kind.name] if kind != TEXTS else []
        return key + ([f"rated {options.rating_threshold}"] if options.rating_threshold is not None else [])

    def measured(self) -> DataReport:
        """The report on the uncut rows that decide; num_rows were read, and num_used of them tokenized."""

        def make() -> tuple[TokenizedRows, DataReport]:
            limit = _FIRST_ROWS if self.options.streaming else self.samples
            num_rows, chosen = spread(self.source.entries(limit, used=self.asked.used), _MOST_MEASURED)
            _, report = self._tokenize(self.source, chosen)
            return NO_ROWS, dataclasses.replace(report, num_rows=num_rows, num_used=len(chosen))

        return through_cache(["measured", *self._key], make)[1]

    def open_stream(self, vocab_size: int) -> tuple[TokenizedRows, DataReport, RowStream]:
        """The first rows, which are checked as others are, their report, and the stream of all rows."""
        options, source = self.options, self.source

        def tokenize(entries: Iterable[Entry]) -> tuple[TokenizedRows, DataReport]:
            block, report = self._tokenize(source, entries)
            tokenization.check_vocabulary(block, vocab_size)
            return block, report

        stream = RowStream(
            source,
            tokenize,
            used=self.asked.used,
            block_rows=options.shuffle_buffer,
            seed=options.seed,
            max_bad_rows=options.max_bad_rows,
            num_rows=source.count() if options.max_steps < 0 else None,
        )
        entries, _ = stream.read_block(StreamPosition(), _FIRST_ROWS)
        first, report = tokenize(entries)
        if report.num_apart and options.max_steps < 0:
            raise UserError(
                "--streaming true: turns of these chats, which the chat template renders differently when others "
                "follow, or pieces of these texts become rows of their own, so the number of rows is unknown. Give "
                "--max_steps."
            )
        check_report(report, options)
        at_a_time = f"{options.shuffle_buffer:,} rows at a time"
        log.info("%s is streamed, and shuffled %s; these were its first.", self.dataset.name, at_a_time)
        return first, report, stream

    def _tokenize(
        self, source: Source, entries: Iterable[Entry], *, show_progress: bool = False
    ) -> tuple[TokenizedRows, DataReport]:
        """Tokenize entries in batches, so that few rows are in memory as text."""
        pieces, lengths = [NO_ROWS], [0]
        report, left = DataReport(source.origin), iter(entries)
        with tqdm(desc="Tokenizing", unit=" rows", disable=not show_progress) as bar:
            while batch := list(islice(left, sources.ROWS_PER_BATCH)):
                if rows := self._named(batch, source, report):
                    row_format = FORMATS[report.dataset_format]
                    if (threshold := self.options.rating_threshold) is not None:
                        row_format = dataclasses.replace(row_format, read=partial(row_format.read, threshold=threshold))
                    learn, of_format = self.options.learn, row_format.template
                    images = self.options.image_processor
                    renderer = Renderer(self.tokenizer, self.template, learn, of_format, self.workers, images)
                    piece, of_rows = tokenization.tokenize_batch(
                        rows, row_format, renderer, self.tokenizer, self.options.longest_row, report
                    )
                    pieces.append(piece)
                    lengths += of_rows
                bar.update(len(batch))
        if not self._columns:
            [(place, reason), *_] = report.places() or [(source.origin, "the dataset is empty")]
            more = f" None of its {report.num_rows:,} rows can be read." if report.num_rows else " Give one with rows."
            raise UserError(f"{place}: {reason}.{more}")
        joined = join_rows(pieces)
        report.length_of_99_percent = int(np.quantile(lengths[1:] or lengths, 0.99, method="inverted_cdf"))
        report.count(joined)
        return joined, report

    def _named(self, entries: Sequence[Entry], source: Source, report: DataReport) -> list[tuple[int, Row]]:
        """(number, row) of the entries that are rows, whose columns are called as their format calls them."""
        rows, folders = [], []
        for part, offset, number, row in entries:
            if not report.parts or report.parts[-1].offset != offset:
                report.parts.append(SourceFile(source.parts[part].name, source.parts[part].unit, offset))
            if isinstance(row, BadRow):
                report.reject(offset + number, str(row))
            else:
                rows.append((offset + number, row))
                folders.append(source.folder_of(part))
        report.num_rows += len(entries)
        known = len(self._columns)
        self._columns.update(dict.fromkeys(column for _, row in rows for column in row))
        if rows and (len(self._columns) > known or self._reading is None):
            first_rows = [row for _, row in rows[: sources.ROWS_LOOKED_AT]]
            asked = self.asked._replace(name=self._reading.dataset_format) if self._reading else self.asked
            found = asked.find(list(self._columns), first_rows, source.origin)
            self._reading = found if self.options.image_processor else found.without_images()
            _check_objective(self._reading, self.options, first_rows, source.origin)
        if self._reading is None:
            return []
        report.dataset_format = self._reading.dataset_format
        report.unused_columns = [column for column in self._columns if column not in self._reading.names]
        named: list[tuple[int, Row]] = []
        for folder, (number, row) in zip(folders, rows, strict=True):
            try:
                named.append((number, {**self._reading.named(row), FOLDER: folder}))
            except BadRow as reason:
                report.reject(number, str(reason))
        return named


def _check_objective(reading: Reading, options: DataOptions, first_rows: Sequence[Row], origin: str) -> None:
    """Refuse rows that the objective cannot learn from. Raises UserError."""
    found, wanted = FORMATS[reading.dataset_format].row_kind, options.row_kind
    if found == wanted:
        return
    if wanted != TEXTS:
        raise UserError(
            f"{origin}: --objective {options.objective} learns from {wanted.described}, and these rows have none in "
            "columns of known names. Other names are given with --columns."
        )
    alone = ""
    if "chosen" in reading.names.values():
        columns, text_format = preferences.chosen_alone(first_rows[0], reading.names)
        if formats.reads(first_rows, columns, text_format):
            options_alone = f"--columns {shlex.join(columns)} --dataset_format {text_format}"
            alone = f"; or train on the chosen answers alone, with {options_alone}"
    say = f"Say how to learn from them, such as --objective {found.objective}"
    raise UserError(f"{origin}: these rows are {found.described}. {say}{alone}.")


def check_report(report: DataReport, options: DataOptions) -> None:
    """Log what became of the rows, and raise UserError if none is left or too many were rejected."""
    allowed, num_bad = options.max_bad_rows, report.num_rejected
    advice = report.describe_cut(options.longest_row)
    if report.num_used == 0 or num_bad > allowed * report.num_rows:
        lines = [*report.describe_rejected().values()]
        if len(lines) > NUMBERS_SHOWN:
            lines[NUMBERS_SHOWN:] = [f"... and {len(lines) - NUMBERS_SHOWN:,} other reasons"]
        cure = f"raise {'--context_length or ' if report.num_too_long else ''}--max_bad_rows"
        raise UserError(
            f"{report.origin}: {num_bad:,} of {report.num_rows:,} rows cannot be used, allowed are {allowed:.1%}. "
            f"Repair them or {cure}." + "".join(f"\n  {line}" for line in [*lines, *advice])
        )
    log.info("%s", report.describe())
    for line in report.describe_rejected().values():
        log.warning("Rows left out, %s", line)
    for line in [*report.describe_notes(), *advice]:
        log.warning("%s", line)
