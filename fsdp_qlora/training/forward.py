"""A forward pass of the sharded model: losses of this rank's tokens, and log-probabilities."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from fsdp_qlora.config.objectives import LogProbs
from fsdp_qlora.data.batches.micro_batch import (
    Batches,
    Collator,
    MicroBatch,
    describe_documents,
    inputs_with_teacher,
)
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.distributed.context import ContextGroup
from fsdp_qlora.distributed.device import to_device
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.clock import Heartbeat
from fsdp_qlora.model.adapters.insert import adapted_layers, as_at_start
from fsdp_qlora.model.architecture.attention import attending
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.sharding.parallelize import gathered, reshard_all
from fsdp_qlora.sharding.recompute import ReferencePass
from fsdp_qlora.sharding.vocabulary import same_tokens, tokens_known
from fsdp_qlora.training import probes
from fsdp_qlora.training.divergence import Likeliest, Teacher
from fsdp_qlora.training.head_loss import HeadLoss, Reduction, loss_of_logits

_REDUCED = 2**14  # tokens of which the ranks' values are on the device at once


@dataclass(eq=False)
class ForwardPass:
    """Computes the losses of micro-batches.

    collator: makes them. attention: the implementation for documents, as of the model's plan; None
    if rows are padded. reference: computes what the policy is compared with in the same pass.
    temperature: that logits are divided by. context: the ranks that share this one's micro-batches.
    towers: the parts that compute images. neftune_alpha: of noise on the embeddings in training
    (Jain et al. 2023).
    """

    model: PreTrainedModel
    ranks: Ranks
    collator: Collator
    precision: Precision
    attention: str | None = None
    reference: ReferencePass | None = None
    temperature: float = 1.0
    context: ContextGroup = field(default_factory=ContextGroup)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    towers: Sequence[nn.Module] = ()
    neftune_alpha: float = 0.0

    def __post_init__(self) -> None:
        self.loss_of_tokens: HeadLoss = partial(
            loss_of_logits, self.model, temperature=self.temperature
        )
        self._lengths: torch.Tensor | int = 1  # of each token's row, [1, T, 1], or of all
        if self.neftune_alpha:
            self.model.get_input_embeddings().register_forward_hook(self._add_noise)

    def _add_noise(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        if not self.model.training:
            return output
        noise = torch.empty_like(output).uniform_(-1, 1)  # of the micro-batch's own seed
        return output + (
            noise * (self.neftune_alpha * (self._lengths * output.shape[-1]) ** -0.5)
        ).to(output.dtype)

    def probe(self) -> None:
        """Find how the loss can be computed, with a few tokens. Called on every rank.

        Raises:
            UserError: a reference cannot pass through the model beside the policy.
        """
        input_ids = probes.few_tokens(self.model)
        documents = (
            {} if self.collator.schedule.padding else describe_documents([input_ids.shape[1]])
        )
        # Every rank has all of these tokens, and shares none of them.
        attention = attending(self.model, self.attention)
        with attention, self.precision.autocasting(self.ranks.device):
            inputs = to_device({"input_ids": input_ids} | documents, self.ranks.device)
            if self.reference:
                beside = (
                    inputs_with_teacher(inputs, inputs) if self.collator.has_teacher else inputs
                )
                probes.check_reference(self.model, self.reference, inputs, beside)
            with same_tokens(self.model, input_ids):
                head_loss = probes.probe_head_loss(self.model, inputs, self.temperature)
            self.loss_of_tokens = head_loss or self.loss_of_tokens

    def token_losses(
        self, batch: MicroBatch, *, reduction: Reduction, alone: bool = False
    ) -> tuple[torch.Tensor, MicroBatch]:
        """The losses of a micro-batch's targets, float32, and the micro-batch on the device.

        Args:
            reduction: as of HeadLoss: "sum" over the targets, []; "none": [1, N], or [2, N] with
                the reference's. A teacher gets what it found before from the micro-batch.
            alone: without the reference.
        """
        on_device = batch.to(self.ranks.device, per_document=reduction == "none")
        reference = (
            self.reference.beside_policy()
            if self.reference and not alone
            else contextlib.nullcontext()
        )
        looked_up = tokens_known(
            self.model,
            batch.tokens_of_ranks,
            first=batch.input_ids.numel(),
            has_images=batch.calls_towers,
        )
        towers = (
            gathered(self.towers, is_used=bool(batch.images))
            if batch.calls_towers
            else contextlib.nullcontext()
        )
        self._lengths = batch.input_ids.shape[1]
        if self.neftune_alpha and (ends := on_device.documents.get("cu_seq_lens_q")) is not None:
            of_rows = ends.diff()
            self._lengths = of_rows.repeat_interleave(of_rows, output_size=self._lengths)[
                :, None
            ].to(torch.float32)
        inputs = on_device.model_inputs | (
            {"context_group": self.context} if self.context.size > 1 else {}
        )
        if isinstance(reduction, Teacher):
            ids, logps = (on_device.answers.get(f"teacher_{name}") for name in ("ids", "logps"))
            reduction = reduction._replace(ids=ids, logps=logps)
        if reduction == "sum" and "weights" in on_device.answers:
            reduction = on_device.answers["weights"]
        with self.precision.autocasting(self.ranks.device), reference, looked_up, towers:
            losses = self.loss_of_tokens(
                inputs, on_device.target_rows, on_device.targets, reduction=reduction
            )
        return losses, on_device

    def attending(self) -> contextlib.AbstractContextManager[None]:
        """Attention that does not cross rows, in forward and in backward passes, which may
        recompute.
        """
        return attending(self.model, self.attention)


def sum_documents(losses: torch.Tensor, batch: MicroBatch, context: ContextGroup) -> LogProbs:
    """Log-probabilities of a micro-batch's documents, on the device, from its tokens' losses, [1,
    N] or [2, N].

    context: the ranks that share the micro-batch, each with the losses of its own tokens.
    """
    documents = losses.split([*batch.num_targets, losses.shape[1] - sum(batch.num_targets)], dim=1)[
        :-1
    ]
    sums = [-part.sum(dim=1) for part in documents]
    policy, *beside = context.summed(torch.stack(sums, dim=1)) if sums else losses[:, :0]
    precomputed = batch.reference if len(batch.reference) else torch.zeros_like(policy)
    return LogProbs(policy, beside[0].detach() if beside else precomputed, batch.target_counts)


@torch.no_grad()
def document_logprobs(forward: ForwardPass, batches: Iterable[MicroBatch]) -> Iterator[LogProbs]:
    """Log-probabilities of the documents of each micro-batch. Called on every rank."""
    forward.model.eval()
    with forward.attending():
        for batch in batches:
            forward.heartbeat.beat(forward.heartbeat.step, "compute")
            yield sum_documents(*forward.token_losses(batch, reduction="none"), forward.context)


def log_probabilities(forward: ForwardPass, table: TokenizedRows) -> np.ndarray:
    """Log-probability of each document under the current weights, float32 [documents]. Called on
    every rank.
    """
    logps = torch.zeros(len(table.document_targets), device=forward.ranks.device)
    # both documents of a row with a label
    rows_of = table.as_documents if len(table.desired) else table
    batches = forward.collator.lay_out_evaluation(rows_of, np.arange(len(rows_of)))
    shown = tqdm(batches, "Reference", unit=" micro-batches", disable=not forward.ranks.is_rank_0)
    for rows, answers in zip(batches.rounds, document_logprobs(forward, shown), strict=True):
        documents = rows_of.documents(rows[forward.collator.data_rank])
        logps[torch.from_numpy(documents).to(logps.device)] = answers.policy
    reshard_all(forward.model)
    # a document has its value on the ranks that share it, and is 0 on the others
    dist.all_reduce(logps)
    return (logps / forward.context.size).cpu().numpy()


def likeliest_of_rows(
    forward: ForwardPass, table: TokenizedRows, rows: np.ndarray, wanted: Likeliest
) -> np.ndarray:
    """Find the likeliest tokens at the targets of consecutive rows: see `divergence.likeliest`.

    Called on every rank, with the same rows; the collator numbers the targets
    (data/batches/taught.py).
    """
    first = int(table.num_targets[: rows[0]].sum())
    count = int(table.num_targets[rows].sum())
    batches = forward.collator.lay_out_evaluation(table, rows)
    return _by_target(
        forward, batches, wanted, np.zeros((count, 2 * wanted.k + 1), np.float32), first
    )


def token_logprobs(
    forward: ForwardPass, table: TokenizedRows, *, at_start: bool = False
) -> np.ndarray:
    """Log-probability of each learned token under the current weights or the first, float32
    [tokens], 0 of others.

    Called on every rank, with the same rows.
    """
    with as_at_start(adapted_layers(forward.model) if at_start else ()):
        return 0 - _by_token(forward, table, "none", width=1)[:, 0]


def likeliest_of_tokens(
    forward: ForwardPass, table: TokenizedRows, wanted: Likeliest
) -> np.ndarray:
    """The likeliest tokens in the place of each learned token: `divergence.likeliest` of [tokens],
    0 of others.

    Called on every rank, with the same rows.
    """
    return _by_token(forward, table, wanted, width=2 * wanted.k + 1)


def _by_token(
    forward: ForwardPass, table: TokenizedRows, reduction: Reduction, *, width: int
) -> np.ndarray:
    table = dataclasses.replace(table, advantages=np.zeros(len(table), np.float32))
    # In the micro-batches of the step: in 16 bits another shape takes another kernel, which rounds
    # differently.
    batches = forward.collator.lay_out_step(table, np.arange(len(table)))
    return _by_target(
        forward, batches, reduction, np.zeros((len(table.input_ids), width), np.float32)
    )


@torch.no_grad()
def _by_target(
    forward: ForwardPass, batches: Batches, reduction: Reduction, empty: np.ndarray, first: int = 0
) -> np.ndarray:
    """Values of all ranks' targets, which the collator numbers from `first` on, in the rows of
    `empty`.
    """
    found = torch.from_numpy(empty)  # on the host: a teacher's of 256 rows are large
    forward.model.eval()
    with forward.attending():
        for batch in batches:
            forward.heartbeat.beat(forward.heartbeat.step, "compute")
            values, on_device = forward.token_losses(batch, reduction=reduction, alone=True)
            is_target = on_device.targets >= 0
            found[(on_device.answers["table_indices"][is_target] - first).cpu()] = values.T[
                is_target
            ].cpu()
    reshard_all(forward.model)
    for part in found.split(_REDUCED):
        here = part.to(forward.ranks.device)
        dist.all_reduce(here)  # a token is a target on one rank
        part.copy_(here)
    return empty
