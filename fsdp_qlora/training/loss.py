"""The summed next-token loss of a micro-batch, computed only at positions with targets."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# Logits are upcast to float32 and turned into probabilities in pieces of this many elements (256 MiB).
MAX_LOGITS = 2**26


def target_positions(labels: torch.Tensor) -> torch.Tensor:
    """Positions t at which some row of labels [B, T] has a target at t + 1: of one row exactly its targets.

    At least one, so that a micro-batch without targets runs forward and backward like the others.
    """
    columns = (labels[:, 1:] != -100).any(dim=0).nonzero().flatten()
    return columns if len(columns) else columns.new_zeros(1)


def summed_loss(
    model: nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor,
    *,
    skip: bool,
    documents: Mapping[str, Any],
) -> torch.Tensor:
    """Sum over the micro-batch's target tokens of -log p(token), in nats, float32.

    Args:
        input_ids, labels: [B, T] int64; labels are -100 where nothing is learned.
        positions: `target_positions(labels)`.
        skip: whether the model can skip the logits of other positions.
        documents: what `data.batches.describe_documents` says of a row of several; empty for padded rows.
    """
    # No attention mask: attention is causal and the padding is on the right, so no real token sees it.
    options = {"logits_to_keep": positions} if skip else {}
    logits = model(input_ids=input_ids, use_cache=False, **options, **documents).logits
    if not skip:
        logits = logits[:, positions]
    return _cross_entropy_sum(logits.flatten(0, 1), labels[:, positions + 1].flatten())


def _cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    rows = max(1, MAX_LOGITS // logits.shape[-1])
    if logits.shape[0] <= rows:
        return _cross_entropy(logits, targets)
    # Recomputed piece by piece in the backward pass, so there is never a whole float32 copy of the logits.
    pieces = zip(logits.split(rows), targets.split(rows), strict=True)
    losses = [checkpoint(_cross_entropy, *piece, use_reentrant=False) for piece in pieces]
    return torch.stack(losses).sum()


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")
