"""The loss of a model's own logits, for models that the loss in chunks does not fit."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from fsdp_qlora.training.attach_loss import rows_of_copies
from fsdp_qlora.training.token_loss import TokenLoss
from fsdp_qlora.utils.errors import UserError


def loss_of_logits(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    rows: Tensor,
    targets: Tensor,
    loss: TokenLoss,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Compute the loss from the model's own logits; the arguments are those of `HeadLoss`.

    For a batch of one row, a model that can do so computes the logits of these rows alone.

    Raises:
        UserError: the loss needs chunks.
    """
    # Before the model runs: its weights stay as they are, and no logits are made for nothing.
    if loss.needs_chunks:
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
    return loss.of_whole_logits(logits_NV, targets, temperature)
