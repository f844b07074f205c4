"""The plan of a run, made before a weight is read: the model without weights, the rows, the steps, the memory."""

import dataclasses
import logging
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fsdp_qlora.adapters.first_values import reduces_base
from fsdp_qlora.adapters.insert import LoraOptions
from fsdp_qlora.adapters.peft_folder import read_adapter, tensor_differences
from fsdp_qlora.adapters.peft_format import peft_config
from fsdp_qlora.config.conflicts import quant_storage_error
from fsdp_qlora.config.marks import of_quantizer
from fsdp_qlora.config.options import TrainConfig, names_marked, pairs
from fsdp_qlora.config.text import needless_lines
from fsdp_qlora.config.train_types import TrainType
from fsdp_qlora.data.prepare import DataOptions, RunData, prepare_data
from fsdp_qlora.data.schedule import Schedule
from fsdp_qlora.data.tokenization import describe_sample
from fsdp_qlora.errors import UserError
from fsdp_qlora.generation.prompts import Question, read_questions
from fsdp_qlora.loading import decoded, hub
from fsdp_qlora.loading.first_adapters import wanted_shapes
from fsdp_qlora.metrics.metric_log import refuse_sinks
from fsdp_qlora.metrics.profiling import check_output
from fsdp_qlora.model import models
from fsdp_qlora.model.attention import choose, describe_kernel
from fsdp_qlora.model.precision import PRECISIONS, Precision, choose_precision
from fsdp_qlora.optimizers.sharded import check_optimizer, check_shard_sizes
from fsdp_qlora.output.text import shorten
from fsdp_qlora.planning import describe, memory, placement
from fsdp_qlora.planning.build_model import LayerOptions, MetaModel, build_model
from fsdp_qlora.planning.placement import Placement, Sized
from fsdp_qlora.planning.step_memory import Step, StepBytes, estimate_step
from fsdp_qlora.quantizers import bnb_4bit
from fsdp_qlora.ranks import distributed
from fsdp_qlora.ranks.distributed import Ranks

log = logging.getLogger("fsdp_qlora")

_SAMPLE_LINES = 12

_UNTIL_CHOSEN = Placement("full_shard", False)


@dataclass(frozen=True)
class ModelPlan:
    """The model before its weights are read.

    meta: it on the meta device, quantized and adapted. documents: the attention implementation for rows without
    padding, None if there is none or they are to be padded. is_packed: its files are in 4 bits already. stored: they
    are in a format that is decoded. placement: how it is distributed. num_shards: ranks that share one copy.
    trains_whole_modules: what trains is more than an adapter, so its gradients do not add up unsharded, and its state
    is not gathered.
    """

    train_type: TrainType
    precision: Precision
    precision_name: str
    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    meta: MetaModel
    documents: str | None
    is_packed: bool
    stored: decoded.StoredFormat | None
    trains_whole_modules: bool
    placement: Placement = _UNTIL_CHOSEN
    num_shards: int = 1


@dataclass(frozen=True)
class Plan:
    """All that is known before a weight is read."""

    model: ModelPlan
    data: RunData
    schedule: Schedule
    warmup_steps: int
    questions: tuple[Question, ...] = ()
    """Of --sample_prompts."""


def make_plan(config: TrainConfig, ranks: Ranks, store: dist.Store | None) -> Plan:
    """Build the model without weights, tokenize the rows, and describe the run.

    Args:
        store: of `distributed.connect`; None for a dry run, which is one process.
    """
    device = planned_device(config, ranks)
    check_optimizer(config.optimizer, device)
    refuse_sinks(config.log_to)
    if config.profile:
        check_output(config.profiling_output)
    questions = read_questions(Path(config.sample_prompts)) if config.sample_prompts else []
    world_size = _planned_world_size(config) if config.dry_run else ranks.world_size
    log.info(describe.describe_device(device, world_size))
    for line in needless_lines(config):
        log.info(line)
    model = plan_model(config, ranks, store, world_size)
    check_shard_sizes(config.optimizer, model.meta.model, model.num_shards)
    if needs_merging := describe.describe_servers(adapter_config(config, model)):
        log.info(needs_merging)
    # Before the process group starts, so that no collective waits for the tokenizer.
    vocab_size = model.meta.model.get_input_embeddings().num_embeddings
    data = prepare_data(model.tokenizer, config.pick(DataOptions), vocab_size=vocab_size)
    schedule = make_schedule(config, data, world_size)
    asked = tuple(question for _, question in questions)
    plan = Plan(model, data, schedule, num_warmup_steps(config, schedule), asked)
    sample = describe_sample(data.train, int(data.train_rows[0]), model.tokenizer)
    log.info("%s", shorten(sample, num_lines=_SAMPLE_LINES, heading="---"))
    log.info(schedule.describe(plan.warmup_steps))
    detail = logging.INFO if config.dry_run else logging.DEBUG
    log.log(detail, describe.describe_batches(schedule, data.train_rows, data.train.lengths))
    blocks_to_recompute(config, model)
    for line in memory_lines(config, ranks, model):
        log.log(detail if line.startswith(" ") else logging.INFO, line)
    return plan


def make_schedule(config: TrainConfig, data: RunData, world_size: int, rows_per_step: int | None = None) -> Schedule:
    """The steps of the run. Where the number of rows is unknown, an epoch is --max_steps long."""
    rows = data.rows_per_epoch
    schedule = config.pick(
        Schedule, num_rows=rows or 1, world_size=world_size, rows_per_step=rows_per_step, mixture=data.mixture
    )
    if rows is not None:
        return schedule
    return dataclasses.replace(schedule, num_rows=schedule.global_batch_size * config.max_steps)


def _planned_world_size(config: TrainConfig) -> int:
    """The number of processes of a run with these options, even if this machine lacks the GPUs for them."""
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if started > 1 or config.requested_processes >= 1:
        return started if started > 1 else config.requested_processes
    return 1 if config.device == "cpu" else max(1, torch.cuda.device_count())


def planned_device(config: TrainConfig, ranks: Ranks) -> torch.device:
    """The device of the planned run: a dry run is often done without a GPU."""
    plans_for_gpu = config.dry_run and config.device != "cpu"
    return torch.device("cuda") if plans_for_gpu and ranks.device.type == "cpu" else ranks.device


def show_samples(config: TrainConfig) -> str:
    """The first rows as the model sees them. Only the model's tokenizer is needed."""
    folder = hub.find_model_folder(
        config.model, with_weights=False, with_code=config.trust_remote_code, is_preview=True
    )
    tokenizer = models.load_tokenizer(folder, config.model, trust_remote_code=config.trust_remote_code)
    data = prepare_data(tokenizer, config.pick(DataOptions), vocab_size=len(tokenizer))
    in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return "\n\n".join(
        describe_sample(data.train, int(row), tokenizer, in_colour=in_colour)
        for row in data.train_rows[: config.show_samples]
    )


def plan_model(config: TrainConfig, ranks: Ranks, store: dist.Store | None, world_size: int) -> ModelPlan:
    """Find the model, and build it without weights as the train type says."""
    # Weights are downloaded last, after all checks that do not need them.
    folder = hub.find_model_folder(
        config.model,
        with_weights=False,
        with_code=config.trust_remote_code,
        is_preview=config.is_preview,
        ranks=ranks,
        store=store,
    )
    model_config = models.load_config(folder, config.model, trust_remote_code=config.trust_remote_code)
    tokenizer = models.load_tokenizer(folder, config.model, trust_remote_code=config.trust_remote_code)
    plan = build_plan(config, ranks, folder, model_config, tokenizer, world_size=world_size, store=store)
    log.info("%s, precision %s", describe.describe_model(plan.meta), plan.precision_name)
    if kernel := describe_kernel(plan.meta.model.config, plan.precision.compute_dtype, ranks.device, plan.documents):
        log.info(kernel)
    models.warn_of_long_context(model_config, config.context_length)
    return plan


def build_plan(
    config: TrainConfig,
    ranks: Ranks,
    folder: Path,
    model_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    world_size: int,
    store: dist.Store | None = None,
) -> ModelPlan:
    """The plan of a model with a given configuration and tokenizer.

    Args:
        store: by which the ranks agree on the placement; None if each decides alone.
    """
    train_type = config.kind
    is_gpu_elsewhere = planned_device(config, ranks).type != ranks.device.type
    asked = "bf16" if is_gpu_elsewhere and config.precision == "auto" else config.precision
    precision_name = choose_precision(asked, ranks.device)
    precision = PRECISIONS[precision_name]
    if error := quant_storage_error(config.quant_storage, precision.compute_name):
        raise UserError(error)
    stored = decoded.take_format(model_config)
    if stored:
        log.info(stored.describe_use(quantizes=train_type.quantizer is not None))
    prequantized = bnb_4bit.take_settings(model_config, config.model)
    if prequantized:
        train_type.check_takes_4bit(config.train_type, config.model)
        log.info(prequantized.describe_use(quant_type=config.quant_type, double_quant=config.double_quant))
    meta = build_model(
        model_config,
        train_type,
        precision,
        ranks.device,
        LayerOptions(
            lora=lora_options(config),
            quantizer=quantizer_options(config, train_type.quantizer),
            prequantized=prequantized,
            new_blocks=models.new_blocks(model_config, config.model) if train_type.trains_new_blocks else (),
        ),
        attn_implementation="auto" if is_gpu_elsewhere else config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    check_model(config, meta)
    plan = ModelPlan(
        train_type=train_type,
        precision=precision,
        precision_name=precision_name,
        folder=folder,
        config=model_config,
        tokenizer=tokenizer,
        meta=meta,
        documents=None
        if config.padding
        else choose(meta.model.config, precision.compute_dtype, ranks.device, requested=config.attn_implementation),
        is_packed=prequantized is not None,
        stored=stored,
        trains_whole_modules=not train_type.has_adapter or bool(config.modules_to_save),
    )
    return placed(plan, choose_placement(config, ranks, plan, store, world_size=world_size), ranks, world_size)


def check_model(config: TrainConfig, meta: MetaModel) -> None:
    """Refuse a model that the adapter to start from does not fit, or of which too little would be quantized."""
    if config.adapter:
        check_adapter(config, meta.model)
    if config.kind.quantizer:
        memory.check_quantized_share(meta.parts, allow_unquantized=config.allow_unquantized)


def placed(plan: ModelPlan, chosen: Placement, ranks: Ranks, world_size: int) -> ModelPlan:
    """The plan with another placement."""
    num_shards = distributed.num_shards(ranks, world_size, sharding_strategy=chosen.sharding_strategy)
    return dataclasses.replace(plan, placement=chosen, num_shards=num_shards)


def choose_placement(
    config: TrainConfig, ranks: Ranks, plan: ModelPlan, store: dist.Store | None, *, world_size: int
) -> Placement:
    """The placement that the options ask for; what they leave open is decided by what fits, alike on all ranks."""
    is_paged_whole = config.optimizer.startswith("paged_") and plan.trains_whole_modules  # it pages from the GPU
    ways = (True, False) if config.gradient_accumulation_steps > 1 else (True,)
    blocks = len(plan.meta.parts.blocks)
    if (asked := config.use_cpu_offload) not in ("auto", True, False) and int(asked) > blocks:
        raise UserError(
            f"--use_cpu_offload {asked}: the model has {blocks} decoder blocks. Give at most that, or true for the "
            "embeddings too."
        )
    found = placement.candidates(
        config.sharding_strategy,
        config.use_cpu_offload,
        world_size=world_size,
        per_node=distributed.ranks_per_node(ranks, world_size),
        on_gpu=planned_device(config, ranks).type == "cuda",
        can_offload=not is_paged_whole,
        accumulates=(False,) if plan.trains_whole_modules else ways,
    )
    if len(found) == 1:
        return found[0]
    sized = []
    for each in found:
        there = placed(plan, each, ranks, world_size)
        estimate = estimate_needs(config, ranks, there).device + step_bytes(config, there).peak
        sized.append(Sized(each, placement.with_margin(estimate)))
    free = torch.cuda.mem_get_info(ranks.device)[0] if ranks.device.type == "cuda" else None
    if free is not None and store is not None and ranks.world_size > 1:
        free = distributed.least_over_ranks(free, "the free GPU memory", ranks, store)
    chosen = placement.choose(sized, free)
    lines = [placement.describe_reduction(sized, free)]
    # Sharded over one rank is what a user of one GPU expects; what is shared by none is not worth a line.
    if world_size > 1 or free is None or chosen.cpu_offload:
        lines.insert(0, placement.describe_choice(sized, free))
    for line in filter(None, lines):
        log.info(line)
    return chosen


def continued(config: TrainConfig, plan: Plan, global_batch_size: int | None) -> Plan:
    """The plan with the rows per step that the run was started with; None for a new run."""
    if global_batch_size in (None, plan.schedule.global_batch_size):
        return plan
    schedule = make_schedule(config, plan.data, plan.schedule.world_size, rows_per_step=global_batch_size)
    plan = dataclasses.replace(plan, schedule=schedule, warmup_steps=num_warmup_steps(config, schedule))
    log.info(schedule.describe(plan.warmup_steps))
    return plan


def lora_options(config: TrainConfig) -> LoraOptions:
    """The options of the adapter."""
    return config.pick(
        LoraOptions,
        prefix="lora_",
        init=config.init_lora_weights,
        rank_pattern={name: int(value) for name, value in pairs(config.rank_pattern)},
        alpha_pattern={name: float(value) for name, value in pairs(config.alpha_pattern)},
    )


def check_adapter(config: TrainConfig, model: PreTrainedModel) -> None:
    """Refuse an adapter to start from that is not one for this model, before weights are downloaded.

    Raises:
        UserError: its base has another name on the hub, or its tensors are not those of this model's adapter.
    """
    adapter = read_adapter(Path(str(config.adapter)).expanduser())
    own = hub.public_name(config.model)
    if adapter.has_other_base(own=own, said_to_be=config.base_name):
        raise UserError(
            f"--adapter {config.adapter} was trained on {adapter.base_name}, and --model_name is {own}. If they are "
            f"the same weights, in other bits or under another name, say so: --base_name {adapter.base_name}."
        )
    if found := tensor_differences(adapter.shapes, wanted_shapes(model, init=config.init_lora_weights)):
        raise UserError(
            f"--adapter {config.adapter} does not fit this model and these options (its base is "
            f"{adapter.base_name or 'not named'}):\n  " + "\n  ".join(found)
        )


def adapter_config(config: TrainConfig, plan: ModelPlan) -> LoraConfig | None:
    """The configuration of the saved adapter, in PEFT's format; None where a whole model is saved."""
    if plan.train_type.adapter is None:
        return None
    return peft_config(
        plan.meta.linears,
        plan.meta.targets,
        plan.meta.target_parameters,
        plan.train_type.adapter,
        lora_options(config),
        base_model=config.base_name or hub.public_name(config.model),
        model_config=plan.config,
    )


def quantizer_options(config: TrainConfig, quantizer: str | None) -> dict[str, Any]:
    """The quantizer's own options."""
    return {name: getattr(config, name) for name in names_marked(of_quantizer(quantizer))}


def num_warmup_steps(config: TrainConfig, schedule: Schedule) -> int:
    if config.warmup_steps >= 0:
        return config.warmup_steps
    return math.ceil(config.warmup_ratio * schedule.total_steps)


def memory_lines(config: TrainConfig, ranks: Ranks, plan: ModelPlan) -> list[str]:
    """Describe a rank's memory needs, and whether they fit in the visible GPU."""
    gpu_bytes = torch.cuda.mem_get_info(ranks.device)[1] if ranks.device.type == "cuda" else None
    lines = describe.describe_memory(
        plan.meta,
        estimate_needs(config, ranks, plan),
        step_bytes(config, plan),
        num_shards=plan.num_shards,
        optimizer=config.optimizer,
        on_gpu=planned_device(config, ranks).type == "cuda",
        gpu_bytes=gpu_bytes,
    )
    if (num_nodes := ranks.world_size // ranks.local_world_size) > 1:
        strategy = plan.placement.sharding_strategy
        lines.append(describe.describe_link(plan.meta, sharding_strategy=strategy, num_nodes=num_nodes))
    return lines


def blocks_to_recompute(config: TrainConfig, plan: ModelPlan) -> int:
    """How many decoder blocks recompute when the run starts; with auto all, until probes have found what fits.

    Raises:
        UserError: the model does not have so many.
    """
    blocks, asked = len(plan.meta.parts.blocks), config.blocks_to_recompute
    if isinstance(asked, int) and asked > blocks:
        raise UserError(f"--recompute {asked}: the model has {blocks} decoder blocks. Give at most that, or all.")
    return asked if isinstance(asked, int) else 0 if asked == "none" else blocks


def step_bytes(config: TrainConfig, plan: ModelPlan) -> StepBytes:
    """What comes and goes on a rank's device in a step, with recompute of every block."""
    _, frees_blocks = distributed.SHARDING_STRATEGIES[plan.placement.sharding_strategy]
    step = Step(
        num_shards=plan.num_shards,
        frees_blocks=frees_blocks,
        cpu_offload=plan.placement.cpu_offload,
        precision=plan.precision,
        num_rows=config.batch_size,
        num_tokens=config.batch_size * config.context_length,
        accumulates=config.gradient_accumulation_steps > 1 and plan.placement.accumulates,
        offloads_activations=config.use_activation_cpu_offload,
    )
    return estimate_step(plan.meta.parts, step)


def estimate_needs(config: TrainConfig, ranks: Ranks, plan: ModelPlan) -> memory.Needs:
    """What a rank needs on its device and on the host."""
    return memory.estimate_needs(
        plan.meta.parts,
        num_shards=plan.num_shards,
        optimizer=config.optimizer,
        cpu_offload=plan.placement.cpu_offload,
        buffer_bytes=config.loading_buffer_mib * 2**20,
        device=planned_device(config, ranks),
    )


def check_resources(config: TrainConfig, ranks: Ranks, plan: ModelPlan) -> None:
    """Refuse a run whose weights alone do not fit, or whose result does not."""
    if config.save_model and ranks.rank < ranks.local_world_size:  # the machine that saves
        size = memory.result_bytes(
            plan.meta.model, dtype=plan.precision.compute_dtype, reduces_base=reduces_base(config.init_lora_weights)
        )
        memory.check_disk(Path(config.output_dir), size)
    memory.check_resources(
        estimate_needs(config, ranks, plan),
        ranks.device,
        ranks_on_host=ranks.local_world_size,
        can_offload=not plan.placement.cpu_offload,
    )
