"""The loss of a model's own logits, for models that the loss in chunks does not fit."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fsdp_qlora.training.attach_loss import rows_of_copies
from fsdp_qlora.training.divergence import Likeliest, Teacher
from fsdp_qlora.training.head_loss import Reduction
from fsdp_qlora.utils.errors import UserError

# Logits are upcast to float32 and turned into probabilities in pieces of this many elements, which
# take 256 MiB.
MAX_LOGITS = 2**26


def loss_of_logits(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    rows: Tensor,
    targets: Tensor,
    *,
    reduction: Reduction = "sum",
    temperature: float = 1.0,
) -> Tensor:
    """Compute the loss from the model's own logits; the arguments are those of `HeadLoss`.

    For a batch of one row, a model that can do so computes the logits of these rows alone.
    """
    if isinstance(reduction, Tensor):
        losses_1N = loss_of_logits(
            model, inputs, rows, targets, temperature=temperature, reduction="none"
        )
        return losses_1N[0] @ reduction
    if isinstance(reduction, Teacher | Likeliest):
        raise UserError(
            "--objective distill needs the loss in chunks, which this model does not allow."
        )
    takes_rows = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    # transformers takes the same positions of every row of the batch.
    skips = len(inputs["input_ids"]) == 1 and takes_rows
    options = {"logits_to_keep": rows} if skips else {}
    logits = model(**inputs, use_cache=False, **options).logits
    # A reference beside the policy adds copies to the batch.
    copies = len(logits) // len(inputs["input_ids"])
    logits_NV = logits.flatten(0, 1)
    # The model's [B, T, V] must not outlive the selection: it would lie beside the loss's pieces.
    del logits
    if not skips:
        logits_NV = logits_NV.index_select(0, rows_of_copies(rows, inputs, copies))
    targets_N = targets.repeat(copies)
    # Recomputed piece by piece in the backward pass, so there is never a whole float32 copy of the
    # logits.
    size = max(1, MAX_LOGITS // logits_NV.shape[-1])
    pieces = zip(logits_NV.split(size), targets_N.split(size), strict=True)
    losses = [
        checkpoint(_cross_entropy, *piece, reduction, temperature, use_reentrant=False)
        for piece in pieces
    ]
    if reduction == "sum":
        return torch.stack(losses).sum()
    by_copy = torch.cat(losses, dim=1).view(len(losses[0]), copies, -1)
    # The policy's losses and entropies, then the losses alone of each further copy.
    return torch.cat([by_copy[:, 0], by_copy[0, 1:]])


def _cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, reduction: str, temperature: float
) -> Tensor:
    """The losses' sum, or the losses, [1, N], or these with the entropies, [2, N]."""
    # In bf16, log-probabilities would have two or three decimal digits.
    logits_NV = logits_NV.float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    if reduction == "sum":
        return F.cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction="sum")
    losses_N = F.cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction="none")
    if reduction == "entropy":
        logps_NV = logits_NV.detach().log_softmax(dim=-1)
        return torch.stack([losses_N, -(logps_NV.exp() * logps_NV).sum(dim=-1)])
    return losses_N[None]
