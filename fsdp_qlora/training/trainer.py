"""One optimizer step and one evaluation of a sharded model, for all train types. The loop is in loop.py."""

import contextlib
import logging
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import PreTrainedModel

from fsdp_qlora.config.objectives import Answers
from fsdp_qlora.control.stops import NUM_FLAGS, Control
from fsdp_qlora.data.batches import collate, describe_documents, join
from fsdp_qlora.data.rows import TokenizedRows
from fsdp_qlora.data.schedule import Schedule
from fsdp_qlora.errors import NotFinite
from fsdp_qlora.model.attention import attending
from fsdp_qlora.model.precision import Precision
from fsdp_qlora.optimizers.sharded import ShardedOptimizer
from fsdp_qlora.ranks.device import to_device
from fsdp_qlora.ranks.distributed import Ranks, derive_seed, gather_numbers
from fsdp_qlora.sharding.parallelize import reshard_all, set_gradient_sync
from fsdp_qlora.sharding.vocabulary import same_tokens, sharing_ranks, tokens_known
from fsdp_qlora.training import probes
from fsdp_qlora.training.head_loss import learned_rows, loss_of_logits
from fsdp_qlora.training.objective import StepObjective, Totals

log = logging.getLogger("fsdp_qlora")

_FIRST_SCALE = 2.0**16  # this and the next: defaults of torch.amp.GradScaler
_SCALE_GROWTH_INTERVAL = 2000  # steps without an overflow after which the scale is doubled
_SMALLEST_SCALE = 1.0  # no scaling: an overflow is then the model's own


@dataclass(frozen=True)
class TrainerOptions:
    """Options of the training steps.

    learning_rate: of a step, counted from 0. max_grad_norm: gradients are clipped to it; inf disables clipping.
    num_replicas: copies of the model among the ranks. sync_every_micro_batch: reduce gradients after each micro-batch,
    if they are too large to accumulate unsharded. on_nonfinite: halt or skip. eval_steps: steps between evaluations,
    0 for none. early_stopping: evaluations in a row without a lower loss that end the run, 0 for no end.
    shares_prompts: what both answers of a pair begin with is computed once.
    """

    precision: Precision
    learning_rate: Callable[[int], float]
    max_grad_norm: float
    num_replicas: int
    sync_every_micro_batch: bool
    pad_token_id: int
    on_nonfinite: str = "halt"
    eval_steps: int = 0
    attention: str | None = None
    early_stopping: int = 0
    shares_prompts: bool = False
    objective: StepObjective = field(default_factory=StepObjective)


class LossScale:
    """The factor on the loss in fp16 (Micikevicius et al. 2018), which keeps small gradients from becoming zero.

    It is halved when gradients overflow, and doubled after many steps without an overflow.

    Every rank computes it from the same gradient norms, so all agree. Without scaling it stays 1.
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
            self.scale, self.steps_since_change = max(self.scale / 2, _SMALLEST_SCALE), 0
        elif self.steps_since_change == _SCALE_GROWTH_INTERVAL:
            self.scale, self.steps_since_change = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        """The values to save in a checkpoint."""
        return {"scale": self.scale, "steps_since_change": self.steps_since_change}

    def load_state(self, state: dict[str, float]) -> None:
        self.scale, self.steps_since_change = float(state["scale"]), int(state["steps_since_change"])


class Trainer:
    """Runs optimizer steps and evaluations of one sharded model."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: ShardedOptimizer,
        data: TokenizedRows,
        ranks: Ranks,
        schedule: Schedule,
        options: TrainerOptions,
        control: Control,
    ) -> None:
        self.model, self.optimizer, self.data, self.ranks = model, optimizer, data, ranks
        self.schedule, self.options, self.control = schedule, options, control
        self.heartbeat = control.heartbeat
        self.stream_position: dict[str, int] = {}  # after the rows of `data`, where they are streamed
        self.gradient_sync = True  # FSDP2's initial state
        self.loss_scale = LossScale(enabled=options.precision.scales_loss)
        self.sharing_ranks = sharing_ranks(model)
        self.memory_watch: probes.MemoryWatch | None = None
        few = {"input_ids": probes.few_tokens(model)}
        documents = {} if schedule.padding else {"documents": describe_documents([few["input_ids"].shape[1]])}
        with self._attention(), self._autocast(), same_tokens(model, few["input_ids"]):
            inputs = self._inputs({**few, **documents})
            if options.objective.reference:
                probes.check_reference(model, options.objective.reference, inputs)
            found = probes.probe_head_loss(model, inputs)
        self.loss_of_tokens, self.objective = found or partial(loss_of_logits, model), options.objective

    def train_step(self, step: int, rows: np.ndarray) -> dict[str, Any]:
        """One optimizer step over `rows` of all ranks; returns its metrics. In fp16 a step may update no weight.

        The loss is a sum over target tokens divided by the step's number of target tokens on all ranks, so
        it does not depend on how the rows are split over ranks and micro-batches. Afterwards `control` says
        whether all ranks stop or save now.

        Raises:
            NotFinite: the loss or the gradient is not finite and the run halts; the weights are unchanged.
        """
        started = time.perf_counter()
        self.heartbeat.beat(step, "rows")
        pieces, scale = self.schedule.micro_batches(rows, self.data.lengths), self.loss_scale.scale
        totals = self.objective.totals(self.data, rows, partial(self._sum_of_ratios, self._turns(pieces), self.data))
        micro_batches = self._micro_batches(pieces)
        measured = []
        self.model.train()
        with self._attention():
            for index, micro_batch in enumerate(micro_batches):
                self._prepare(step, index, is_last=index == len(micro_batches) - 1)
                numbers = self._loss(micro_batch, totals)
                # FSDP2 averages gradients over ranks; the factor turns that into a sum.
                (numbers[0] * (scale * self.ranks.world_size / totals.divisor)).backward()
                measured.append(numbers.detach())
        self.optimizer.take_gradients()
        sums, grad_norm, memory = self._exchange(step, measured)
        self.heartbeat.beat(step, "update")
        lr, is_finite = self.options.learning_rate(step), self._is_finite(step, pieces, measured, sums[0], grad_norm)
        if is_finite and math.isfinite(grad_norm):
            self._clip_and_unscale(grad_norm)
            self.optimizer.step(lr)
        # The gradients' memory is of FSDP2's reduction stream, which waits for this one before it writes there again.
        self.optimizer.zero_grad()
        if is_finite:
            self.loss_scale.update(overflowed=not math.isfinite(grad_norm))
        if self.memory_watch:
            self.memory_watch.stepped(memory[:, -1].max().item())
        return {
            **{"step": step + 1, "epoch": (step + 1) / self.schedule.steps_per_epoch},
            **{"loss": sums[0] / totals.divisor, "grad_norm": grad_norm, "lr": lr},
            "num_target_tokens": int(self.data.num_targets[rows].sum()),
            **self.objective.means(sums, totals),
            **self._size_and_speed(rows, pieces, time.perf_counter() - started),
            "memory_gib": self._memory_record(memory),
            **({} if is_finite else {"skipped": True}),
            **({"loss_scale": scale} if self.loss_scale.enabled else {}),
            **({"recompute": self.memory_watch.number} if self.memory_watch else {}),
        }

    def _prepare(self, step: int, index: int, *, is_last: bool) -> None:
        """Before this rank's micro-batch: signs of life, gradient synchronization and randomness."""
        self.heartbeat.beat(step, "compute")
        self._set_gradient_sync(is_last or self.options.sync_every_micro_batch)
        # Randomness depends on the micro-batch alone, so that a run can be resumed.
        global_index = index * self.ranks.world_size + self.ranks.rank
        torch.manual_seed(derive_seed("dropout", self.schedule.seed, step, global_index))

    def _clip_and_unscale(self, grad_norm: float) -> None:
        limit = self.options.max_grad_norm
        factor = (limit / grad_norm if grad_norm > limit > 0 else 1.0) / self.loss_scale.scale
        if factor != 1.0:
            self.optimizer.scale_gradients(factor)

    def _size_and_speed(self, rows: np.ndarray, pieces: list[np.ndarray], seconds: float) -> dict[str, Any]:
        """Entries of a step's record that follow from its rows and time."""
        num_tokens = int(self.data.lengths[rows].sum())
        computed = self.data.num_computed(None, shares=self.options.shares_prompts)
        of_computed, of_lock_step = self.schedule.useful_shares(pieces, self.data.lengths, computed)
        return {
            "num_tokens": num_tokens,
            "useful_of_computed": round(of_computed, 4),
            "useful_of_lock_step": round(of_lock_step, 4),
            "tokens_per_second": num_tokens / seconds,
            "step_seconds": seconds,
        }

    def _exchange(self, step: int, measured: list[torch.Tensor]) -> tuple[list[float], float, torch.Tensor]:
        """The step's only communication besides FSDP2's: the sums of what was measured, the gradient norm, and memory.

        It also carries the flags by which the ranks of `control` agree whether to stop or save. Only at its end does
        the host wait for the device, once in a step.
        """
        self.heartbeat.beat(step, "exchange")
        sums, squared_norm = torch.stack(measured, dim=1).double().sum(dim=1), sum(self.optimizer.squared_norms())
        local = [*sums, squared_norm, *self.control.flags(step), *self._memory_gib()]
        numbers, flags = gather_numbers(local, self.ranks.device), len(sums) + 1
        self.control.agree(numbers[:, flags : flags + NUM_FLAGS])
        *totals, total_squared_norm = numbers[:, :flags].sum(dim=0).tolist()
        grad_norm = math.sqrt(total_squared_norm / self.options.num_replicas) / self.loss_scale.scale
        return totals, grad_norm, numbers[:, flags + NUM_FLAGS :]

    def try_longest(self, rows: np.ndarray) -> None:
        """Run forward and backward on the run's longest micro-batch, so that a lack of memory shows now.

        Every rank runs it, and no step is taken. Memory for the optimizer's state is allocated meanwhile, and gradients
        are accumulated if the run does so. The run's numbers do not change: every step seeds its own randomness, and
        the gradients are discarded.

        Args:
            rows: all rows to train on.
        """
        self._try(*self._longest(rows))

    def _longest(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        computed = self.data.num_computed(self.objective.row.side, shares=self.options.shares_prompts)
        return self.schedule.longest_micro_batch(rows, self.data.lengths, computed)

    def _try(self, micro_batch: np.ndarray, num_turns: int) -> int:
        """Returns the most bytes of GPU memory that were allocated between a forward and a backward pass."""
        self.heartbeat.beat(self.heartbeat.step, "compute")
        self.model.train()
        state = self.optimizer.room_for_state()
        held = 0
        for is_last in (False, True) if num_turns > 1 else (True,):
            self._set_gradient_sync(is_last or self.options.sync_every_micro_batch)
            with self._attention():
                batch = self._batch([micro_batch] * self.ranks.world_size, self.data, self.objective.row.side)
                loss = self._loss(batch, self.objective.totals(self.data, micro_batch))[0]
                held = max(held, torch.cuda.memory_allocated())
                loss.backward()
        del state
        self.optimizer.zero_grad()
        return held

    def fit_recompute(self, rows: np.ndarray, *, block_bytes: int, too_few: int | None = None) -> None:
        """Let as few blocks recompute as fit on every rank's GPU. Called on every rank.

        Args:
            rows: as for `try_longest`. block_bytes: about what a block keeps without recompute.
            too_few: blocks that recomputed when an earlier start ran out of memory.
        """
        meter = probes.GpuMeter(self.ranks.device)
        longest, num_turns = self._longest(rows)  # goes through the whole run

        def try_step() -> tuple[int, int]:
            meter.start()
            return self._try(longest, num_turns), meter.room()

        def least(value: float) -> float:
            return gather_numbers([value], self.ranks.device).min().item()

        number = probes.fit_recompute(self.model, try_step, least, block_bytes=block_bytes, too_few=too_few)
        self.memory_watch = probes.MemoryWatch(self.model, number, most=least(meter.most_in_steps()))
        log.debug("Recompute: %d of %d blocks, found by probing.", number, self.memory_watch.blocks)

    @torch.no_grad()
    def evaluate(self, step: int, data: TokenizedRows, rows: np.ndarray) -> dict[str, Any] | None:
        """Mean loss over the target tokens of `rows`, in nats, and its exponential, the perplexity; of pairs the mean
        over pairs and the objective's metrics. None if all ranks have agreed to stop instead.

        Called on every rank.
        """
        self.model.eval()
        measured: list[torch.Tensor] = []
        turns = self._eval_turns(rows, data)
        totals = self.objective.totals(data, rows, partial(self._sum_of_ratios, turns, data))
        with self._attention():
            for turn in turns:
                self.heartbeat.beat(step, "evaluate")
                measured.append(self._loss(self._batch(turn, data, self.objective.row.side), totals).double())
                self.control.agree(gather_numbers(self.control.flags(step), self.ranks.device))
                if self.control.stop:
                    break
        reshard_all(self.model)
        if self.control.stop:
            return None
        sums = gather_numbers([*torch.stack(measured, dim=1).sum(dim=1)], self.ranks.device).sum(dim=0).tolist()
        mean_loss = sums[0] / totals.divisor
        return {
            "eval_loss": mean_loss,
            **self.objective.describe_loss(mean_loss),
            **self.objective.means(sums, totals),
            "num_target_tokens": int(data.num_targets[rows].sum()),
        }

    def _set_gradient_sync(self, enabled: bool) -> None:
        if enabled != self.gradient_sync:  # it walks all modules
            set_gradient_sync(self.model, enabled)
            self.gradient_sync = enabled

    def _eval_turns(self, rows: np.ndarray, data: TokenizedRows) -> list[list[np.ndarray]]:
        """The rows of all ranks' micro-batches of an evaluation, turn by turn."""
        size = self.schedule.batch_size * self.ranks.world_size
        # Padded rows keep the order in which their losses were always added.
        parts = [rows[i : i + size] for i in range(0, len(rows), size)] if self.schedule.padding else [rows]
        return [turn for part in parts for turn in self._turns(self.schedule.micro_batches(part, data.lengths))]

    def _turns(self, pieces: list[np.ndarray]) -> list[list[np.ndarray]]:
        """The rows of all ranks' micro-batches, turn by turn."""
        return [pieces[i : i + self.ranks.world_size] for i in range(0, len(pieces), self.ranks.world_size)]

    def _sum_of_ratios(self, turns: list[list[np.ndarray]], data: TokenizedRows) -> float:
        """The sum of the log-ratios of policy and reference over the rows' second documents. Called on every rank."""
        ratios = [answers.ratio().sum().double() for answers in self._answers(turns, data, side=1)]
        return gather_numbers([torch.stack(ratios).sum()], self.ranks.device).sum().item()

    def log_probabilities(self, data: TokenizedRows) -> np.ndarray:
        """Of each document by the model as it is, float32 [documents]. Called on every rank."""
        found = torch.zeros(len(data.document_targets), device=self.ranks.device)
        turns = self._eval_turns(np.arange(len(data)), data)
        shown = tqdm(turns, "Reference", unit=" micro-batches", disable=not self.ranks.is_rank_0)
        for turn, answers in zip(turns, self._answers(shown, data, side=None), strict=True):
            found[torch.from_numpy(data.documents(turn[self.ranks.rank])).to(found.device)] = answers.policy
        reshard_all(self.model)
        dist.all_reduce(found)  # a document has its value on one rank, and is 0 on the others
        return found.cpu().numpy()

    @torch.no_grad()
    def _answers(self, turns: Iterable[list[np.ndarray]], data: TokenizedRows, side: int | None) -> Iterator[Answers]:
        """The documents of this rank's micro-batches, turn by turn."""
        self.model.eval()
        with self._attention():
            for turn in turns:
                self.heartbeat.beat(self.heartbeat.step, "compute")
                micro_batch = self._batch(turn, data, side)
                losses, inputs = self._token_losses(micro_batch)
                yield self.objective.answers(losses, micro_batch, inputs)

    def _micro_batches(self, pieces: list[np.ndarray]) -> list[dict[str, Any]]:
        """This rank's batches of an optimizer step."""
        return [self._batch(turn, self.data, self.objective.row.side) for turn in self._turns(pieces)]

    def _batch(self, turn: Sequence[np.ndarray], data: TokenizedRows, side: int | None) -> dict[str, Any]:
        """This rank's batch of a turn, with what it must know of the ranks that share the vocabulary with it."""
        lay_out = collate if self.schedule.padding else partial(join, shares=self.options.shares_prompts)
        ranks = {self.ranks.rank, *self.sharing_ranks}
        batches = {rank: lay_out(data, turn[rank], pad_token_id=self.options.pad_token_id, side=side) for rank in ranks}
        own = batches[self.ranks.rank]
        if not self.sharing_ranks:
            return own
        most_learned = max(len(learned_rows(batch["labels"])[0]) for batch in batches.values())
        tokens = [batches[rank]["input_ids"].flatten() for rank in self.sharing_ranks]
        return {**own, "most_learned": most_learned, "tokens_of_ranks": tokens}

    def _loss(self, micro_batch: dict[str, Any], totals: Totals) -> torch.Tensor:
        """The micro-batch's part of the loss, and without gradient of the objective's metrics; float32."""
        losses, inputs = self._token_losses(micro_batch)
        return self.objective.measure(losses, micro_batch, totals, inputs)

    def _token_losses(self, micro_batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The losses of the micro-batch's tokens or their sum, as the objective needs them, and its inputs."""
        rows, targets = learned_rows(micro_batch["labels"], at_least=micro_batch.get("most_learned", 1))
        if (places := micro_batch.get("documents", {}).get("places")) is not None:
            rows = places[rows]
        of_objective = micro_batch["of_rows"] if self.objective.of_each else {}
        inputs = self._inputs(micro_batch, rows=rows, targets=targets, **of_objective)
        rows, targets = inputs.pop("rows"), inputs.pop("targets")
        taken = {name: inputs.pop(name) for name in of_objective}
        tokens, reference = micro_batch.get("tokens_of_ranks"), self.objective.reference
        beside = reference.beside_policy() if reference else contextlib.nullcontext()
        with self._autocast(), beside, tokens_known(self.model, tokens, first=micro_batch["input_ids"].numel()):
            return self.loss_of_tokens(inputs, rows, targets, of_each=self.objective.of_each), taken

    def _inputs(self, micro_batch: dict[str, Any], **others: torch.Tensor) -> dict[str, Any]:
        """The model's arguments, and others, on its device."""
        values = {"input_ids": micro_batch["input_ids"], **micro_batch.get("documents", {}), **others}
        return to_device(values, self.ranks.device)

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        """Attention that does not cross rows, in forward and in backward passes, which may recompute."""
        return attending(self.model, self.options.attention)

    def _autocast(self) -> torch.autocast:
        precision = self.options.precision
        return torch.autocast(self.ranks.device.type, dtype=precision.compute_dtype, enabled=precision.autocast)

    def _is_finite(
        self, step: int, pieces: list[np.ndarray], measured: list[torch.Tensor], loss_sum: float, grad_norm: float
    ) -> bool:
        """Whether the step's numbers are finite; a gradient's overflow that a smaller loss scale avoids is no fault.

        Called on every rank.

        Raises:
            NotFinite: they are not, and the run halts; the samples are named.
        """
        if math.isfinite(loss_sum) and math.isfinite(grad_norm):
            return True
        if math.isfinite(loss_sum) and self.loss_scale.can_fall:
            scale = self.loss_scale.scale
            log.info("Step %d is skipped: its gradients overflowed at a loss scale of %g, now halved.", step + 1, scale)
            return True
        losses = gather_numbers([numbers[0] for numbers in measured], self.ranks.device)
        turns = self._turns(pieces)
        bad = [turns[index][rank] for rank, index in (~losses.isfinite()).nonzero().tolist()]
        samples = self.sample_numbers(np.concatenate(bad or pieces))
        message = (
            f"Step {step + 1}: the {'loss' if bad else 'gradient'} is not finite (gradient norm {grad_norm}), "
            f"with samples {samples} of the dataset. No weight was updated in this step."
        )
        if self.options.on_nonfinite == "halt":
            raise NotFinite(
                f"{message} Look at these rows. A lower --lr or --precision bf16/fp32 may help; --on_nonfinite skip "
                "skips such steps."
            )
        log.warning("%s It is skipped.", message)
        return False

    def sample_numbers(self, rows: np.ndarray) -> str:
        """The rows' numbers in the dataset, as text."""
        numbers = sorted(self.data.row_numbers[rows].tolist())
        return f"{', '.join(map(str, numbers[:32]))}{', ...' if len(numbers) > 32 else ''}"

    def _memory_gib(self) -> list[float]:
        """This rank's peak so far: allocated and reserved GPU memory, or resident memory on the CPU."""
        if self.ranks.device.type == "cuda":
            return [torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30]
        return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]

    def _memory_record(self, gathered: torch.Tensor) -> dict[str, list[float]]:
        names = ("allocated", "reserved") if self.ranks.device.type == "cuda" else ("peak_rss",)
        return {name: [round(value, 3) for value in gathered[:, i].tolist()] for i, name in enumerate(names)}
