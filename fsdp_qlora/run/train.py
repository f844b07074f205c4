"""One rank's run from its options to its result.

The training loop is in training/loop.py, the optimizer step in training/trainer.py.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_qlora.checkpoint.resume import RunFolder
from fsdp_qlora.checkpoint.train_state import TrainState
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.text import resolved_yaml
from fsdp_qlora.data.batches.schedule import Schedule
from fsdp_qlora.distributed.device import make_deterministic
from fsdp_qlora.distributed.supervision import clock
from fsdp_qlora.distributed.supervision.stops import Signals
from fsdp_qlora.export.save_results import leave_result, save_result
from fsdp_qlora.export.upload import push_result
from fsdp_qlora.model.kernels.in_use import using_ways
from fsdp_qlora.planning.fit import memory_settings
from fsdp_qlora.planning.placement import check_resources
from fsdp_qlora.planning.run_plan import with_rows_per_step
from fsdp_qlora.run.base import FetchedBase, PlannedBase, teacher_base
from fsdp_qlora.run.build_trainer import (
    build_trainer,
    open_source,
    precompute_reference,
    try_memory,
)
from fsdp_qlora.run.extra_measurements import open_extra_measurements
from fsdp_qlora.run.facts import describe_result, run_facts
from fsdp_qlora.run.identity import agree, claim_folder, known_facts
from fsdp_qlora.run.load_model import result_form, warn_left_out
from fsdp_qlora.run.prepare import (
    PreparedRun,
    check_images,
    check_services,
    prepare_run,
    show_samples,
)
from fsdp_qlora.run.session import SupervisedSession, enter_rank, open_supervised_session
from fsdp_qlora.run.supervision import RunSupervisor
from fsdp_qlora.run.teach import open_teacher
from fsdp_qlora.run.ways import TriedKernels, graphed_parts
from fsdp_qlora.sharding.optimizer import OPTIMIZERS
from fsdp_qlora.training.loop import train
from fsdp_qlora.utils.errors import NotFinite, RolloutError, RunStopped

log = logging.getLogger("fsdp_qlora")


def run(config: TrainConfig, signals: Signals | None = None, notes: Sequence[str] = ()) -> None:
    """Run what the options describe. Called on every rank.

    Args:
        signals: those of the process, if it handles them already.
        notes: lines about how the options were given.
    Raises:
        UserError: the options, the model or the data cannot be used.
        TrainingError: the run cannot continue.
        RunStopped: it was asked to stop; the same command resumes it.
        LostRank: another rank has ended.
        Crashed: an unexpected error, already printed.
    """
    # First, since cuBLAS reads its workspace size once, when a GPU is first used.
    if config.deterministic:
        make_deterministic()
    ranks = enter_rank(config)
    for line in notes:
        log.info("%s", line)
    if isinstance(config.dry_run, str):
        samples = show_samples(config, ranks)
        if ranks.is_rank_0:
            print(samples)
        return
    if config.dry_run:
        log.debug("Options:\n%s", resolved_yaml(config))
        prepare_run(config, ranks, None)
        return
    # The folder is locked until the process group has ended: another run must not find it half
    # written.
    with (
        claim_folder(config, ranks) as folder,
        open_supervised_session(
            ranks, signals or Signals(), hang_minutes=config.hang_minutes
        ) as session,
    ):
        run_in_session(config, folder, session)


def run_in_session(config: TrainConfig, folder: RunFolder, session: SupervisedSession) -> None:
    """Prepare, decide where to start, load and train. Nothing of the model is left afterwards."""
    ranks = session.ranks
    with session.kept_until_all_connect():
        if ranks.is_rank_0:
            check_services(config, folder.path)
        prepared = prepare_run(config, ranks, session.store)
        plan = prepared.plan
        if ranks.is_rank_0:
            check_images(config, plan, folder.path)
        # All that can be refused without weights is refused before they are downloaded.
        folder.check_contents(known_facts(plan), plan.model.folder)
        check_resources(prepared.config, plan.placed)
        base = PlannedBase(prepared.config, plan.placed, session.store).fetch()
        if plan.teacher:
            teacher_base(prepared.config, plan.teacher, session).fetch()
        warn_left_out(prepared.config, plan.model, base.weights)
        planned = [plan.model, *([plan.teacher.model] if plan.teacher else [])]
        graphed = graphed_parts(prepared.config, plan)
        num_tokens = plan.placed.step.num_tokens
        kernels = TriedKernels.of(prepared.config, *planned, graphed=graphed, num_tokens=num_tokens)
    session.start_group(plan.placed.layout)
    identity = agree(prepared, ranks, base.weights)
    start = folder.choose_start(identity)
    if start.is_finished:
        log.info("This run is finished already: nothing to do. Its results are in %s.", folder.path)
        return
    ways = kernels.choose(start.ways)
    identity |= {"run_id": start.run_id, "ways": ways._asdict()}
    less_memory = memory_settings(prepared.config, plan.placed.placement, ranks)
    supervisor = RunSupervisor(prepared.config, folder, start, session, memory_settings=less_memory)
    with using_ways(ways):
        train_and_export(prepared, base, identity, supervisor)


def train_and_export(
    run: PreparedRun, base: FetchedBase, identity: dict[str, Any], supervisor: RunSupervisor
) -> None:
    """Load the model, run the remaining steps, and save the result."""
    config = run.config
    setup = run.setup
    ranks = supervisor.ranks
    start = supervisor.start
    folder = supervisor.folder.path
    plan = with_rows_per_step(config, run.plan, start.global_batch_size)
    with supervisor.loading():
        # Before the student is loaded: the two need not fit beside each other.
        teacher = open_teacher(config, plan, ranks, supervisor.control)
        mesh = base.load().mesh
        target_values = teacher.targets if teacher else None
        trainer = build_trainer(config, plan, ranks, supervisor.control, target_values)
        if config.precompute_reference:
            plan = precompute_reference(config, plan, trainer, identity["facts"])
    identity |= _record_of_rows(trainer.schedule, was_padded=start.was_padded)
    state = TrainState(
        trainer.model,
        trainer.optimizer,
        mesh,
        ranks,
        is_large=plan.model.trains_whole_modules,
        beat=supervisor.beat_while_saving,
    )
    if start.folder:  # before a file of an earlier run is removed
        state.check(Path(start.folder), start.tensors)
    files = {"config.yaml": resolved_yaml(config)} | plan.data.files()
    all_write = plan.model.trains_whole_modules or OPTIMIZERS[config.optimizer].is_local
    supervisor.folder.prepare(files, identity, keep_run=not start.is_new, all_write=all_write)
    supervisor.facts.describe(lambda: run_facts(plan))
    form = result_form(config, plan.model, base.weights)
    measurements = open_extra_measurements(config, plan, setup, trainer, folder)
    total_steps = plan.schedule.total_steps
    with supervisor.recording(state, identity, measurements, total_steps=total_steps) as recorder:
        progress = supervisor.restore(state)
        try:
            with recorder.watching():
                # Only a GPU is probed; on a CPU --recompute auto means all.
                if ranks.device.type == "cuda":
                    try_memory(config, plan, trainer, start)
                source = open_source(config, plan, setup, trainer, folder, start.run_id, teacher)
                train(trainer, plan.data, source, progress, recorder, measurements.scores)
        except (RunStopped, NotFinite, RolloutError) as error:
            # The newest checkpoint is a result until the run continues.
            if config.save_model:
                leave_result(form, folder, ranks)
            if isinstance(error, RunStopped) and error.ending.state == "over_budget":
                push_result(folder, config.push_to_hub, ranks)
            raise
        if config.save_model:
            save_result(form, ranks, folder, about=identity, progress=progress)
        push_result(folder, config.push_to_hub, ranks)
        recorder.metrics.summary(progress.summary())
    seconds = clock.elapsed() - supervisor.started
    log.info(describe_result(progress.summary(), folder, seconds, saved=config.save_model))
    for line in plan.data.describe_left_out():
        log.info("%s", line)


def _record_of_rows(schedule: Schedule, *, was_padded: bool | None) -> dict[str, Any]:
    """The part of a run's record on the rows of its steps.

    Logs where rows are padded otherwise than in the steps that the run goes on from.

    Args:
        was_padded: whether those were padded; None if there are none, or it is unknown.
    """
    if was_padded is not None and was_padded != schedule.padding:
        then, now = ("padded", "not padded") if was_padded else ("not padded", "padded")
        log.info(
            "The run continues with other batches: rows %s then, %s now. Results are as accurate, "
            "but other sums are rounded.",
            then,
            now,
        )
    return {"global_batch_size": schedule.global_batch_size, "padded": schedule.padding}
