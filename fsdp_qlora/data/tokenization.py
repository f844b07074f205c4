"""Tokenization: rows of text become flat arrays of token ids and of which of them are learned."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm import tqdm

from fsdp_qlora.data.cache import cache_path, locked, read_cache, tokenizer_identity, write_cache
from fsdp_qlora.data.formats import FORMATS, BadRow, Format, Segment, choose_format
from fsdp_qlora.data.rows import NUMBERS_SHOWN, DataReport, Row, Rows, SourceFile, TokenizedRows
from fsdp_qlora.data.sources import DEFAULT_SAMPLES, DUMMY, Source, find_source
from fsdp_qlora.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("fsdp_qlora")

NO_ROOM = "no room for a response within context_length"  # why a row is left out
TEXTS_PER_BATCH = 1000  # enough to keep the threads of a fast tokenizer busy


def prepare_rows(
    dataset: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    dataset_format: str = "auto",
    dataset_samples: int | None = None,
    on_bad_row: str = "skip",
    max_bad_rows: float = 0.01,
    seed: int = 0,
    cache_dir: str | Path,
    show_progress: bool = False,
) -> tuple[TokenizedRows, DataReport]:
    """Tokenize a dataset, or map what an earlier call with the same input left in `cache_dir`.

    Every rank calls it: the first to come on a machine does the work, the others wait and map its file.

    Args:
        dataset: a name or path, see sources.find_source.
        context_length: rows are cut to this many tokens, from the end.
        dataset_format: a key of formats.FORMATS, or "auto" to tell it from the columns.
        dataset_samples: only the first N rows.
        on_bad_row: "skip" leaves unusable rows out and lists them, "error" refuses a dataset that has any.
        max_bad_rows: the fraction of rows that "skip" may leave out.
        seed: decides the random tokens of the dummy dataset, nothing else.
        show_progress: may be true in every rank, since only the one that works draws a bar.
    Raises:
        UserError: the dataset is missing, malformed, empty or has too many unusable rows, the tokenizer
            has no end-of-sequence token, or `cache_dir` cannot be written.
    """
    num_samples = DEFAULT_SAMPLES.get(dataset) if dataset_samples is None else dataset_samples
    if dataset == DUMMY:
        assert num_samples is not None
        made = dummy_rows(num_samples, len(tokenizer), context_length=context_length, seed=seed)
    else:
        source = find_source(dataset)
        made = _tokenize_source(
            source, tokenizer, context_length, dataset_format, num_samples, Path(cache_dir), show_progress
        )
    check_report(made[1], on_bad_row=on_bad_row, max_bad_rows=max_bad_rows)
    if dataset_samples is not None and made[1].num_rows < dataset_samples:
        log.warning("dataset_samples is %d, but there are only %d rows.", dataset_samples, made[1].num_rows)
    return made


def _tokenize_source(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    dataset_format: str,
    num_samples: int | None,
    cache_dir: Path,
    show_progress: bool,
) -> tuple[TokenizedRows, DataReport]:
    """Map the cached rows of a source, or make them; one process at a time."""
    if tokenizer.eos_token_id is None:
        raise UserError(
            "The tokenizer has no eos_token, so the model could not learn to stop. Set eos_token in the "
            "model's tokenizer_config.json."
        )
    key = [source.identity, tokenizer_identity(tokenizer), dataset_format, context_length, num_samples]
    path = cache_path(cache_dir, key)
    with locked(path):
        cached = read_cache(path)
        if cached is not None:
            log.info("Tokenized rows are taken from %s", path)
            # The same content may lie at another path now.
            return cached[0], dataclasses.replace(cached[1], origin=source.origin)
        rows = source.read(num_samples)
        name = choose_format(rows.columns, dataset_format=dataset_format, origin=source.origin)
        made = tokenize_rows(rows, name, source.origin, tokenizer, context_length, show_progress)
        write_cache(path, *made)
        return read_cache(path) or made  # mapped, so that all ranks share it


def check_report(report: DataReport, *, on_bad_row: str = "skip", max_bad_rows: float) -> None:
    """Log what became of the rows, and refuse a dataset of which too much is unusable.

    Raises:
        UserError: no row is left, or more were rejected than `on_bad_row` and `max_bad_rows` allow; the first are
            named with their places.
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


def check_vocabulary(tokenized: TokenizedRows, vocab_size: int) -> None:
    """Make sure that the model has an embedding for every token.

    Raises:
        UserError: a token id is outside [0, vocab_size); it names the first such row.
    """
    ids = tokenized.input_ids
    if len(ids) == 0 or (ids.min() >= 0 and ids.max() < vocab_size):
        return
    position = int(((ids < 0) | (ids >= vocab_size)).argmax())
    row = int(np.searchsorted(tokenized.offsets, position, side="right")) - 1
    raise UserError(
        f"Row {tokenized.row_numbers[row]} has the token id {ids[position]}, but the model "
        f"has {vocab_size} embeddings. The tokenizer is not this model's."
    )


def describe_sample(tokenized: TokenizedRows, row: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of one row for people, each masked or learned stretch under a heading."""
    part = slice(tokenized.offsets[row], tokenized.offsets[row + 1])
    ids, learned = tokenized.input_ids[part].tolist(), tokenized.learned[part].tolist()
    lines = [f"Sample: row {tokenized.row_numbers[row]}, {len(ids)} tokens"]
    for is_learned, group in itertools.groupby(zip(ids, learned, strict=True), key=lambda pair: pair[1]):
        stretch = [token for token, _ in group]
        lines.append(f"--- {'learned' if is_learned else 'masked'} ({len(stretch)} tokens) ---")
        lines.append(str(tokenizer.decode(stretch)))
    return "\n".join(lines)


class EncodedRow(NamedTuple):
    """One row as tokens."""

    number: int
    """The number of the row in the dataset."""
    ids: np.ndarray
    """int32 [tokens]."""
    learned: np.ndarray
    """bool [tokens]."""


def tokenize_rows(
    rows: Rows,
    dataset_format: str,
    origin: str,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    show_progress: bool = False,
) -> tuple[TokenizedRows, DataReport]:
    """Render and tokenize rows. Segments are tokenized apart, so the boundaries of what is learned are exact.

    A row ends with the end-of-sequence token, which is learned if the last segment is. Rows are cut at
    `context_length`, from the end. A row that cannot be rendered, or that has nothing learned before the cut, is
    left out and listed in the report.
    """
    rejected: defaultdict[str, list[int]] = defaultdict(list)
    for number, reason in rows.malformed.items():
        rejected[reason].append(number)
    used: list[EncodedRow] = []
    num_tokens_cut: list[int] = []
    with tqdm(total=len(rows.rows), desc="Tokenizing", unit=" rows", disable=not show_progress) as bar:
        for start in range(0, len(rows.rows), TEXTS_PER_BATCH):
            batch = slice(start, start + TEXTS_PER_BATCH)
            rendered = _render(rows.rows[batch], rows.numbers[batch], FORMATS[dataset_format], rejected)
            for whole in _encode(rendered, tokenizer):
                row = EncodedRow(whole.number, whole.ids[:context_length], whole.learned[:context_length])
                if not row.learned[1:].any():  # the first token has nothing to be predicted from
                    rejected[NO_ROOM].append(row.number)
                    continue
                used.append(row)
                num_tokens_cut.append(len(whole.ids) - len(row.ids))
            bar.update(len(rows.rows[batch]))
    tokenized = _flatten(used)
    report = DataReport(
        origin=origin,
        dataset_format=dataset_format,
        num_rows=len(rows.rows) + len(rows.malformed),
        num_used=len(tokenized),
        num_tokens=len(tokenized.input_ids),
        num_targets=int(tokenized.num_targets.sum()),
        num_truncated=sum(cut > 0 for cut in num_tokens_cut),
        num_tokens_cut=sum(num_tokens_cut),
        rejected=dict(rejected),
        parts=rows.files,
    )
    return tokenized, report


def dummy_rows(num_rows: int, vocab_size: int, *, context_length: int, seed: int) -> tuple[TokenizedRows, DataReport]:
    """Rows of random tokens that fill the context, all learned: for measuring speed, not for learning."""
    ids = np.random.default_rng(seed).integers(vocab_size, size=(num_rows, context_length), dtype=np.int32)
    learned = np.ones(context_length, dtype=np.bool_)
    tokenized = _flatten([EncodedRow(number, row, learned) for number, row in enumerate(ids, start=1)])
    report = DataReport(
        origin=DUMMY,
        dataset_format=DUMMY,
        num_rows=num_rows,
        num_used=num_rows,
        num_tokens=ids.size,
        num_targets=int(tokenized.num_targets.sum()),
        num_truncated=0,
        num_tokens_cut=0,
        rejected={},
        parts=[SourceFile(DUMMY, "row")],
    )
    return tokenized, report


def _render(
    rows: Sequence[Row], numbers: Sequence[int], row_format: Format, rejected: defaultdict[str, list[int]]
) -> list[tuple[int, list[Segment]]]:
    """(number, segments) of the rows that can be used. The others are added to `rejected`."""
    rendered = []
    for number, row in zip(numbers, rows, strict=True):
        try:
            segments = row_format.render(row)
            if not any(segment.learned and segment.text for segment in segments):
                raise BadRow("nothing to learn")
            rendered.append((number, segments))
        except BadRow as reason:
            rejected[str(reason)].append(number)
    return rendered


def _encode(rendered: list[tuple[int, list[Segment]]], tokenizer: PreTrainedTokenizerBase) -> Iterator[EncodedRow]:
    """Tokenize whole rows: the first segment as a text begins, the last with an end-of-sequence token."""
    eos = tokenizer.eos_token_id
    first = [segments[0].text for _, segments in rendered]
    later = [segment.text for _, segments in rendered for segment in segments[1:]]
    first_ids = iter(_token_ids(first, tokenizer, add_special_tokens=True))
    later_ids = iter(_token_ids(later, tokenizer, add_special_tokens=False))
    for number, segments in rendered:
        begin = next(first_ids)
        if begin and begin[-1] == eos:  # some tokenizers end every text with it
            begin = begin[:-1]
        spans = [begin, *itertools.islice(later_ids, len(segments) - 1)]
        spans[-1] = [*spans[-1], eos]
        learned = np.repeat([segment.learned for segment in segments], [len(span) for span in spans])
        yield EncodedRow(number, np.fromiter(itertools.chain(*spans), dtype=np.int32), learned)


def _token_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[list[int]]:
    """The ids of each text; all texts in one call, which a fast tokenizer spreads over threads."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return ids


def _flatten(rows: Sequence[EncodedRow]) -> TokenizedRows:
    return TokenizedRows(
        input_ids=np.concatenate([np.zeros(0, dtype=np.int32), *(row.ids for row in rows)]),
        learned=np.concatenate([np.zeros(0, dtype=np.bool_), *(row.learned for row in rows)]),
        offsets=np.cumsum([0, *(len(row.ids) for row in rows)], dtype=np.int64),
        row_numbers=np.array([row.number for row in rows], dtype=np.int64),
    )
