"""Batches: rows of tokens become tensors, padded or concatenated (padding-free)."""

from typing import Any

import numpy as np
import torch

from fsdp_qlora.data.rows import Numbers, TokenizedRows
from fsdp_qlora.data.schedule import NOTHING

IGNORE_INDEX = -100  # the label that torch's cross entropy ignores


def collate(tokenized: TokenizedRows, rows: Numbers, *, pad_token_id: int, side: int | None = None) -> dict[str, Any]:
    """Pad rows on the right to the longest of them; of pairs each answer is a row.

    There is no attention mask: in a causal model no token sees the padding after it, and padding has no label.

    Args:
        rows: row indices. Without any, the batch is one row of padding, for a rank that has no rows in this turn.
        side: 0 or 1 for the first or second document of each row, None for all.
    Returns:
        `input_ids` and `labels`, int64 [B, T]. A label has the same position as its token and is -100 where the
        token is masked, padding or first in its row, so `(labels != -100).sum()` is the number of targets;
        `num_targets`, that of each document (none without rows); `of_rows`, for the objective, float32: the same,
        `desired`, the rows' labels, and `reference`, if known.
    """
    documents = tokenized.documents(rows, side)
    starts, ends = tokenized.document_offsets[documents], tokenized.document_offsets[documents + 1]
    shape = (len(documents), int((ends - starts).max())) if len(documents) else (1, NOTHING)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        ids = tokenized.input_ids[start:end]
        input_ids[i, : end - start] = ids
        labels[i, : end - start] = np.where(tokenized.learned[start:end], ids, IGNORE_INDEX)
    labels[:, 0] = IGNORE_INDEX  # nothing comes before it to predict it from
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        **_about(tokenized, rows, documents),
    }


def _about(tokenized: TokenizedRows, rows: Numbers, documents: np.ndarray) -> dict[str, list[Any]]:
    known = {
        "num_targets": (tokenized.document_targets, documents),
        "desired": (tokenized.desired, np.asarray(rows, dtype=np.int64)),
        "reference": (tokenized.reference, documents),
    }
    of_rows = {name: values[numbers] if len(values) else values for name, (values, numbers) in known.items()}
    return {
        "num_targets": of_rows["num_targets"].tolist(),
        "of_rows": {name: torch.from_numpy(values.astype(np.float32)) for name, values in of_rows.items()},
    }


def join(
    tokenized: TokenizedRows, rows: Numbers, *, pad_token_id: int, side: int | None = None, shares: bool = False
) -> dict[str, Any]:
    """Concatenate rows into one row, the tokens of each a document of its own.

    Args:
        rows, pad_token_id, side: as for `collate`.
        shares: compute once what both documents of a row begin with, where both are taken.
    Returns:
        `input_ids`, and `labels` int64 [1, T], as from `collate`, and `documents`, see `describe_documents`.
    """
    if not len(rows):
        return collate(tokenized, rows, pad_token_id=pad_token_id) | {"documents": describe_documents([NOTHING])}
    documents = tokenized.documents(rows, side)
    starts = tokenized.document_offsets[documents]
    lengths = tokenized.document_offsets[documents + 1] - starts
    firsts = np.cumsum(lengths) - lengths
    places = np.arange(lengths.sum()) + np.repeat(starts - firsts, lengths)
    input_ids = tokenized.input_ids[places].astype(np.int64)
    labels = np.where(tokenized.learned[places], input_ids, IGNORE_INDEX)
    labels[firsts] = IGNORE_INDEX  # nothing comes before it to predict it from
    described = describe_documents(lengths.tolist(), tokenized.num_shared[rows] if shares and side is None else None)
    return {
        "input_ids": torch.from_numpy(input_ids)[None, described.get("own_tokens", slice(None))],
        "labels": torch.from_numpy(labels)[None],
        **_about(tokenized, rows, documents),
        "documents": described,
    }


def describe_documents(lengths: list[int], num_shared: Numbers | None = None) -> dict[str, Any]:
    """The arguments by which a model of transformers knows documents in one row of T tokens.

    Args:
        num_shared: of each pair of documents, with how many of the first's tokens the second begins. The model computes
            those once, all but their attention (model/attention.py).
    Returns:
        `position_ids`, int64 [1, T], from 0 in each document. The others are for the attention function:
        `cu_seq_lens_q`, `cu_seq_lens_k`, where documents begin and end, int32 [documents + 1]; `max_length_q`,
        `max_length_k`, the longest document's tokens; `document_lengths`, those of each, without asking a device.
        With shared tokens `position_ids` are of the tokens that are computed; `own_tokens`, int64, has their places
        among all T, and `places`, int64 [T], those of all T among them. The rest has names that other layers ignore.
    """
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    position_ids = np.arange(ends[-1], dtype=np.int64) - np.repeat(ends[:-1], lengths)
    bounds, longest = torch.from_numpy(ends), max(lengths)
    known: dict[str, Any] = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    known |= {"max_length_q": longest, "max_length_k": longest}
    if num_shared is not None:
        skipped = np.stack([np.zeros_like(num_shared), num_shared], axis=1).ravel()
        is_own = position_ids >= np.repeat(skipped, lengths)
        in_first = np.arange(ends[-1]) - np.repeat([0, *lengths[:-1]], lengths)  # as far into the document before
        places = np.where(is_own, np.cumsum(is_own) - 1, (np.cumsum(is_own) - 1)[in_first])
        known = {"own_tokens": torch.from_numpy(np.flatnonzero(is_own)), "places": torch.from_numpy(places)}
        known["document_ends"], position_ids = bounds, position_ids[is_own]
    return {"position_ids": torch.from_numpy(position_ids)[None], "document_lengths": lengths, **known}
