"""The plan of a run, made before a weight is read."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.schedule import Schedule
from fsdp_qlora.data.batches.tokenization import sample_line
from fsdp_qlora.data.held_out import PromptSets
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.data.taken_rows import TAKEN
from fsdp_qlora.distributed.device import shares_host_memory
from fsdp_qlora.distributed.layout import SHARDING_STRATEGIES
from fsdp_qlora.model.model_parts import count_bytes
from fsdp_qlora.planning.chosen_settings import choose_settings
from fsdp_qlora.planning.generation import AnswerSize, Generation, plan_generation
from fsdp_qlora.planning.gpus import gpu_of
from fsdp_qlora.planning.long_attention import keeping_attention_here
from fsdp_qlora.planning.placement import PlacedModel, least_free, place
from fsdp_qlora.planning.plan import ModelPlan, log_plan
from fsdp_qlora.planning.report import PlanReport
from fsdp_qlora.planning.run_rows import RunRows, make_schedule
from fsdp_qlora.planning.teacher import plan_teacher
from fsdp_qlora.sharding.optimizer import check_shard_sizes
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import format_bytes

log = logging.getLogger("fsdp_qlora")


class HeldOutPlan(NamedTuple):
    """The prompts of evaluations, and how the run's own model answers them."""

    prompts: PromptSets
    generation: Generation

    @property
    def most_prompts(self) -> int:
        """Prompts of the largest set."""
        return max(map(len, self.prompts.values()))


@dataclass(frozen=True)
class Plan:
    """The decisions of a run before a weight is read."""

    placed: PlacedModel
    data: RunData
    schedule: Schedule
    warmup_steps: int
    generation: Generation | None = None
    """How the run's own model answers its prompts."""
    teacher: PlacedModel | None = None
    """The model that goes over the rows before training."""
    held_out: HeldOutPlan | None = None
    """The answers that are scored at each evaluation."""

    @property
    def model(self) -> ModelPlan:
        return self.placed.model


def make_plan(
    config: TrainConfig,
    model: ModelPlan,
    data: RunData,
    store: dist.Store | None,
    earlier: Mapping[str, Any],
    held_out: PromptSets,
) -> tuple[TrainConfig, Plan]:
    """Place a model and its rows on the ranks, and describe the run. Called on every rank.

    Args:
        store: of the session; None for a dry run, which is one process.
        earlier: as for `choose_settings`.
        held_out: the prompts whose answers are scored, if any are.
    Returns:
        The options with those that auto replaces, and the plan.
    """
    if config.auto or config.context_parallel_size == "auto":
        chosen = choose_settings(config, model, data, store, earlier)
        config = dataclasses.replace(config, **chosen)
    data_size = model.machine.data_size(config.context_size)
    schedule = make_schedule(config, data, data_size, pads_images=model.pads_images)
    shares_tokens = model.shares_tokens(config.context_size)
    longest = RunRows(config, data, schedule, shares_tokens=shares_tokens).longest()
    placed = keeping_attention_here(place(config, model, longest, store), store)
    check_shard_sizes(config.optimizer, model.meta.model, placed.layout.num_shards)
    teacher = plan_teacher(config, model, data, longest, store) if config.teacher else None
    generation = None
    if data.prompts and not config.rollout_url:
        generation = plan_own_generation(config, placed, data, schedule, store)
    planned = plan_evaluation(config, placed, held_out, store)
    warmup_steps = num_warmup_steps(config, schedule)
    plan = Plan(placed, data, schedule, warmup_steps, generation, teacher, planned)
    _log_plan(config, plan)
    return config, plan


def plan_own_generation(
    config: TrainConfig,
    placed: PlacedModel,
    data: RunData,
    schedule: Schedule,
    store: dist.Store | None,
) -> Generation:
    """Plan how the run's own model answers its prompts, on the GPU that has least memory free."""
    # The free memory of all ranks is compared, so that they answer in the same rounds.
    free = least_free(placed.model.machine, "the memory for generation", store)
    num_answers = schedule.global_batch_size
    longest = int(data.lengths.max())
    values = int(data.known_rows.images.num_values.max(initial=0))
    per_prompt = schedule.num_generations
    size = AnswerSize(longest, config.max_completion_length, values, per_prompt)
    return _plan_answers(config, placed, num_answers, size, free)


def plan_evaluation(
    config: TrainConfig, placed: PlacedModel, held_out: PromptSets, store: dist.Store | None
) -> HeldOutPlan | None:
    """Plan how the run's own model answers held-out prompts; None if there are none.

    As for the answers of a step, these come between steps, and fit beside what stays in memory.
    """
    longest_prompt = max(
        (int(each.lengths.max(initial=0)) for each in held_out.values()), default=0
    )
    if not longest_prompt:
        return None
    free = least_free(placed.model.machine, "the memory for evaluations", store)
    most_prompts = max(map(len, held_out.values()))
    most_new = config.max_completion_length
    values = max(int(each.rows.images.num_values.max(initial=0)) for each in held_out.values())
    size = AnswerSize(longest_prompt + most_new, most_new, values)
    return HeldOutPlan(held_out, _plan_answers(config, placed, most_prompts, size, free))


def _plan_answers(
    config: TrainConfig, placed: PlacedModel, num_answers: int, size: AnswerSize, free: int | None
) -> Generation:
    """Plan answers on the machine. The others as for `plan_generation`."""
    device = placed.model.machine.ranks.device
    gpu = None
    if device.type == "cuda":
        gpu = gpu_of(torch.cuda.get_device_properties(device))
    return plan_generation(
        placed,
        num_answers,
        size,
        free,
        gpu,
        has_turns=bool(config.environment),
    )


def _log_plan(config: TrainConfig, plan: Plan) -> None:
    """Log rows, steps and memory."""
    placed = plan.placed
    data = plan.data
    machine = plan.model.machine
    log_plan(config, sample_line(data.known_rows, int(data.train_rows[0]), plan.model.tokenizer))
    if plan.schedule.padding and config.batching != "padded":
        log.info("Rows are planned with padding: with images this model needs it.")
    for line in filter(None, (plan.schedule.describe(plan.warmup_steps), placed.reduction)):
        log.info("%s", line)
    if plan.generation:
        num_prompts = plan.schedule.global_batch_size // plan.schedule.num_generations
        num_left = len(data.train_rows) % num_prompts
        log.info(
            "%s", plan.generation.describe(num_prompts, plan.schedule.num_generations, num_left)
        )
    if plan.held_out:
        held_out = plan.held_out
        log.info("%s", held_out.generation.describe_evaluation(held_out.most_prompts))
    log_plan(config, *PlanReport.of(placed).lines(), placed.reason)
    if shares_host_memory(machine.ranks.device):
        log.info(
            "This GPU's memory is the host's: weights or activations on the host free none of it."
        )
    for line in data.describe_left_out():
        log.warning("%s", line)
    num_nodes = machine.ranks.world_size // machine.ranks.local_world_size
    if num_nodes > 1:
        log.info("%s", _describe_link(placed, num_nodes=num_nodes))


def _describe_link(placed: PlacedModel, *, num_nodes: int) -> str:
    """One line: about how much each of several nodes sends to the others in a step."""
    meta = placed.model.meta
    sharded_over, frees_blocks = SHARDING_STRATEGIES[placed.placement.sharding_strategy]
    counts = count_bytes(meta.parts.kinds(meta.model), 1)
    sizes = {name: count.total for name, count in counts.items()}
    # A ring's all-reduce sends nearly twice the size of the gradients.
    size = format_bytes(2 * sizes.pop("trainable") * (num_nodes - 1) // num_nodes)
    line = (
        f"Between {num_nodes} nodes: each sends about {size} per step, gradients of trainable "
        "weights"
    )
    if sharded_over == "all":
        # Blocks that are freed after the forward pass are gathered once more for the backward pass.
        gathered = sum(sizes.values()) * (2 if frees_blocks else 1) * (num_nodes - 1) // num_nodes
        line += f", and {format_bytes(gathered)} per micro-batch, gathered weights"
    return line


def num_warmup_steps(config: TrainConfig, schedule: Schedule) -> int:
    warmup = config.warmup
    return warmup if isinstance(warmup, int) else math.ceil(warmup * schedule.total_steps)


def with_rows_per_step(config: TrainConfig, plan: Plan, global_batch_size: int | None) -> Plan:
    """The plan with the rows per step that the run was started with; None for a new run.

    Raises UserError: a new run has the rows of the one that it replaces, too few for its steps.
    """
    if global_batch_size not in (None, plan.schedule.global_batch_size):
        schedule = make_schedule(
            config,
            plan.data,
            plan.schedule.data_size,
            rows_per_step=global_batch_size,
            pads_images=plan.model.pads_images,
        )
        plan = dataclasses.replace(
            plan, schedule=schedule, warmup_steps=num_warmup_steps(config, schedule)
        )
        log.info(schedule.describe(plan.warmup_steps))
    _refuse_few_rows(config, plan)
    return plan


def _refuse_few_rows(config: TrainConfig, plan: Plan) -> None:
    """Raise UserError if a part of the rows was taken that ends the run before --max_steps."""
    num_steps = plan.schedule.total_steps
    if TAKEN in plan.data.provenance and num_steps < config.max_steps:
        raise UserError(
            f"--max_steps {config.max_steps}: the rows that were taken for the unfinished run are "
            f"enough for {num_steps} steps of this one, which does not continue it. Take rows anew "
            "with --resume off:replace."
        )
