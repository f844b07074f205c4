"""One rank's run, in its order: plan without weights, shard and load, verify, train, save.

Besides the command line this is the one place that sees the options; everything it calls takes plain arguments.
The training step is `Trainer.train_step` in trainer.py.
"""

import contextlib
import dataclasses
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
    decoded_tensors,
    describe,
    distributed,
    endings,
    export,
    hub,
    models,
    packed,
    parallelize,
    quant_cache,
    resources,
    restarts,
    resume,
    run_folder,
    verify,
    weights,
)
from fsdp_qlora.adapter_init import decompose_weights, initialize_adapters, reduces_base
from fsdp_qlora.adapters import LoraOptions
from fsdp_qlora.checkpoint import DamagedCheckpoint
from fsdp_qlora.checkpoint_files import Checkpoint
from fsdp_qlora.config import TrainConfig, needless_lines, pairs, resolved_options, resolved_yaml
from fsdp_qlora.control import Budget, Control
from fsdp_qlora.data.prepare import RunData, prepare_data
from fsdp_qlora.distributed import Ranks
from fsdp_qlora.errors import UserError
from fsdp_qlora.fingerprint import fingerprint_files
from fsdp_qlora.launch import planned_processes
from fsdp_qlora.metrics import copy_metrics, cut_metrics, open_metric_log
from fsdp_qlora.mirror import Mirror
from fsdp_qlora.mirror_stores import open_store
from fsdp_qlora.optim import ShardedOptimizer, check_optimizer, learning_rate
from fsdp_qlora.peft_format import peft_config
from fsdp_qlora.precision import PRECISIONS, Precision, choose_precision
from fsdp_qlora.profiling import MemoryLog, open_profiler
from fsdp_qlora.progress import Progress
from fsdp_qlora.redact import redact_values
from fsdp_qlora.run_folder import Status
from fsdp_qlora.saving import Saver
from fsdp_qlora.train_loop import train
from fsdp_qlora.train_state import TrainState
from fsdp_qlora.train_types import QUANTIZER_OPTIONS, TRAIN_TYPES, TrainType
from fsdp_qlora.trainer import Schedule, Trainer
from fsdp_qlora.watchdog import Heartbeat, Watchdog

log = logging.getLogger("fsdp_qlora")


# Options that may differ between nodes: paths, and how each was started.
_OWN = {"model_name", "dataset", "eval_dataset", "output_dir", "profiling_output", "overwrite_output_dir"}
_OWN |= {"quant_cache", "loading_buffer_mib", "world_size", "nproc_per_node", "master_addr", "master_port", "verbose"}
_OWN |= {"resume", "mirror", "llama_pro_path"}


@dataclass(frozen=True)
class Plan:
    """All that is known before a weight is read.

    is_packed: the model's files are in 4 bits already. stored: they are in a format that is decoded.
    """

    train_type: TrainType
    precision: Precision
    precision_name: str
    model_folder: Path
    model_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    meta: parallelize.MetaModel
    is_packed: bool
    stored: decoded_tensors.StoredFormat | None
    data: RunData
    schedule: Schedule
    warmup_steps: int
    num_shards: int


def run(config: TrainConfig) -> None:
    """Do what the options say; every rank calls it.

    Raises:
        UserError: the options, the model or the data cannot be used.
        TrainingError: the run cannot go on.
        RunStopped: it was asked to stop, and will go on from there when it is started again.
        LostRank: another rank has ended.
    """
    ranks = distributed.read_ranks()
    distributed.set_up_logging(ranks, verbose=config.verbose)
    if config.dry_run:
        make_plan(config, ranks)
        log.info("Options:\n%s", resolved_yaml(config))
        return
    if config.mirror:
        open_store(config.mirror)  # refused before any work where it cannot be used
    output_dir = Path(config.output_dir)
    # Only rank 0 writes; the ranks beside it say so too.
    if ranks.rank < ranks.local_world_size:
        check_output_dir(config, output_dir, ranks)
    with run_folder.locked(output_dir) if ranks.is_rank_0 else contextlib.nullcontext():
        run_locked(config, ranks, output_dir)


def run_locked(config: TrainConfig, ranks: Ranks, output_dir: Path) -> None:
    """The run itself, while no other may write into its folder."""
    started = time.monotonic()
    plan = make_plan(config, ranks)
    export.check_keeps_model(output_dir, plan.model_folder)
    checkpoint = decoded_tensors.open_checkpoint(plan.model_folder, plan.stored)
    sources = weights.match_tensors(plan.meta.model, checkpoint, packed=plan.is_packed)
    check_resources(config, ranks, plan)

    store = distributed.start_process_group(ranks, timeout_minutes=max(30, 2 * config.hang_minutes))
    distributed.check_agreement(
        {
            "the options": {name: value for name, value in resolved_options(config).items() if name not in _OWN},
            "the rows": rows_digest(plan.data),
            "the model": ({**plan.model_config.to_dict(), "_name_or_path": None}, sorted(sources)),
        },
        ranks.device,
    )
    about = describe_run(config, ranks, plan, checkpoint)
    start = resume.choose_start(
        output_dir,
        about,
        ranks,
        resume=config.resume,
        overwrite=config.overwrite_output_dir,
        is_unattended=restarts.is_unattended(),
        mirror=open_store(config.mirror) if config.mirror else None,
    )
    if start.is_finished:
        log.info("This run is finished already: nothing to do. Its results are in %s.", output_dir)
        distributed.stop_process_group()
        return
    budget = Budget(
        config.max_hours, config.max_cost_usd, config.price_per_hour, start.used_seconds, start.reserve_seconds
    )
    budget.check()
    plan, about = go_on_with(config, plan, about, start)
    mesh = distributed.build_mesh(ranks, sharding_strategy=config.sharding_strategy)
    memory = MemoryLog(ranks.device, enabled=config.profile_memory)
    with endings.naming_lost_ranks("while the model was loaded"):
        shard_and_load(config, ranks, plan, mesh, checkpoint, sources)
        memory.record("after loading")
        verify.check_byte_account(plan.meta.model, mesh)
        verify.check_one_layer(plan.meta.model, checkpoint, sources, packed=plan.is_packed)
    if ranks.is_rank_0:
        files = {"config.yaml": resolved_yaml(config), **plan.data.files()}
        export.prepare_output_dir(output_dir, files, keep_run=not start.is_new)
        run_folder.write_atomically(output_dir / run_folder.RUN, {**about, "run_id": start.run_id})

    status = Status(
        output_dir,
        is_rank_0=ranks.is_rank_0,
        state="running",
        run_id=start.run_id,
        start_step=start.step,
        step=start.step,
        saved_step=start.step if start.folder and not start.is_new else -1,
        total_steps=plan.schedule.total_steps,
        deaths=start.deaths,
        seconds=start.used_seconds,
        reason=None,
        exit_code=None,
    )
    status.update()
    control = Control(is_rank_0=ranks.is_rank_0, budget=budget, save_seconds=60 * config.save_minutes, started=started)
    watchdog = Watchdog(
        Heartbeat(),
        store,
        ranks,
        hang_minutes=config.hang_minutes,
        output_dir=output_dir,
        on_end=status.end,
    )
    with endings.recorded(status, watchdog, memory_settings=endings.memory_settings(resolved_options(config))):
        summary = train_and_save(config, ranks, plan, mesh, memory, start, about, status, control, watchdog)
    log.info(describe.describe_result(summary, output_dir, time.monotonic() - started, saved=config.save_model))
    distributed.stop_process_group()


def check_output_dir(config: TrainConfig, output_dir: Path, ranks: Ranks) -> None:
    """Refuse a folder that holds something else than this run, as far as the options tell."""
    goes_on = config.resume == "auto" and resume.is_run(output_dir)
    goes_on |= config.resume not in ("auto", "off") and resume.is_of(output_dir, Path(config.resume).expanduser())
    export.check_output_dir(output_dir, overwrite=config.overwrite_output_dir or goes_on)
    resume.check_options(
        output_dir,
        resolved_options(config),
        resume=config.resume,
        overwrite=config.overwrite_output_dir,
        world_size=ranks.world_size,
    )


def describe_run(config: TrainConfig, ranks: Ranks, plan: Plan, checkpoint: Checkpoint) -> dict[str, Any]:
    """What makes this run this run: for its folder, its checkpoints, and to tell it from others."""
    model_config = {**plan.model_config.to_dict(), "_name_or_path": None}
    return {
        "options": resolved_options(config),
        "facts": {
            "base": fingerprint_files(checkpoint.files.values()) if ranks.is_rank_0 else None,
            "model": f"{distributed.derive_seed(model_config):x}",
            "rows": rows_digest(plan.data),
            "precision": plan.precision_name,
        },
        "world_size": ranks.world_size,
        "global_batch_size": plan.schedule.global_batch_size,
    }


def rows_digest(data: RunData) -> list[str | int]:
    return [data.train.digest(), data.evaluation.digest(), len(data.eval_rows)]


def go_on_with(
    config: TrainConfig, plan: Plan, about: dict[str, Any], start: resume.Start
) -> tuple[Plan, dict[str, Any]]:
    """The plan, and what it is of, with the rows per step that the run was started with."""
    about = {**about, "run_id": start.run_id}
    if start.global_batch_size in (None, plan.schedule.global_batch_size):
        return plan, about
    schedule = dataclasses.replace(plan.schedule, rows_per_step=start.global_batch_size)
    plan = dataclasses.replace(plan, schedule=schedule, warmup_steps=num_warmup_steps(config, schedule))
    log.info(schedule.describe(plan.warmup_steps))
    return plan, {**about, "global_batch_size": start.global_batch_size}


def make_plan(config: TrainConfig, ranks: Ranks) -> Plan:
    """Build the model without weights, tokenize the rows, and say what is going to happen."""
    train_type = TRAIN_TYPES[config.train_type]
    precision_name = choose_precision(config.precision, ranks.device)
    precision = PRECISIONS[precision_name]
    precision.check_storage(config.quant_storage)
    check_optimizer(config.optimizer, ranks.device)
    world_size = planned_processes(config) if config.dry_run else ranks.world_size
    log.info(describe.describe_device(ranks.device, world_size))
    for line in needless_lines(config):
        log.info(line)
    folder = hub.find_model_folder(
        config.model,
        with_weights=not config.dry_run,
        with_code=config.trust_remote_code,
        local_rank=ranks.local_rank,
        show_progress=ranks.is_rank_0,
    )
    model_config = models.load_config(folder, config.model, trust_remote_code=config.trust_remote_code)
    stored = decoded_tensors.take_format(model_config)
    if stored:
        log.info(stored.describe_use(quantizes=train_type.quantizer is not None))
    prequantized = packed.take_settings(model_config, config.model)
    if prequantized:
        train_type.check_takes_4bit(config.train_type, config.model)
        log.info(prequantized.describe_use(quant_type=config.quant_type, double_quant=config.double_quant))
    tokenizer = models.load_tokenizer(folder, config.model, trust_remote_code=config.trust_remote_code)
    meta = parallelize.build_model(
        model_config,
        train_type,
        precision,
        ranks.device,
        attn_implementation=config.attn_implementation,
        quantizer_options=quantizer_options(config, train_type.quantizer),
        lora=lora_options(config),
        prequantized=prequantized,
        trust_remote_code=config.trust_remote_code,
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
        on_bad_row=config.on_bad_row,
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
    warmup_steps = num_warmup_steps(config, schedule)
    log.info(schedule.describe(warmup_steps))
    log.info(data.sample)
    return Plan(
        train_type=train_type,
        precision=precision,
        precision_name=precision_name,
        model_folder=folder,
        model_config=model_config,
        tokenizer=tokenizer,
        meta=meta,
        is_packed=prequantized is not None,
        stored=stored,
        data=data,
        schedule=schedule,
        warmup_steps=warmup_steps,
        num_shards=num_shards,
    )


def lora_options(config: TrainConfig) -> LoraOptions:
    """The options of the adapter."""
    return LoraOptions(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=config.lora_target_modules,
        target_parameters=config.lora_target_parameters,
        use_rslora=config.use_rslora,
        rank_pattern={name: int(value) for name, value in pairs(config.rank_pattern)},
        alpha_pattern={name: float(value) for name, value in pairs(config.alpha_pattern)},
        init=config.init_lora_weights,
        modules_to_save=config.modules_to_save,
    )


def num_warmup_steps(config: TrainConfig, schedule: Schedule) -> int:
    if config.warmup_steps >= 0:
        return config.warmup_steps
    return math.ceil(config.warmup_ratio * schedule.total_steps)


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
    """Refuse a run whose weights alone do not fit, or whose result does not."""
    if config.save_model and ranks.rank < ranks.local_world_size:  # the machine that saves
        size = resources.result_bytes(
            plan.meta.model, dtype=plan.precision.compute_dtype, reduces_base=reduces_base(config.init_lora_weights)
        )
        resources.check_disk(Path(config.output_dir), size)
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
    init, cache_folder = config.init_lora_weights, config.quant_cache
    if init != "true":
        decompose_weights(model, checkpoint, sources, mesh, ranks.device, init=init, seed=config.seed)
    if reduces_base(init) and plan.train_type.quantizer:
        cache_folder = "off"
        log.info("The quantized weights are not kept for the next start: with %s they belong to this adapter.", init)
    load_weights = functools.partial(
        weights.load_weights,
        model,
        mesh=mesh,
        device=ranks.device,
        max_bytes_in_flight=config.loading_buffer_mib * 2**20,
        show_progress=ranks.is_rank_0,
    )
    layers = {} if plan.is_packed else weights.quantized_layers(model)
    cache = quant_cache.open_cache(cache_folder, layers, checkpoint, sources, ranks, mesh)
    if cache:
        cache.load(load_weights)
    else:
        load_weights(checkpoint=checkpoint, sources=sources, packed=plan.is_packed)
    initialize_adapters(model, mesh, seed=config.seed)


def train_and_save(
    config: TrainConfig,
    ranks: Ranks,
    plan: Plan,
    mesh: DeviceMesh,
    memory: MemoryLog,
    start: resume.Start,
    about: dict[str, Any],
    status: Status,
    control: Control,
    watchdog: Watchdog,
) -> dict[str, float]:
    """Run the steps that are left and save the result; returns the run's summary."""
    model, schedule, output_dir = plan.meta.model, plan.schedule, Path(config.output_dir)
    optimizer = ShardedOptimizer(
        model,
        config.optimizer,
        lr=config.learning_rate,
        weight_decay=config.wd,
        lr_ratio_B=config.loraplus_lr_ratio,
    )
    trainer = Trainer(
        model,
        optimizer,
        plan.data.train,
        ranks,
        schedule=schedule,
        precision=plan.precision,
        num_replicas=ranks.world_size // plan.num_shards,
        max_grad_norm=config.grad_norm if config.apply_gradient_clipping else math.inf,
        # Gradients of an adapter are small enough to add up unsharded; a whole model's or module's are not.
        sync_every_micro_batch=not plan.train_type.has_adapter or bool(config.modules_to_save),
        # No token sees the padding, so any id in the vocabulary will do; a pad token may be outside of it.
        pad_token_id=plan.tokenizer.eos_token_id,
        on_nonfinite=config.on_nonfinite,
        control=control,
        heartbeat=watchdog.heartbeat,
    )
    state = TrainState(
        model,
        optimizer,
        mesh,
        ranks,
        is_large=not plan.train_type.has_adapter,
        beat=lambda: watchdog.heartbeat.beat(watchdog.heartbeat.step, "save"),
    )
    if start.folder:
        try:
            state.load(Path(start.folder), start.tensors)
        except DamagedCheckpoint as error:
            raise UserError(f"Rank {ranks.rank} cannot read the checkpoint, though rank 0 could: {error}.") from error
    progress = Progress.from_dict(start.progress)
    if ranks.is_rank_0 and start.folder:
        if start.is_new:
            copy_metrics(Path(start.folder).parents[1], output_dir)
        cut_metrics(output_dir, progress.step, progress.last_eval_step)
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
        output_dir=output_dir,
        total_steps=schedule.total_steps,
        config=resolved_options(config),
        project_name=redact_values(config.project_name),
        name=redact_values(config.name),
        group=redact_values(config.group),
        entity=redact_values(config.entity),
        is_rank_0=ranks.is_rank_0,
        run_id=start.run_id,
    ) as metrics:
        mirror = Mirror(output_dir, open_store(config.mirror) if config.mirror and ranks.is_rank_0 else None)
        saver = Saver(
            output_dir / run_folder.CHECKPOINTS,
            state,
            ranks,
            about=about,
            save_steps=config.save_steps,
            save_total_limit=config.save_total_limit,
            before_save=metrics.flush,
            on_saved=mirror.copy_later,
            saved_step=start.step if start.folder and not start.is_new else -1,
        )
        with control.catching_signals(), contextlib.closing(mirror), watchdog.watching():
            if ranks.device.type == "cuda":
                trainer.try_longest(plan.data.train_rows)
            train(
                trainer,
                plan.data,
                metrics,
                progress,
                saver if config.save_model else None,
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
                on_step=lambda progress: status.keep(
                    step=progress.step,
                    saved_step=saver.saved_step,
                    seconds=control.used_seconds(),
                    reserve_seconds=control.reserve_seconds(),
                ),
            )
        profiler.close()
        if config.save_model:
            with trainer.optimizer.averaged():
                save(config, ranks, plan)
        summary = progress.summary()
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
    if plan.train_type.adapter is None:
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
        plan.train_type.adapter,
        lora_options(config),
        base_model=hub.public_name(config.model_name),
        model_config=plan.model_config,
    )
    export.save_adapter(model, adapter, plan.tokenizer, output_dir, is_rank_0=ranks.is_rank_0)
