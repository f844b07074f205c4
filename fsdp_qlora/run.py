"""One rank's run, in its order: plan without weights, shard and load, verify, train, save.

Besides the command line this is the one place that sees the options; everything it calls takes plain arguments.
The training step is `Trainer.train_step` in trainer.py.
"""

import functools
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from fsdp_qlora import (
    describe,
    distributed,
    export,
    hub,
    models,
    packed,
    parallelize,
    quant_cache,
    resources,
    verify,
    weights,
)
from fsdp_qlora.adapters import peft_config
from fsdp_qlora.checkpoint_files import Checkpoint
from fsdp_qlora.config import TrainConfig, needless_lines, resolved_options, resolved_yaml
from fsdp_qlora.data.prepare import RunData, prepare_data
from fsdp_qlora.distributed import Ranks
from fsdp_qlora.launch import planned_processes
from fsdp_qlora.metrics import open_metric_log
from fsdp_qlora.optim import ShardedOptimizer, learning_rate
from fsdp_qlora.precision import PRECISIONS, Precision, choose_precision
from fsdp_qlora.profiling import MemoryLog, open_profiler
from fsdp_qlora.train_types import QUANTIZER_OPTIONS, TRAIN_TYPES, TrainType
from fsdp_qlora.trainer import Schedule, Trainer, train

log = logging.getLogger("fsdp_qlora")


# Options that may differ between nodes: paths, and how each was started.
_OWN = {"model_name", "llama_pro_path", "dataset", "eval_dataset", "output_dir", "overwrite_output_dir"}
_OWN |= {"profiling_output", "quant_cache", "loading_buffer_mib", "world_size", "nproc_per_node", "master_addr"}
_OWN |= {"master_port", "verbose"}


@dataclass(frozen=True)
class Plan:
    """All that is known before a weight is read. is_packed: the model's files are in 4 bits already."""

    train_type: TrainType
    precision: Precision
    model_folder: Path
    model_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    meta: parallelize.MetaModel
    is_packed: bool
    data: RunData
    schedule: Schedule
    warmup_steps: int
    num_shards: int


def run(config: TrainConfig) -> None:
    """Do what the options say; every rank calls it.

    Raises:
        UserError: the options, the model or the data cannot be used.
        TrainingError: the run cannot go on.
    """
    started = time.perf_counter()
    ranks = distributed.read_ranks()
    distributed.set_up_logging(ranks, verbose=config.verbose)
    output_dir = Path(config.output_dir)
    # Only rank 0 writes; the ranks beside it say so too.
    if not config.dry_run and ranks.rank < ranks.local_world_size:
        export.check_output_dir(output_dir, overwrite=config.overwrite_output_dir)
    plan = make_plan(config, ranks)
    if config.dry_run:
        log.info("Options:\n%s", resolved_yaml(config))
        return
    export.check_keeps_model(output_dir, plan.model_folder)
    checkpoint = Checkpoint(plan.model_folder)
    sources = weights.match_tensors(plan.meta.model, checkpoint, packed=plan.is_packed)
    check_resources(config, ranks, plan)

    distributed.start_process_group(ranks)
    distributed.check_agreement(
        {
            "the options": {name: value for name, value in resolved_options(config).items() if name not in _OWN},
            "the rows": (plan.data.train.digest(), plan.data.evaluation.digest(), len(plan.data.eval_rows)),
            "the model": ({**plan.model_config.to_dict(), "_name_or_path": None}, sorted(sources)),
        },
        ranks.device,
    )
    mesh = distributed.build_mesh(ranks, sharding_strategy=config.sharding_strategy)
    memory = MemoryLog(ranks.device, enabled=config.profile_memory)
    shard_and_load(config, ranks, plan, mesh, checkpoint, sources)
    memory.record("after loading")
    verify.check_byte_account(plan.meta.model, mesh)
    verify.check_one_layer(plan.meta.model, checkpoint, sources, packed=plan.is_packed)
    if ranks.is_rank_0:
        export.prepare_output_dir(output_dir, resolved_yaml(config))

    summary = train_and_save(config, ranks, plan, memory)
    seconds = time.perf_counter() - started
    log.info(describe.describe_result(summary, output_dir, seconds, saved=config.save_model))
    distributed.stop_process_group()


def make_plan(config: TrainConfig, ranks: Ranks) -> Plan:
    """Build the model without weights, tokenize the rows, and say what is going to happen."""
    train_type = TRAIN_TYPES[config.train_type]
    precision_name = choose_precision(config.precision, ranks.device)
    precision = PRECISIONS[precision_name]
    precision.check_storage(config.quant_storage)
    world_size = planned_processes(config) if config.dry_run else ranks.world_size
    log.info(describe.describe_device(ranks.device, world_size))
    for line in needless_lines(config):
        log.info(line)
    folder = hub.find_model_folder(config.model, with_weights=not config.dry_run)
    model_config = models.load_config(folder, config.model)
    prequantized = packed.take_settings(model_config, config.model)
    if prequantized:
        train_type.check_takes_4bit(config.train_type, config.model)
        log.info(prequantized.describe_use(quant_type=config.quant_type, double_quant=config.double_quant))
    tokenizer = models.load_tokenizer(folder, config.model)
    meta = parallelize.build_model(
        model_config,
        train_type,
        precision,
        ranks.device,
        attn_implementation=config.attn_implementation,
        quantizer_options=quantizer_options(config, train_type.quantizer),
        lora_rank=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        lora_target_modules=list(config.lora_target_modules),
        lora_target_parameters=list(config.lora_target_parameters),
        prequantized=prequantized,
        new_blocks=models.new_blocks(model_config, config.model) if train_type.trains_new_blocks else (),
    )
    if train_type.quantizer:
        describe.check_quantized_share(meta, allow_unquantized=config.allow_unquantized)
    log.info("%s, precision %s", describe.describe_model(meta), precision_name)
    models.warn_of_long_context(model_config, config.context_length)
    num_shards = distributed.num_shards(ranks, world_size, sharding_strategy=config.sharding_strategy)
    for line in describe.describe_memory(meta, num_shards=num_shards, optimizer=config.optimizer):
        log.info(line)
    # Before the ranks meet, so that no collective waits for the tokenizer.
    data = prepare_data(
        tokenizer,
        dataset=config.dataset,
        eval_dataset=config.eval_dataset,
        eval_fraction=config.eval_fraction,
        context_length=config.context_length,
        dataset_format=config.dataset_format,
        dataset_samples=config.dataset_samples,
        max_bad_rows=config.max_bad_rows,
        seed=config.seed,
        vocab_size=meta.model.get_input_embeddings().num_embeddings,
    )
    schedule = Schedule(
        num_rows=len(data.train_rows),
        batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        world_size=world_size,
        num_epochs=config.num_epochs,
        max_steps=config.max_steps,
        seed=config.seed,
    )
    warmup_steps = config.warmup_steps
    if warmup_steps < 0:
        warmup_steps = math.ceil(config.warmup_ratio * schedule.total_steps)
    log.info(schedule.describe(warmup_steps))
    log.info(data.sample)
    return Plan(
        train_type=train_type,
        precision=precision,
        model_folder=folder,
        model_config=model_config,
        tokenizer=tokenizer,
        meta=meta,
        is_packed=prequantized is not None,
        data=data,
        schedule=schedule,
        warmup_steps=warmup_steps,
        num_shards=num_shards,
    )


def quantizer_options(config: TrainConfig, quantizer: str | None) -> dict[str, Any]:
    """The options that are the quantizer's own."""
    options = {
        "quant_type": config.quant_type,
        "double_quant": config.double_quant,
        "n_bits": config.n_bits,
        "group_size": config.group_size,
        "int8_threshold": config.int8_threshold,
    }
    return {name: options[name] for name in QUANTIZER_OPTIONS.get(quantizer or "", ())}


def check_resources(config: TrainConfig, ranks: Ranks, plan: Plan) -> None:
    """Refuse a run whose weights alone do not fit."""
    needs = resources.estimate_needs(
        plan.meta.model,
        num_shards=plan.num_shards,
        optimizer=config.optimizer,
        cpu_offload=config.use_cpu_offload,
        buffer_bytes=config.loading_buffer_mib * 2**20,
        device=ranks.device,
    )
    resources.check_resources(
        needs, ranks.device, ranks_on_host=ranks.local_world_size, can_offload=not config.use_cpu_offload
    )


def shard_and_load(
    config: TrainConfig,
    ranks: Ranks,
    plan: Plan,
    mesh: DeviceMesh,
    checkpoint: Checkpoint,
    sources: dict[str, str],
) -> None:
    """Turn the plan's model into this rank's shards, filled from the checkpoint or the quantized cache."""
    model = plan.meta.model
    if config.use_gradient_checkpointing:
        parallelize.checkpoint_activations(model, offload=config.use_activation_cpu_offload)
    parallelize.shard_model(
        model,
        mesh,
        sharding_strategy=config.sharding_strategy,
        precision=plan.precision,
        cpu_offload=config.use_cpu_offload,
    )
    log.debug("%s", model)
    parallelize.materialize(model, ranks.device, cpu_offload=config.use_cpu_offload)
    load_weights = functools.partial(
        weights.load_weights,
        model,
        mesh=mesh,
        device=ranks.device,
        seed=config.seed,
        max_bytes_in_flight=config.loading_buffer_mib * 2**20,
        show_progress=ranks.is_rank_0,
    )
    layers = {} if plan.is_packed else weights.quantized_layers(model)
    cache = quant_cache.open_cache(config.quant_cache, layers, checkpoint, sources, ranks, mesh)
    if cache:
        cache.load(load_weights)
    else:
        load_weights(checkpoint=checkpoint, sources=sources, packed=plan.is_packed)


def train_and_save(config: TrainConfig, ranks: Ranks, plan: Plan, memory: MemoryLog) -> dict[str, float]:
    """Run all steps and save the result; returns the run's summary."""
    model, schedule = plan.meta.model, plan.schedule
    trainer = Trainer(
        model,
        ShardedOptimizer(model, config.optimizer, lr=config.learning_rate, weight_decay=config.wd),
        plan.data.train,
        ranks,
        schedule=schedule,
        precision=plan.precision,
        num_replicas=ranks.world_size // plan.num_shards,
        max_grad_norm=config.grad_norm if config.apply_gradient_clipping else math.inf,
        # Gradients of an adapter are small enough to add up unsharded; a whole model's are not.
        sync_every_micro_batch=not plan.train_type.has_adapter,
        # No token sees the padding, so any id in the vocabulary will do; a pad token may be outside of it.
        pad_token_id=plan.tokenizer.eos_token_id,
    )
    profiler = open_profiler(
        enabled=config.profile,
        output=Path(config.profiling_output),
        rank=ranks.rank,
        with_stack=config.with_stack,
        with_shapes=config.with_shapes,
        export_trace=config.export_trace,
        export_memory_timeline=config.export_memory_timeline,
        wait_steps=config.wait_steps,
        warmup_steps=config.profiling_warmup_steps,
        active_steps=config.active_steps,
        repeat=config.repeat,
        frequency=config.profiling_frequency,
    )
    with open_metric_log(
        config.log_to,
        output_dir=Path(config.output_dir),
        total_steps=schedule.total_steps,
        config=resolved_options(config),
        project_name=config.project_name,
        name=config.name,
        group=config.group,
        entity=config.entity,
        is_rank_0=ranks.is_rank_0,
    ) as metrics:
        summary = train(
            trainer,
            plan.data,
            metrics,
            learning_rate=functools.partial(
                learning_rate,
                peak=config.learning_rate,
                schedule=config.lr_scheduler,
                warmup_steps=plan.warmup_steps,
                total_steps=schedule.total_steps,
            ),
            eval_steps=config.eval_steps,
            profiler=profiler,
            memory=memory,
        )
        profiler.close()
        if config.save_model:
            save(config, ranks, plan)
        metrics.summary(summary)
    return summary


def save(config: TrainConfig, ranks: Ranks, plan: Plan) -> None:
    """Write the adapter, or the whole model where blocks of it or all were trained. Every rank calls it."""
    model, output_dir = plan.meta.model, Path(config.output_dir)
    if plan.train_type.trains_new_blocks:
        export.save_new_blocks(
            model,
            plan.tokenizer,
            output_dir,
            base=Checkpoint(plan.model_folder),
            dtype=plan.precision.compute_dtype,
            is_rank_0=ranks.is_rank_0,
        )
        return
    if not plan.train_type.has_adapter:
        dtype = plan.precision.compute_dtype
        export.save_model(
            model,
            plan.model_config,
            plan.tokenizer,
            output_dir,
            base_folder=plan.model_folder,
            dtype=dtype,
            is_rank_0=ranks.is_rank_0,
        )
        return
    adapter = peft_config(
        plan.meta.linears,
        plan.meta.targets,
        plan.meta.target_parameters,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        base_model=config.model_name,
        model_config=plan.model_config,
    )
    export.save_adapter(model, adapter, plan.tokenizer, output_dir, is_rank_0=ranks.is_rank_0)
