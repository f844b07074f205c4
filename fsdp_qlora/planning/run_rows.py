"""Plans a run's rows: their steps, their longest and mean micro-batch."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.largest import longest_micro_batch, most_values_packed
from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.data.batches.schedule import Schedule, epoch_order
from fsdp_qlora.data.batches.shared_tokens import (
    RowTokens,
    SharedTokens,
    shared_in_groups,
    shared_in_pairs,
    shared_of_prompts,
)
from fsdp_qlora.data.run_data import RunData
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
    tokens = sum(longest.of_documents)
    squares = sum(length**2 for length in longest.of_documents)
    return PlannedRows(longest, MicroBatchSize(tokens, squares, data_size * tokens), _TOKENS)


def needed_rows(config: TrainConfig, data_size: int) -> int | None:
    """The rows, or prompts, that the steps of the run take.

    None if it takes all rows: all epochs, or as many rows in a step as auto decides with them. So
    does a teacher's run: what the teacher says is kept for all rows, also for runs on other ranks.

    Args:
        data_size: ranks that get other rows than each other.
    """
    leaves_settings = config.auto or config.context_parallel_size == "auto"
    is_taught = config.teacher and not config.teacher_url
    if config.max_steps < 0 or leaves_settings or is_taught:
        return None
    rows = config.batch_size * config.gradient_accumulation_steps * data_size
    objective = config.objective_row
    if not objective.kind_of_rows(config).is_sampled:
        return config.max_steps * rows
    steps = -(-config.max_steps // config.num_iterations)
    return steps * -(-rows // objective.answers_per_prompt(config))


def make_schedule(
    config: TrainConfig,
    data: RunData,
    data_size: int,
    rows_per_step: int | None = None,
    *,
    pads_images: bool = False,
) -> Schedule:
    """The steps of the run.

    pads_images: whether the model needs padding for rows with images, as far as it is known.
    """
    is_answered = bool(data.prompts)
    objective = config.objective_row
    if data.have_images and config.context_size > 1:
        raise UserError(
            "--context_parallel_size divides rows of text, and some rows have images: leave it out."
        )
    kind = objective.kind_of_rows(config)
    if data.have_images and pads_images and kind.has_teacher:
        raise UserError(
            f"--objective {config.objective}: a teacher's tokens follow the student's without "
            "padding, and with images this model needs padding: tokens of an image see later ones "
            "of it."
        )
    schedule = config.pick(
        Schedule,
        num_rows=data.rows_per_epoch,
        data_size=data_size,
        global_batch_size=rows_per_step
        or config.batch_size * config.gradient_accumulation_steps * data_size,
        batching="padded" if data.have_images and pads_images else config.batching,
        mixture=data.mixture,
        seed=config.seed if config.shuffle else None,
        context_length=config.longest_row * kind.num_documents,
        num_generations=objective.answers_per_prompt(config) if is_answered else 1,
        num_iterations=config.num_iterations if is_answered else 1,
    )
    return _of_answers(schedule) if is_answered else schedule


def _of_answers(schedule: Schedule) -> Schedule:
    """The schedule of prompts, whose answers fill whole steps.

    An epoch leaves out the prompts that fill no step.
    """
    rows = schedule.global_batch_size
    group = schedule.num_generations
    prompts, rest = divmod(rows, group)
    if rest:
        divisors = ", ".join(str(size) for size in range(2, rows + 1) if rows % size == 0)
        raise UserError(
            f"num_generations: a step learns from {rows} answers (batch_size x "
            f"gradient_accumulation_steps x ranks), not a multiple of {group}. Give "
            f"{divisors or 'more rows'}, or a multiple of {group} answers."
        )
    if schedule.num_rows < prompts:
        raise UserError(
            f"dataset: an optimizer step needs {prompts} prompts ({rows} answers, {group} to "
            f"each), and there are {schedule.num_rows}. Give more prompts or a smaller "
            "--gradient_accumulation_steps."
        )
    return dataclasses.replace(
        schedule, num_rows=schedule.num_rows // prompts * rows * schedule.num_iterations
    )


def _most_prompts(num_answers: int, per_prompt: int) -> int:
    """The prompts of consecutive answers, at most."""
    whole, rest = divmod(num_answers, per_prompt)
    if not rest or per_prompt % num_answers == 0:
        return max(1, whole)
    # The first and the last prompt may have further answers in other micro-batches.
    return whole + 2 if rest > 1 else whole + 1


class RunRows:
    """The rows and steps of a run, whose context may be shorter than the prepared rows'.

    Args:
        shares_tokens: whether the model computes what documents begin with once.
    """

    def __init__(
        self, config: TrainConfig, data: RunData, schedule: Schedule, *, shares_tokens: bool
    ) -> None:
        self.config = config
        self.data = data
        self.schedule = schedule
        self.lengths = np.minimum(data.lengths, schedule.context_length)
        kind = config.objective_row.kind_of_rows(config)
        rows = data.known_rows
        in_rows = len(rows.splits) > 0
        shares = kind.shares_prompts and shares_tokens and not schedule.why_apart(in_rows=in_rows)
        self._shares_in_pairs = shares and in_rows
        own = rows.learned_from(shares_prompts=self._shares_in_pairs).own + data.completion_length
        prompts = None
        if shares and not self._shares_in_pairs:
            prompts = np.minimum(shared_of_prompts(rows.lengths), schedule.context_length)
        self._computed = RowTokens(
            np.minimum(own, schedule.context_length), rows.row_numbers, prompts
        )

    def planned(self) -> PlannedRows:
        """Sum up the rows."""
        schedule = self.schedule
        of_epoch = self.data.train_rows
        if self.data.mixture:
            of_epoch = epoch_order(
                of_epoch, seed=self.config.seed, epoch=0, mixture=self.data.mixture
            )
        num_rows = min(
            schedule.num_epochs * schedule.num_rows,
            schedule.total_steps * schedule.global_batch_size,
        )
        tokens = float(num_rows * self.lengths[of_epoch].mean())
        return PlannedRows(self.longest(), self.mean_micro_batch(), tokens)

    def longest(self) -> Lengths:
        """The run's longest micro-batch, padding included."""
        longest, _ = longest_micro_batch(
            self.schedule, self.data.train_rows, self.lengths, self._computed
        )
        lengths = self._lengths_of(longest)
        processor = self.data.image_processor
        num_values = self._most_image_values()
        if processor is None or not num_values:
            return lengths
        return lengths._replace(image_values=num_values, example_image=processor.example)

    def _most_image_values(self) -> int:
        """Values of the images in the micro-batch with the most, or a bound for them."""
        rows = self.data.known_rows
        if not len(rows.images):
            return 0
        schedule = self.schedule
        times = schedule.num_generations
        at_a_time = schedule.batch_size
        if self._computed.prompts is not None:
            # Answers that share their prompt share its images, too.
            at_a_time = _most_prompts(at_a_time, times)
            times = 1
        num_values = rows.images.num_values.repeat(times)
        if not self._shares_in_pairs:
            # A model gets them with each document that it learns from.
            num_values = num_values * len(rows.learned_documents([0]))
        if schedule.batching == "packed":
            return most_values_packed(
                num_values,
                self.lengths.repeat(times),
                most_tokens=schedule.batch_size * schedule.context_length,
                most_rows=schedule.global_batch_size,
            )
        return int(-np.sort(-num_values)[:at_a_time].sum())

    def mean_micro_batch(self) -> MicroBatchSize:
        """The mean over the rounds of the run's first steps."""
        steps = self.schedule.rounds_of_first_steps(
            self.data.train_rows, self.lengths, self._computed.prompts
        )
        rounds = list(itertools.chain.from_iterable(steps))
        # a round's longest micro-batch is its first
        longest = [self._lengths_of(first) for first, *_ in rounds]
        computed = sum(lengths.num_computed for lengths in longest)
        squares = sum(lengths.num_squares for lengths in longest)
        useful = sum(int(self.lengths[piece].sum()) for piece in itertools.chain(*rounds))
        return MicroBatchSize(*(total / len(longest) for total in (computed, squares, useful)))

    def _lengths_of(self, micro_batch: np.ndarray) -> Lengths:
        """Tokens of a micro-batch as they are computed, padding included."""
        rows = self.data.known_rows
        most = self.config.longest_row
        learned = rows.learned_documents(micro_batch)
        lengths = (
            rows.document_offsets[learned + 1]
            - rows.document_offsets[learned]
            + self.data.completion_length
        )
        # A plan may be for a shorter context than the rows were cut for.
        tokens = np.minimum(lengths, most).tolist()
        if self.schedule.padding:
            tokens = [max(tokens, default=0)] * len(tokens)
        return Lengths(tokens, self._shared(micro_batch, most))

    def _shared(self, micro_batch: np.ndarray, most: int) -> SharedTokens | None:
        """The tokens that documents of a micro-batch share, at most `most` of each."""
        if self._shares_in_pairs:
            shared = shared_in_pairs(self.data.known_rows.num_shared[micro_batch])
        elif self._computed.prompts is not None:
            groups = self._computed.groups[micro_batch]
            shared = shared_in_groups(groups, self._computed.prompts[micro_batch])
        else:
            return None
        return SharedTokens(
            np.minimum(shared.counts, most).tolist(), np.asarray(shared.sources).tolist()
        )
