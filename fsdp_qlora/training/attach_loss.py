"""Attaches the loss in chunks to a sharded model: its decoder and head compute it together."""

from collections.abc import Mapping
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel

from fsdp_qlora.model.adapters.token_rows import head_token_rows
from fsdp_qlora.sharding.vocabulary import shared_head_of
from fsdp_qlora.training.head_loss import MAX_CHUNK_BYTES, chunked_loss
from fsdp_qlora.training.token_loss import Head, LogitForm, TokenLoss, whole_head


class HeadLoss(Protocol):
    """Runs a model and computes a loss of its tokens."""

    def __call__(
        self, inputs: Mapping[str, Any], rows: Tensor, targets: Tensor, loss: TokenLoss
    ) -> Tensor:
        """Return the sum, [], or the loss's values, [R, N], and behind them a reference's losses.

        Args:
            inputs: arguments of the base model.
            rows: which of its outputs predict a target, int64 [N], counted through all tokens of
                the batch; where a teacher's tokens follow, [2 * N].
            targets: int64 [N].
        """


def attach_head_loss(
    model: PreTrainedModel, form: LogitForm, chunk_bytes: int = MAX_CHUNK_BYTES
) -> HeadLoss:
    """Give a sharded model a method that computes the loss from its decoder and head.

    `probe_head_loss` tries whether the model allows that. FSDP2 gathers weights around `forward`,
    and around methods that are registered with it.

    Args:
        chunk_bytes: as for `chunked_loss`.
    """
    head = model.get_output_embeddings()
    shared = shared_head_of(model)
    new_rows = head_token_rows(model)

    def loss_of_hidden(self: nn.Module, hidden: Tensor, targets: Tensor, loss: TokenLoss) -> Tensor:
        weight: Any = shared.rows() if shared else self.weight
        bias: Any = self.bias
        if shared:
            own_head = Head(weight, bias, form, shared)
        else:
            if new_rows:
                new_rows.write_into(weight)
            own_head = whole_head(weight, bias, form, new_rows)
        # A reference's or a teacher's states follow the policy's.
        has_others = len(hidden) > len(targets)
        states = hidden.split(len(targets)) if has_others else (hidden,)
        values = [
            chunked_loss(each.hidden_NH, each.head, targets, each.loss, chunk_bytes)
            for each in loss.passes(states, own_head)
        ]
        return torch.cat(values) if len(values) > 1 else values[0]

    def loss_of_tokens(
        self: PreTrainedModel,
        inputs: Mapping[str, Any],
        rows: Tensor,
        targets: Tensor,
        loss: TokenLoss,
    ) -> Tensor:
        hidden = self.base_model(**inputs, use_cache=False)[0]
        rows = rows_of_copies(rows, inputs, copies=len(hidden) // len(inputs["input_ids"]))
        # Only tokens with a target go through the head.
        hidden_NH = hidden.flatten(0, 1).index_select(0, rows)
        values: Tensor = head.loss_of_hidden(hidden_NH, targets, loss)
        return values

    for module, method in ((head, loss_of_hidden), (model, loss_of_tokens)):
        setattr(module, method.__name__, MethodType(method, module))
        register_fsdp_forward_method(module, method.__name__)
    result: HeadLoss = model.loss_of_tokens
    return result


def rows_of_copies(rows: Tensor, inputs: Mapping[str, Any], copies: int) -> Tensor:
    """The rows of the policy and of the reference, whose tokens follow the policy's."""
    if copies == 1:
        return rows
    return torch.cat([rows + copy * inputs["input_ids"].numel() for copy in range(copies)])


def free_head_before_backward(model: PreTrainedModel) -> None:
    """Free the gathered head once the loss is there: its gradients are computed by then."""
    head = model.get_output_embeddings()
    # A tied head is of the root's group, which FSDP2 keeps for the backward pass.
    if isinstance(head, FSDPModule):
        head.set_reshard_after_forward(True)
        head.set_unshard_in_backward(False)
