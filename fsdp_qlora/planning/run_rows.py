"""A run's rows as its plan needs them: how they become steps, their longest and their mean micro-batch."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from fsdp_qlora.config.objectives import PAIRS
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.data.batches.schedule import Schedule, epoch_order
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.model.architecture.attention import can_share
from fsdp_qlora.planning.placement import longest_allowed
from fsdp_qlora.planning.speed import MicroBatchSize
from fsdp_qlora.utils.errors import UserError

_TOKENS = 10e6  # to train on, where no dataset is known


class PlannedRows(NamedTuple):
    """The rows of a run in three figures.

    longest: the longest micro-batch. micro_batch: the mean one. tokens: tokens of all epochs.
    """

    longest: Lengths
    micro_batch: MicroBatchSize
    tokens: float


def allowed_rows(config: TrainConfig, data_size: int) -> PlannedRows:
    """As many and as long rows as the options allow."""
    longest = longest_allowed(config)
    tokens, squares = sum(longest.of_documents), sum(length**2 for length in longest.of_documents)
    return PlannedRows(longest, MicroBatchSize(tokens, squares, data_size * tokens), _TOKENS)


def make_schedule(config: TrainConfig, data: RunData, data_size: int, rows_per_step: int | None = None) -> Schedule:
    """The steps of the run. Where the number of rows is unknown, an epoch is --max_steps long."""
    rows, is_answered = data.rows_per_epoch, data.prompts is not None
    if data.have_images and config.context_size > 1:
        raise UserError("--context_parallel_size divides rows without padding, and rows with images are padded.")
    schedule = config.pick(
        Schedule,
        num_rows=rows or 1,
        data_size=data_size,
        global_batch_size=rows_per_step or config.batch_size * config.gradient_accumulation_steps * data_size,
        batching="padded" if data.have_images else config.batching,
        mixture=data.mixture,
        context_length=config.longest_row * config.row_kind.num_documents,
        num_generations=config.num_generations if is_answered else 1,
        num_iterations=config.num_iterations if is_answered else 1,
    )
    if is_answered:
        return _of_answers(schedule)
    if rows is not None:
        return schedule
    return dataclasses.replace(schedule, num_rows=schedule.global_batch_size * config.max_steps)


def _of_answers(schedule: Schedule) -> Schedule:
    """The schedule of prompts, whose answers fill whole steps; an epoch leaves out what is left of the prompts."""
    rows, each = schedule.global_batch_size, schedule.num_generations
    prompts, rest = divmod(rows, each)
    if rest:
        divisors = ", ".join(str(number) for number in range(2, rows + 1) if rows % number == 0) or "more rows"
        raise UserError(
            f"num_generations: a step learns from {rows} answers (batch_size x gradient_accumulation_steps x ranks), "
            f"which are no whole groups of {each}. Give {divisors}, or a multiple of {each} answers."
        )
    if schedule.num_rows < prompts:
        raise UserError(
            f"dataset: an optimizer step needs {prompts} prompts ({rows} answers, {each} to each), and there are "
            f"{schedule.num_rows}. Give more prompts or a smaller --gradient_accumulation_steps."
        )
    return dataclasses.replace(schedule, num_rows=schedule.num_rows // prompts * rows * schedule.num_iterations)


class RunRows:
    """The rows and steps of a run, which may have a shorter context than the rows were prepared for.

    Args:
        documents: the attention implementation, as of the model's plan.
    """

    def __init__(self, config: TrainConfig, data: RunData, schedule: Schedule, documents: str | None) -> None:
        self.config, self.data, self.schedule = config, data, schedule
        self.lengths = np.minimum(data.lengths, schedule.context_length)
        self._shares_prompts = config.row_kind == PAIRS and can_share(documents)

    def planned(self) -> PlannedRows:
        """Sum up the rows; those of a stream are as long as the options allow, on average as the stream's first."""
        schedule = self.schedule
        of_epoch = epoch_order(self.data.train_rows, seed=self.config.seed, epoch=0, mixture=self.data.mixture)
        number = min(schedule.num_epochs * schedule.num_rows, schedule.total_steps * schedule.global_batch_size)
        tokens = float(number * self.lengths[of_epoch].mean())
        return PlannedRows(self.longest(), self.mean_micro_batch(), tokens)

    def longest(self) -> Lengths:
        """The run's longest micro-batch, padding included; of a stream, whose rows are unknown, the most possible."""
        if self.data.rows_per_epoch is None:
            return longest_allowed(self.config)
        computed = self.data.train.num_learned_from(shares_prompts=self._shares_prompts)
        computed = np.minimum(computed + self.data.completion_length, self.schedule.context_length)
        longest, _ = self.schedule.longest_micro_batch(self.data.train_rows, self.lengths, computed)
        most_values = np.sort(self.data.train.image_sizes[:, 1])[-self.schedule.batch_size :].sum()
        return self._lengths_of(longest)._replace(image_values=int(most_values))

    def mean_micro_batch(self) -> MicroBatchSize:
        """The mean over the rounds of the run's first steps."""
        rounds = list(itertools.chain(*self.schedule.rounds_of_first_steps(self.data.train_rows, self.lengths)))
        longest = [self._lengths_of(first) for first, *_ in rounds]  # a round's longest micro-batch is its first
        computed = sum(each.num_computed for each in longest)
        squares = sum(length**2 for each in longest for length in each.of_documents)
        useful = sum(int(self.lengths[piece].sum()) for piece in itertools.chain(*rounds))
        return MicroBatchSize(*(total / len(longest) for total in (computed, squares, useful)))

    def _lengths_of(self, micro_batch: np.ndarray) -> Lengths:
        """Tokens of a micro-batch as they are computed, padding included."""
        rows, most = self.data.train, self.config.longest_row
        learned = rows.learned_documents(micro_batch)
        lengths = rows.document_offsets[learned + 1] - rows.document_offsets[learned] + self.data.completion_length
        found = np.minimum(lengths, most).tolist()
        if self.schedule.padding:
            found = [max(found, default=0)] * len(found)
        shared = np.minimum(rows.num_shared[micro_batch], most).tolist() if self._shares_prompts else None
        return Lengths(found, shared)
