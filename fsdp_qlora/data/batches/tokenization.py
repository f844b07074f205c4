"""Tokenization: rows of text become flat arrays of token ids and of the mask of learned tokens."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.config.objectives import LABELS, PAIRS, TEACHER_ROWS, TEXTS, RowKind
from fsdp_qlora.data.batches.report import NO_ROOM, NO_ROOM_FOR_TURN, DataReport
from fsdp_qlora.data.batches.row_images import NO_IMAGES, RowImages
from fsdp_qlora.data.batches.rows import Column, TokenizedRows
from fsdp_qlora.data.batches.side_by_side import chunks_of
from fsdp_qlora.data.content import (
    NO_TARGET,
    BadRow,
    Content,
    Rendered,
    Segment,
    SourceFile,
    num_common,
)
from fsdp_qlora.data.sources.source import DUMMY
from fsdp_qlora.data.text.preferences import join_sides, with_mismatched_answers
from fsdp_qlora.data.text.rendering import Renderer
from fsdp_qlora.utils.errors import UserError

_GREEN = "\x1b[32m"
_PLAIN = "\x1b[0m"
# Notes on rows that are used.
MERGED = "a token would span the boundary of what is learned, so the two sides are tokenized apart"
DOUBLE_BOS = "the chat template begins with two beginning-of-sequence tokens"
IMAGE_TOKEN = "its text has the token that stands for an image, a video or sound in this model"
OTHER_ANSWER = "its answer has other tokens behind the teacher's prompt than behind its own"
NO_END = "what is learned does not end with a token at which a model stops"

Ids = list[int]
Encoded = tuple[Ids, np.ndarray, tuple[str, ...]]  # token ids, bool [tokens], notes


class EncodedRow(NamedTuple):
    """One row as tokens, cut at context_length."""

    row_number: int
    """In the dataset."""
    ids: np.ndarray
    """int32 [tokens]."""
    learned: np.ndarray
    """bool [tokens], or float [tokens] where turns have weights."""
    num_cut: int = 0
    """Tokens that were cut off."""
    notes: tuple[str, ...] = ()
    """Oddities of the row, which is used."""
    split: int | None = None
    """The index of the second answer's first token."""
    desired: bool | None = None
    """The label of a row that has one."""
    start: int | None = None
    """The index of the first token of an answer that begins with a part that is left out."""
    images: tuple[bytes, ...] = ()
    """The names of the row's images, from `image_store.keep`."""
    image_values: int = 0
    """Numbers that the processor makes of the images."""
    reason: str = ""
    """Why nothing of it is learned."""


def tokenize_batch(
    rows: Sequence[tuple[int, Content]],
    row_kind: RowKind,
    renderer: Renderer,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    report: DataReport,
) -> tuple[TokenizedRows, list[int]]:
    """Tokenize (number, content) pairs, so that the boundaries of what is learned are exact.

    A row that is not filled into a chat template ends with the end-of-sequence token, which is
    learned if the last segment is. Rows are cut at `context_length`, from the end; documents become
    several rows. A row that cannot be rendered, or that has nothing learned before the cut, is left
    out and listed in the report.

    Returns:
        The tokenized rows, and the tokens of each before it was cut; for pairs, the tokens of the
        longer answer.
    """
    rendered = _render(rows, renderer, report)
    report.is_chat |= any(row.kind == "chat" for _, row in rendered)
    report.is_filled |= any(row.kind == "template" for _, row in rendered)
    encoded = list(encode(rendered, tokenizer, context_length))
    lengths = [len(row.ids) + row.num_cut for row in encoded]
    join = {PAIRS: _pair, TEACHER_ROWS: _with_teacher}.get(row_kind)
    if join:
        encoded = [join(*encoded[i : i + 2]) for i in range(0, len(encoded), 2)]
        lengths = [*map(max, lengths[::2], lengths[1::2])]
    chosen = _choose(encoded, report)
    if row_kind == LABELS:
        chosen = with_mismatched_answers(chosen, context_length)
    return _flatten(chosen, row_kind), lengths


def _pair(chosen: EncodedRow, rejected: EncodedRow) -> EncodedRow:
    """The answers as one row of two documents.

    It has no targets if one answer has none, or if the context cuts both alike.
    """
    two = join_sides((chosen.ids, rejected.ids), (chosen.learned, rejected.learned))
    both_have_targets = chosen.learned[1:].any() and rejected.learned[1:].any()
    # Two equal documents have a margin of zero, and no gradient, whatever the model says.
    two["learned"] &= both_have_targets and not np.array_equal(chosen.ids, rejected.ids)
    two |= {"num_cut": chosen.num_cut + rejected.num_cut, "notes": chosen.notes + rejected.notes}
    return chosen._replace(reason=chosen.reason or rejected.reason, **two)


def _with_teacher(student: EncodedRow, teacher: EncodedRow) -> EncodedRow:
    """The same answer to two prompts as one row of two documents.

    The answer is learned as far as the context has room for it in both.
    """
    # The first token of a document is never a target, so it is not counted.
    sides = [
        (side.ids, (side.learned != 0) & (np.arange(len(side.ids)) > 0))
        for side in (student, teacher)
    ]
    answers = [ids[learned] for ids, learned in sides]
    num = min(map(len, answers))
    is_same = np.array_equal(answers[0][:num], answers[1][:num])
    # The first `num` targets of each side: target i of the student is target i of the teacher. A
    # tokenizer may merge an answer's start with its prompt: then nothing can be compared.
    most = num if is_same else 0
    masks = [learned & (np.cumsum(learned) <= most) for _, learned in sides]
    two = join_sides([ids for ids, _ in sides], masks)
    two |= {"num_cut": student.num_cut + teacher.num_cut, "notes": student.notes + teacher.notes}
    reason = student.reason or teacher.reason
    if not reason and not is_same:
        reason = OTHER_ANSWER
    return student._replace(reason=reason, **two)


def _choose(encoded: Iterable[EncodedRow], report: DataReport) -> list[EncodedRow]:
    """The rows that can be learned from, in their order; the others are in the report."""
    chosen: list[EncodedRow] = []
    for row_number, group in itertools.groupby(encoded, key=lambda row: row.row_number):
        of_row = list(group)
        # the first token has nothing to predict it
        learning = [row for row in of_row if row.learned[1:].any()]
        chosen += learning
        report.num_apart += max(0, len(learning) - 1)
        for note in dict.fromkeys(note for row in of_row for note in row.notes):
            report.note(row_number, note)
        if not learning:
            reasons = [row.reason for row in of_row if row.reason]
            if not reasons:
                reasons = [NO_ROOM if any(row.num_cut for row in of_row) else NO_TARGET]
            report.reject(row_number, reasons[0])
        elif len(learning) < len(of_row):
            report.note(row_number, NO_ROOM_FOR_TURN)
    report.num_truncated += sum(row.num_cut > 0 for row in chosen)
    report.num_tokens_cut += sum(row.num_cut for row in chosen)
    return chosen


def dummy_rows(
    num_rows: int, vocab_size: int, kind: RowKind, *, context_length: int, seed: int
) -> tuple[TokenizedRows, DataReport]:
    """Rows of random tokens for measuring speed, all learned.

    Each fills the context, or has two documents that do.
    """
    length = context_length * kind.num_documents
    ids = np.random.default_rng(seed).integers(vocab_size, size=(num_rows, length), dtype=np.int32)
    learned = np.ones(length, dtype=np.bool_)
    split = None if kind == TEXTS else context_length
    rows = [
        EncodedRow(row_number, row, learned, split=split)
        for row_number, row in enumerate(ids, start=1)
    ]
    tokenized = _flatten(rows, kind)
    report = DataReport(DUMMY, DUMMY, [SourceFile(DUMMY, "row")], num_rows=num_rows)
    report.count(tokenized)
    return tokenized, report


def _render(
    rows: Sequence[tuple[int, Content]], renderer: Renderer, report: DataReport
) -> list[tuple[int, Rendered]]:
    """(number, text or tokens) of the rows that can be used. The others are in the report."""
    rendered: list[tuple[int, Rendered]] = []
    rendered_rows = renderer.render_all([content for _, content in rows])
    for (row_number, _), result in zip(rows, rendered_rows, strict=True):
        if isinstance(result, BadRow):
            report.reject(row_number, str(result))
        else:
            rendered += [(row_number, row) for row in result]
    return rendered


def _flatten(rows: Sequence[EncodedRow], kind: RowKind) -> TokenizedRows:
    labels = [row.desired for row in rows if row.desired is not None]
    columns = {"desired": Column("row", np.array(labels, np.bool_))} if labels else {}
    # An empty array first: no rows at all have the types of the others, too.
    learned = np.concatenate([np.zeros(0, dtype=np.bool_), *(row.learned for row in rows)])
    return TokenizedRows(
        input_ids=np.concatenate([np.zeros(0, dtype=np.int32), *(row.ids for row in rows)]),
        learned=learned.astype(np.float32) if learned.dtype.kind == "f" else learned,
        offsets=np.cumsum([0, *(len(row.ids) for row in rows)], dtype=np.int64),
        row_numbers=np.array([row.row_number for row in rows], dtype=np.int64),
        splits=np.array([row.split for row in rows if row.split is not None], dtype=np.int64),
        learns="first_document" if kind.num_learned < kind.num_documents else "all",
        columns=columns,
        images=_images_of(rows),
    )


def _images_of(rows: Sequence[EncodedRow]) -> RowImages:
    names = b"".join(name for row in rows for name in row.images)
    if not names:
        return NO_IMAGES
    sizes = [(len(row.images), row.image_values) for row in rows]
    return RowImages(
        np.frombuffer(names, dtype=np.uint8).reshape(-1, 16), np.array(sizes, dtype=np.int64)
    )


def check_vocabulary(tokenized: TokenizedRows, vocab_size: int) -> None:
    """Raise UserError if the model has no embedding for a token."""
    first = 0
    for ids in chunks_of(tokenized.input_ids):
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            place = int(((ids < 0) | (ids >= vocab_size)).argmax())
            row = int(np.searchsorted(tokenized.offsets, first + place, side="right")) - 1
            raise UserError(
                f"Row {tokenized.row_numbers[row]} has the token id {ids[place]}, but the model "
                f"has {vocab_size} embeddings. The tokenizer is not this model's; if tokens were "
                "added to it, give the model with its own tokenizer, and name them in --add_tokens."
            )
        first += len(ids)


def sample_line(tokenized: TokenizedRows, row: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """One line of a row's text: the end of its first prompt, and what is learned after it.

    For a pair this is the chosen answer.
    """
    document = tokenized.documents([row])[0]
    start, end = tokenized.document_offsets[document : document + 2]
    learned = np.flatnonzero(tokenized.learned[start:end])
    first = start + int(learned[0]) if len(learned) else end  # nothing of a prompt is learned
    prompt, answer = (
        " ".join(str(tokenizer.decode(tokenized.input_ids[span])).split())
        for span in (slice(start, first), slice(first, end))
    )
    return f"Sample, row {tokenized.row_numbers[row]}: ...{prompt[-40:]} -> {answer}"


def describe_sample(
    tokenized: TokenizedRows,
    row: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sides: Sequence[str] = (),
    in_colour: bool = False,
) -> str:
    """The text of one row for people.

    Each masked or learned span is under a heading, or what is learned is green.

    Args:
        sides: names of its documents, if they are neither a pair nor an answer with a label.
    """
    texts = list[str]()
    if "desired" in tokenized.columns and not sides:
        sides = ["desired" if tokenized.columns["desired"].values[row] else "not desired"]
    sides = sides or ["chosen", "rejected"]
    for document, side in zip(tokenized.documents([row]), sides, strict=False):
        bounds = slice(*tokenized.document_offsets[document : document + 2])
        ids = tokenized.input_ids[bounds]
        learned = tokenized.learned[bounds]
        name = str(tokenized.row_numbers[row])
        if len(tokenized.splits):
            name += f", {side}"
        text = f"Sample: row {name}, {len(ids)} tokens"
        if in_colour:
            text += f", {(learned != 0).sum()} learned (green)\n"
        edges = np.flatnonzero(np.diff(learned)) + 1
        for part, is_learned in zip(np.split(ids, edges), learned[[0, *edges]], strict=True):
            decoded = str(tokenizer.decode(part))
            if in_colour:
                text += f"{_GREEN}{decoded}{_PLAIN}" if is_learned else decoded
            else:
                weight = f", weight {is_learned:g}" if is_learned not in (0, 1) else ""
                text += (
                    f"\n--- {'learned' if is_learned else 'masked'} ({len(part)} "
                    f"tokens{weight}) ---\n{decoded}"
                )
        texts.append(text)
    return "\n".join(texts)


# --- the ids of a row's text, with the exact boundaries of what is learned ---


def encode(
    rendered: Sequence[tuple[int, Rendered]],
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
) -> Iterator[EncodedRow]:
    """Tokenize (number, row) pairs, in their order."""
    encoders = {
        kind: encoder([row for _, row in rendered if row.kind == kind], tokenizer)
        for kind, encoder in _ENCODERS.items()
    }
    for row_number, row in rendered:
        ids, learned, notes = next(encoders[row.kind])
        if row.kind == "document":
            # Each piece of a document begins with the last token of the piece before, so that every
            # token is predicted.
            starts = range(0, max(1, len(ids) - 1), max(1, context_length - 1))
            num_cut = 0
        else:
            starts = range(1)
            num_cut = len(ids[context_length:])
        reason = ""
        if row.image_ids:
            of_image = np.isin(ids, row.image_ids)
            # The model puts an image at each such token: one that the row's text has by itself
            # would take the place of a real one.
            reason = IMAGE_TOKEN if of_image.sum() != row.num_image_ids else ""
            if reason or (num_cut and of_image[context_length:].any()):
                learned[:] = False  # a part of an image says nothing
        prompt = None if row.desired is None or reason else row.before_part()
        before = encode_prompt(prompt, tokenizer) if prompt else []
        for start in starts:
            window = slice(start, start + context_length)
            yield EncodedRow(
                row_number,
                np.array(ids[window], dtype=np.int32),
                learned[window].copy(),  # a view would keep the whole document
                num_cut,
                notes=() if start else row.notes + notes,
                desired=row.desired,
                start=num_common(before, ids) if prompt else None,
                images=row.images,
                image_values=row.image_values,
                reason=reason,
            )


def encode_prompt(prompt: Rendered, tokenizer: PreTrainedTokenizerBase) -> Ids:
    """The token ids in front of an answer. Raises BadRow for image tokens in its text."""
    [row] = encode([(0, prompt)], tokenizer, context_length=2**31)
    if row.reason:
        raise BadRow(row.reason)
    ids: Ids = row.ids.tolist()
    return ids if prompt.kind in ("chat", "tokens") else ids[:-1]  # without the end token


def _encode_apart(
    rows: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Encoded]:
    """Tokenize segments one by one.

    The first has the tokens that begin a text, the last an end-of-sequence token.
    """
    eos = tokenizer.eos_token_id
    first = iter(
        _token_ids([row.segments[0].text for row in rows], tokenizer, add_special_tokens=True)
    )
    texts = [segment.text for row in rows for segment in row.segments[1:]]
    later = iter(_token_ids(texts, tokenizer, add_special_tokens=False))
    for row in rows:
        spans = [
            _without_end(next(first), tokenizer),
            *itertools.islice(later, len(row.segments) - 1),
        ]
        is_end = [*(segment.ends for segment in row.segments[:-1]), True]
        spans = [[*span, eos] if ends else span for span, ends in zip(spans, is_end, strict=True)]
        yield *_join(spans, row.segments), ()


def _encode_joint(
    rows: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase, *, templated: bool
) -> Iterator[Encoded]:
    """Tokenize the whole text at once, as when the model is used.

    Where a token would span a boundary of what is learned, its two sides are tokenized apart.
    """
    if not tokenizer.is_fast:  # one in Python gives no offsets of its tokens in the text
        pieces = ((*_pieces(row.segments, tokenizer, templated), ()) for row in rows)
        yield from pieces if templated else _encode_apart(rows, tokenizer)
        return
    texts = ["".join(segment.text for segment in row.segments) for row in rows]
    options = {"return_offsets_mapping": True, "verbose": False}
    encoding = tokenizer(texts, add_special_tokens=not templated, **options) if texts else {}
    # Chat templates end turns with added tokens of their own, such as <|im_end|>.
    stops = {tokenizer.eos_token_id, *tokenizer.added_tokens_decoder}
    for row, ids, offsets in zip(
        rows, encoding.get("input_ids", ()), encoding.get("offset_mapping", ()), strict=True
    ):
        segments = row.segments
        notes = []
        learned = _learned_tokens(segments, offsets)
        if learned is None:
            notes.append(MERGED)
            ids, learned = _pieces(segments, tokenizer, templated)
        if not templated:
            ids, learned = _with_end(ids, learned, bool(segments[-1].learned), tokenizer)
        elif ids[:2] == [tokenizer.bos_token_id] * 2:
            notes.append(DOUBLE_BOS)
        # A model that never learns an end does not stop. A text whose last segment is only read may
        # end with any token.
        ends_learned = templated or segments[-1].learned
        if learned.any() and ends_learned and ids[int(np.flatnonzero(learned)[-1])] not in stops:
            notes.append(NO_END)
        yield ids, learned, tuple(notes)


_ENCODERS: dict[str, Callable[[Sequence[Rendered], PreTrainedTokenizerBase], Iterator[Encoded]]] = (
    dict.fromkeys(("segments", "template"), _encode_apart)
    | dict.fromkeys(("text", "document"), partial(_encode_joint, templated=False))
    | {
        "chat": partial(_encode_joint, templated=True),
        "tokens": lambda rows, _: (
            (list(row.ids), np.array(row.learned, dtype=np.bool_), ()) for row in rows
        ),
    }
)


def _learned_tokens(
    segments: Sequence[Segment], offsets: Sequence[tuple[int, int]]
) -> np.ndarray | None:
    """Whether each token is learned; None if one belongs to a learned and to a masked segment."""
    filled = [segment for segment in segments if segment.text] or segments[:1]
    bounds = np.cumsum([len(segment.text) for segment in filled])
    of_segment = np.array([segment.learned for segment in filled])
    # Segments of one stretch are learned alike. A token may reach over a whole stretch.
    stretches = np.cumsum(np.diff(of_segment, prepend=of_segment[:1]) != 0)
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(places[:, 1])
    # Some tokenizers leave a token's leading space out of its offsets: it starts where the previous
    # token ended.
    starts = np.minimum(places[:, 0], np.concatenate([[0], ends[:-1]]))
    edges = np.stack([starts, np.maximum(ends - 1, starts)])
    touched = np.searchsorted(bounds, edges, side="right").clip(max=len(bounds) - 1)
    first, last = stretches[touched]
    return of_segment[touched[0]] if (first == last).all() else None


def _pieces(
    segments: Sequence[Segment], tokenizer: PreTrainedTokenizerBase, templated: bool
) -> tuple[Ids, np.ndarray]:
    """Stretches of like segments apart, so that no token spans a boundary."""
    groups = itertools.groupby(segments, key=lambda segment: segment.learned)
    joined = [
        Segment("".join(segment.text for segment in group), learned) for learned, group in groups
    ]
    spans = _token_ids([segment.text for segment in joined], tokenizer, add_special_tokens=False)
    if not templated:
        [begin] = _token_ids([joined[0].text], tokenizer, add_special_tokens=True)
        spans[0] = _without_end(begin, tokenizer) if len(spans) > 1 else begin
    return _join(spans, joined)


def _with_end(
    ids: Ids, learned: np.ndarray, end_is_learned: bool, tokenizer: PreTrainedTokenizerBase
) -> tuple[Ids, np.ndarray]:
    """The ids with one beginning-of-sequence token at most, and one end-of-sequence token."""
    # A text that begins with the token, as some rows do, gets a second one from the tokenizer.
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]
        learned = learned[1:]
    ids = _without_end(ids, tokenizer)
    return [*ids, tokenizer.eos_token_id], np.append(learned[: len(ids)], end_is_learned)


def _without_end(ids: Ids, tokenizer: PreTrainedTokenizerBase) -> Ids:
    # some tokenizers end every text with it
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def _join(spans: Sequence[Ids], segments: Sequence[Segment]) -> tuple[Ids, np.ndarray]:
    learned = np.repeat([segment.learned for segment in segments], [len(span) for span in spans])
    return list(itertools.chain.from_iterable(spans)), learned


def _token_ids(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool
) -> list[Ids]:
    """The ids of each text; all texts in one call, which a fast tokenizer spreads over threads."""
    if not texts:
        return []
    ids: list[Ids] = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)[
        "input_ids"
    ]
    return ids
