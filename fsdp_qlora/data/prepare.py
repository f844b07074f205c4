"""The run's rows: training and held-out, tokenized or taken from the cache, checked and described."""

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data import tokenization
from fsdp_qlora.data.cache import cache_path, join_cached, locked, read_cache, tokenizer_identity, write_cache
from fsdp_qlora.data.dataset_names import parse_eval_names, parse_name
from fsdp_qlora.data.formats import FORMATS, choose_format, given_names, parse_columns, used_columns
from fsdp_qlora.data.mixture import Mixture, check_weights, mix, split_rows
from fsdp_qlora.data.prompt_record import prompt_record
from fsdp_qlora.data.prompts import find_template
from fsdp_qlora.data.rendering import Renderer
from fsdp_qlora.data.rows import NO_ROOM, NUMBERS_SHOWN, DataReport, Rows, TokenizedRows, join_pieces
from fsdp_qlora.data.schedule import split_eval
from fsdp_qlora.data.sources import DEFAULT_SAMPLES, DUMMY, Part, Source, find_parts, find_source
from fsdp_qlora.data.streaming import Place, RowStream, StreamOptions
from fsdp_qlora.errors import UserError
from fsdp_qlora.redact import redact_values
from fsdp_qlora.storage.files import cache_folder

log = logging.getLogger("fsdp_qlora")

_ROWS_LOOKED_AT = 1000  # of a stream, before training


@dataclass(frozen=True)
class DataOptions:
    """The options that decide a run's rows. Each is the option of the same name, and its help says what it means."""

    dataset: tuple[str, ...]
    eval_dataset: tuple[str, ...]
    eval_fraction: float
    context_length: int
    dataset_format: str
    columns: tuple[str, ...]
    prompt_template: str | None
    learn: str
    dataset_samples: int | None
    on_bad_row: str
    max_bad_rows: float
    seed: int
    streaming: bool = False
    shuffle_buffer: int = 10_000
    max_steps: int = -1


@dataclass(frozen=True)
class RunData:
    """The rows of a run."""

    train: TokenizedRows
    train_rows: np.ndarray
    """Indices of the rows of `train` to train on, int64."""
    evaluation: TokenizedRows
    eval_rows: np.ndarray
    """Indices of the rows of `evaluation` to evaluate on, int64."""
    sample: str
    """One row as text, its masked and learned parts marked."""
    rejected: list[tuple[str, str]]
    """(place, reason) of every row that was left out."""
    about: dict[str, Any] = field(default_factory=dict)
    """For the result's card, as JSON. data: name, format and number of rows of each dataset; eval_data: the same;
    prompt: as `prompt_record`, of the first dataset."""
    eval_sets: dict[str, np.ndarray] = field(default_factory=dict)
    """The parts of `eval_rows` by name, the first one first, where there are several."""
    mixture: Mixture | None = None
    """The datasets' parts in an epoch, where they have weights."""
    stream: RowStream | None = None
    """Where the rows to train on are streamed; `train` then has the first ones, to look at."""
    reports: tuple[DataReport, ...] = ()
    """What became of the rows of each dataset to train on; of a stream, of its first rows."""

    @property
    def rows_per_epoch(self) -> int | None:
        """None where it is unknown."""
        if self.stream is not None:
            return self.stream.num_rows
        return sum(self.mixture.rows_per_epoch) if self.mixture else len(self.train_rows)

    @property
    def identity(self) -> list[object]:
        """What tells the rows from others."""
        streamed = [self.stream.identity] if self.stream is not None else []
        return [self.train.digest, self.evaluation.digest, len(self.eval_rows), *streamed]

    def files(self) -> dict[str, str]:
        """Files for the run's folder, name -> text: rejected.jsonl, if rows were left out."""
        lines = [json.dumps(redact_values({"row": place, "reason": reason})) + "\n" for place, reason in self.rejected]
        return {"rejected.jsonl": "".join(lines)} if lines else {}


def prepare_data(tokenizer: PreTrainedTokenizerBase, options: DataOptions, *, vocab_size: int) -> RunData:
    """Tokenize the datasets, or take them from the cache, and hold rows out for evaluation.

    Args:
        vocab_size: the number of embeddings of the model.
    Raises:
        UserError: a dataset cannot be used, see `prepare_rows`, or has a token that the model does not have.
    """

    def prepare(datasets: Sequence[str], samples: int | None) -> list[TokenizedRows]:
        parts = []
        for dataset in datasets:
            one = dataclasses.replace(options, dataset=(dataset,), dataset_samples=samples)
            rows, report = prepare_rows(tokenizer, one, cache_dir=_tokenized_folder(), show_progress=True)
            if samples is not None and report.num_rows < samples:
                log.warning("dataset_samples is %d, but there are only %d rows.", samples, report.num_rows)
            tokenization.check_vocabulary(rows, vocab_size)
            rejected.extend(report.places())
            described.append(_about(dataset, report, report.num_used))
            reports.append(report)
            parts.append(rows)
        return parts

    rejected: list[tuple[str, str]] = []
    described: list[dict[str, Any]] = []
    reports: list[DataReport] = []
    eval_names = parse_eval_names(options.eval_dataset)
    shares = check_weights([parse_name(dataset) for dataset in options.dataset])
    stream = mixture = None
    if options.streaming:
        first, report, stream = _open_stream(tokenizer, options, vocab_size)
        described.append(_about(options.dataset[0], report, stream.num_rows))
        reports.append(report)
        parts, train_rows, eval_rows = [first], np.arange(len(first)), np.arange(0)
    else:
        parts = prepare(options.dataset, options.dataset_samples)
        train_rows, eval_rows = split_eval(sum(map(len, parts)), fraction=options.eval_fraction, seed=options.seed)
        mixture = _mixture(options.dataset, shares, parts, train_rows) if shares else None
    train = evaluation = join_cached(_tokenized_folder(), parts)
    eval_sets = {}
    if eval_names:
        eval_parts = prepare(list(eval_names.values()), None)
        evaluation = join_cached(_tokenized_folder(), eval_parts)
        eval_rows = np.arange(len(evaluation))
        ends = np.cumsum([len(part) for part in eval_parts])
        eval_sets = dict(zip(eval_names, np.split(eval_rows, ends[:-1]), strict=True))
    about = {
        "prompt": prompt_record(described[0]["format"], find_template(options.prompt_template)),
        "data": described[: len(options.dataset)],
        "eval_data": described[len(options.dataset) :],
    }
    sample = tokenization.describe_sample(train, int(train_rows[0]), tokenizer)
    of_training = tuple(reports[: len(options.dataset)])
    several = eval_sets if len(eval_sets) > 1 else {}
    held_out = (evaluation, eval_rows, sample, rejected, about, several)
    return RunData(train, train_rows, *held_out, mixture, stream, of_training)


def _tokenized_folder() -> Path:
    return cache_folder() / "tokenized"


def _about(dataset: str, report: DataReport, num_rows: int | None) -> dict[str, Any]:
    return {"name": _public(dataset), "format": report.dataset_format, "rows": num_rows}


def _public(dataset: str) -> str:
    """A dataset's name without the local path."""
    name = parse_name(dataset).name
    return Path(name).expanduser().resolve().name if Path(name).expanduser().exists() else dataset


def _open_stream(
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, vocab_size: int
) -> tuple[TokenizedRows, DataReport, RowStream]:
    """The first rows of a dataset, which are checked as others are, their report, and the stream of all."""
    [dataset] = map(parse_name, options.dataset)
    template, renames = find_template(options.prompt_template), parse_columns(options.columns)
    parts, identity = find_parts(dataset)
    columns: dict[str, None] = {}  # of all rows so far: those of one block may lack one that others have
    format_name = options.dataset_format

    def tokenize(rows: Rows) -> tuple[TokenizedRows, DataReport]:
        columns.update(dict.fromkeys(rows.columns))
        rows = dataclasses.replace(rows, columns=list(columns))
        if rows.rows:
            rows, _ = _with_format(rows, renames, format_name, dataset.name)
        pieces, report = tokenization.tokenize_rows(
            rows, format_name, dataset.name, tokenizer, options.context_length, renderer
        )
        made = join_pieces(pieces)
        tokenization.check_vocabulary(made, vocab_size)
        return made, report

    stream = RowStream(
        parts,
        tokenize,
        StreamOptions(
            used=partial(used_columns, dataset_format=options.dataset_format, renames=renames),
            block_rows=options.shuffle_buffer,
            seed=options.seed,
            max_bad_rows=options.max_bad_rows if options.on_bad_row == "skip" else 0.0,
        ),
        origin=dataset.name,
        identity=identity,
        num_rows=count_streamed(dataset.name, parts) if options.max_steps < 0 else None,
    )
    rows, _ = stream.read_block(Place(), _ROWS_LOOKED_AT)
    if not rows.rows:
        raise UserError(f"{dataset.name}: {next(iter(rows.malformed.values()), 'the dataset is empty')}.")
    _, format_name = _format_of(rows, renames, options.dataset_format, dataset.name)
    renderer = Renderer(tokenizer, template, options.learn, FORMATS[format_name].template)
    first, report = tokenize(rows)
    if report.num_apart and options.max_steps < 0:
        raise UserError(
            "--streaming true: turns of these chats become rows of their own, since the chat template writes them in "
            "another way when others follow, so nobody knows how many rows there are. Give --max_steps."
        )
    check_report(
        report,
        on_bad_row=options.on_bad_row,
        max_bad_rows=options.max_bad_rows,
        context_length=options.context_length,
    )
    log.info(
        "%s is streamed, and shuffled %s rows at a time; these were its first.",
        dataset.name,
        f"{options.shuffle_buffer:,}",
    )
    return first, report, stream


def count_streamed(dataset: str, parts: Sequence[Part]) -> int:
    """The rows of an epoch.

    Raises:
        UserError: nobody knows it.
    """
    counts = [part.count() for part in parts]
    if None in counts:
        raise UserError(f"--streaming true: nobody knows how many rows {dataset} has. Give --max_steps.")
    return sum(count for count in counts if count is not None)


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
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, *, cache_dir: str | Path, show_progress: bool = False
) -> tuple[TokenizedRows, DataReport]:
    """Tokenize the one `options.dataset`, or map what an earlier call with the same input left in `cache_dir`.

    Every rank calls it. The first one on a machine does the work, the others wait and map its file.

    Args:
        show_progress: may be true on every rank, since only the one that works draws a bar.
    Raises:
        UserError: the dataset is missing, malformed, empty or has too many unusable rows, the tokenizer
            has no end-of-sequence token, or `cache_dir` cannot be written.
    """
    [dataset], limit = map(parse_name, options.dataset), options.dataset_samples
    num_samples = DEFAULT_SAMPLES.get(dataset.name) if limit is None else limit
    if dataset.name == DUMMY:
        assert num_samples is not None
        rows, report = tokenization.dummy_rows(
            num_samples, len(tokenizer), context_length=options.context_length, seed=options.seed
        )
    else:
        rows, report = _cached_rows(
            find_source(dataset), num_samples, tokenizer, options, Path(cache_dir), show_progress=show_progress
        )
    check_report(
        report,
        on_bad_row=options.on_bad_row,
        max_bad_rows=options.max_bad_rows,
        context_length=options.context_length,
    )
    return rows, report


def _cached_rows(
    source: Source,
    num_samples: int | None,
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    cache_dir: Path,
    *,
    show_progress: bool,
) -> tuple[TokenizedRows, DataReport]:
    """Map the cached rows of a source, or make them, one process at a time."""
    template = find_template(options.prompt_template)
    renames = parse_columns(options.columns)
    key = [source.identity, tokenizer_identity(tokenizer), options.dataset_format, options.context_length, num_samples]
    key += [renames, dataclasses.astuple(template), options.learn, tokenizer.chat_template]
    path = cache_path(cache_dir, key)
    with locked(path):
        cached = read_cache(path)
        if cached is not None:
            log.info("Tokenized rows are read from %s", path)
            # The same content may be at another path now.
            return cached[0], dataclasses.replace(cached[1], origin=source.origin)
        used = partial(used_columns, dataset_format=options.dataset_format, renames=renames)
        rows, name = _with_format(source.read(num_samples, used=used), renames, options.dataset_format, source.origin)
        # The other ranks of the machine wait.
        num_workers = min(8, max(1, (os.cpu_count() or 1) // 2))
        with Renderer(tokenizer, template, options.learn, FORMATS[name].template, num_workers) as renderer:
            pieces, report = tokenization.tokenize_rows(
                rows, name, source.origin, tokenizer, options.context_length, renderer, show_progress
            )
        write_cache(path, pieces, report)
        return read_cache(path) or (join_pieces(pieces), report)  # mapped, so that all ranks share it


def _with_format(rows: Rows, renames: Mapping[str, str], dataset_format: str, origin: str) -> tuple[Rows, str]:
    """The rows with the columns of their format, and its name. Raises UserError as `_format_of`."""
    names, name = _format_of(rows, renames, dataset_format, origin)
    return rows.renamed(names), name


def _format_of(rows: Rows, renames: Mapping[str, str], dataset_format: str, origin: str) -> tuple[dict[str, str], str]:
    """The columns that are used -> their names in the rows' format, and the format's name.

    Raises:
        UserError: a column to rename is not there, or the columns are of no format.
    """
    if missing := [name for name in renames if name not in rows.columns]:
        raise UserError(
            f"columns: {origin} has no column {', '.join(map(repr, missing))}. It has: {', '.join(rows.columns)}."
        )
    given = given_names(rows.columns, renames)
    first = {given[column]: value for column, value in rows.rows[0].items() if column in given}
    name = choose_format(list(given.values()), dataset_format=dataset_format, origin=origin, first_row=first)
    wanted = FORMATS[name].renames(given.values())
    return {column: wanted[named] for column, named in given.items() if named in wanted}, name


def check_report(report: DataReport, *, on_bad_row: str, max_bad_rows: float, context_length: int) -> None:
    """Log what became of the rows, and refuse a dataset with too many unusable ones.

    A row without room for its response is no bad row: it is told apart, with the context that would do.

    Args:
        on_bad_row: "skip" leaves unusable rows out, "error" allows none.
        max_bad_rows: the fraction of rows that "skip" may leave out.
    Raises:
        UserError: no row is left, or too many were rejected. The message names the first of them with their places.
    """
    skips, is_empty = on_bad_row == "skip", report.num_used == 0
    counts_too_long = is_empty or not skips
    num_bad = report.num_rejected - (0 if counts_too_long else report.num_too_long)
    allowed = max_bad_rows if skips else 0.0
    advice = report.describe_cut(context_length)
    if is_empty or num_bad > allowed * report.num_rows:
        bad = [(place, reason) for place, reason in report.places() if counts_too_long or reason != NO_ROOM]
        lines = [f"{place}: {reason}" for place, reason in bad[:NUMBERS_SHOWN]]
        if num_bad > len(lines):
            lines.append(f"... and {num_bad - len(lines):,} more")
        limit = f"allowed are {allowed:.1%}" if skips else "--on_bad_row is error"
        cure = "raise --max_bad_rows" if skips else "leave them out with --on_bad_row skip"
        if report.num_too_long == num_bad:
            cure = "raise --context_length"
        raise UserError(
            f"{report.origin}: {num_bad:,} of {report.num_rows:,} rows cannot be used, {limit}. Repair them or {cure}."
            + "".join(f"\n  {line}" for line in [*lines, *advice])
        )
    log.info("%s", report.describe())
    for line in report.describe_rejected():
        log.warning("Rows left out, %s", line)
    for line in [*report.describe_notes(), *advice]:
        log.warning("%s", line)
