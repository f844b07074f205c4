"""The run's rows: training and held-out, tokenized or taken from the cache, checked and described."""

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data import tokenization
from fsdp_qlora.data.cache import cache_path, locked, read_cache, tokenizer_identity, write_cache
from fsdp_qlora.data.formats import choose_format
from fsdp_qlora.data.rows import NUMBERS_SHOWN, DataReport, TokenizedRows
from fsdp_qlora.data.schedule import split_eval
from fsdp_qlora.data.sources import DEFAULT_SAMPLES, DUMMY, Source, find_source
from fsdp_qlora.errors import UserError
from fsdp_qlora.redact import redact_values
from fsdp_qlora.storage.files import cache_folder

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True)
class DataOptions:
    """The options that decide a run's rows. Each is the option of the same name, and its help says what it means."""

    dataset: str
    eval_dataset: str | None
    eval_fraction: float
    context_length: int
    dataset_format: str
    dataset_samples: int | None
    on_bad_row: str
    max_bad_rows: float
    seed: int


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

    def prepare(options: DataOptions) -> TokenizedRows:
        rows, report = prepare_rows(tokenizer, options, cache_dir=cache_folder() / "tokenized", show_progress=True)
        tokenization.check_vocabulary(rows, vocab_size)
        rejected.extend(report.places())
        return rows

    rejected: list[tuple[str, str]] = []
    train = evaluation = prepare(options)
    train_rows, eval_rows = split_eval(len(train), fraction=options.eval_fraction, seed=options.seed)
    if options.eval_dataset is not None:
        evaluation = prepare(dataclasses.replace(options, dataset=options.eval_dataset, dataset_samples=None))
        eval_rows = np.arange(len(evaluation))
    sample = tokenization.describe_sample(train, int(train_rows[0]), tokenizer)
    return RunData(train, train_rows, evaluation, eval_rows, sample, rejected)


def prepare_rows(
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, *, cache_dir: str | Path, show_progress: bool = False
) -> tuple[TokenizedRows, DataReport]:
    """Tokenize `options.dataset`, or map what an earlier call with the same input left in `cache_dir`.

    Every rank calls it. The first one on a machine does the work, the others wait and map its file.

    Args:
        show_progress: may be true on every rank, since only the one that works draws a bar.
    Raises:
        UserError: the dataset is missing, malformed, empty or has too many unusable rows, the tokenizer
            has no end-of-sequence token, or `cache_dir` cannot be written.
    """
    dataset, limit = options.dataset, options.dataset_samples
    num_samples = DEFAULT_SAMPLES.get(dataset) if limit is None else limit
    if dataset == DUMMY:
        assert num_samples is not None
        rows, report = tokenization.dummy_rows(
            num_samples, len(tokenizer), context_length=options.context_length, seed=options.seed
        )
    else:
        rows, report = _cached_rows(
            find_source(dataset), num_samples, tokenizer, options, Path(cache_dir), show_progress=show_progress
        )
    check_report(report, on_bad_row=options.on_bad_row, max_bad_rows=options.max_bad_rows)
    if limit is not None and report.num_rows < limit:
        log.warning("dataset_samples is %d, but there are only %d rows.", limit, report.num_rows)
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
    dataset_format, context_length = options.dataset_format, options.context_length
    key = [source.identity, tokenizer_identity(tokenizer), dataset_format, context_length, num_samples]
    path = cache_path(cache_dir, key)
    with locked(path):
        cached = read_cache(path)
        if cached is not None:
            log.info("Tokenized rows are read from %s", path)
            # The same content may be at another path now.
            return cached[0], dataclasses.replace(cached[1], origin=source.origin)
        rows = source.read(num_samples)
        name = choose_format(rows.columns, dataset_format=dataset_format, origin=source.origin)
        made = tokenization.tokenize_rows(rows, name, source.origin, tokenizer, context_length, show_progress)
        write_cache(path, *made)
        return read_cache(path) or made  # mapped, so that all ranks share it


def check_report(report: DataReport, *, on_bad_row: str, max_bad_rows: float) -> None:
    """Log what became of the rows, and refuse a dataset with too many unusable ones.

    Args:
        on_bad_row: "skip" leaves unusable rows out, "error" allows none.
        max_bad_rows: the fraction of rows that "skip" may leave out.
    Raises:
        UserError: no row is left, or too many were rejected. The message names the first of them with their places.
    """
    allowed = max_bad_rows if on_bad_row == "skip" else 0.0
    if report.num_used == 0 or report.num_rejected > allowed * report.num_rows:
        lines = [f"{place}: {reason}" for place, reason in report.places()[:NUMBERS_SHOWN]]
        if report.num_rejected > len(lines):
            lines.append(f"... and {report.num_rejected - len(lines):,} more")
        limit = f"allowed are {allowed:.1%}" if on_bad_row == "skip" else "--on_bad_row is error"
        advice = "raise --max_bad_rows" if on_bad_row == "skip" else "leave them out with --on_bad_row skip"
        raise UserError(
            f"{report.origin}: {report.num_rejected:,} of {report.num_rows:,} rows cannot be used, {limit}. "
            f"Repair them or {advice}.\n  " + "\n  ".join(lines)
        )
    log.info("%s", report.describe())
    for line in report.describe_rejected():
        log.warning("Rows left out, %s", line)
