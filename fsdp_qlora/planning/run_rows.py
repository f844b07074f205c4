"""Plans a run's rows: their steps, their longest and mean micro-batch, their generation."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
from transformers import PretrainedConfig

from fsdp_qlora.config.objectives import PAIRS
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.data.batches.schedule import Schedule, epoch_order
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.model.architecture.attention import can_share
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.model_parts import count_bytes
from fsdp_qlora.planning.fit import with_margin, without_margin
from fsdp_qlora.planning.gpus import Gpu
from fsdp_qlora.planning.placement import PlacedModel, longest_allowed
from fsdp_qlora.planning.speed import MicroBatchSize, seconds_per_pass
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import GIB, format_bytes

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


def make_schedule(
    config: TrainConfig, data: RunData, data_size: int, rows_per_step: int | None = None
) -> Schedule:
    """The steps of the run."""
    is_answered = bool(data.prompts)
    objective = config.objective_row
    if data.have_images and config.context_size > 1:
        raise UserError(
            "--context_parallel_size divides rows without padding, and rows with images are padded."
        )
    schedule = config.pick(
        Schedule,
        num_rows=data.rows_per_epoch,
        data_size=data_size,
        global_batch_size=rows_per_step
        or config.batch_size * config.gradient_accumulation_steps * data_size,
        batching="padded" if data.have_images else config.batching,
        mixture=data.mixture,
        context_length=config.longest_row * objective.kind_of_rows(config).num_documents,
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


class RunRows:
    """The rows and steps of a run, whose context may be shorter than the prepared rows'.

    Args:
        documents: the attention implementation, as of the model's plan.
    """

    def __init__(
        self, config: TrainConfig, data: RunData, schedule: Schedule, documents: str | None
    ) -> None:
        self.config = config
        self.data = data
        self.schedule = schedule
        self.lengths = np.minimum(data.lengths, schedule.context_length)
        self._shares_prompts = config.objective_row.kind_of_rows(config) == PAIRS and can_share(
            documents
        )

    def planned(self) -> PlannedRows:
        """Sum up the rows."""
        schedule = self.schedule
        of_epoch = epoch_order(
            self.data.train_rows, seed=self.config.seed, epoch=0, mixture=self.data.mixture
        )
        num_rows = min(
            schedule.num_epochs * schedule.num_rows,
            schedule.total_steps * schedule.global_batch_size,
        )
        tokens = float(num_rows * self.lengths[of_epoch].mean())
        return PlannedRows(self.longest(), self.mean_micro_batch(), tokens)

    def longest(self) -> Lengths:
        """The run's longest micro-batch, padding included."""
        computed = self.data.known_rows.num_learned_from(shares_prompts=self._shares_prompts)
        computed = np.minimum(computed + self.data.completion_length, self.schedule.context_length)
        longest, _ = self.schedule.longest_micro_batch(self.data.train_rows, self.lengths, computed)
        most_values = np.sort(self.data.train.images.num_values)[-self.schedule.batch_size :].sum()
        return self._lengths_of(longest)._replace(image_values=int(most_values))

    def mean_micro_batch(self) -> MicroBatchSize:
        """The mean over the rounds of the run's first steps."""
        steps = self.schedule.rounds_of_first_steps(self.data.train_rows, self.lengths)
        rounds = list(itertools.chain.from_iterable(steps))
        # a round's longest micro-batch is its first
        longest = [self._lengths_of(first) for first, *_ in rounds]
        computed = sum(lengths.num_computed for lengths in longest)
        squares = sum(length**2 for lengths in longest for length in lengths.of_documents)
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
        if not self._shares_prompts:
            return Lengths(tokens)
        return Lengths(tokens, np.minimum(rows.num_shared[micro_batch], most).tolist())


# --- rows that the model generates ---


_LEAST_ON_CPU = GIB  # bytes for the completions of a rank on a CPU, whose steps may need less
# layers' caches that growing by a token needs beside them: one in and one out, and holes
_GROWING = 3
# of a completion's logits in float32 while a token is drawn: logits, probabilities, noise, ratio
_COPIES = 4


class Generation(NamedTuple):
    """How a rank generates the completions of a step.

    at_a_time: completions that share a cache. per_rank: completions of a step, at most. cache:
    bytes of the cache. gathered: bytes of the blocks' weights if they stay gathered; 0 if they are
    gathered for each token. seconds: for the longest completions; None if no GPU is known.
    """

    at_a_time: int
    per_rank: int
    cache: int
    gathered: int
    seconds: float | None = None

    def describe(self, num_prompts: int, num_generations: int, num_left: int) -> str:
        """One line for the plan. num_left: prompts of an epoch that fill no step."""
        line = (
            f"Generation: {num_generations} answers to each of {num_prompts} prompts for a step, "
            f"of {self.per_rank} on a rank {self.at_a_time} at a time "
            f"(cache {format_bytes(self.cache)})"
        )
        if self.gathered:
            line += f"; weights stay gathered ({format_bytes(self.gathered)})"
        if self.seconds is not None:
            line += f"; at most about {self.seconds:,.0f} s per generation"
        if num_left:
            line += f"; an epoch leaves out {num_left} prompts, which fill no step"
        return line


def plan_generation(
    placed: PlacedModel,
    num_answers: int,
    longest: int,
    most_new: int,
    free: int | None,
    gpu: Gpu | None = None,
) -> Generation:
    """Plan the answers that are generated at a time: as many as fit, and at least one.

    They fit beside what stays in memory, with a step's margin, in equal rounds.

    Args:
        num_answers: of a step on all ranks.
        longest: tokens of a prompt with its answer, of which `most_new` are the answer's at most.
        free: bytes of the GPU that has least; without it they get what a step needs. Weights stay
            gathered if they fit beside as many as a step has room for.
        gpu: for the time.
    """
    model = placed.model
    memory = placed.memory
    layout = placed.layout
    # Generation comes between steps: it may have what the peak of a step takes and gives back.
    room = sum(memory.phases[memory.peak].values()) + memory.overhead
    if model.machine.device.type != "cuda":
        room = max(room, _LEAST_ON_CPU)
    itemsize = model.precision.compute_dtype.itemsize
    answer_bytes = _bytes_of_answer(model.meta.model.config, longest, most_new, itemsize)
    per_rank = -(-num_answers // model.machine.world_size)
    at_a_time = min(per_rank, max(1, room // answer_bytes))
    gathered = 0
    if layout.num_shards > 1 and layout.frees_blocks and not placed.placement.offload.blocks:
        kinds = model.meta.parts.kinds(model.meta.parts.blocks)
        gathered = sum(count.total for count in count_bytes(kinds, 1).values())
        needed = (
            sum(memory.resident.values()) + memory.overhead + at_a_time * answer_bytes + gathered
        )
        fits = gathered + at_a_time * answer_bytes <= room
        if free is not None:
            fits = with_margin(needed) <= free
        if not fits:
            gathered = 0
    if free is not None:
        room = max(
            room, without_margin(free) - sum(memory.resident.values()) - memory.overhead - gathered
        )
        at_a_time = min(per_rank, max(1, room // answer_bytes))
    # Equal rounds: a small last one would take as long as a full one, token by token.
    rounds = -(-per_rank // at_a_time)
    at_a_time = -(-per_rank // rounds)
    seconds = None
    if gpu:
        per_token = seconds_per_pass(placed, gpu, at_a_time, gathered=gathered > 0)
        seconds = rounds * most_new * per_token
    return Generation(at_a_time, per_rank, at_a_time * answer_bytes, gathered, seconds)


def _bytes_of_answer(config: PretrainedConfig, tokens: int, most_new: int, itemsize: int) -> int:
    """Bytes of an answer's cache, and of its computation.

    The computation is of the prompt (with a mask) or of the last token.

    The stand-in for CUDA reserves 59 to 96% of it for 8 to 128 answers of an 8B with 12 blocks.
    """
    shapes = block_shapes(config)
    prompt = tokens - most_new
    hidden = shapes[0].hidden
    inner = max(shape.inner for shape in shapes)

    def caches(tokens: int) -> list[int]:
        lengths = [min(shape.window or tokens, tokens) * shape.has_keys for shape in shapes]
        return [
            2 * itemsize * n * shape.groups * shape.head_dim
            for n, shape in zip(lengths, shapes, strict=True)
        ]

    at_prompt = sum(caches(prompt)) + prompt * (
        (4 * hidden + 3 * inner) * itemsize + (1 + itemsize) * prompt
    )
    at_end = sum(caches(tokens)) + _GROWING * max(caches(tokens))
    return max(at_prompt, at_end) + _COPIES * 4 * config.get_text_config().vocab_size
