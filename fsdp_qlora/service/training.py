"""Passes and optimizer steps for the requests of clients, with one adapter at a time."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from tinker import types

from fsdp_qlora.data.batches.micro_batch import IGNORE_INDEX, MicroBatch
from fsdp_qlora.data.batches.rows import Numbers, TokenizedRows
from fsdp_qlora.distributed.process_group import gather_numbers
from fsdp_qlora.service.adapter_store import AdapterState, AdapterStore
from fsdp_qlora.service.losses import LOSSES
from fsdp_qlora.service.train_request import TrainRequest
from fsdp_qlora.training.cross_entropy import CrossEntropy
from fsdp_qlora.utils.errors import UserError


class RequestTargets:
    """Gives the collator the values of the request in work, if there is one."""

    def __init__(self) -> None:
        self.request: TrainRequest | None = None

    def __call__(self, table: TokenizedRows, rows: Numbers) -> dict[str, torch.Tensor]:
        """The inputs of the rows' losses; none for rows that are only scored."""
        return self.request.target_values(rows) if self.request is not None else {}


@dataclass(eq=False)
class RequestTrainer:
    """Trains the adapters of a model. Every rank makes the same calls.

    targets: that the trainer's collator asks.
    """

    adapters: AdapterStore
    targets: RequestTargets

    def forward_backward(self, adapter: AdapterState, request: TrainRequest, seq: int) -> bytes:
        """The answer to a request: the summed loss, and the targets' log-probabilities.

        Args:
            seq: number of the request, which seeds its dropout.
        """
        trainer = self.adapters.trainer
        ranks = self.adapters.trainer.ranks
        self.adapters.activate(adapter)
        batches = trainer.collator.lay_out_step(request.table, np.arange(len(request.table)))
        found = torch.zeros(request.values["places"].size, device=ranks.device)
        total = torch.zeros((), device=ranks.device)

        def loss_of_batch(batch: MicroBatch) -> torch.Tensor:
            loss, logps, places = self._loss(request, batch)
            total.add_(loss.detach())
            found[places] = logps
            return loss

        self.targets.request = request
        try:
            trainer.accumulate(seq, batches, loss_of_batch, backward=not request.forward_only)
        finally:
            self.targets.request = None
        # A target is on one rank, and the others have zero there.
        dist.all_reduce(found)
        dist.all_reduce(total)
        logprobs = found.view(len(request.values["places"]), -1).cpu().numpy()
        return request.encode(logprobs, {"loss:sum": total.item()})

    def _loss(
        self, request: TrainRequest, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A micro-batch's loss; its targets' log-probabilities, and their places in the request."""
        forward = self.adapters.trainer.forward
        losses, on_device = forward.token_losses(
            request.with_targets(batch), CrossEntropy(by_token=True)
        )
        is_target = on_device.targets != IGNORE_INDEX
        logps = -losses[0]
        given = on_device.target_values
        loss = LOSSES[request.loss]

        def documents(values: torch.Tensor) -> torch.Tensor:
            sums = values.new_zeros(len(request.table)).index_add(
                0, given["datum"], values * is_target
            )
            return forward.context.summed(sums)[given["datum"]]

        values = torch.where(is_target, loss.sum(logps, given, request.config, documents), 0.0)
        return values.sum(), logps.detach()[is_target], given["places"][is_target]

    def optim_step(self, adapter: AdapterState, params: types.AdamParams) -> dict[str, float]:
        """Update an adapter by its gradients; returns the step's metrics.

        Raises:
            UserError: the step would leave weights that are not finite.
        """
        self.adapters.activate(adapter)
        trainer = self.adapters.trainer
        for parameter in self.adapters.frozen(adapter):
            parameter.grad = None
        trainer.optimizer.take_gradients()
        squares = gather_numbers([sum(trainer.optimizer.squared_norms())], trainer.ranks.device)
        norm = trainer.grad_norm(squares.sum().item())
        trainer.apply(
            norm,
            params.learning_rate,
            params.grad_clip_norm,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        if math.isfinite(norm):
            adapter.steps += 1
            # The shards are lost with it; the scheduler brings the model back without this step.
            if not self.adapters.is_finite():
                self.adapters.abandon()
                raise UserError(
                    f"The step would leave weights that are not finite; it is not taken: {params}."
                )
        # JSON has no infinity.
        metrics = {
            "grad_norm": norm if math.isfinite(norm) else -1.0,
            "skipped": float(not math.isfinite(norm)),
        }
        return metrics
