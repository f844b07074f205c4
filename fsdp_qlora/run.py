"""One rank's run from start to end: plan, claim the folder, load, train under supervision, export.

Besides the command line, only this module, load_model.py, supervision.py and planning/plan.py read the options;
everything else takes plain arguments. The training loop is in training/loop.py, the optimizer step in
training/trainer.py.
"""

import logging
from pathlib import Path
from typing import Any

from fsdp_qlora import distributed
from fsdp_qlora.adapters.earlier import parent_of, read_adapter
from fsdp_qlora.adapters.first_values import LiveValues, start_values
from fsdp_qlora.attention import leave_out_cudnn
from fsdp_qlora.checkpointing.checkpoint import DamagedCheckpoint, record_of
from fsdp_qlora.checkpointing.progress import Progress
from fsdp_qlora.checkpointing.result import changed_error
from fsdp_qlora.checkpointing.run_folder import RunFolder
from fsdp_qlora.checkpointing.same_run import StartRequest
from fsdp_qlora.checkpointing.stores import open_store
from fsdp_qlora.checkpointing.train_state import TrainState
from fsdp_qlora.config.marks import MAY_DIFFER, PER_NODE
from fsdp_qlora.config.options import TrainConfig, names_marked
from fsdp_qlora.config.resolved import identity_settings, resolved_options, resolved_yaml
from fsdp_qlora.control import clock, exits, restarts
from fsdp_qlora.distributed import Ranks
from fsdp_qlora.errors import NotFinite, RankError, RunStopped, TrainingError, UserError
from fsdp_qlora.generation.generate import Stops, TextGenerator
from fsdp_qlora.generation.prompts import PromptFormat, Question, read_questions
from fsdp_qlora.generation.samples import SAMPLE_TOKENS, Samples
from fsdp_qlora.generation.sampling import SamplingOptions
from fsdp_qlora.load_model import build_trainer, load_model
from fsdp_qlora.loading import hub
from fsdp_qlora.loading.load_weights import match_tensors
from fsdp_qlora.loading.weight_files import Weights, open_weight_files
from fsdp_qlora.planning import describe
from fsdp_qlora.planning.facts import run_facts
from fsdp_qlora.planning.plan import (
    ModelPlan,
    Plan,
    adapter_config,
    check_resources,
    continued,
    make_plan,
    show_samples,
    step_bytes,
)
from fsdp_qlora.results.record import Base
from fsdp_qlora.results.upload import login_advice, upload
from fsdp_qlora.results.write import ResultForm
from fsdp_qlora.storage.fingerprint import fingerprint_files
from fsdp_qlora.supervision import Supervision
from fsdp_qlora.training.loop import train
from fsdp_qlora.training.trainer import Trainer

log = logging.getLogger("fsdp_qlora")


def run(config: TrainConfig) -> None:
    """Run what the options describe. Called on every rank.

    Raises:
        UserError: the options, the model or the data cannot be used.
        TrainingError: the run cannot continue.
        RunStopped: it was asked to stop; the same command resumes it.
        LostRank: another rank has ended.
        Crashed: an unexpected error, already printed.
    """
    if config.deterministic:
        distributed.make_deterministic()
    leave_out_cudnn()
    # A dry run may plan for GPUs that are elsewhere.
    ranks = distributed.read_ranks("auto" if config.is_preview and config.device == "cuda" else config.device)
    distributed.set_up_logging(ranks, verbose=config.verbose)
    if config.show_samples:
        samples = show_samples(config)
        if ranks.is_rank_0:
            print(samples)
        return
    if config.dry_run:
        log.debug("Options:\n%s", resolved_yaml(config))
        make_plan(config, ranks, None)
        return
    with RunFolder(Path(config.output_dir), ranks, start_request(config, ranks)).claimed() as folder:
        started = clock.elapsed()  # what comes before the first step counts for the budget too
        timeout_minutes = max(30, 2 * config.hang_minutes)
        store = distributed.connect(ranks, timeout_minutes=timeout_minutes, wait_minutes=config.hang_minutes)
        with distributed.kept_until_all_connect(store, ranks):
            plan = make_plan(config, ranks, store)
            folder.check_keeps_model(plan.model.folder)
            folder.check_contents(known_facts(plan))
            check_resources(config, ranks, plan.model)
            if config.push_to_hub and ranks.is_rank_0 and (advice := login_advice(config.push_to_hub)):
                log.warning(advice)
            hub.fetch_weights(config.model, plan.model.folder, ranks=ranks, store=store)
            weights = open_weights(plan.model)
        own_store = distributed.start_process_group(ranks, store, timeout_minutes=timeout_minutes)
        identity = agree(config, ranks, plan, weights)
        start = folder.choose_start(identity)
        if start.is_finished:
            log.info("This run is finished already: nothing to do. Its results are in %s.", folder.path)
        else:
            identity |= {"run_id": start.run_id}
            helps = memory_settings(config, plan.model, ranks)
            guard = Supervision(config, folder, start, own_store, started=started, memory_settings=helps)
            train_and_export(config, plan, weights, identity, guard)
    distributed.stop_process_group()


def train_and_export(
    config: TrainConfig, plan: Plan, weights: Weights, identity: dict[str, Any], guard: Supervision
) -> None:
    """Load the model, run the remaining steps, and save the result."""
    ranks, start = guard.ranks, guard.start
    plan = continued(config, plan, start.global_batch_size)
    identity |= {"global_batch_size": plan.schedule.global_batch_size}
    with guard.loading():
        mesh = load_model(config, plan.model, weights, ranks)
    guard.memory.record("after loading")
    distributed.release_loading_memory(ranks.device)
    trainer = build_trainer(config, plan, ranks, guard.control)
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
    guard.folder.prepare(files, identity, keep_run=not start.is_new)
    guard.facts.describe(lambda: run_facts(plan, optimizer=config.optimizer))
    form = result_form(config, plan.model)
    guard.samples = open_samples(config, plan, trainer, guard.folder.path)
    with guard.guarding(state, identity, total_steps=plan.schedule.total_steps):
        progress = restore(state, guard)
        try:
            with guard.watching():
                if ranks.device.type == "cuda":
                    try_memory(config, plan, trainer, is_retry=start.failed_starts > 0)
                train(trainer, plan.data, progress, guard)
        except (RunStopped, NotFinite) as error:
            leave_result(config, form, guard, error)
            raise
        if config.save_model:
            save_result(form, trainer, guard, progress)
        push_result(config, guard)
        guard.finished(progress.summary())
    log.info(describe.describe_result(progress.summary(), guard.folder.path, guard.seconds, saved=config.save_model))


def try_memory(config: TrainConfig, plan: Plan, trainer: Trainer, *, is_retry: bool) -> None:
    """Try the longest rows on the GPU, and find how many blocks must recompute if that is left open."""
    rows = plan.data.train_rows
    if config.blocks_to_recompute != "auto" or config.use_activation_cpu_offload:
        trainer.try_longest(rows)
    elif is_retry:
        log.info("Recompute: all blocks, since the last start ended before it made progress.")
        trainer.try_longest(rows)
    else:
        trainer.fit_recompute(rows, block_bytes=step_bytes(config, plan.model).block)


# --- before the ranks meet ---


def start_request(config: TrainConfig, ranks: Ranks) -> StartRequest:
    """What this start was asked to do with the run's folder. Raises UserError if the mirror cannot be used."""
    return StartRequest(
        options=resolved_options(config),
        may_differ=names_marked(MAY_DIFFER),
        world_size=ranks.world_size,
        resume=config.resume,
        overwrite=config.overwrite_output_dir,
        is_unattended=restarts.is_unattended(),
        mirror=open_store(config.mirror) if config.mirror else None,
    )


def open_weights(plan: ModelPlan) -> Weights:
    """Open the model's files and match them with its weights."""
    files = open_weight_files(plan.folder, plan.stored)
    return match_tensors(plan.meta.model, files, packed=plan.is_packed)


# --- the ranks together ---


def known_facts(plan: Plan) -> dict[str, Any]:
    """What of the run is compared by content, as far as it is known without the weights: see same_run.FACTS."""
    model_config = {**plan.model.config.to_dict(), "_name_or_path": None}
    return {
        "model": f"{distributed.derive_seed(model_config):x}",
        "rows": plan.data.identity,
        "precision": plan.model.precision_name,
    }


def agree(config: TrainConfig, ranks: Ranks, plan: Plan, weights: Weights) -> dict[str, Any]:
    """Check that all ranks have the same options, rows and model; returns the run's identity.

    Raises:
        UserError: they differ; the same on every rank.
    """
    options, per_node, facts = resolved_options(config), names_marked(PER_NODE), known_facts(plan)
    base = fingerprint_files(weights.files.files.values()) if ranks.is_rank_0 else None
    parent, digest = agree_on_parent(config, ranks, base)
    distributed.check_agreement(
        {
            "the options": {name: value for name, value in options.items() if name not in per_node},
            "the rows": facts["rows"],
            "the prompts of --sample_prompts": sample_questions(config),
            "the model": (facts["model"], sorted(weights.sources)),
        },
        ranks.device,
    )
    return {
        "options": options,
        "facts": {"base": base, **facts, "adapter": digest},
        **({"parent": parent} if parent else {}),
        "world_size": ranks.world_size,
        "global_batch_size": plan.schedule.global_batch_size,
        **plan.data.about,
    }


def memory_settings(config: TrainConfig, plan: ModelPlan, ranks: Ranks) -> str:
    """What would help if memory is short, in words."""
    recompute = config.blocks_to_recompute
    is_all = (recompute == "auto" and ranks.device.type == "cpu") or recompute == "all"
    chosen = {"recompute": "all" if is_all else recompute, **plan.placement.options}
    return exits.memory_settings(resolved_options(config) | chosen)


def agree_on_parent(config: TrainConfig, ranks: Ranks, base: str | None) -> tuple[dict[str, Any], str | None]:
    """Whom the run descends from by --adapter, empty without, and a hash of it, which rank 0 has checked.

    Args:
        base: fingerprint of the base's weights, on rank 0.
    Raises:
        UserError: the adapter has changed since it was saved, or belongs to other weights; the same on every rank.
    """
    if config.adapter is None:
        return {}, None
    adapter, failure, digest = read_adapter(Path(config.adapter).expanduser()), None, None
    if ranks.is_rank_0:
        digest = record_of(adapter.weights).sha256
        failure = changed_error(adapter.folder, [adapter.weights.name])
        trained_on = adapter.record.get("base", {}).get("weights")
        if failure is None and config.base_name is None and trained_on not in (None, base):
            failure = (
                f"it was trained on other weights than those of --model_name {config.model}. If they are the same in "
                "other bits or files, say so by naming them: --base_name OWNER/NAME"
            )
    if failure := distributed.first_failure(failure, ranks.device):
        raise UserError(f"--adapter {config.adapter} cannot be used: {failure}.")
    return parent_of(adapter), digest


def restore(state: TrainState, guard: Supervision) -> Progress:
    """Load the checkpoint to start from, if there is one; returns its progress."""
    start = guard.start
    if start.folder:
        try:
            state.load(Path(start.folder), start.tensors)
        except DamagedCheckpoint as error:
            rank = guard.ranks.rank
            raise RankError(f"Rank {rank} cannot read the checkpoint, though rank 0 could: {error}.") from error
    return Progress.from_dict(start.progress)


# --- samples ---


def sample_questions(config: TrainConfig) -> list[Question]:
    """The questions of --sample_prompts."""
    rows = read_questions(Path(config.sample_prompts)) if config.sample_prompts else []
    return [asked for _, asked in rows]


def open_samples(config: TrainConfig, plan: Plan, trainer: Trainer, folder: Path) -> Samples | None:
    """What answers --sample_prompts at each evaluation; None without them."""
    if not config.sample_prompts:
        return None
    model, tokenizer = plan.model.meta.model, plan.model.tokenizer
    prompt_format = PromptFormat(tokenizer, plan.data.about["prompt"])
    stops = Stops(tokenizer, model, prompt_format.stop_text)
    sampling = SamplingOptions(max_new_tokens=SAMPLE_TOKENS)
    generator = TextGenerator(model, trainer.ranks, plan.model.precision, stops, sampling)
    averaged = trainer.optimizer.averaged
    return Samples(sample_questions(config), prompt_format, generator, trainer.ranks, folder, averaged)


# --- the result ---


def result_form(config: TrainConfig, plan: ModelPlan) -> ResultForm:
    """The form of the run's results."""
    settings, changed = identity_settings(resolved_options(config))
    return ResultForm(plan, adapter_config(config, plan), published_base(config), settings, changed)


def published_base(config: TrainConfig) -> Base:
    """The base model as the result names it."""
    name = config.base_name or hub.public_name(config.model)
    return Base(name, is_on_hub="/" in name or not Path(config.model).expanduser().is_dir())


def save_result(form: ResultForm, trainer: Trainer, guard: Supervision, progress: Progress) -> None:
    """Save the adapter, or the whole model if its blocks or all weights were trained. Called on every rank.

    Raises:
        TrainingError: it could not be written; the same on every rank.
    """
    failure, is_rank_0 = None, trainer.ranks.is_rank_0
    values = LiveValues(form.plan.meta.model, keeps=is_rank_0)
    try:
        with trainer.optimizer.averaged():
            form.save(values, guard.folder.path, about=guard.identity, progress=progress.to_dict())
    except TrainingError as error:
        failure = str(error)
    if is_rank_0 and failure is None:
        form.leave_adapters(guard.folder.path, newest=False, best=progress.best_eval_loss is not None)
        if advice := form.describe_loading(guard.folder.path):
            log.info(advice)
    if failure := distributed.first_failure(failure, trainer.ranks.device):
        raise TrainingError(failure)


def leave_result(config: TrainConfig, form: ResultForm, guard: Supervision, error: Exception) -> None:
    """Leave the newest and the best checkpoint's adapter when the run ends early. Called on every rank.

    The other ranks wait for rank 0: torchrun ends all of them when one has ended.
    """
    if not config.save_model:
        return
    output_dir = guard.folder.path
    if guard.ranks.is_rank_0:
        has_eval = bool(config.eval_dataset or config.eval_fraction)
        if form.peft is not None:
            form.leave_adapters(output_dir, newest=True, best=has_eval)
            if advice := form.describe_loading(output_dir):
                log.info(advice)
        else:
            log.info(
                "The model as it is now can be made of the newest checkpoint: fsdp-qlora export %s --out DIR",
                output_dir,
            )
    distributed.first_failure(None, guard.ranks.device)
    if isinstance(error, RunStopped) and error.ending.state == "over_budget":
        push_result(config, guard)


def push_result(config: TrainConfig, guard: Supervision) -> None:
    """Upload the result, if that was asked for. Called on every rank."""
    if config.push_to_hub and config.save_model:
        if guard.ranks.is_rank_0 and (
            failure := upload(guard.folder.path, config.push_to_hub, public=config.push_public)
        ):
            log.warning(failure)
        distributed.first_failure(None, guard.ranks.device)
