"""One rank's run, in its order: plan without weights, shard and load, verify, train, save.

With planning.py, and besides the command line, this is where the options are read; all else takes plain arguments.
The training step is `Trainer.train_step` in training/trainer.py.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import time
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora import distributed, export
from fsdp_qlora.adapters.first_values import initialize_adapters, reduces_base
from fsdp_qlora.adapters.peft_format import peft_config
from fsdp_qlora.checkpointing import resume, run_folder
from fsdp_qlora.checkpointing.checkpoint import DamagedCheckpoint
from fsdp_qlora.checkpointing.mirror import Mirror
from fsdp_qlora.checkpointing.progress import Progress
from fsdp_qlora.checkpointing.run_folder import Status
from fsdp_qlora.checkpointing.saving import Saver
from fsdp_qlora.checkpointing.stores import open_store
from fsdp_qlora.checkpointing.train_state import TrainState
from fsdp_qlora.config.marks import PER_NODE
from fsdp_qlora.config.options import TrainConfig, names_marked, resolved_options, resolved_yaml
from fsdp_qlora.control import exits, restarts
from fsdp_qlora.control.stops import Budget, Control
from fsdp_qlora.control.watchdog import Heartbeat, Watchdog
from fsdp_qlora.data.prepare import RunData
from fsdp_qlora.distributed import Ranks
from fsdp_qlora.errors import TrainingError, UserError
from fsdp_qlora.loading import decoded, hub
from fsdp_qlora.loading.decomposed_adapters import decompose_weights
from fsdp_qlora.loading.load_weights import load_weights, match_tensors, quantized_layers
from fsdp_qlora.loading.weight_files import WeightFiles
from fsdp_qlora.metrics.metric_log import copy_metrics, cut_metrics, open_metric_log
from fsdp_qlora.metrics.profiling import MemoryLog, open_profiler
from fsdp_qlora.optimizers.sharded import ShardedOptimizer, learning_rate
from fsdp_qlora.planning import describe
from fsdp_qlora.planning.plan import Plan, check_resources, lora_options, make_plan, num_warmup_steps
from fsdp_qlora.quant_cache.cache import open_cache
from fsdp_qlora.redact import redact_values
from fsdp_qlora.sharding import parallelize, verify
from fsdp_qlora.storage.fingerprint import fingerprint_files
from fsdp_qlora.training.loop import train
from fsdp_qlora.training.trainer import Trainer

log = logging.getLogger("fsdp_qlora")


def run(config: TrainConfig) -> None:
    """Do what the options say; every rank calls it.

    Raises:
        UserError: the options, the model or the data cannot be used.
        TrainingError: the run cannot go on.
        RunStopped: it was asked to stop, and will go on from there when it is started again.
        LostRank: another rank has ended.
    """
    if config.deterministic:
        distributed.make_deterministic()
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
    weight_files = decoded.open_weight_files(plan.model_folder, plan.stored)
    sources = match_tensors(plan.meta.model, weight_files, packed=plan.is_packed)
    check_resources(config, ranks, plan)

    store = distributed.start_process_group(ranks, timeout_minutes=max(30, 2 * config.hang_minutes))
    per_node = names_marked(PER_NODE)
    distributed.check_agreement(
        {
            "the options": {name: value for name, value in resolved_options(config).items() if name not in per_node},
            "the rows": rows_digest(plan.data),
            "the model": ({**plan.model_config.to_dict(), "_name_or_path": None}, sorted(sources)),
        },
        ranks.device,
    )
    about = describe_run(config, ranks, plan, weight_files)
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
    with exits.naming_lost_ranks("while the model was loaded"):
        shard_and_load(config, ranks, plan, mesh, weight_files, sources)
        memory.record("after loading")
        verify.check_byte_account(plan.meta.model, mesh)
        verify.check_one_layer(plan.meta.model, weight_files, sources, packed=plan.is_packed)
    if ranks.is_rank_0:
        files = {"config.yaml": resolved_yaml(config), **plan.data.files()}
        stored = {**about, "started_from": config.resume}
        export.prepare_output_dir(output_dir, files, about=stored, keep_run=not start.is_new)

    status = Status(
        output_dir,
        is_rank_0=ranks.is_rank_0,
        state="running",
        run_id=start.run_id,
        start_step=start.step,
        step=start.step,
        saved_step=start.saved_step,
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
    with exits.recorded(status, watchdog, memory_settings=exits.memory_settings(resolved_options(config))):
        summary = train_and_save(config, ranks, plan, mesh, memory, start, about, status, control, watchdog)
    log.info(describe.describe_result(summary, output_dir, time.monotonic() - started, saved=config.save_model))
    distributed.stop_process_group()


def check_output_dir(config: TrainConfig, output_dir: Path, ranks: Ranks) -> None:
    """Refuse a folder that holds something else than this run, as far as the options tell."""
    goes_on = config.resume == "auto" and resume.is_run(output_dir)
    goes_on |= config.resume not in ("auto", "off") and resume.is_of(output_dir, Path(config.resume).expanduser())
    goes_on |= resume.goes_on_by_itself(
        output_dir,
        resolved_options(config),
        resume=config.resume,
        world_size=ranks.world_size,
        is_unattended=restarts.is_unattended(),
    )
    export.check_output_dir(output_dir, overwrite=config.overwrite_output_dir or goes_on)
    resume.check_options(
        output_dir,
        resolved_options(config),
        resume=config.resume,
        overwrite=config.overwrite_output_dir,
        world_size=ranks.world_size,
    )


def describe_run(config: TrainConfig, ranks: Ranks, plan: Plan, weight_files: WeightFiles) -> dict[str, Any]:
    """What makes this run this run: for its folder, its checkpoints, and to tell it from others."""
    model_config = {**plan.model_config.to_dict(), "_name_or_path": None}
    return {
        "options": resolved_options(config),
        "facts": {
            "base": fingerprint_files(weight_files.files.values()) if ranks.is_rank_0 else None,
            "model": f"{distributed.derive_seed(model_config):x}",
            "rows": rows_digest(plan.data),
            "precision": plan.precision_name,
        },
        "world_size": ranks.world_size,
        "global_batch_size": plan.schedule.global_batch_size,
    }


def rows_digest(data: RunData) -> list[str | int]:
    return [data.train.digest, data.evaluation.digest, len(data.eval_rows)]


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


def shard_and_load(
    config: TrainConfig,
    ranks: Ranks,
    plan: Plan,
    mesh: DeviceMesh,
    weight_files: WeightFiles,
    sources: dict[str, str],
) -> None:
    """Turn the plan's model into this rank's shards, filled from the weight files or the quantized cache."""
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
        decompose_weights(model, weight_files, sources, mesh, ranks.device, init=init, seed=config.seed)
    if reduces_base(init) and plan.train_type.quantizer:
        cache_folder = "off"
        log.info("The quantized weights are not kept for the next start: with %s they belong to this adapter.", init)
    load = functools.partial(
        load_weights,
        model,
        mesh=mesh,
        device=ranks.device,
        max_bytes_in_flight=config.loading_buffer_mib * 2**20,
        show_progress=ranks.is_rank_0,
    )
    layers = {} if plan.is_packed else quantized_layers(model)
    cache = open_cache(cache_folder, layers, weight_files, sources, ranks, mesh)
    if cache:
        cache.load(load)
    else:
        load(weight_files=weight_files, sources=sources, packed=plan.is_packed)
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
    # An adapter alone is small enough to add up its gradients unsharded and gather its state; whole modules are not.
    is_large = not plan.train_type.has_adapter or bool(config.modules_to_save)
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
        sync_every_micro_batch=is_large,
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
        is_large=is_large,
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
            saved_step=start.saved_step,
        )
        if start.folder and start.saved_step >= 0:
            mirror.copy_later(Path(start.folder))  # a kill may have come before its copy
        # Rank 0 waits for the last copy when the others need it no more.
        with control.catching_signals(), contextlib.closing(mirror):
            with watchdog.watching():
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
    """Write the result. Every rank calls it.

    Raises:
        TrainingError: it could not be written; the same on every rank.
    """
    failure = ""
    try:
        write_result(config, ranks, plan)
    except TrainingError as error:
        failure = str(error)
    for reason in filter(None, distributed.gather_texts(failure, ranks.device)):
        raise TrainingError(reason)


def write_result(config: TrainConfig, ranks: Ranks, plan: Plan) -> None:
    """Write the adapter, or the whole model where blocks of it or all were trained. Rank 0 writes."""
    model, output_dir = plan.meta.model, Path(config.output_dir)
    if plan.train_type.trains_new_blocks:
        export.save_new_blocks(
            model,
            plan.tokenizer,
            output_dir,
            base=WeightFiles(plan.model_folder),
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
