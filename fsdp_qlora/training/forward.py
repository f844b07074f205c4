"""A forward pass of the sharded model: from the rows of a round to the losses of this rank's tokens."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.data.batches.micro_batch import MicroBatch, concatenate_rows, describe_documents, pad_rows
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import Round, Schedule
from fsdp_qlora.data.batches.streaming import read_ahead
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.distributed.context import ContextGroup
from fsdp_qlora.distributed.device import to_device
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.clock import Heartbeat
from fsdp_qlora.model.architecture.attention import attending
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.sharding.parallelize import gathered
from fsdp_qlora.sharding.recompute import ReferencePass
from fsdp_qlora.sharding.vocabulary import same_tokens, sharing_ranks, tokens_known
from fsdp_qlora.training import probes
from fsdp_qlora.training.head_loss import HeadLoss, Reduction, loss_of_logits
from fsdp_qlora.utils.errors import UserError

_AHEAD = 2  # micro-batches


@dataclass(eq=False)
class ForwardPass:
    """Lays out micro-batches and computes their losses.

    attention: the implementation for documents, as of the model's plan; None if rows are padded. shares_prompts: what
    both answers of a pair begin with is computed once. reference: computes what the policy is compared with in the same
    pass. temperature: that logits are divided by. image_processor: for rows with images; towers: the parts that
    compute these. context: the ranks that share this one's micro-batches.
    """

    model: PreTrainedModel
    ranks: Ranks
    schedule: Schedule
    precision: Precision
    pad_token_id: int
    attention: str | None = None
    shares_prompts: bool = False
    reference: ReferencePass | None = None
    temperature: float = 1.0
    context: ContextGroup = field(default_factory=ContextGroup)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    image_processor: ImageProcessor | None = None
    towers: Sequence[nn.Module] = ()

    def __post_init__(self) -> None:
        self.sharing_ranks = sharing_ranks(self.model)
        self.loss_of_tokens: HeadLoss = partial(loss_of_logits, self.model, temperature=self.temperature)

    def probe(self) -> None:
        """Find how the loss can be computed, with a few tokens. Called on every rank.

        Raises:
            UserError: a reference cannot pass through the model beside the policy.
        """
        input_ids = probes.few_tokens(self.model)
        documents = {} if self.schedule.padding else describe_documents([input_ids.shape[1]])
        with self.attending(), self.autocast(), same_tokens(self.model, input_ids):
            inputs = to_device({"input_ids": input_ids, **documents}, self.ranks.device)
            if self.reference:
                probes.check_reference(self.model, self.reference, inputs)
            found = probes.probe_head_loss(self.model, inputs, self.temperature)
            self.loss_of_tokens = found or self.loss_of_tokens

    def micro_batch(self, rows: Round, table: TokenizedRows) -> MicroBatch:
        """This rank's part of a round, with what it must know of the ranks that share the vocabulary with it."""
        size, ranks = self.context.size, {self.ranks.rank, *self.sharing_ranks}
        whole = {each: self._lay_out(rows[each], table) for each in {rank // size for rank in ranks}}
        batches = {rank: whole[rank // size].part(self.context, rank % size) for rank in ranks}
        own, sharing = batches[self.ranks.rank], [batches[rank] for rank in self.sharing_ranks]
        if len(table.images) and table.image_sizes[np.concatenate(rows), 0].any():
            own = self._with_images(own, rows, table)
        return own.beside(sharing) if sharing else own

    def micro_batches(self, rounds: Sequence[Round], table: TokenizedRows) -> Iterable[MicroBatch]:
        """This rank's part of each round; with images made in a thread, a few ahead of their use."""
        made = (self.micro_batch(rows, table) for rows in rounds)
        return read_ahead(made, num=_AHEAD) if len(table.images) else [*made]

    def _with_images(self, own: MicroBatch, rows: Round, table: TokenizedRows) -> MicroBatch:
        assert self.image_processor is not None
        if not self.schedule.padding:
            raise UserError("Rows with images follow rows without in this stream. Give --batching padded.")
        names = [[*map(bytes, table.images_of(row))] for row in rows[self.data_rank]]
        taken = inspect.signature(type(self.model).forward).parameters
        images = self.image_processor.model_inputs([*filter(None, names)], own.input_ids, taken) if any(names) else {}
        return dataclasses.replace(own, images=images, calls_towers=True)

    def _lay_out(self, rows: np.ndarray, table: TokenizedRows) -> MicroBatch:
        if self.schedule.padding:
            return pad_rows(table, rows, pad_token_id=self.pad_token_id)
        return concatenate_rows(
            table,
            rows,
            pad_token_id=self.pad_token_id,
            shares_prompts=self.shares_prompts,
            num_parts=self.context.size,
        )

    @property
    def data_rank(self) -> int:
        """The place of this rank's micro-batch in a round."""
        return self.ranks.rank // self.context.size

    def eval_rounds(self, rows: np.ndarray, table: TokenizedRows) -> list[Round]:
        """The rounds of an evaluation of some rows."""
        size = self.schedule.batch_size * self.schedule.data_size
        # Padded rows keep the order in which their losses were always added.
        parts = [rows[i : i + size] for i in range(0, len(rows), size)] if self.schedule.padding else [rows]
        return [each for part in parts for each in self.schedule.rounds(part, table.lengths)]

    def token_losses(
        self, batch: MicroBatch, *, reduction: Reduction, alone: bool = False
    ) -> tuple[torch.Tensor, MicroBatch]:
        """The losses of a micro-batch's targets, float32, and the micro-batch on the device.

        Args:
            reduction: as of HeadLoss: "sum" over the targets, []; "none": [1, N], or [2, N] with the reference's.
            alone: without the reference.
        """
        on_device = batch.to(self.ranks.device, per_document=reduction == "none")
        reference = self.reference.beside_policy() if self.reference and not alone else contextlib.nullcontext()
        known = tokens_known(self.model, batch.tokens_of_ranks, first=batch.input_ids.numel())
        towers = gathered(self.towers, is_used=bool(batch.images)) if batch.calls_towers else contextlib.nullcontext()
        with self.autocast(), reference, known, towers:
            losses = self.loss_of_tokens(
                on_device.model_inputs, on_device.target_rows, on_device.targets, reduction=reduction
            )
        return losses, on_device

    def attending(self) -> contextlib.AbstractContextManager[None]:
        """Attention that does not cross rows, in forward and in backward passes, which may recompute."""
        return attending(self.model, self.attention)

    def autocast(self) -> torch.autocast:
        return torch.autocast(
            self.ranks.device.type, dtype=self.precision.compute_dtype, enabled=self.precision.autocast
        )
