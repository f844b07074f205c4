"""Batches: rows of tokens become padded tensors."""

from collections.abc import Sequence

import numpy as np
import torch

from fsdp_qlora.data.rows import TokenizedRows

IGNORE_INDEX = -100  # the label that torch's cross entropy ignores


def collate(
    tokenized: TokenizedRows, rows: Sequence[int] | np.ndarray, *, pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Pad rows on the right to the longest of them.

    There is no attention mask: in a causal model no token sees the padding after it, and padding has no label.

    Args:
        rows: row indices. Without any, the batch is one row of padding, for a rank that has no rows in this turn.
    Returns:
        `input_ids` and `labels`, int64 [B, T]. A label has the same position as its token and is -100 where the
        token is masked, padding or first in its row, so `(labels != -100).sum()` is the number of targets.
    """
    starts, ends = tokenized.offsets[:-1][rows], tokenized.offsets[1:][rows]
    shape = (len(rows), int((ends - starts).max())) if len(rows) else (1, 2)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        ids = tokenized.input_ids[start:end]
        input_ids[i, : end - start] = ids
        labels[i, : end - start] = np.where(tokenized.learned[start:end], ids, IGNORE_INDEX)
    labels[:, 0] = IGNORE_INDEX  # nothing comes before it to predict it from
    return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
