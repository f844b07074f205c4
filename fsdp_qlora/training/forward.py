"""A forward pass of the sharded model: losses of this rank's tokens, and log-probabilities."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from fsdp_qlora.config.objectives import LogProbs
from fsdp_qlora.data.batches.collator import Batches, Collator
from fsdp_qlora.data.batches.micro_batch import MicroBatch, describe_documents, inputs_with_teacher
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.target_values import number_targets, number_tokens
from fsdp_qlora.distributed.context import ContextGroup
from fsdp_qlora.distributed.device import to_device
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.clock import Heartbeat
from fsdp_qlora.model.adapters.insert import adapted_layers, as_at_start
from fsdp_qlora.model.architecture.attention import attending
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.sharding.groups import reshard_all
from fsdp_qlora.sharding.recompute import ReferencePass
from fsdp_qlora.sharding.towers import gathered, tower_adapters
from fsdp_qlora.sharding.vocabulary import same_tokens, tokens_known
from fsdp_qlora.training import probes
from fsdp_qlora.training.attach_loss import HeadLoss
from fsdp_qlora.training.cross_entropy import CrossEntropy
from fsdp_qlora.training.token_loss import TokenLoss
from fsdp_qlora.training.top_tokens import TopTokens
from fsdp_qlora.training.whole_logits import loss_of_logits

# Tokens of which the ranks' values are on the device at once.
_REDUCED = 2**14


@dataclass(eq=False)
class ForwardPass:
    """Computes the losses of micro-batches."""

    model: PreTrainedModel
    ranks: Ranks
    collator: Collator
    """Makes the micro-batches."""
    precision: Precision
    attention: str | None = None
    """The attention implementation for documents, as the plan says; None if rows are padded."""
    reference: ReferencePass | None = None
    """Computes what the policy is compared with in the same pass."""
    temperature: float = 1.0
    """Logits are divided by it."""
    context: ContextGroup = field(default_factory=ContextGroup)
    """The ranks that share this one's micro-batches."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    towers: Sequence[nn.Module] = ()
    """The parts of the model that compute images."""
    neftune_alpha: float = 0.0
    """Scale of the noise on the embeddings in training (Jain et al. 2023)."""

    def __post_init__(self) -> None:
        self.loss_of_tokens: HeadLoss = partial(
            loss_of_logits, self.model, temperature=self.temperature
        )
        # The length of each token's row, [1, T, 1], or of all rows.
        self._lengths: torch.Tensor | int = 1
        self._shows_images = False
        self.tower_adapters = tower_adapters(self.model)
        embedding = self.model.get_input_embeddings()
        if self.tower_adapters is not None:
            embedding.register_forward_hook(self._begin_graph)
        if self.neftune_alpha:
            embedding.register_forward_hook(self._add_noise)

    def _begin_graph(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        # Images give the first block's input a gradient. Without any it gets one all the same, so
        # that blocks have the same collectives in the backward passes of all ranks.
        if torch.is_grad_enabled() and not self._shows_images and not output.requires_grad:
            output.requires_grad_()

    def _add_noise(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        if not self.model.training:
            return output
        # `Trainer.prepare` has seeded torch for the micro-batch, so a resumed run draws it again.
        noise = torch.empty_like(output).uniform_(-1, 1)
        # alpha / sqrt(L * d), with L tokens of the row and d its embedding size, as in the paper.
        scale = self.neftune_alpha * (self._lengths * output.shape[-1]) ** -0.5
        return output + (noise * scale).to(output.dtype)

    def probe(self) -> None:
        """Find how the loss can be computed, with a few tokens. Called on every rank.

        Raises:
            UserError: a reference cannot pass through the model beside the policy.
        """
        input_ids = probes.few_tokens(self.model)
        documents: dict[str, Any] = {}
        if not self.collator.schedule.padding:
            documents = describe_documents([input_ids.shape[1]])
        if self.tower_adapters is not None:
            self.tower_adapters.prepare()
        # Every rank has all of these tokens, and shares none of them.
        attention = attending(self.model, self.attention)
        with attention, self.precision.autocasting(self.ranks.device):
            inputs = to_device({"input_ids": input_ids} | documents, self.ranks.device)
            if self.reference:
                # A teacher reads its own prompt, so its tokens follow the student's. Another
                # reference reads the policy's tokens.
                both = inputs
                if self.collator.has_teacher:
                    both = inputs_with_teacher(inputs, inputs)
                probes.check_reference(self.model, self.reference, inputs, both)
            with same_tokens(self.model, input_ids):
                head_loss = probes.probe_head_loss(self.model, inputs, self.temperature)
            self.loss_of_tokens = head_loss or self.loss_of_tokens

    def token_losses(
        self,
        batch: MicroBatch,
        loss: TokenLoss,
        *,
        per_document: bool = False,
        alone: bool = False,
    ) -> tuple[torch.Tensor, MicroBatch]:
        """The losses of a micro-batch's targets, float32, and the micro-batch on the device.

        They are the sum, [], or the loss's values, [R, N], and behind them the reference's losses.

        Args:
            per_document: copy what losses of documents read, too.
            alone: without the reference.
        """
        on_device = batch.to(self.ranks.device, per_document=per_document)
        inputs = on_device.model_inputs
        if self.context.size > 1:
            inputs["context_group"] = self.context
        if self.neftune_alpha:
            self._lengths = _lengths_of_rows(on_device)
        loss = loss.with_values(on_device.target_values)
        self._shows_images = bool(batch.images)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.precision.autocasting(self.ranks.device))
            if self.reference and not alone:
                beside = self.reference.beside_policy(shows_images=self._shows_images)
                stack.enter_context(beside)
            stack.enter_context(
                tokens_known(
                    self.model,
                    batch.tokens_of_ranks,
                    first=batch.input_ids.numel(),
                    has_images=batch.calls_towers,
                )
            )
            if batch.calls_towers:
                # Gathering is collective: a rank without images takes part if another one has some.
                towers = gathered(self.towers, self.tower_adapters, is_used=self._shows_images)
                stack.enter_context(towers)
            losses = self.loss_of_tokens(inputs, on_device.target_rows, on_device.targets, loss)
        return losses, on_device

    def attending(self) -> contextlib.AbstractContextManager[None]:
        """Keep attention from crossing rows in this block.

        Backward passes must be in it, too: they compute blocks again that recompute.
        """
        return attending(self.model, self.attention)


def _lengths_of_rows(batch: MicroBatch) -> torch.Tensor | int:
    """The length of each token's row, float32 [1, T, 1]; one number where rows are padded."""
    length = batch.input_ids.shape[1]
    ends = batch.documents.get("cu_seq_lens_q")
    if ends is None:
        return length
    lengths = ends.diff()
    # Without its size, the host would wait for the device to know it.
    return lengths.repeat_interleave(lengths, output_size=length)[:, None].to(torch.float32)


def sum_documents(losses: torch.Tensor, batch: MicroBatch, context: ContextGroup) -> LogProbs:
    """Log-probabilities of a micro-batch's documents, on the device.

    Args:
        losses: of its tokens, [1, N], or [2, N] with the reference's.
        context: the ranks that share the micro-batch, each with the losses of its own tokens.
    """
    documents = losses.split(_sizes(batch, losses.shape[1]), dim=1)[:-1]
    if documents:
        sums = torch.stack([-part.sum(dim=1) for part in documents], dim=1)
        policy, *references = context.summed(sums)
    else:
        policy, *references = losses[:, :0]
    if references:
        reference = references[0].detach()
    elif len(batch.reference):
        reference = batch.reference
    else:
        reference = torch.zeros_like(policy)
    return LogProbs(policy, reference, batch.target_counts)


def spread_sums(values: torch.Tensor, batch: MicroBatch, context: ContextGroup) -> torch.Tensor:
    """At each target [N] the sum of values [N] over its document, differentiable.

    Targets that count nothing get 0. context: as in `sum_documents`.
    """
    sizes = _sizes(batch, len(values))
    *documents, others = values.split(sizes)
    if not documents:
        return torch.zeros_like(values)
    sums = context.summed(torch.stack([part.sum() for part in documents]))
    # A rank without tokens of a document takes part in the sums of both passes, too.
    parts = [total.expand(size) for total, size in zip(sums, sizes[:-1], strict=True)]
    return torch.cat([*parts, torch.zeros_like(others)])


def _sizes(batch: MicroBatch, num_targets: int) -> list[int]:
    """The number of targets of each document on this rank, and of those that count nothing.

    The latter are behind the documents' (`MicroBatch.beside`). num_targets: of all.
    """
    return [*batch.num_targets, num_targets - sum(batch.num_targets)]


@torch.no_grad()
def document_logprobs(forward: ForwardPass, batches: Iterable[MicroBatch]) -> Iterator[LogProbs]:
    """Log-probabilities of the documents of each micro-batch. Called on every rank."""
    forward.model.eval()
    with forward.attending():
        for batch in batches:
            forward.heartbeat.beat(forward.heartbeat.step, "compute")
            losses = forward.token_losses(batch, CrossEntropy(by_token=True), per_document=True)
            yield sum_documents(*losses, forward.context)


def log_probabilities(forward: ForwardPass, table: TokenizedRows) -> np.ndarray:
    """Log-probability of each document under the current weights, float32 [documents].

    Called on every rank, with the same rows.
    """
    logps = torch.zeros(len(table.document_targets), device=forward.ranks.device)
    # A step may learn the first document of a row alone. Here both count.
    rows_of = table.as_documents if table.learns == "first_document" else table
    batches = forward.collator.lay_out_evaluation(rows_of, np.arange(len(rows_of)))
    shown = tqdm(batches, "Reference", unit=" micro-batches", disable=not forward.ranks.is_rank_0)
    for rows, answers in zip(batches.rounds, document_logprobs(forward, shown), strict=True):
        documents = rows_of.documents(rows[forward.collator.data_rank])
        logps[torch.from_numpy(documents).to(logps.device)] = answers.policy
    reshard_all(forward.model)
    # A document has its value on the ranks that share it, and is 0 on the others.
    dist.all_reduce(logps)
    return (logps / forward.context.size).cpu().numpy()


def top_tokens_of_rows(
    forward: ForwardPass, table: TokenizedRows, rows: np.ndarray, top_tokens: TopTokens
) -> np.ndarray:
    """Find the top tokens at the targets of consecutive rows, float32 [targets, 2 * k + 1].

    Called on every rank, with the same rows.
    """
    first = int(table.num_targets[: rows[0]].sum())
    count = int(table.num_targets[rows].sum())
    collator = dataclasses.replace(forward.collator, target_values=number_targets)
    batches = collator.lay_out_evaluation(table, rows)
    empty = np.zeros((count, top_tokens.num_values), np.float32)
    return _by_target(forward, batches, top_tokens, empty, first)


def token_logprobs(
    forward: ForwardPass, table: TokenizedRows, *, at_start: bool = False
) -> np.ndarray:
    """Log-probability of each learned token, float32 [tokens]; 0 for other tokens.

    Called on every rank, with the same rows.

    at_start: under the weights before the first step, not the current ones.
    """
    with as_at_start(adapted_layers(forward.model) if at_start else ()):
        # 0 - x and no -x: a token that is not learned gets 0, not -0.
        return 0 - values_of_tokens(forward, table, CrossEntropy(by_token=True))[:, 0]


def values_of_tokens(forward: ForwardPass, table: TokenizedRows, loss: TokenLoss) -> np.ndarray:
    """The loss's values for each learned token, float32 [tokens, R]; 0 for other tokens.

    Called on every rank, with the same rows.
    """
    collator = dataclasses.replace(forward.collator, target_values=number_tokens)
    # In the micro-batches of the step: in 16 bits another shape takes another kernel, which rounds
    # differently.
    batches = collator.lay_out_step(table, np.arange(len(table)))
    empty = np.zeros((len(table.input_ids), loss.num_values), np.float32)
    return _by_target(forward, batches, loss, empty)


@torch.no_grad()
def _by_target(
    forward: ForwardPass, batches: Batches, loss: TokenLoss, empty: np.ndarray, first: int = 0
) -> np.ndarray:
    """Fill `empty` with the values of all ranks' targets.

    first: the number of the target in its first row.
    """
    # On the host, in the array's own memory: a teacher's values of 256 rows are large.
    by_target = torch.from_numpy(empty)
    forward.model.eval()
    with forward.attending():
        for batch in batches:
            forward.heartbeat.beat(forward.heartbeat.step, "compute")
            values, on_device = forward.token_losses(batch, loss, alone=True)
            is_target = on_device.targets >= 0
            places = (on_device.target_values["numbers"][is_target] - first).cpu()
            by_target[places] = values.T[is_target].cpu()
    reshard_all(forward.model)
    # A token is a target on one rank, and 0 on the others: their sum is its value, exactly.
    for part in by_target.split(_REDUCED):
        on_device_part = part.to(forward.ranks.device)
        dist.all_reduce(on_device_part)
        part.copy_(on_device_part)
    return empty
