"""One optimizer step and one evaluation of a sharded model, for all train types. The loop is in
loop.py.
"""

import logging
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fsdp_qlora.data.batches.micro_batch import Batches, MicroBatch
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import RowsInMemory, StepRows
from fsdp_qlora.distributed.process_group import gather_numbers
from fsdp_qlora.distributed.ranks import derive_seed
from fsdp_qlora.distributed.supervision.stops import NUM_FLAGS, Control
from fsdp_qlora.sharding.optimizer import ShardedOptimizer
from fsdp_qlora.sharding.parallelize import reshard_all, set_gradient_sync
from fsdp_qlora.training.forward import ForwardPass
from fsdp_qlora.training.objective import TokenMean, Totals
from fsdp_qlora.utils.errors import NotFinite

log = logging.getLogger("fsdp_qlora")

_FIRST_SCALE = 2.0**16  # of the loss in fp16; this and the next: defaults of torch.amp.GradScaler
_SCALE_GROWTH_INTERVAL = 2000  # steps without an overflow after which the scale is doubled
_SMALLEST_SCALE = 1.0  # no scaling: an overflow is then the model's own
# name -> multiple of the peak learning rate at a progress in [0, 1] after the warm-up.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


@dataclass(frozen=True)
class TrainerOptions:
    """Options of the training steps.

    learning_rate: after the warm-up. lr_scheduler: of SCHEDULES. total_steps: with those of the
    warm-up. max_grad_norm: gradients are clipped to it, inf for no clipping. num_replicas: copies
    of the model among the ranks. sync_every_micro_batch: reduce gradients after each micro-batch,
    if they are too large to accumulate unsharded. on_nonfinite: halt or skip. eval_steps: steps
    between evaluations, 0 for none. early_stopping: evaluations in a row without a lower loss that
    end the run, 0 for no end.
    """

    learning_rate: float
    lr_scheduler: str
    warmup_steps: int
    total_steps: int
    max_grad_norm: float
    num_replicas: int
    sync_every_micro_batch: bool
    on_nonfinite: str
    eval_steps: int
    early_stopping: int

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: linear warm-up, then the schedule."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.learning_rate * SCHEDULES[self.lr_scheduler](progress)


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
        self.gradient_sync = True  # FSDP2's initial state
        self.loss_scale = LossScale(enabled=forward.precision.compute_dtype == torch.float16)
        # (GiB reserved) -> blocks that recompute
        self.watch_memory: Callable[[float], int] | None = None

    def train_step(self, data: StepRows) -> dict[str, Any]:
        """One optimizer step over the rows of all ranks; returns its metrics. In fp16 a step may
        update no weight.

        The loss is a sum over target tokens divided by the step's number of target tokens on all
        ranks, so it does not depend on how the rows are split over ranks and micro-batches.
        Afterwards `control` says whether all ranks stop or save now.

        Raises:
            NotFinite: the loss or the gradient is not finite and the run halts; the weights are
            unchanged.
        """
        started = time.perf_counter()
        step = data.step
        self.heartbeat.beat(step, "rows")
        batches = self.collator.lay_out_step(data.table, data.rows)
        totals = self.objective.totals(batches, self.forward)
        measured = list[torch.Tensor]()
        scale = self.loss_scale.scale
        self.model.train()
        with self.forward.attending():
            for index, micro_batch in enumerate(batches):
                self.prepare(step, index, is_last=index == len(batches) - 1)
                numbers = self._loss(micro_batch, totals)
                # FSDP2 averages gradients over ranks; the factor turns that into a sum.
                (numbers[0] * (scale * self.ranks.world_size / totals.divisor)).backward()
                measured.append(numbers.detach())
        self.optimizer.take_gradients()
        sums, grad_norm, memory = self._exchange(step, measured)
        self.heartbeat.beat(step, "update")
        lr = self.options.lr_at(step)
        is_finite = self._is_finite(step, batches, measured, sums[0], grad_norm)
        if is_finite and math.isfinite(grad_norm):
            self.clip_and_unscale(grad_norm, self.options.max_grad_norm)
            self.optimizer.step(lr)
        # The gradients' memory is of FSDP2's reduction stream, which waits for this one before it
        # writes there again.
        self.optimizer.zero_grad()
        if is_finite:
            self.loss_scale.update(overflowed=not math.isfinite(grad_norm))
        sizes = batches.sizes()
        seconds = time.perf_counter() - started
        record: dict[str, Any] = {
            "step": step + 1,
            "epoch": (step + 1) / self.schedule.steps_per_epoch,
            "loss": sums[0] / totals.divisor,
            "grad_norm": grad_norm,
            "lr": lr,
            "num_target_tokens": batches.num_targets,
        }
        record |= data.metrics
        record |= self.objective.means(sums, totals)
        record |= sizes
        record["tokens_per_second"] = sizes["num_tokens"] / seconds
        record["step_seconds"] = seconds
        record["memory_gib"] = self._memory_record(memory)
        if not is_finite:
            record["skipped"] = True
        if self.loss_scale.enabled:
            record["loss_scale"] = scale
        if self.watch_memory:
            record["recompute"] = self.watch_memory(memory[:, -1].max().item())
        return record

    def _loss(self, micro_batch: MicroBatch, totals: Totals) -> torch.Tensor:
        """The micro-batch's part of the loss, followed by the objective's metrics without gradient;
        float32.
        """
        losses, on_device = self.forward.token_losses(
            micro_batch, reduction=self.objective.reduction
        )
        return self.objective.measure(losses, on_device, totals)

    def prepare(self, step: int, index: int, *, is_last: bool) -> None:
        """Before this rank's micro-batch: signs of life,
        gradient synchronization and randomness.
        """
        self.heartbeat.beat(step, "compute")
        self._set_gradient_sync(is_last or self.options.sync_every_micro_batch)
        # Randomness depends on the micro-batch alone, so that a run can be resumed.
        global_index = index * self.schedule.data_size + self.collator.data_rank
        # of the micro-batch
        part = (self.forward.context.rank,) if self.forward.context.rank else ()
        torch.manual_seed(derive_seed("dropout", self.schedule.seed, step, global_index, *part))

    def clip_and_unscale(self, grad_norm: float, limit: float) -> None:
        """Take the loss scale out of the gradients, and clip their norm to a limit above 0."""
        factor = (limit / grad_norm if grad_norm > limit > 0 else 1.0) / self.loss_scale.scale
        if factor != 1.0:
            self.optimizer.scale_gradients(factor)

    def _exchange(
        self, step: int, measured: list[torch.Tensor]
    ) -> tuple[list[float], float, torch.Tensor]:
        """The step's only communication besides FSDP2's: the sums of what was measured, the
        gradient norm, and memory.

        It also carries the flags by which the ranks of `control` agree whether to stop or save.
        Only at its end does the host wait for the device, once in a step.
        """
        self.heartbeat.beat(step, "exchange")
        sums = torch.stack(measured, dim=1).double().sum(dim=1)
        squared_norm = sum(self.optimizer.squared_norms())
        local = [*sums, squared_norm, *self.control.flags(step), *self._memory_gib()]
        numbers = gather_numbers(local, self.ranks.device)
        flags = len(sums) + 1
        self.control.agree(numbers[:, flags : flags + NUM_FLAGS])
        *totals, total_squared_norm = numbers[:, :flags].sum(dim=0).tolist()
        grad_norm = (
            math.sqrt(total_squared_norm / self.options.num_replicas) / self.loss_scale.scale
        )
        return totals, grad_norm, numbers[:, flags + NUM_FLAGS :]

    def try_longest(self, data: RowsInMemory) -> None:
        """Run forward and backward on the run's longest micro-batch, so that a lack of memory shows
        now.

        Every rank runs it, and no step is taken. Memory for the optimizer's state is allocated
        meanwhile, and gradients are accumulated if the run does so. The run's numbers do not
        change: every step seeds its own randomness, and the gradients are discarded.

        Args:
            data: all rows to train on.
        """
        self.try_micro_batch(data.table, *self.longest(data))

    def longest(self, data: RowsInMemory) -> tuple[np.ndarray, int]:
        """The run's longest micro-batch, and the most rounds of a step.

        Goes through the whole run.
        """
        computed = data.table.num_learned_from(shares_prompts=self.collator.shares_prompts)
        return self.schedule.longest_micro_batch(data.rows, data.table.lengths, computed)

    def try_micro_batch(
        self, table: TokenizedRows, micro_batch: np.ndarray, num_rounds: int
    ) -> int:
        """As `try_longest`; returns the most bytes that were allocated between a forward and a
        backward pass.
        """
        self.heartbeat.beat(self.heartbeat.step, "compute")
        self.model.train()
        state = self.optimizer.room_for_state()
        batches = self.collator.repeated(table, micro_batch, min(2, num_rounds))
        held = 0
        for index, batch in enumerate(batches):
            self._set_gradient_sync(
                index == len(batches) - 1 or self.options.sync_every_micro_batch
            )
            with self.forward.attending():
                loss = self._loss(batch, self.objective.totals(batches))[0]
                held = max(held, torch.cuda.memory_allocated())
                loss.backward()
        del state
        self.optimizer.zero_grad()
        return held

    @torch.no_grad()
    def evaluate(self, step: int, table: TokenizedRows, rows: np.ndarray) -> dict[str, Any] | None:
        """Mean loss over the target tokens of `rows`, in nats, and its exponential, the perplexity;
        of pairs the mean over pairs and the objective's metrics. None if all ranks have agreed to
        stop instead.

        Called on every rank.
        """
        self.model.eval()
        batches = self.collator.lay_out_evaluation(table, rows)
        measured = list[torch.Tensor]()
        totals = self.objective.totals(batches, self.forward)
        with self.forward.attending():
            for micro_batch in batches:
                self.heartbeat.beat(step, "evaluate")
                measured.append(self._loss(micro_batch, totals).double())
                self.control.agree(gather_numbers(self.control.flags(step), self.ranks.device))
                if self.control.stop:
                    break
        reshard_all(self.model)
        if self.control.stop:
            return None
        sums = (
            gather_numbers([*torch.stack(measured, dim=1).sum(dim=1)], self.ranks.device)
            .sum(dim=0)
            .tolist()
        )
        mean_loss = sums[0] / totals.divisor
        return (
            {"eval_loss": mean_loss}
            | self.objective.describe_loss(mean_loss)
            | self.objective.means(sums, totals)
            | {"num_target_tokens": batches.num_targets}
        )

    def _set_gradient_sync(self, enabled: bool) -> None:
        if enabled != self.gradient_sync:  # it walks all modules
            set_gradient_sync(self.model, enabled)
            self.gradient_sync = enabled

    def _is_finite(
        self,
        step: int,
        batches: Batches,
        measured: list[torch.Tensor],
        loss_sum: float,
        grad_norm: float,
    ) -> bool:
        """Whether the step's numbers are finite; a gradient's overflow that a smaller loss scale
        avoids is no fault.

        Called on every rank.

        Raises:
            NotFinite: they are not, and the run halts; the samples are named.
        """
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
        losses = gather_numbers([numbers[0] for numbers in measured], self.ranks.device)
        bad = [(index, rank) for rank, index in (~losses.isfinite()).nonzero().tolist()]
        message = (
            f"Step {step + 1}: the {'loss' if bad else 'gradient'} is not finite (gradient norm "
            f"{grad_norm}), with samples {batches.describe_samples(bad)} of the dataset. No weight "
            "was updated in this step."
        )
        if self.options.on_nonfinite == "halt":
            raise NotFinite(
                f"{message} Look at these rows. A lower --lr or --precision bf16/fp32 may help; "
                "--on_nonfinite skip "
                "skips such steps."
            )
        log.warning("%s It is skipped.", message)
        return False

    def _memory_gib(self) -> list[float]:
        """This rank's peak so far: allocated and reserved GPU memory, or resident memory on the
        CPU.
        """
        if self.ranks.device.type == "cuda":
            return [
                torch.cuda.max_memory_allocated() / 2**30,
                torch.cuda.max_memory_reserved() / 2**30,
            ]
        return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]

    def _memory_record(self, gathered: torch.Tensor) -> dict[str, list[float]]:
        names = ("allocated", "reserved") if self.ranks.device.type == "cuda" else ("peak_rss",)
        return {
            name: [round(value, 3) for value in gathered[:, i].tolist()]
            for i, name in enumerate(names)
        }


class LossScale:
    """The factor on the loss in fp16 (Micikevicius et al. 2018), which keeps small gradients from
    becoming zero.

    It is halved when gradients overflow, and doubled after many steps without an overflow. Every
    rank computes it from the same gradient norms, so all agree. Without scaling it stays 1.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = _FIRST_SCALE if enabled else 1.0
        self.steps_since_change = 0

    @property
    def can_fall(self) -> bool:
        return self.enabled and self.scale > _SMALLEST_SCALE

    def update(self, *, overflowed: bool) -> None:
        """Update after an optimizer step."""
        if not self.enabled:
            return
        self.steps_since_change += 1
        if overflowed:
            self.scale = max(self.scale / 2, _SMALLEST_SCALE)
            self.steps_since_change = 0
        elif self.steps_since_change == _SCALE_GROWTH_INTERVAL:
            self.scale = self.scale * 2
            self.steps_since_change = 0

    def state(self) -> dict[str, float]:
        """The values to save in a checkpoint."""
        return {"scale": self.scale, "steps_since_change": self.steps_since_change}

    def load_state(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.steps_since_change = int(state["steps_since_change"])
