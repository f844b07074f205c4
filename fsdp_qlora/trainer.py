"""The training loop: one for all train types."""

import logging
import math
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from fsdp_qlora.data.batches import collate
from fsdp_qlora.data.prepare import RunData
from fsdp_qlora.data.sampler import epoch_order, split_step, steps_per_epoch
from fsdp_qlora.data.tokenization import TokenizedRows
from fsdp_qlora.distributed import Ranks, derive_seed, gather_numbers
from fsdp_qlora.errors import TrainingError
from fsdp_qlora.loss import summed_loss, target_positions
from fsdp_qlora.loss_scale import LossScale
from fsdp_qlora.metrics import MetricLog
from fsdp_qlora.models import can_skip_logits
from fsdp_qlora.optim import ShardedOptimizer
from fsdp_qlora.parallelize import reshard_all, set_gradient_sync
from fsdp_qlora.precision import Precision
from fsdp_qlora.profiling import MemoryLog, Profiler

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True)
class Schedule:
    """How rows become optimizer steps.

    batch_size: rows per rank and micro-batch. total_steps: optimizer steps of the whole run.
    """

    num_rows: int
    batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    num_epochs: int
    max_steps: int
    seed: int

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.num_rows, global_batch_size=self.global_batch_size)

    @property
    def total_steps(self) -> int:
        steps = self.steps_per_epoch * self.num_epochs
        return steps if self.max_steps < 0 else min(steps, self.max_steps)

    def describe(self, warmup_steps: int) -> str:
        """One line: rows, batch and steps."""
        return (
            f"Steps: {self.total_steps} of {self.global_batch_size} rows ({self.world_size} rank"
            f"{'s' * (self.world_size > 1)} x {self.batch_size} rows x {self.gradient_accumulation_steps} "
            f"micro-batch{'es' * (self.gradient_accumulation_steps > 1)}), {self.steps_per_epoch} per epoch of "
            f"{self.num_rows} rows, {warmup_steps} of warm-up"
        )

    def rows_of_steps(self, train_rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """(step, its rows) for every step: a pure function of (seed, epoch)."""
        for step in range(self.total_steps):
            epoch, index = divmod(step, self.steps_per_epoch)
            if index == 0:
                order = epoch_order(train_rows, seed=self.seed, epoch=epoch)
            yield step, order[index * self.global_batch_size : (index + 1) * self.global_batch_size]


class Trainer:
    """Runs optimizer steps and evaluations of one sharded model."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: ShardedOptimizer,
        data: TokenizedRows,
        ranks: Ranks,
        *,
        schedule: Schedule,
        precision: Precision,
        num_replicas: int,
        max_grad_norm: float,
        sync_every_micro_batch: bool,
        pad_token_id: int,
    ) -> None:
        self.model, self.optimizer, self.data, self.ranks = model, optimizer, data, ranks
        self.schedule, self.precision = schedule, precision
        self.num_replicas, self.max_grad_norm = num_replicas, max_grad_norm
        self.sync_every_micro_batch, self.pad_token_id = sync_every_micro_batch, pad_token_id
        self.gradient_sync = True  # FSDP2's initial state
        self.loss_scale = LossScale(enabled=precision.scales_loss)
        self.skip_logits = can_skip_logits(model)

    def train_step(self, step: int, rows: np.ndarray, lr: float) -> dict[str, Any]:
        """One optimizer step over `rows` of all ranks; returns its metrics. In fp16 it may change no weight.

        The loss is a sum over target tokens divided by the step's number of target tokens on all ranks, so
        it does not depend on how the rows are split over ranks and micro-batches.

        Raises:
            TrainingError: the loss or the gradient is not finite; the weights have not been changed.
        """
        started = time.perf_counter()
        self.model.train()
        num_targets = int(self.data.num_targets[rows].sum())
        micro_batches = self._micro_batches(rows)
        losses = []
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            self._set_gradient_sync(last or self.sync_every_micro_batch)
            # Randomness is a function of the micro-batch alone, so that a run can be repeated and resumed.
            global_index = index * self.ranks.world_size + self.ranks.rank
            torch.manual_seed(derive_seed("dropout", self.schedule.seed, step, global_index))
            loss = self._loss(micro_batch)
            # FSDP2 averages gradients over ranks; the factor makes that a sum.
            (loss * (self.loss_scale.scale * self.ranks.world_size / num_targets)).backward()
            losses.append(loss.detach())
        self.optimizer.take_gradients()
        local_losses = torch.stack(losses).tolist()
        local = [sum(local_losses), self.optimizer.squared_norm(), *self._memory_gib()]
        numbers = gather_numbers(local, self.ranks.device)
        loss_sum, squared_norm = numbers[:, :2].sum(dim=0).tolist()
        scale = self.loss_scale.scale
        grad_norm = math.sqrt(squared_norm / self.num_replicas) / scale
        overflowed = not math.isfinite(grad_norm)
        if not math.isfinite(loss_sum) or (overflowed and not self.loss_scale.can_fall):
            self._stop(step, rows, local_losses, grad_norm)
        if overflowed:
            log.info("Step %d is skipped: its gradients overflowed at a loss scale of %g, now halved.", step + 1, scale)
        else:
            clip = self.max_grad_norm / grad_norm if grad_norm > self.max_grad_norm > 0 else 1.0
            if clip / scale != 1.0:
                self.optimizer.scale_gradients(clip / scale)
            self.optimizer.step(lr)
        self.loss_scale.update(overflowed=overflowed)
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        num_tokens = int(self.data.lengths[rows].sum())
        return {
            "step": step + 1,
            "epoch": (step + 1) / self.schedule.steps_per_epoch,
            "loss": loss_sum / num_targets,
            "grad_norm": grad_norm,
            "lr": lr,
            "num_target_tokens": num_targets,
            "num_tokens": num_tokens,
            "tokens_per_second": num_tokens / seconds,
            "step_seconds": seconds,
            "memory_gib": self._memory_record(numbers[:, 2:]),
            **({"loss_scale": scale} if self.loss_scale.enabled else {}),
        }

    @torch.no_grad()
    def evaluate(self, data: TokenizedRows, rows: np.ndarray) -> dict[str, Any]:
        """Mean loss over the target tokens of `rows` (nats), all ranks taking part."""
        self.model.eval()
        local_sum = 0.0
        size = self.schedule.batch_size * self.ranks.world_size
        for start in range(0, len(rows), size):
            for micro_batch in self._micro_batches(rows[start : start + size], data):
                local_sum += self._loss(micro_batch).item()
        reshard_all(self.model)
        num_targets = int(data.num_targets[rows].sum())
        total = gather_numbers([local_sum], self.ranks.device).sum().item()
        return {"eval_loss": total / num_targets, "num_target_tokens": num_targets}

    def _set_gradient_sync(self, enabled: bool) -> None:
        if enabled != self.gradient_sync:  # it walks all modules
            set_gradient_sync(self.model, enabled)
            self.gradient_sync = enabled

    def _micro_batches(self, rows: np.ndarray, data: TokenizedRows | None = None) -> list[dict[str, torch.Tensor]]:
        data = data or self.data
        split = split_step(
            rows,
            data.lengths,
            world_size=self.ranks.world_size,
            rank=self.ranks.rank,
            batch_size=self.schedule.batch_size,
        )
        return [collate(data, part, pad_token_id=self.pad_token_id) for part in split]

    def _loss(self, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum of the micro-batch's token losses, float32 scalar."""
        positions = target_positions(micro_batch["labels"])
        device = self.ranks.device
        with torch.autocast(device.type, dtype=self.precision.compute_dtype, enabled=self.precision.autocast):
            return summed_loss(
                self.model,
                micro_batch["input_ids"].to(device, non_blocking=True),
                micro_batch["labels"].to(device, non_blocking=True),
                positions.to(device, non_blocking=True),
                skip=self.skip_logits,
            )

    def _stop(self, step: int, rows: np.ndarray, local_losses: list[float], grad_norm: float) -> None:
        """Name the samples with which the loss or gradient became non-finite, the same on every rank."""
        losses = gather_numbers(local_losses, self.ranks.device)
        bad_rows: list[int] = []
        for rank, index in (~losses.isfinite()).nonzero().tolist():
            split = split_step(
                rows,
                self.data.lengths,
                world_size=self.ranks.world_size,
                rank=rank,
                batch_size=self.schedule.batch_size,
            )
            bad_rows += split[index].tolist()
        what = "loss" if bad_rows else "gradient"
        numbers = sorted(self.data.row_numbers[bad_rows or rows].tolist())
        raise TrainingError(
            f"Step {step + 1}: the {what} is not finite (gradient norm {grad_norm}), with samples "
            f"{', '.join(map(str, numbers[:32]))}{', ...' if len(numbers) > 32 else ''} of the dataset. Nothing "
            "was updated in this step. Look at these rows; a lower --lr or --precision bf16/fp32 may help."
        )

    def _memory_gib(self) -> list[float]:
        """This rank's peak so far: allocated and reserved GPU memory, or resident memory on the CPU."""
        if self.ranks.device.type == "cuda":
            return [torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30]
        return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]

    def _memory_record(self, gathered: torch.Tensor) -> dict[str, list[float]]:
        names = ("allocated", "reserved") if self.ranks.device.type == "cuda" else ("peak_rss",)
        return {name: [round(value, 3) for value in gathered[:, i].tolist()] for i, name in enumerate(names)}


def train(
    trainer: Trainer,
    data: RunData,
    metrics: MetricLog,
    *,
    learning_rate: Callable[[int], float],
    eval_steps: int,
    profiler: Profiler,
    memory: MemoryLog,
) -> dict[str, float]:
    """Run every optimizer step; evaluate before the first, every `eval_steps` and after the last.

    Returns:
        The run's summary: final loss and held-out losses, tokens and seconds.
    """
    summary: dict[str, float] = {}

    def evaluate(step: int) -> None:
        if len(data.eval_rows):
            result = trainer.evaluate(data.evaluation, data.eval_rows)
            metrics.evaluation({"step": step, "epoch": step / trainer.schedule.steps_per_epoch, **result})
            summary.setdefault("first_eval_loss", float(result["eval_loss"]))  # type: ignore[arg-type]
            summary["eval_loss"] = result["eval_loss"]

    evaluate(0)
    started, num_tokens = time.perf_counter(), 0
    for step, rows in trainer.schedule.rows_of_steps(data.train_rows):
        record = trainer.train_step(step, rows, learning_rate(step))
        metrics.step(record)
        profiler.step()
        memory.record(f"after step {step + 1}")
        num_tokens += record["num_tokens"]
        summary["loss"] = record["loss"]
        done = step + 1
        if done == trainer.schedule.total_steps or (eval_steps and done % eval_steps == 0):
            evaluate(done)
    summary |= {"num_tokens": num_tokens, "train_seconds": time.perf_counter() - started}
    return summary
