"""Tokenization: rows of text become flat arrays of token ids, and of which of them are learned."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.formats import FORMATS, BadRow, Format, Segment
from fsdp_qlora.data.rows import DataReport, Row, Rows, SourceFile, TokenizedRows
from fsdp_qlora.data.sources import DUMMY
from fsdp_qlora.errors import UserError

NO_ROOM = "no room for a response within context_length"  # why a row is left out
TEXTS_PER_BATCH = 1000  # enough to keep the threads of a fast tokenizer busy


class EncodedRow(NamedTuple):
    """One row as tokens, cut at context_length."""

    number: int
    """The number of the row in the dataset."""
    ids: np.ndarray
    """int32 [tokens]."""
    learned: np.ndarray
    """bool [tokens]."""
    num_cut: int = 0
    """Tokens that were cut off."""


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
    with tqdm(total=len(rows.rows), desc="Tokenizing", unit=" rows", disable=not show_progress) as bar:
        for start in range(0, len(rows.rows), TEXTS_PER_BATCH):
            batch = slice(start, start + TEXTS_PER_BATCH)
            rendered = _render(rows.rows[batch], rows.numbers[batch], FORMATS[dataset_format], rejected)
            for row in _encode(rendered, tokenizer, context_length):
                if row.learned[1:].any():  # the first token has nothing to be predicted from
                    used.append(row)
                else:
                    rejected[NO_ROOM].append(row.number)
            bar.update(len(rows.rows[batch]))
    tokenized = _flatten(used)
    report = DataReport(
        origin=origin,
        dataset_format=dataset_format,
        num_rows=len(rows.rows) + len(rows.malformed),
        num_used=len(tokenized),
        num_tokens=len(tokenized.input_ids),
        num_targets=int(tokenized.num_targets.sum()),
        num_truncated=sum(row.num_cut > 0 for row in used),
        num_tokens_cut=sum(row.num_cut for row in used),
        rejected=dict(rejected),
        parts=rows.files,
    )
    return tokenized, report


def dummy_rows(num_rows: int, vocab_size: int, *, context_length: int, seed: int) -> tuple[TokenizedRows, DataReport]:
    """Rows of random tokens that fill the context, all learned. For measuring speed."""
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


def _encode(
    rendered: list[tuple[int, list[Segment]]], tokenizer: PreTrainedTokenizerBase, context_length: int
) -> Iterator[EncodedRow]:
    """Tokenize rows: the first segment with the tokens that begin a text, the last with an end-of-sequence token."""
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
        ids = list(itertools.chain.from_iterable(spans))
        learned = np.repeat([segment.learned for segment in segments], [len(span) for span in spans])
        kept = slice(context_length)
        yield EncodedRow(number, np.array(ids[kept], dtype=np.int32), learned[kept].copy(), len(ids[context_length:]))


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


def check_vocabulary(tokenized: TokenizedRows, vocab_size: int) -> None:
    """Make sure that the model has an embedding for every token.

    Raises:
        UserError: a token id is outside [0, vocab_size). The message names the first such row.
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
    """The text of one row for people, each masked or learned span under a heading."""
    start, end = tokenized.offsets[row : row + 2]
    ids, learned = tokenized.input_ids[start:end].tolist(), tokenized.learned[start:end].tolist()
    lines = [f"Sample: row {tokenized.row_numbers[row]}, {len(ids)} tokens"]
    for is_learned, group in itertools.groupby(zip(ids, learned, strict=True), key=lambda pair: pair[1]):
        span = [token for token, _ in group]
        lines.append(f"--- {'learned' if is_learned else 'masked'} ({len(span)} tokens) ---")
        lines.append(str(tokenizer.decode(span)))
    return "\n".join(lines)
