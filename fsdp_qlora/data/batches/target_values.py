"""Values of each target besides its token, by name: `MicroBatch.target_values`.

N is the number of a micro-batch's targets. Values that a micro-batch has:

- Completions that the run has sampled: `advantages` and `shares` (one over the targets of its row),
  and `old_logps` and `sampled_logps` where rows have these columns, float32 [N]. Written by
  micro_batch.py, read by `objective.Policy`.
- Rows whose turns have weights: `weights`, float32 [N]. Written by micro_batch.py, read by the loss
  of `objective.TokenMean`.
- Rows with a teacher's probabilities: `teacher_ids`, int64 [N, k], and `teacher_logps`, float32
  [N, k + 1]. Written by the collator's `target_values` (a teacher's files or server), read by the
  loss of `objective.Distillation`.
- Targets whose values are collected into an array: `numbers`, int64 [N]. Written by the collator's
  `target_values`, if it is `number_targets` or `number_tokens`; read by training/forward.py.
- A client's rows: what its loss reads (service/losses.py), `target_tokens`, `datum` and `places`,
  [N, K]. Written by service/train_request.py, read by service/training.py.
"""

from collections.abc import Callable

import numpy as np
import torch

from fsdp_qlora.data.batches.rows import Numbers, TokenizedRows

TargetValues = Callable[[TokenizedRows, np.ndarray], dict[str, torch.Tensor]]
"""Rows, and the indices of some of them -> values of their targets by name, in order. Rows without
a target have the values of one that counts nothing.
"""


def target_indices(table: TokenizedRows, rows: Numbers) -> np.ndarray:
    """The index of each target of some rows among the table's tokens, int64 [N].

    Rows without a target have one index, of the target that counts nothing.
    """
    documents = table.learned_documents(rows)
    # From the second token on: nothing precedes the first one, which is never a target.
    firsts = table.document_offsets[documents] + 1
    ends = table.document_offsets[documents + 1]
    by_document = [np.zeros(0, np.int64)]
    for first, end in zip(firsts, ends, strict=True):
        by_document.append(first + np.flatnonzero(table.learned[first:end]))
    return _at_least_one(np.concatenate(by_document))


def number_tokens(table: TokenizedRows, rows: Numbers) -> dict[str, torch.Tensor]:
    """Number the targets of some rows by their index among the table's tokens."""
    return {"numbers": torch.from_numpy(target_indices(table, rows))}


def number_targets(table: TokenizedRows, rows: Numbers) -> dict[str, torch.Tensor]:
    """Number the targets of some rows among the table's targets.

    Rows have one document each. Rows without a target have one number, as of `target_indices`.
    """
    # Those of a row follow each other, so each row's first number and its count are enough.
    chosen = np.asarray(rows, np.int64)
    ends = table.target_ends[chosen]
    counts = table.num_targets[chosen]
    numbers = np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())
    return {"numbers": torch.from_numpy(_at_least_one(numbers))}


def _at_least_one(numbers: np.ndarray) -> np.ndarray:
    return numbers if len(numbers) else np.zeros(1, np.int64)
