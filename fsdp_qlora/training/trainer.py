"""One optimizer step and one evaluation of a sharded model, for all train types.

The loop over steps is in loop.py.
"""

import logging
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fsdp_qlora.data.batches.collator import Batches
from fsdp_qlora.data.batches.micro_batch import MicroBatch
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import StepRows
from fsdp_qlora.data.longest_rows import LongestRows
from fsdp_qlora.distributed.process_group import gather_numbers
from fsdp_qlora.distributed.ranks import derive_seed
from fsdp_qlora.distributed.supervision.stops import NUM_FLAGS, Control
from fsdp_qlora.sharding.groups import reshard_all, set_gradient_sync
from fsdp_qlora.sharding.optimizer import ShardedOptimizer
from fsdp_qlora.sharding.recompute import has_graphs
from fsdp_qlora.training.forward import ForwardPass
from fsdp_qlora.training.loss_scale import LossScale
from fsdp_qlora.training.objective import TokenMean, Totals
from fsdp_qlora.utils.errors import NotFinite

log = logging.getLogger("fsdp_qlora")


# name -> multiple of the peak learning rate at a progress in [0, 1] after the warm-up.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


@dataclass(frozen=True)
class TrainerOptions:
    """Options of the training steps."""

    learning_rate: float
    """The peak, after the warm-up."""
    lr_scheduler: str
    """A name in SCHEDULES."""
    warmup_steps: int
    total_steps: int
    """Steps of the run, the warm-up included."""
    max_grad_norm: float
    """Gradients are clipped to this norm; inf for no clipping."""
    num_replicas: int
    """Copies of the model among the ranks."""
    sync_every_micro_batch: bool
    """Reduce gradients after each micro-batch, if they are too large to accumulate unsharded."""
    on_nonfinite: str
    """halt or skip."""
    eval_steps: int
    """Steps between two evaluations; 0 for none."""
    early_stopping: int
    """Evaluations in a row without a lower loss after which the run ends; 0 for no such end."""
    seed: int
    """The seed of the dropout."""

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: linear warm-up, then the schedule."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.learning_rate * SCHEDULES[self.lr_scheduler](progress)


class _Exchanged(NamedTuple):
    """Numbers of a step that every rank has after the exchange.

    sums: the loss and the objective's metrics, summed over all ranks. grad_norm: of the whole
    model's gradient, without the loss scale. memory: each rank's figures in GiB, [ranks, values].
    """

    sums: list[float]
    grad_norm: float
    memory: torch.Tensor


class Trainer:
    """Runs optimizer steps and evaluations of one sharded model."""

    def __init__(
        self,
        forward: ForwardPass,
        optimizer: ShardedOptimizer,
        objective: TokenMean,
        options: TrainerOptions,
        control: Control,
    ) -> None:
        self.forward = forward
        self.optimizer = optimizer
        self.objective = objective
        self.options = options
        self.control = control
        self.model = forward.model
        self.ranks = forward.ranks
        self.collator = forward.collator
        self.schedule = self.collator.schedule
        self.heartbeat = control.heartbeat
        # FSDP2 reduces gradients in every backward pass until it is told otherwise.
        self.gradient_sync = True
        # bf16 has the exponent of float32, so only fp16 gradients can become zero.
        self.loss_scale = LossScale(enabled=forward.precision.compute_dtype == torch.float16)
        # (GiB reserved) -> number of blocks that recompute; set by planning/fit.py
        self.watch_memory: Callable[[float], int] | None = None

    def train_step(self, data: StepRows) -> dict[str, Any]:
        """Run one optimizer step over the rows of all ranks; returns its metrics.

        The loss is a sum over target tokens divided by the step's number of target tokens on all
        ranks, so it does not depend on how the rows are split over ranks and micro-batches.
        In fp16 a step may update no weight. Afterwards `control` says whether all ranks stop or
        save now.

        Raises:
            NotFinite: the loss or the gradient is not finite and the run halts; the weights are
                unchanged.
        """
        started = time.perf_counter()
        step = data.step
        self.heartbeat.beat(step, "rows")
        batches = self.collator.lay_out_step(data.table, data.rows)
        totals = self.objective.totals(batches, self.forward)

        measured = self._forward_backward(step, batches, totals)
        self.optimizer.take_gradients()
        exchanged = self._exchange(step, measured)

        self.heartbeat.beat(step, "update")
        scale = self.loss_scale.scale
        is_finite = self._is_finite(step, batches, measured, exchanged)
        # An overflow in fp16 counts as finite for the run: the step is left out, and the loss scale
        # falls.
        if is_finite:
            self.apply(exchanged.grad_norm, self.options.lr_at(step), self.options.max_grad_norm)
        else:
            self.optimizer.zero_grad()

        record = self._record(data, batches, totals, exchanged, started)
        if not is_finite:
            record["skipped"] = True
        if self.loss_scale.enabled:
            # The scale of this step's gradients, which the update may have changed for the next.
            record["loss_scale"] = scale
        if self.watch_memory:
            # All ranks have the same figures, so all change their blocks at the same step.
            reserved_gib = exchanged.memory[:, -1].max().item()
            record["recompute"] = self.watch_memory(reserved_gib)
        return record

    def _forward_backward(self, step: int, batches: Batches, totals: Totals) -> list[torch.Tensor]:
        """Accumulate the gradients of a step's mean loss.

        Returns:
            The loss and the metrics of each micro-batch, as `_loss`, still on the device.
        """
        measured = list[torch.Tensor]()

        def loss_of_batch(micro_batch: MicroBatch) -> torch.Tensor:
            numbers = self._loss(micro_batch, totals)
            # Reading a value here would make the host wait for the device in each micro-batch.
            measured.append(numbers.detach())
            return numbers[0]

        self.accumulate(step, batches, loss_of_batch, divisor=totals.divisor)
        return measured

    def accumulate(
        self,
        step: int,
        batches: Batches,
        loss_of_batch: Callable[[MicroBatch], torch.Tensor],
        *,
        divisor: float = 1.0,
        backward: bool = True,
    ) -> None:
        """Run this rank's micro-batches forward and backward, and accumulate their gradients.

        Args:
            step: number that seeds the dropout.
            loss_of_batch: gives a micro-batch's part of a sum over all ranks, float32 [].
            divisor: divides the sum.
            backward: False for forward passes alone, without dropout.
        """
        # FSDP2 averages gradients over ranks, where the loss is a sum over all of them: the number
        # of ranks turns the average into a sum.
        factor = self.loss_scale.scale * self.ranks.world_size / divisor
        self.model.train(backward)
        # The backward passes are in it, too, since they compute blocks again that recompute.
        with self.forward.attending(), torch.set_grad_enabled(backward):
            # Every rank has the same number of micro-batches, since each forward and backward pass
            # has collectives. A rank without rows for a round computes tokens without a target.
            for index, micro_batch in enumerate(batches):
                self._prepare(step, index, is_last=index == len(batches) - 1)
                loss = loss_of_batch(micro_batch)
                if backward:
                    (loss * factor).backward()
        # Without a backward pass, which would free them, weights may stay gathered.
        if not backward:
            reshard_all(self.model)

    def _loss(self, micro_batch: MicroBatch, totals: Totals) -> torch.Tensor:
        """Compute a micro-batch's part of the loss, and the objective's metrics of it.

        Returns:
            float32 [1 + metrics]: the loss, then the metrics without gradient.
        """
        objective = self.objective
        loss = objective.loss
        if self.model.training and objective.learned_loss:
            loss = objective.learned_loss
        losses, on_device = self.forward.token_losses(
            micro_batch, loss, per_document=objective.per_document
        )
        return objective.measure(losses, on_device, totals)

    def _prepare(self, step: int, index: int, *, is_last: bool) -> None:
        """Make ready for this rank's next micro-batch: heartbeat, gradient sync and random seed."""
        self.heartbeat.beat(step, "compute")
        # Gradients accumulate unsharded on each rank, and are reduced once, after the last one.
        self._set_gradient_sync(is_last or self.options.sync_every_micro_batch)
        # The seed depends on the micro-batch alone, and on nothing that was drawn before: a resumed
        # run draws the same dropout masks.
        global_index = index * self.schedule.data_size + self.collator.data_rank
        # Ranks that share a micro-batch have other tokens of it, and need other masks.
        context_rank = self.forward.context.rank
        part = (context_rank,) if context_rank else ()
        torch.manual_seed(derive_seed("dropout", self.options.seed, step, global_index, *part))

    def _exchange(self, step: int, measured: list[torch.Tensor]) -> _Exchanged:
        """Share the step's numbers: the only exchange besides those in forward and backward.

        It also carries the flags by which the ranks of `control` agree whether to stop or save.
        Only at its end does the host wait for the device, once in a step.
        """
        self.heartbeat.beat(step, "exchange")
        # In float64, rounding stays so small that the split over micro-batches and ranks does not
        # show in the float32 digits of the sums.
        sums = torch.stack(measured, dim=1).double().sum(dim=1)
        # Squares add up over shards and over devices; norms do not.
        squared_norm = sum(self.optimizer.squared_norms())
        local = [*sums, squared_norm, *self.control.flags(step), *self._memory_gib()]
        numbers = gather_numbers(local, self.ranks.device)
        # Columns: the sums, the squared norm, the flags, and memory.
        first_flag = len(sums) + 1
        first_memory = first_flag + NUM_FLAGS
        self.control.agree(numbers[:, first_flag:first_memory])
        *totals, total_squared_norm = numbers[:, :first_flag].sum(dim=0).tolist()
        return _Exchanged(totals, self.grad_norm(total_squared_norm), numbers[:, first_memory:])

    def grad_norm(self, squared_norms: float) -> float:
        """The norm of the model's gradient, without the loss scale.

        squared_norms: the optimizer's, summed over all ranks.
        """
        # Every replica of the model has the whole gradient, which was counted once for each.
        return math.sqrt(squared_norms / self.options.num_replicas) / self.loss_scale.scale

    def apply(self, grad_norm: float, lr: float, max_grad_norm: float, **options: Any) -> None:
        """Update the weights, unless the gradient has overflowed, and free the gradients.

        Args:
            grad_norm: from `grad_norm`; an overflow makes the loss scale fall.
            max_grad_norm: gradients are clipped to this norm; 0 or inf for no clipping.
            options: of the optimizer, such as betas, from now on.
        """
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            self._clip_and_unscale(grad_norm, max_grad_norm)
            self.optimizer.step(lr, **options)
        # The gradients' memory is of FSDP2's reduction stream, which waits for this one before it
        # writes there again.
        self.optimizer.zero_grad()
        self.loss_scale.update(overflowed=not is_finite)

    def _clip_and_unscale(self, grad_norm: float, limit: float) -> None:
        """Take the loss scale out of the gradients, and clip their norm to a limit above 0."""
        clipping = limit / grad_norm if grad_norm > limit > 0 else 1.0
        # One factor for both, so that the gradients are read and written once.
        factor = clipping / self.loss_scale.scale
        if factor != 1.0:
            self.optimizer.scale_gradients(factor)

    def _record(
        self,
        data: StepRows,
        batches: Batches,
        totals: Totals,
        exchanged: _Exchanged,
        started: float,
    ) -> dict[str, Any]:
        """The metrics of a step, in the order of metrics.jsonl.

        started: when the step began.
        """
        sizes = batches.sizes()
        seconds = time.perf_counter() - started
        record: dict[str, Any] = {
            "step": data.step + 1,
            "epoch": (data.step + 1) / self.schedule.steps_per_epoch,
            "loss": exchanged.sums[0] / totals.divisor,
            "grad_norm": exchanged.grad_norm,
            "lr": self.options.lr_at(data.step),
            "num_target_tokens": batches.num_targets,
        }
        record |= data.metrics
        record |= self.objective.means(exchanged.sums, totals)
        record |= sizes
        record["tokens_per_second"] = sizes["num_tokens"] / seconds
        record["step_seconds"] = seconds
        record["memory_gib"] = self._memory_record(exchanged.memory)
        return record

    def try_longest(self, longest: LongestRows) -> None:
        """Run the longest micro-batch forward and backward, so that a lack of memory shows now.

        Every rank runs it, and no step is taken. Memory for the optimizer's state is allocated
        meanwhile, and gradients are accumulated if the run does so. The run's numbers do not
        change: every step seeds its own randomness, and the gradients are discarded.
        """
        self.try_micro_batch(longest)
        if has_graphs(self.model):
            # They are captured when inputs of a form come again.
            self.try_micro_batch(longest)

    def try_micro_batch(self, longest: LongestRows) -> int:
        """Run a micro-batch forward and backward; returns the bytes allocated in between.

        Returns:
            The maximum bytes that are allocated on the GPU between a forward and a backward pass,
            when all activations are kept; 0 on a CPU.
        """
        self.heartbeat.beat(self.heartbeat.step, "compute")
        self.model.train()
        state = self.optimizer.room_for_state()
        # The second of two rounds computes beside the first one's accumulated gradients; a third
        # would need no more memory.
        batches = self.collator.repeated(longest.table, longest.rows, min(2, longest.num_rounds))
        most_bytes = 0
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            self._set_gradient_sync(is_last or self.options.sync_every_micro_batch)
            with self.forward.attending():
                loss = self._loss(batch, self.objective.totals(batches))[0]
                if self.ranks.device.type == "cuda":
                    most_bytes = max(most_bytes, torch.cuda.memory_allocated())
                loss.backward()
        del state
        self.optimizer.zero_grad()
        return most_bytes

    @torch.no_grad()
    def evaluate(self, step: int, table: TokenizedRows, rows: np.ndarray) -> dict[str, Any] | None:
        """Compute the mean loss of rows without an update. Called on every rank.

        Returns:
            The mean over target tokens, in nats, and its exponential, the perplexity; for pairs the
            mean over pairs and the objective's metrics. None if all ranks have agreed to stop.
        """
        self.model.eval()
        batches = self.collator.lay_out_evaluation(table, rows)
        measured = list[torch.Tensor]()
        totals = self.objective.totals(batches, self.forward)
        with self.forward.attending():
            for micro_batch in batches:
                self.heartbeat.beat(step, "evaluate")
                measured.append(self._loss(micro_batch, totals).double())
                # An evaluation may take long. All ranks decide together, so none waits in a
                # collective for one that has left.
                self.control.agree(gather_numbers(self.control.flags(step), self.ranks.device))
                if self.control.stop:
                    break
        # FSDP2 keeps the root's weights gathered until the backward pass, and here is none.
        reshard_all(self.model)
        if self.control.stop:
            return None
        local_sums = torch.stack(measured, dim=1).sum(dim=1)
        sums = gather_numbers([*local_sums], self.ranks.device).sum(dim=0).tolist()
        mean_loss = sums[0] / totals.divisor
        record: dict[str, Any] = {"eval_loss": mean_loss}
        record |= self.objective.describe_loss(mean_loss)
        record |= self.objective.means(sums, totals)
        record["num_target_tokens"] = batches.num_targets
        return record

    def _set_gradient_sync(self, enabled: bool) -> None:
        # FSDP2's setter walks all modules, so it is called for a change alone.
        if enabled != self.gradient_sync:
            set_gradient_sync(self.model, enabled)
            self.gradient_sync = enabled

    def _is_finite(
        self,
        step: int,
        batches: Batches,
        measured: list[torch.Tensor],
        exchanged: _Exchanged,
    ) -> bool:
        """Whether the step's numbers are finite. Called on every rank.

        A gradient's overflow that a smaller loss scale avoids is no fault.

        Raises:
            NotFinite: they are not, and the run halts; the samples are named.
        """
        loss_sum = exchanged.sums[0]
        grad_norm = exchanged.grad_norm
        # Every rank has the same numbers, so all take the same branch, and all or none of them
        # take part in the gathering below.
        if math.isfinite(loss_sum) and math.isfinite(grad_norm):
            return True
        if math.isfinite(loss_sum) and self.loss_scale.can_fall:
            scale = self.loss_scale.scale
            log.info(
                "Step %d is skipped: its gradients overflowed at a loss scale of %g, now halved.",
                step + 1,
                scale,
            )
            return True
        # [ranks, micro-batches]
        losses = gather_numbers([numbers[0] for numbers in measured], self.ranks.device)
        places = (~losses.isfinite()).nonzero().tolist()
        bad = [(index, rank) for rank, index in places]
        fault = "loss" if bad else "gradient"
        message = (
            f"Step {step + 1}: the {fault} is not finite (gradient norm "
            f"{grad_norm}), with samples {batches.describe_samples(bad)} of the dataset. No weight "
            "was updated in this step."
        )
        if self.options.on_nonfinite == "halt":
            raise NotFinite(
                f"{message} Look at these rows. A lower --lr or --precision bf16/fp32 may help; "
                "--on_nonfinite skip skips such steps."
            )
        log.warning("%s It is skipped.", message)
        return False

    def _memory_gib(self) -> list[float]:
        """This rank's peaks so far: allocated and reserved GPU memory, or resident CPU memory."""
        if self.ranks.device.type == "cuda":
            return [
                torch.cuda.max_memory_allocated() / 2**30,
                torch.cuda.max_memory_reserved() / 2**30,
            ]
        # Linux gives kilobytes here.
        return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]

    def _memory_record(self, gathered: torch.Tensor) -> dict[str, list[float]]:
        is_gpu = self.ranks.device.type == "cuda"
        names = ("allocated", "reserved") if is_gpu else ("peak_rss",)
        return {
            name: [round(value, 3) for value in gathered[:, column].tolist()]
            for column, name in enumerate(names)
        }
