"""Encoding: the text of rows becomes token ids, with the exact boundaries of the learned spans."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.examples import Rendered, Segment

# Notes on rows that are used.
MERGED = "a token would span the boundary of what is learned, so the two sides are tokenized apart"
DOUBLE_BOS = "the chat template begins with two beginning-of-sequence tokens"
NO_END = "what is learned does not end with a token at which a model stops"


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
    notes: tuple[str, ...] = ()
    """What is odd about the row, though it is used."""


Ids = list[int]
Encoded = tuple[Ids, np.ndarray, tuple[str, ...]]  # token ids, bool [tokens], notes


def encode(
    rendered: Sequence[tuple[int, Rendered]], tokenizer: PreTrainedTokenizerBase, context_length: int
) -> Iterator[EncodedRow]:
    """Tokenize (number, row) pairs, in their order."""
    apart = [row.segments for _, row in rendered if not row.tokens and not _is_joint(row, tokenizer)]
    joint = {
        templated: [row.segments for _, row in rendered if _is_joint(row, tokenizer) and row.is_templated == templated]
        for templated in (False, True)
    }
    from_apart = _encode_apart(apart, tokenizer)
    from_joint = {templated: iter(_encode_joint(rows, tokenizer, templated)) for templated, rows in joint.items()}
    for number, row in rendered:
        notes = row.notes
        if row.tokens:
            ids, learned = list(row.tokens.ids), np.array(row.tokens.learned, dtype=np.bool_)
        else:
            ids, learned, more = next(from_joint[row.is_templated] if _is_joint(row, tokenizer) else from_apart)
            notes += more
        kept = slice(context_length)
        kept_ids = np.array(ids[kept], dtype=np.int32)
        yield EncodedRow(number, kept_ids, learned[kept].copy(), len(ids[context_length:]), notes)


def _is_joint(row: Rendered, tokenizer: PreTrainedTokenizerBase) -> bool:
    # A tokenizer in Python does not say where its tokens stand in the text; it is given segments apart.
    return row.is_joint and not row.tokens and (tokenizer.is_fast or row.is_templated)


def _encode_apart(rows: Sequence[Sequence[Segment]], tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
    """Segments one by one: the first with the tokens that begin a text, the last with an end-of-sequence token."""
    eos = tokenizer.eos_token_id
    first = [segments[0].text for segments in rows]
    later = [segment.text for segments in rows for segment in segments[1:]]
    first_ids = iter(_token_ids(first, tokenizer, add_special_tokens=True))
    later_ids = iter(_token_ids(later, tokenizer, add_special_tokens=False))
    for segments in rows:
        begin = next(first_ids)
        if begin and begin[-1] == eos:  # some tokenizers end every text with it
            begin = begin[:-1]
        spans = [begin, *itertools.islice(later_ids, len(segments) - 1)]
        spans = [[*span, eos] if segment.ends else span for span, segment in zip(spans, segments, strict=True)]
        spans[-1] = [*spans[-1], eos]
        yield *_join(spans, segments), ()


def _encode_joint(
    rows: Sequence[Sequence[Segment]], tokenizer: PreTrainedTokenizerBase, templated: bool
) -> Iterator[Encoded]:
    """The whole text at once, as it is tokenized when the model is used, unless a token would span a boundary."""
    if not rows:
        return
    if not tokenizer.is_fast:
        for segments in rows:
            yield *_pieces(segments, tokenizer, templated), ()
        return
    found = tokenizer(
        ["".join(segment.text for segment in segments) for segments in rows],
        add_special_tokens=not templated,
        return_offsets_mapping=True,
        verbose=False,
    )
    stops = {tokenizer.eos_token_id, *tokenizer.added_tokens_decoder}
    for segments, ids, offsets in zip(rows, found["input_ids"], found["offset_mapping"], strict=True):
        learned = _learned_tokens(segments, offsets)
        notes = []
        if learned is None:
            notes.append(MERGED)
            ids, learned = _pieces(segments, tokenizer, templated)
        if not templated:
            ids, learned = _with_end(ids, learned, segments[-1].learned, tokenizer)
        elif ids[:2] == [tokenizer.bos_token_id] * 2:
            notes.append(DOUBLE_BOS)
        if learned.any() and ids[int(np.flatnonzero(learned)[-1])] not in stops and segments[-1].learned | templated:
            notes.append(NO_END)
        yield ids, learned, tuple(notes)


def _learned_tokens(segments: Sequence[Segment], offsets: Sequence[tuple[int, int]]) -> np.ndarray | None:
    """Whether each token is learned; None if one belongs to a learned and to a masked segment."""
    bounds = np.cumsum([len(segment.text) for segment in segments])
    of_segment = np.array([segment.learned for segment in segments])
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(places[:, 1])
    # Some tokenizers leave a token's leading space out of its offsets: it starts where the previous token ended.
    starts = np.minimum(places[:, 0], np.concatenate([[0], ends[:-1]]))

    def learned_at(positions: np.ndarray) -> np.ndarray:
        found: np.ndarray = of_segment[np.searchsorted(bounds, positions, side="right").clip(max=len(bounds) - 1)]
        return found

    first, last = learned_at(starts), learned_at(np.maximum(ends - 1, starts))
    return first if (first == last).all() else None


def _pieces(segments: Sequence[Segment], tokenizer: PreTrainedTokenizerBase, templated: bool) -> tuple[Ids, np.ndarray]:
    """Stretches of like segments apart, so that no token spans a boundary."""
    groups = itertools.groupby(segments, key=lambda segment: segment.learned)
    joined = [Segment("".join(segment.text for segment in group), learned) for learned, group in groups]
    spans = _token_ids([segment.text for segment in joined], tokenizer, add_special_tokens=False)
    if not templated:
        [spans[0]] = _token_ids([joined[0].text], tokenizer, add_special_tokens=True)
        if len(spans) > 1 and spans[0] and spans[0][-1] == tokenizer.eos_token_id:
            spans[0] = spans[0][:-1]
    return _join(spans, joined)


def _with_end(
    ids: Ids, learned: np.ndarray, end_is_learned: bool, tokenizer: PreTrainedTokenizerBase
) -> tuple[Ids, np.ndarray]:
    """One beginning-of-sequence token at most, where the text has its own, and one end-of-sequence token."""
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids, learned = ids[1:], learned[1:]
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids, learned = ids[:-1], learned[:-1]
    return [*ids, tokenizer.eos_token_id], np.append(learned, end_is_learned)


def _join(spans: Sequence[Ids], segments: Sequence[Segment]) -> tuple[Ids, np.ndarray]:
    learned = np.repeat([segment.learned for segment in segments], [len(span) for span in spans])
    return list(itertools.chain.from_iterable(spans)), learned


def _token_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[Ids]:
    """The ids of each text; all texts in one call, which a fast tokenizer spreads over threads."""
    if not texts:
        return []
    ids: list[Ids] = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return ids
