"""Tokenization: rows of text become flat arrays of token ids, and of which of them are learned."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.encoding import EncodedRow, encode
from fsdp_qlora.data.examples import BadRow, Rendered
from fsdp_qlora.data.formats import FORMATS, Format
from fsdp_qlora.data.rendering import Renderer
from fsdp_qlora.data.rows import NO_ROOM, NO_ROOM_FOR_TURN, NO_TARGET, DataReport, Row, Rows, SourceFile, TokenizedRows
from fsdp_qlora.data.sources import DUMMY
from fsdp_qlora.errors import UserError

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
TEXTS_PER_BATCH = 1000  # enough to keep the threads of a fast tokenizer busy


def tokenize_rows(
    rows: Rows,
    dataset_format: str,
    origin: str,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    renderer: Renderer,
    show_progress: bool = False,
) -> tuple[list[TokenizedRows], DataReport]:
    """Render and tokenize rows, so that the boundaries of what is learned are exact.

    A row that is not filled into a chat template ends with the end-of-sequence token, which is learned if the last
    segment is. Rows are cut at `context_length`, from the end. A row that cannot be rendered, or that has nothing
    learned before the cut, is left out and listed in the report.

    Args:
        rows: their content is given up as it is tokenized, so that text and tokens are not both in memory.
    Returns:
        The tokenized rows, in pieces.
    """
    row_format = FORMATS[dataset_format]
    rejected: defaultdict[str, list[int]] = defaultdict(list)
    for number, reason in rows.malformed.items():
        rejected[reason].append(number)
    kept, pieces = _Kept(rejected), []
    with tqdm(total=len(rows.rows), desc="Tokenizing", unit=" rows", disable=not show_progress) as bar:
        for start in range(0, len(rows.rows), TEXTS_PER_BATCH):
            batch = slice(start, start + TEXTS_PER_BATCH)
            rendered = _render(rows.rows[batch], rows.numbers[batch], row_format, renderer, rejected)
            pieces.append(_flatten(kept.choose(encode(rendered, tokenizer, context_length))))
            rows.rows[batch] = [{}] * len(rows.rows[batch])
            bar.update(len(rows.rows[batch]))
    pieces = pieces or [_flatten([])]
    num_used = sum(map(len, pieces))
    report = DataReport(
        origin=origin,
        dataset_format=dataset_format,
        num_rows=len(rows.rows) + len(rows.malformed),
        num_used=num_used,
        num_apart=num_used - kept.num_rows,
        num_tokens=sum(len(piece.input_ids) for piece in pieces),
        num_targets=sum(int(piece.num_targets.sum()) for piece in pieces),
        num_truncated=kept.num_truncated,
        num_tokens_cut=kept.num_tokens_cut,
        rejected=dict(rejected),
        parts=rows.files,
        notes=dict(kept.notes),
        unused_columns=rows.unused_columns,
        length_of_99_percent=int(np.quantile(kept.lengths, 0.99, method="higher")) if kept.lengths else 0,
    )
    return pieces, report


class _Kept:
    """Chooses the encoded rows that can be learned from, and counts."""

    def __init__(self, rejected: defaultdict[str, list[int]]) -> None:
        self.rejected = rejected
        self.notes: defaultdict[str, list[int]] = defaultdict(list)
        self.lengths: list[int] = []
        self.num_rows = self.num_truncated = self.num_tokens_cut = 0

    def choose(self, encoded: Iterable[EncodedRow]) -> list[EncodedRow]:
        """Those that can be learned from, in their order."""
        chosen: list[EncodedRow] = []
        for number, group in itertools.groupby(encoded, key=lambda row: row.number):
            of_row = list(group)
            learning = [row for row in of_row if row.learned[1:].any()]  # the first token has nothing to predict it
            chosen += learning
            self.lengths += [len(row.ids) + row.num_cut for row in of_row]
            self.num_rows += bool(learning)
            for note in dict.fromkeys(note for row in of_row for note in row.notes):
                self.notes[note].append(number)
            if not learning:
                self.rejected[NO_ROOM if any(row.num_cut for row in of_row) else NO_TARGET].append(number)
            elif len(learning) < len(of_row):
                self.notes[NO_ROOM_FOR_TURN].append(number)
        self.num_truncated += sum(row.num_cut > 0 for row in chosen)
        self.num_tokens_cut += sum(row.num_cut for row in chosen)
        return chosen


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
    rows: Sequence[Row],
    numbers: Sequence[int],
    row_format: Format,
    renderer: Renderer,
    rejected: defaultdict[str, list[int]],
) -> list[tuple[int, Rendered]]:
    """(number, text or tokens) of the rows that can be used. The others are added to `rejected`."""
    read = []
    for number, row in zip(numbers, rows, strict=True):
        try:
            read.append((number, row_format.read(row)))
        except BadRow as reason:
            rejected[str(reason)].append(number)
    rendered: list[tuple[int, Rendered]] = []
    for (number, _), made in zip(read, renderer.render_all([content for _, content in read]), strict=True):
        if isinstance(made, BadRow):
            rejected[str(made)].append(number)
        else:
            rendered += [(number, row) for row in made]
    return rendered


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


def describe_sample(
    tokenized: TokenizedRows, row: int, tokenizer: PreTrainedTokenizerBase, *, in_colour: bool = False
) -> str:
    """The text of one row for people: each masked or learned span under a heading, or what is learned in green."""
    start, end = tokenized.offsets[row : row + 2]
    ids, learned = tokenized.input_ids[start:end].tolist(), tokenized.learned[start:end].tolist()
    heading = f"Sample: row {tokenized.row_numbers[row]}, {len(ids)} tokens"
    spans = []
    for is_learned, group in itertools.groupby(zip(ids, learned, strict=True), key=lambda pair: pair[1]):
        span = [token for token, _ in group]
        text = str(tokenizer.decode(span))
        if in_colour:
            spans.append(f"{_GREEN}{text}{_PLAIN}" if is_learned else text)
        else:
            spans.append(f"\n--- {'learned' if is_learned else 'masked'} ({len(span)} tokens) ---\n{text}")
    return f"{heading}, {sum(learned)} learned (green)\n{''.join(spans)}" if in_colour else heading + "".join(spans)
