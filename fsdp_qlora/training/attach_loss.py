"""Attaches the loss in chunks to a sharded model: its decoder and head compute it together."""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel

from fsdp_qlora.model.adapters.token_rows import head_token_rows
from fsdp_qlora.sharding.vocabulary import shared_head_of
from fsdp_qlora.training.divergence import Likeliest, Teacher, Vocabulary, WholeVocabulary
from fsdp_qlora.training.head_loss import LogitForm, Reduction, chunked_loss, likeliest_tokens

# ({argument of the base model: value}, rows [N], targets [N]) -> loss. Rows count through all
# tokens of the batch. With reduction="none" the loss of each token instead of the sum: [1, N], or
# [2, N] with the reference's (sharding/recompute.py); "entropy" puts another row behind the first,
# the entropy of the policy, without gradient. With a Teacher, whose hidden states may follow the
# student's, the rows are the divergence from it, the agreement with it, without gradient, and the
# loss if that is wanted. With Likeliest it gives these tokens, [2 * k + 1, N].
HeadLoss = Callable[..., Tensor]


def attach_head_loss(model: PreTrainedModel, form: LogitForm) -> HeadLoss:
    """Give a sharded model a method that computes the loss from its decoder and head.

    `probe_head_loss` tries whether the model allows that. FSDP2 gathers weights around `forward`,
    and around methods that are registered with it.
    """
    head = model.get_output_embeddings()
    shared = shared_head_of(model)
    new_rows = head_token_rows(model)

    def loss_of_hidden(
        self: nn.Module, hidden: Tensor, targets: Tensor, *, reduction: Reduction = "sum"
    ) -> Tensor:
        weight: Any = shared.rows() if shared else self.weight
        whole = WholeVocabulary(len(weight), new_rows)
        if whole.new_rows and not shared:
            whole.new_rows.write_into(weight)
        bias: Any = self.bias
        if isinstance(reduction, Tensor) or reduction == "sum":
            return chunked_loss(
                hidden, weight, bias, targets, form, shared or whole, reduction=reduction
            )
        if isinstance(reduction, Likeliest):
            return likeliest_tokens(hidden, weight, bias, form, reduction, shared or whole)
        losses = _token_losses(hidden, (weight, bias), targets, form, shared, reduction)
        return torch.cat([part.view(-1, len(targets)) for part in losses])

    def loss_of_tokens(
        self: PreTrainedModel,
        inputs: Mapping[str, Any],
        rows: Tensor,
        targets: Tensor,
        *,
        reduction: Reduction = "sum",
    ) -> Tensor:
        hidden = self.base_model(**inputs, use_cache=False)[0]
        rows = rows_of_copies(rows, inputs, copies=len(hidden) // len(inputs["input_ids"]))
        # Only tokens with a target go through the head.
        hidden_NH = hidden.flatten(0, 1).index_select(0, rows)
        loss: Tensor = head.loss_of_hidden(hidden_NH, targets, reduction=reduction)
        return loss

    for module, method in ((head, loss_of_hidden), (model, loss_of_tokens)):
        setattr(module, method.__name__, MethodType(method, module))
        register_fsdp_forward_method(module, method.__name__)
    result: HeadLoss = model.loss_of_tokens
    return result


def _token_losses(
    hidden: Tensor,
    parameters: tuple[Tensor, Tensor | None],
    targets: Tensor,
    form: LogitForm,
    shared: Vocabulary | None,
    reduction: Reduction,
) -> list[Tensor]:
    """The rows of losses that `HeadLoss` has for reductions by token.

    hidden: the policy's states, and behind them the reference's or the teacher's. parameters:
    weight and bias.
    """
    weight, bias = parameters
    policy, *others = hidden.split(len(targets))
    if isinstance(reduction, Teacher) and others:
        reduction = reduction._replace(hidden=others.pop().detach())
    losses = [chunked_loss(policy, weight, bias, targets, form, shared, reduction=reduction)]
    for reference in others:
        losses.append(
            chunked_loss(reference.detach(), weight, bias, targets, form, shared, reduction="none")
        )
    if isinstance(reduction, Teacher) and reduction.with_nll:
        # The usual loss beside the divergence uses the model's own probabilities, unscaled.
        plain = form._replace(temperature=1.0)
        losses.append(chunked_loss(policy, weight, bias, targets, plain, shared, reduction="none"))
    return losses


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
