"""Probes before the first step: what a model can compute is tried on a few tokens.

Whether the loss can be computed in chunks, rows without padding, and rows in parts on several
ranks. No class of a model is named here.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_qlora.data.batches.micro_batch import describe_documents, documents_of_part
from fsdp_qlora.data.batches.shared_tokens import SharedTokens
from fsdp_qlora.distributed.context import ContextGroup
from fsdp_qlora.distributed.device import to_device
from fsdp_qlora.distributed.process_group import gather_numbers
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.adapters.insert import adapted_layers, as_at_start
from fsdp_qlora.model.architecture.attention import attending, packing_blocker
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.sharding.groups import reshard_all
from fsdp_qlora.sharding.recompute import ReferencePass
from fsdp_qlora.sharding.vocabulary import same_tokens, sharing_ranks, tokens_known
from fsdp_qlora.training.attach_loss import HeadLoss, attach_head_loss, free_head_before_backward
from fsdp_qlora.training.cross_entropy import CrossEntropy
from fsdp_qlora.training.head_loss import MAX_CHUNK_BYTES
from fsdp_qlora.training.token_loss import LogitForm
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import first_line

log = logging.getLogger("fsdp_qlora")

_NUM_TOKENS = 8
# How configs name the factor on the head's outputs, and the cap of what results. granite divides by
# logits_scaling, and hyperclovax multiplies by it: the probe tells.
_SCALES = (
    "logit_scale",
    "logits_scaling",
    "logits_mup_width_multiplier",
    "lm_head_multiplier",
    "output_multiplier",
)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Another number with such a name may change logits in a way that a few tokens do not show.
_ABOUT_LOGITS = re.compile(r"^(?!.*(attn|attention|router|to_keep)).*(logit|lm_head|output_mult)")
# Of the loss of a few tokens, by the model and by us. In 16 bits a model rounds logits, scaled and
# capped.
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}

# The second document is short behind a long one, so that it suffers most from what is left of the
# first.
_LENGTHS = (40, 8)
# Of a rank's part of a row: as far as a short convolution looks back.
_FIRST_TOKENS = 3
# Of a token's logits: rounding, also of other kernels, stays far below; what another document
# leaves, far above.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


def few_tokens(model: PreTrainedModel) -> torch.Tensor:
    """Token ids to probe a model with, int64 [1, 8]."""
    vocabulary = model.get_input_embeddings().num_embeddings
    return (torch.arange(1, _NUM_TOKENS + 1) * 37 % vocabulary)[None]


@torch.no_grad()
def probe_head_loss(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    temperature: float = 1.0,
    chunk_bytes: int = MAX_CHUNK_BYTES,
) -> HeadLoss | None:
    """Find out whether a model's loss can be computed over chunks of tokens.

    Called on every rank, with weights loaded; runs the model and compares with its own logits.

    Args:
        inputs: the base model's arguments, as in a step, for `few_tokens`.
        temperature: of the loss that is returned.
        chunk_bytes: as for `chunked_loss`, for the loss that is returned.
    Returns:
        The loss, or None where the model needs whole logits, which is said in one line.
    """
    reason = head_loss_blocker(model)
    if not reason:
        model.eval()
        logits = model(**inputs, use_cache=False).logits
        reshard_all(model)
        errors = {
            form: _loss_error(model, form, inputs, logits) for form in _logit_forms(model.config)
        }
        # Errors are the largest of all ranks, so every rank finds the same form.
        form = min(errors, key=lambda form: errors[form])
        if errors[form] <= LOSS_TOLERANCE[logits.dtype]:
            free_head_before_backward(model)
            return attach_head_loss(model, form._replace(temperature=temperature), chunk_bytes)
        reason = "its logits are not its head's outputs, scaled or capped as its config says"
    log.info("The loss is computed from whole logits, which takes more memory: %s.", reason)
    return None


@torch.no_grad()
def check_reference(
    model: PreTrainedModel,
    reference: ReferencePass,
    inputs: Mapping[str, Any],
    both: Mapping[str, Any],
) -> None:
    """Make sure that the reference beside the policy is what it is alone. Called on every rank.

    Args:
        inputs: as for `probe_head_loss`.
        both: the same, or with these tokens as a teacher's behind them.
    Raises:
        UserError: the model passes other values than hidden states between its blocks, or refuses
            two batches in one.
    """
    other_way = "Compute it before training: --precompute_reference true."
    model.eval()
    try:
        with reference.beside_policy(), same_tokens(model, both["input_ids"].cpu()):
            together = model(**both, use_cache=False).logits
    except (RuntimeError, ValueError, IndexError) as error:
        # An error that names no shape is one of a lost rank or of memory, and none of the model.
        if not re.search(r"\b(shape|size|dimension)s?\b", str(error)):
            raise
        name = type(model).__name__.removeprefix("FSDP")
        raise UserError(
            f"{name} cannot run a reference in the policy's forward pass ({first_line(error)}). "
            f"{other_way}"
        ) from error
    reshard_all(model)
    with as_at_start(adapted_layers(model)), same_tokens(model, inputs["input_ids"].cpu()):
        alone = model(**inputs, use_cache=False).logits
    reshard_all(model)
    # The reference is behind the policy in the batch, a teacher in the row: both become a batch.
    together = together.view(-1, *alone.shape[1:])
    difference = (together[len(alone) :] - alone).float().norm()
    most = largest_of_ranks(difference / alone.float().norm())
    if len(together) != 2 * len(alone) or most > LOSS_TOLERANCE[alone.dtype]:
        raise UserError(
            f"{type(model).__name__} passes other values than hidden states between its blocks, so "
            f"the reference cannot run in the policy's forward pass. {other_way}"
        )


def largest_of_ranks(error: torch.Tensor) -> float:
    """The largest error of all ranks; 0 where there are no values, as on a stand-in for a GPU."""
    return gather_numbers([torch.nan_to_num(error)], error.device).max().item()


def head_loss_blocker(model: PreTrainedModel) -> str:
    """Why a model's loss cannot be computed from its head; empty if it may be."""
    head = model.get_output_embeddings()
    base = model.base_model
    if base is model or head is None or any(module is head for module in base.modules()):
        return f"{type(model).__name__} does not keep its head apart from its decoder"
    if not isinstance(head, nn.Linear):
        return f"the head of {type(model).__name__} is a {type(head).__name__}"
    unknown = [
        name
        for name in _numbers(model.config)
        if name not in (*_SCALES, *_CAPS) and _ABOUT_LOGITS.match(name)
    ]
    return f"its config has {unknown[0]}, which may change logits" if unknown else ""


def _logit_forms(config: PretrainedConfig) -> list[LogitForm]:
    """The ways from outputs to logits that the names of a config's numbers allow."""
    numbers = _numbers(config)
    caps = [numbers[name] for name in _CAPS if name in numbers]
    cap = caps[0] if caps else None
    scales = [numbers[name] for name in _SCALES if name in numbers]
    # A model may multiply or divide by the number, or not use it at all.
    candidates = [1.0, *scales, *(1 / scale for scale in scales)]
    # Without repetitions, in this order: among equal errors the first form is taken.
    return [LogitForm(scale, cap) for scale in dict.fromkeys(candidates)]


def _numbers(config: PretrainedConfig) -> dict[str, float]:
    """The numbers of a config and of its text model's, by name, but 0."""
    values = config.to_dict() | config.get_text_config().to_dict()
    # type() and not isinstance: True is an int, too. 0 switches such a number off.
    return {
        name: float(value)
        for name, value in values.items()
        if type(value) in (int, float) and value
    }


def _loss_error(
    model: PreTrainedModel, form: LogitForm, inputs: Mapping[str, Any], logits: torch.Tensor
) -> float:
    """The relative error of the loss by decoder and head, the maximum over all ranks.

    It is compared with the loss of the model's own logits.
    """
    targets = inputs["input_ids"][0]
    rows = torch.arange(len(targets), device=targets.device)
    loss = attach_head_loss(model, form)(inputs, rows, targets, CrossEntropy())
    reshard_all(model)
    expected = F.cross_entropy(logits[0].float(), targets, reduction="sum")
    return largest_of_ranks((loss - expected).abs() / expected.abs())


class Probed(NamedTuple):
    """A loaded model as it is probed."""

    model: PreTrainedModel
    documents: str | None
    """The attention implementation for documents, from `attention.choose`."""
    ranks: Ranks
    precision: Precision
    is_exact: bool
    """Whether a token's values in float32 are the same in another batch."""

    @property
    def tolerance(self) -> float:
        return _TOLERANCE[self.precision.compute_dtype if self.is_exact else torch.bfloat16]

    def tokens(self) -> torch.Tensor:
        """The tokens of both documents, one after the other, int64 [48]."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        # A prime, so that the ids differ and are spread over the vocabulary.
        return torch.arange(sum(_LENGTHS)).mul(7919).remainder(vocabulary)

    def logits(
        self, input_ids: torch.Tensor, *tokens: torch.Tensor, **documents: Any
    ) -> torch.Tensor:
        """The model's logits. tokens: what each rank looks up, if they are not the same."""
        model = self.model
        device = self.ranks.device
        looked_up = tokens_known(model, tokens) if tokens else same_tokens(model, input_ids)
        with self.precision.autocasting(device), looked_up:
            inputs = to_device({"input_ids": input_ids} | documents, device)
            logits: torch.Tensor = model(**inputs, use_cache=False).logits
        reshard_all(model)
        return logits


def probe_packing(probed: Probed, *, num_shared: int = 0) -> str | None:
    """Why the rows of a model must be padded, in words; None if they can be concatenated.

    Called on every rank. num_shared: try documents whose first `num_shared` tokens are computed
    once.
    """
    if probed.documents is None:
        return "its attention has no such form"
    reason = packing_blocker(probed.model)
    if reason:
        return reason
    try:
        difference = _difference(probed, num_shared)
    except (NotImplementedError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        # Until a whole forward pass FSDP2 takes the block that the error left for gathered,
        # whatever `reshard` does, and an optimizer made then would hold other parameters than those
        # that get the gradients.
        with torch.no_grad():
            probed.logits(probed.tokens()[None])
    else:
        # The most of all ranks, so that every rank comes to the same decision.
        most = largest_of_ranks(difference)
        if most > probed.tolerance:
            reason = f"a second document in a row differs by {most:.0%} from it alone"
    reshard_all(probed.model)
    return reason


def check_context(probed: Probed, context: ContextGroup) -> None:
    """Make sure that a model computes the same where ranks share the tokens of a row.

    Called on every rank. The first tokens of a part would miss most of what only other ranks know.

    Args:
        context: the ranks that share this one's row.
    Raises:
        UserError: something besides attention passes on what other tokens know.
    """
    model = probed.model.eval()
    row = probed.tokens()[None]
    documents = describe_documents(list(_LENGTHS), num_parts=context.size)
    # Padding makes the row's length a multiple of the number of parts.
    missing = documents["position_ids"].shape[1] - row.shape[1]
    row = F.pad(row, (0, missing))
    local = context.own(row.shape[1])
    with torch.no_grad(), attending(model, probed.documents):
        expected = probed.logits(row, **documents)[0, local].double()
    # Each rank that shares the vocabulary must know which tokens the others look up.
    parts = [rank % context.size for rank in sharing_ranks(model)]
    tokens = [row[0, context.own(row.shape[1], part)] for part in parts]
    documents = documents_of_part(documents, context.rank, context.size)
    documents = documents | {"context_group": context}
    with torch.no_grad(), attending(model, probed.documents):
        logits = probed.logits(row[:, local], *tokens, **documents)[0].double()
    most = largest_of_ranks(relative_difference(logits[:_FIRST_TOKENS], expected[:_FIRST_TOKENS]))
    if most > probed.tolerance:
        raise UserError(
            f"--context_parallel_size {context.size} cannot divide {type(model).__name__}: with "
            f"rows split across ranks, its outputs change by {most:.0%}. A layer other than "
            "attention mixes tokens."
        )


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The relative difference of tokens' logits or states, [tokens, V]: the median over tokens."""
    # Without their mean, which a softmax does not see, and which may be far larger than the rest.
    scale = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    difference = (logits - expected).norm(dim=-1)
    ratios = torch.where(scale > 0, difference / scale, difference).sort().values
    return ratios[len(ratios) // 2]


@torch.no_grad()
def _difference(probed: Probed, num_shared: int) -> torch.Tensor:
    """The relative difference of the second document's logits from its logits alone."""
    model = probed.model.eval()
    first, second = probed.tokens().split(_LENGTHS)
    second = torch.cat([first[:num_shared], second[num_shared:]])
    # Alone, and not in a padded batch: there rope may depend on the length of the longest row.
    alone = probed.logits(second[None])[0, num_shared:].double()
    shared = SharedTokens([0, num_shared], [0, 0]) if num_shared else None
    documents = describe_documents(list(_LENGTHS), shared)
    with attending(model, probed.documents):
        row = torch.cat([first, second[num_shared:]])[None]
        behind = probed.logits(row, **documents)[0, len(first) :].double()
    return relative_difference(behind, alone)
