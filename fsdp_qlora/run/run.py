"""One rank's run from start to end: plan, claim the folder, load, train under supervision, export.

The training loop is in training/loop.py, the optimizer step in training/trainer.py.
"""

import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_qlora.adapters.first_values import start_values
from fsdp_qlora.checkpointing.checkpoint import DamagedCheckpoint
from fsdp_qlora.checkpointing.mirror import open_store
from fsdp_qlora.checkpointing.progress import Progress
from fsdp_qlora.checkpointing.resume import RunFolder, Start
from fsdp_qlora.checkpointing.train_state import TrainState
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.text import resolved_options, resolved_yaml
from fsdp_qlora.control import clock, exits
from fsdp_qlora.control.presence import Presence
from fsdp_qlora.control.stops import Signals
from fsdp_qlora.data.prepare import prepare_data
from fsdp_qlora.data.schedule import RowsInMemory
from fsdp_qlora.data.tokenization import describe_sample
from fsdp_qlora.errors import NotFinite, RankError, RunStopped
from fsdp_qlora.generation.generate import SAMPLE_TOKENS, Samples, SamplingOptions, Stops, TextGenerator
from fsdp_qlora.generation.prompts import PromptFormat
from fsdp_qlora.loading import hub
from fsdp_qlora.loading.load_weights import match_tensors
from fsdp_qlora.loading.weight_files import WeightFiles, Weights
from fsdp_qlora.model import models
from fsdp_qlora.planning import describe
from fsdp_qlora.planning.facts import Measured, run_facts
from fsdp_qlora.planning.fit import fit_on_gpu
from fsdp_qlora.planning.gpus import gpu_of
from fsdp_qlora.planning.plan import ModelPlan, PlacedModel, check_resources
from fsdp_qlora.planning.run_plan import Plan, continued, data_options, make_plan
from fsdp_qlora.ranks.device import configure_kernels, make_deterministic
from fsdp_qlora.ranks.process_group import process_group_closed, release_loading_memory, start_process_group
from fsdp_qlora.ranks.ranks import Ranks, read_ranks, set_up_logging
from fsdp_qlora.ranks.store import connect, kept_until_all_connect
from fsdp_qlora.results.card import Base
from fsdp_qlora.results.write import ResultForm, check_uploads, leave_result, push_result, save_result
from fsdp_qlora.run.identity import agree, known_facts, start_request
from fsdp_qlora.run.load_model import build_trainer, load_model, precompute_reference
from fsdp_qlora.run.supervision import Guard
from fsdp_qlora.sharding.optimizer import OPTIMIZERS
from fsdp_qlora.training.loop import train
from fsdp_qlora.training.trainer import Trainer

log = logging.getLogger("fsdp_qlora")


def run(config: TrainConfig, signals: Signals | None = None, notes: Sequence[str] = ()) -> None:
    """Run what the options describe. Called on every rank.

    Args:
        signals: those of the process, if it handles them already. notes: lines about how the options were given.
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
    if config.show_samples:
        samples = show_samples(config)
        if ranks.is_rank_0:
            print(samples)
        return
    if config.dry_run:
        log.debug("Options:\n%s", resolved_yaml(config))
        make_plan(config, ranks, None)
        return
    mirror = open_store(config.mirror) if config.mirror else None
    claim = RunFolder(Path(config.output_dir), ranks, start_request(config, ranks), mirror).claimed()
    with claim as folder, process_group_closed():
        _run_with_others(config, folder, signals or Signals())


def _run_with_others(config: TrainConfig, folder: RunFolder, signals: Signals) -> None:
    """Meet the other ranks, plan, load and train. Nothing of the model is left when it returns."""
    started, ranks = clock.elapsed(), folder.ranks  # what comes before the first step counts for the budget too
    timeout_minutes = max(30, 2 * config.hang_minutes)
    store = connect(ranks, timeout_minutes=timeout_minutes, wait_minutes=config.hang_minutes)
    presence = Presence(store, ranks, hang_minutes=config.hang_minutes)
    with exits.aborting_others(presence), signals.handled():
        with kept_until_all_connect(store, ranks):
            if ranks.is_rank_0:
                check_uploads(config)
            plan = make_plan(config, ranks, store)
            config = dataclasses.replace(config, **plan.chosen)
            folder.check_contents(known_facts(plan), plan.model.folder)
            check_resources(config, plan.model)
            hub.fetch_weights(config.model_name, plan.model.folder, ranks=ranks, store=store)
            weights = open_weights(plan.model)
        start_process_group(ranks, store, timeout_minutes=timeout_minutes)
        identity = agree(config, ranks, plan, weights)
        start = folder.choose_start(identity)
        if start.is_finished:
            log.info("This run is finished already: nothing to do. Its results are in %s.", folder.path)
        else:
            identity |= {"run_id": start.run_id}
            helps = memory_settings(config, plan.model, ranks)
            guard = Guard(config, folder, start, presence, signals, started=started, memory_settings=helps)
            train_and_export(config, plan, weights, identity, guard)


def show_samples(config: TrainConfig) -> str:
    """The first rows as the model sees them. Only the model's tokenizer is needed."""
    folder = hub.find_model_folder(
        config.model_name, with_weights=False, with_code=config.trust_remote_code, is_preview=True
    )
    tokenizer = models.load_tokenizer(folder, config.model_name, trust_remote_code=config.trust_remote_code)
    data = prepare_data(tokenizer, data_options(config, folder, tokenizer), vocab_size=len(tokenizer))
    in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return "\n\n".join(
        describe_sample(data.train, int(row), tokenizer, in_colour=in_colour)
        for row in data.train_rows[: config.show_samples]
    )


def train_and_export(config: TrainConfig, plan: Plan, weights: Weights, identity: dict[str, Any], guard: Guard) -> None:
    """Load the model, run the remaining steps, and save the result."""
    ranks, start, folder = guard.ranks, guard.start, guard.folder.path
    plan = continued(config, plan, start.global_batch_size)
    identity |= {"global_batch_size": plan.schedule.global_batch_size}
    with guard.loading():
        mesh = load_model(config, plan.model, weights, ranks)
        guard.memory.record("after loading")
        release_loading_memory(ranks.device)
        trainer = build_trainer(config, plan, ranks, guard.control)  # tries a few tokens
        if config.precompute_reference:
            plan = dataclasses.replace(plan, data=precompute_reference(config, plan.data, trainer, identity["facts"]))
    state = TrainState(
        trainer.model,
        trainer.optimizer,
        mesh,
        ranks,
        is_large=plan.model.trains_whole_modules,
        beat=guard.beat_save,
        start=start_values(trainer.model, keep=ranks.is_rank_0),
    )
    if start.folder:  # before a file of an earlier run is removed
        state.check(Path(start.folder), start.tensors)
    files = {"config.yaml": resolved_yaml(config), **plan.data.files()}
    all_write = plan.model.trains_whole_modules or OPTIMIZERS[config.optimizer].is_local
    guard.folder.prepare(files, identity, keep_run=not start.is_new, all_write=all_write)
    guard.facts.describe(lambda: run_facts(plan))
    form = ResultForm(plan.model, Base.of(config.model_name, config.base_name))
    samples = open_samples(config, plan, trainer, folder)
    with guard.recording(state, identity, samples, total_steps=plan.schedule.total_steps) as recorder:
        progress = restore(state, guard)
        if plan.tasks:
            recorder.measure_tasks = partial(
                plan.tasks.measure, trainer.model, plan.model.tokenizer, plan.model.precision, ranks,
                batch_size=config.batch_size, bootstrap_iters=0,
            )  # fmt: skip
        try:
            with recorder.watching():
                if ranks.device.type == "cuda":
                    recorder.measured = Measured(config, plan, gpu_of(torch.cuda.get_device_properties(ranks.device)))
                    try_memory(config, plan, trainer, start)
                train(trainer, plan.data, progress, recorder)
        except (RunStopped, NotFinite) as error:
            if config.save_model:
                leave_result(form, folder, ranks)
            if isinstance(error, RunStopped) and error.ending.state == "over_budget":
                push_result(folder, config.push_to_hub, ranks, public=config.push_public)
            raise
        if config.save_model:
            save_result(form, trainer, folder, about=identity, progress=progress)
        push_result(folder, config.push_to_hub, ranks, public=config.push_public)
        recorder.metrics.summary(progress.summary())
    seconds = clock.elapsed() - guard.started
    log.info(describe.describe_result(progress.summary(), folder, seconds, saved=config.save_model))
    for line in plan.data.describe_left_out():
        log.info("%s", line)


def try_memory(config: TrainConfig, plan: Plan, trainer: Trainer, start: Start) -> None:
    """Try the longest rows on the GPU, and find how many blocks must recompute if that is left open."""
    rows = RowsInMemory(plan.data.train, plan.data.train_rows)
    if config.recompute != "auto" or config.use_activation_cpu_offload:
        trainer.try_longest(rows)
    elif start.failed_starts:
        log.info("Recompute: all blocks, since the last start ended before it made progress.")
        trainer.try_longest(rows)
    else:
        fit_on_gpu(trainer, rows, block_bytes=plan.model.memory.block, too_few=start.too_few)


def open_weights(plan: ModelPlan) -> Weights:
    """Open the model's files and match them with its weights."""
    files = WeightFiles(plan.folder, plan.stored)
    return match_tensors(plan.meta.model, files, packed=plan.is_packed)


def memory_settings(config: TrainConfig, plan: PlacedModel, ranks: Ranks) -> str:
    """What would help if memory is short, in words."""
    recompute = config.recompute
    is_all = recompute == "all" or (recompute == "auto" and ranks.device.type == "cpu")
    chosen = {"recompute": "all" if is_all else recompute, **plan.placement.options}
    return exits.memory_settings(resolved_options(config) | chosen)


def restore(state: TrainState, guard: Guard) -> Progress:
    """Load the checkpoint to start from, if there is one; returns its progress."""
    start = guard.start
    if start.folder:
        try:
            state.load(Path(start.folder), start.tensors)
        except DamagedCheckpoint as error:
            rank = guard.ranks.rank
            raise RankError(f"Rank {rank} cannot read the checkpoint, though rank 0 could: {error}.") from error
    return Progress.from_dict(start.progress)


def open_samples(config: TrainConfig, plan: Plan, trainer: Trainer, folder: Path) -> Samples | None:
    """What answers --sample_prompts at each evaluation; None without them."""
    if not config.sample_prompts:
        return None
    model, tokenizer = plan.model.meta.model, plan.model.tokenizer
    prompt_format = PromptFormat(tokenizer, plan.data.provenance["prompt"])
    stops = Stops(tokenizer, model, prompt_format.stop_text)
    sampling = SamplingOptions(max_new_tokens=SAMPLE_TOKENS)
    generator = TextGenerator(model, trainer.ranks, plan.model.precision, stops, sampling)
    samples = Samples(plan.questions, prompt_format, generator, folder)
    prompt_format.close()
    return samples
