"""One rank's run from start to end: plan, claim the folder, load, train under supervision, export.

The training loop is in training/loop.py, the optimizer step in training/trainer.py.
"""

import dataclasses
import logging
import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_qlora.checkpoint.checkpoint import DamagedCheckpoint
from fsdp_qlora.checkpoint.mirror import open_store
from fsdp_qlora.checkpoint.progress import Progress
from fsdp_qlora.checkpoint.resume import RunFolder, Start
from fsdp_qlora.checkpoint.run_folder import StartRequest, is_finished
from fsdp_qlora.checkpoint.train_state import TrainState
from fsdp_qlora.config.marks import MAY_DIFFER, REPLACE
from fsdp_qlora.config.options import TrainConfig, names_marked
from fsdp_qlora.config.text import resolved_options, resolved_yaml
from fsdp_qlora.data.batches.schedule import RowsInMemory
from fsdp_qlora.data.batches.tokenization import describe_sample
from fsdp_qlora.data.run_data import prepare_data
from fsdp_qlora.distributed.device import configure_kernels, make_deterministic
from fsdp_qlora.distributed.process_group import (
    process_group_closed,
    release_cached_memory,
    start_process_group,
)
from fsdp_qlora.distributed.ranks import read_ranks, set_up_logging
from fsdp_qlora.distributed.store import connect, kept_until_all_connect
from fsdp_qlora.distributed.supervision import clock, exits, restarts
from fsdp_qlora.distributed.supervision.presence import Presence
from fsdp_qlora.distributed.supervision.stops import Signals
from fsdp_qlora.export.save_results import leave_result, save_result
from fsdp_qlora.export.upload import check_uploads, push_result
from fsdp_qlora.model.architecture.config import most_positions
from fsdp_qlora.planning.fit import fit_on_gpu, memory_settings
from fsdp_qlora.planning.gpus import gpu_of
from fsdp_qlora.planning.placement import check_resources
from fsdp_qlora.planning.plan import read_model, with_new_tokens
from fsdp_qlora.planning.run_plan import (
    Plan,
    continued,
    data_options,
    make_plan,
    teacher_config,
    with_kept_context,
)
from fsdp_qlora.run.build_trainer import build_trainer, open_source, precompute_reference
from fsdp_qlora.run.facts import Measured, run_facts
from fsdp_qlora.run.identity import agree, known_facts
from fsdp_qlora.run.load_model import fetch_weights, load_model, result_form, warn_left_out
from fsdp_qlora.run.supervision import Extras, Guard
from fsdp_qlora.run.teach import taught_by_teacher
from fsdp_qlora.sharding.loading.weight_files import Weights
from fsdp_qlora.sharding.optimizer import OPTIMIZERS
from fsdp_qlora.training.generation.generator import TextGenerator
from fsdp_qlora.training.generation.prompt_format import PromptFormat
from fsdp_qlora.training.generation.samples import SAMPLE_TOKENS, Samples
from fsdp_qlora.training.generation.sampling import SamplingOptions, Stops
from fsdp_qlora.training.loop import train
from fsdp_qlora.training.rl.client import check_server
from fsdp_qlora.training.trainer import Trainer
from fsdp_qlora.utils.errors import NotFinite, RankError, RolloutError, RunStopped
from fsdp_qlora.utils.text import format_count

log = logging.getLogger("fsdp_qlora")


def run(config: TrainConfig, signals: Signals | None = None, notes: Sequence[str] = ()) -> None:
    """Run what the options describe. Called on every rank.

    Args:
        signals: those of the process, if it handles them already. notes: lines about how the
        options were given.
    Raises:
        UserError: the options, the model or the data cannot be used.
        TrainingError: the run cannot continue.
        RunStopped: it was asked to stop; the same command resumes it.
        LostRank: another rank has ended.
        Crashed: an unexpected error, already printed.
    """
    if config.deterministic:
        make_deterministic()
    configure_kernels()
    # A dry run may plan for GPUs that are elsewhere.
    ranks = read_ranks("auto" if config.is_preview and config.device == "cuda" else config.device)
    set_up_logging(ranks, verbose=config.verbose)
    for line in notes:
        log.info("%s", line)
    if isinstance(config.dry_run, str):
        samples = show_samples(with_kept_context(config, ranks, None))
        if ranks.is_rank_0:
            print(samples)
        return
    if config.dry_run:
        log.debug("Options:\n%s", resolved_yaml(config))
        make_plan(config, ranks, None)
        return
    mirror = open_store(config.mirror) if config.mirror else None
    request = StartRequest(
        options=resolved_options(config),
        may_differ=names_marked(MAY_DIFFER),
        world_size=ranks.world_size,
        resume=config.start_from,
        overwrite=config.resume.endswith(REPLACE),
        is_unattended=restarts.is_unattended(),
    )
    claim = RunFolder(Path(config.output_dir), ranks, request, mirror).claimed()
    with claim as folder, process_group_closed():
        _run_with_others(config, folder, signals or Signals())


def _run_with_others(config: TrainConfig, folder: RunFolder, signals: Signals) -> None:
    """Meet the other ranks, plan, load and train. Nothing of the model is left when it returns."""
    # what comes before the first step counts for the budget too
    started = clock.elapsed()
    ranks = folder.ranks
    timeout_minutes = max(30, 2 * config.hang_minutes)
    store = connect(ranks, timeout_minutes=timeout_minutes, wait_minutes=config.hang_minutes)
    presence = Presence(store, ranks, hang_minutes=config.hang_minutes)
    with exits.aborting_others(presence), signals.handled():
        with kept_until_all_connect(store, ranks):
            if ranks.is_rank_0:
                check_uploads(config)
                if config.rollout_url and not is_finished(folder.path):
                    check_server(config.rollout_url, (config.model_name, config.base_name))
                if config.teacher_url and not is_finished(folder.path):
                    check_server(config.teacher_url, [config.teacher], "teacher_url")
            plan = make_plan(config, ranks, store)
            config = dataclasses.replace(config, **plan.chosen)
            folder.check_contents(known_facts(plan), plan.model.folder)
            check_resources(config, plan.placed)
            weights = fetch_weights(config, plan.model, ranks, store)
            if plan.teacher:
                fetch_weights(
                    teacher_config(config),
                    plan.teacher.model,
                    ranks,
                    dist.PrefixStore("teacher", store),
                )
            warn_left_out(config, plan.model, weights)
        start_process_group(
            ranks, store, layout=plan.placed.layout, timeout_minutes=timeout_minutes
        )
        identity = agree(config, ranks, plan, weights)
        start = folder.choose_start(identity)
        if start.is_finished:
            log.info(
                "This run is finished already: nothing to do. Its results are in %s.", folder.path
            )
        else:
            identity |= {"run_id": start.run_id}
            helps = memory_settings(config, plan.placed.placement, ranks)
            guard = Guard(
                config, folder, start, presence, signals, started=started, memory_settings=helps
            )
            train_and_export(config, plan, weights, identity, guard)


def show_samples(config: TrainConfig) -> str:
    """The first rows as the model sees them. Only the model's tokenizer is needed."""
    folder, model_config, tokenizer = read_model(config)
    tokenizer, _ = with_new_tokens(config, model_config, tokenizer)
    options = data_options(config, folder, tokenizer)
    longest = most_positions(model_config)
    data = prepare_data(tokenizer, options, vocab_size=len(tokenizer), longest=longest)
    sides = ("student", "teacher") if config.objective == "distill" else ()
    in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return "\n\n".join(
        describe_sample(data.train, int(row), tokenizer, sides=sides, in_colour=in_colour)
        for row in data.train_rows[: int(str(config.dry_run).partition("=")[2] or 3)]
    )


def train_and_export(
    config: TrainConfig, plan: Plan, weights: Weights, identity: dict[str, Any], guard: Guard
) -> None:
    """Load the model, run the remaining steps, and save the result."""
    ranks = guard.ranks
    start = guard.start
    folder = guard.folder.path
    heartbeat = guard.control.heartbeat
    plan = continued(config, plan, start.global_batch_size)
    identity |= {"global_batch_size": plan.schedule.global_batch_size}
    with guard.loading():
        of_targets = taught_by_teacher(config, plan, ranks, guard.control)
        mesh = load_model(config, plan.placed, weights, ranks)
        release_cached_memory(ranks.device)
        # tries a few tokens
        trainer = build_trainer(config, plan, ranks, guard.control, of_targets)
        if config.precompute_reference:
            plan = dataclasses.replace(
                plan, data=precompute_reference(config, plan.data, trainer, identity["facts"])
            )
    state = TrainState(
        trainer.model,
        trainer.optimizer,
        mesh,
        ranks,
        is_large=plan.model.trains_whole_modules,
        beat=lambda: heartbeat.beat(heartbeat.step, "save"),
    )
    if start.folder:  # before a file of an earlier run is removed
        state.check(Path(start.folder), start.tensors)
    files = {"config.yaml": resolved_yaml(config)} | plan.data.files()
    all_write = plan.model.trains_whole_modules or OPTIMIZERS[config.optimizer].is_local
    guard.folder.prepare(files, identity, keep_run=not start.is_new, all_write=all_write)
    guard.facts.describe(lambda: run_facts(plan))
    form = result_form(config, plan.model, weights)
    extras = open_extras(config, plan, trainer, folder)
    with guard.recording(
        state, identity, extras, total_steps=plan.schedule.total_steps
    ) as recorder:
        progress = restore(state, guard)
        try:
            with recorder.watching():
                if ranks.device.type == "cuda":
                    try_memory(config, plan, trainer, start)
                source = open_source(config, plan, trainer, folder, run_id=start.run_id)
                train(trainer, plan.data, source, progress, recorder)
        except (RunStopped, NotFinite, RolloutError) as error:
            if config.save_model:
                leave_result(form, folder, ranks)
            if isinstance(error, RunStopped) and error.ending.state == "over_budget":
                push_result(folder, config.push_to_hub, ranks)
            raise
        if config.save_model:
            save_result(form, ranks, folder, about=identity, progress=progress)
        push_result(folder, config.push_to_hub, ranks)
        recorder.metrics.summary(progress.summary())
    seconds = clock.elapsed() - guard.started
    log.info(describe_result(progress.summary(), folder, seconds, saved=config.save_model))
    for line in plan.data.describe_left_out():
        log.info("%s", line)


def describe_result(
    summary: dict[str, float], output_dir: Path, seconds: float, *, saved: bool
) -> str:
    """The end of a run: losses, speed and where the files are."""
    lines = [f"Finished in {seconds:.0f} s: last training loss {summary['loss']:.4f}"]
    if "eval_loss" in summary:
        ends = f"{summary['first_eval_loss']:.4f} -> {summary['eval_loss']:.4f}"
        if summary.get("best_eval_loss", math.inf) < summary["eval_loss"]:
            ends += (
                f", lowest trained {summary['best_eval_loss']:.4f} at step "
                f"{summary['best_eval_step']:.0f}"
            )
        lines.append(f"  held-out loss {ends}")
    rate = summary["num_tokens"] / max(summary["train_seconds"], 1e-9)
    lines.append(f"  {format_count(summary['num_tokens'])} tokens, {rate:.0f} tokens/s")
    entries = output_dir.iterdir() if output_dir.is_dir() else ()
    files = sorted(
        path.name for path in entries if path.is_file() and not path.name.startswith(".")
    )
    lines.append(
        f"  {'Saved' if saved else 'Nothing saved, metrics only'}: {output_dir}/ "
        f"({', '.join(files)})"
    )
    return "\n".join(lines)


def try_memory(config: TrainConfig, plan: Plan, trainer: Trainer, start: Start) -> None:
    """Try the longest rows on the GPU, and find how many blocks must recompute if that is left
    open.
    """
    rows = RowsInMemory(plan.data.train, plan.data.train_rows)
    if config.recompute != "auto":
        trainer.try_longest(rows)
    elif start.failed_starts:
        log.info("Recompute: all blocks, since the last start ended before it made progress.")
        trainer.try_longest(rows)
    else:
        fit_on_gpu(trainer, rows, block_bytes=plan.placed.memory.block, too_few=start.too_few)


def restore(state: TrainState, guard: Guard) -> Progress:
    """Load the checkpoint to start from, if there is one; returns its progress."""
    start = guard.start
    if start.folder:
        try:
            state.load(Path(start.folder), start.tensors)
        except DamagedCheckpoint as error:
            rank = guard.ranks.rank
            raise RankError(
                f"Rank {rank} cannot read the checkpoint, though rank 0 could: {error}."
            ) from error
    return Progress.from_dict(start.progress)


def open_extras(config: TrainConfig, plan: Plan, trainer: Trainer, folder: Path) -> Extras:
    """Collect what the options and the device let a run measure beside its losses."""
    model = trainer.model
    ranks = trainer.ranks
    tokenizer = plan.model.tokenizer
    precision = plan.model.precision
    samples = measure_tasks = measured = None
    if config.sample_prompts:
        prompt_format = PromptFormat(tokenizer, plan.data.provenance["prompt"])
        stops = Stops(tokenizer, model, prompt_format.stop_text)
        generator = TextGenerator(
            model, ranks, precision, stops, SamplingOptions(max_new_tokens=SAMPLE_TOKENS)
        )
        samples = Samples(plan.questions, prompt_format, generator, folder)
        prompt_format.close()
    if plan.tasks:
        options: dict[str, Any] = {"batch_size": config.batch_size, "bootstrap_iters": 0}
        measure_tasks = partial(plan.tasks.measure, model, tokenizer, precision, ranks, **options)
    if ranks.device.type == "cuda":
        measured = Measured(config, plan, gpu_of(torch.cuda.get_device_properties(ranks.device)))
    return Extras(samples, measure_tasks, measured)
