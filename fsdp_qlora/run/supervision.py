"""Supervises the training of a run.

`RunSupervisor` ends it in order. `StepRecorder` keeps metrics, samples and checkpoints.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_qlora.checkpoint.checkpoint import DamagedCheckpoint
from fsdp_qlora.checkpoint.mirror import Mirror
from fsdp_qlora.checkpoint.progress import Progress
from fsdp_qlora.checkpoint.resume import RunFolder
from fsdp_qlora.checkpoint.run_folder import Status
from fsdp_qlora.checkpoint.saving import Saver
from fsdp_qlora.checkpoint.start import Start
from fsdp_qlora.checkpoint.train_state import TrainState
from fsdp_qlora.config.marks import save_times
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.text import resolved_options
from fsdp_qlora.distributed.process_group import release_cached_memory
from fsdp_qlora.distributed.supervision import exits
from fsdp_qlora.distributed.supervision.stops import Budget, Control
from fsdp_qlora.distributed.supervision.watchdog import Watchdog
from fsdp_qlora.observability.facts import Facts
from fsdp_qlora.observability.metric_log import (
    MetricLog,
    copy_records,
    cut_metrics,
    open_metric_log,
)
from fsdp_qlora.observability.page.report import write_at_end
from fsdp_qlora.observability.sinks import SinkOptions
from fsdp_qlora.run.extra_measurements import ExtraMeasurements
from fsdp_qlora.run.session import SupervisedSession
from fsdp_qlora.utils.errors import RankError
from fsdp_qlora.utils.run_files import CHECKPOINTS

# How long saving may fail before the run ends; 3 times --save_every if that is longer.
_MIN_FAILING_MINUTES = 30.0


class RunSupervisor:
    """Ends a rank in order: its status, signals, budget and watchdog, and reports of its failures.

    A rank that fails must tell the others why before it closes anything: they wait for seconds
    only, while closing the mirror (its last copy) or wandb may take minutes. So
    `exits.reporting_failures` is the innermost block, and slow closing is done in the outermost.

    Attributes:
        control: the trainer's requests to stop or save, and its heartbeat.
        facts: the records for the report, from the start on.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        start: Start,
        session: SupervisedSession,
        *,
        memory_settings: str,
    ) -> None:
        """
        Args:
            memory_settings: options to advise when memory is exhausted.
        Raises:
            RunStopped: earlier starts of this run have used up its budget.
        """
        self.config = config
        self.folder = folder
        self.start = start
        self.ranks = folder.ranks
        self.started = session.started
        self.presence = session.presence
        self.memory_settings = memory_settings
        is_rank_0 = self.ranks.is_rank_0
        self.save_steps, self.save_minutes = save_times(config.save_every)
        budget = config.pick(
            Budget, used_seconds=start.used_seconds, reserve_seconds=start.reserve_seconds
        )
        budget.check()
        self.control = Control(
            is_rank_0=is_rank_0,
            budget=budget,
            save_seconds=60 * self.save_minutes,
            started=self.started,
            signals=session.signals,
        )
        self.control.heartbeat.step = start.step
        # Blocks that recomputed when a start ran out of memory: later ones, too, begin with more.
        out_of_memory = {} if start.too_few is None else {"too_few": start.too_few}
        self.status = Status(
            folder.path,
            is_rank_0=is_rank_0,
            state="running",
            run_id=start.run_id,
            start_step=start.step,
            step=start.step,
            saved_step=start.saved_step,
            deaths=start.failed_starts,
            **out_of_memory,
            seconds=start.used_seconds,
            reason=None,
            exit_code=None,
        )
        self.watchdog = Watchdog(
            self.control.heartbeat,
            self.presence,
            hang_minutes=config.hang_minutes,
            output_dir=folder.path,
        )
        self.facts = Facts(folder.path, is_rank_0=is_rank_0, started=self.started, step=start.step)
        self.facts.mark("planning")

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Report errors of loading the model, and count a failure as a start without progress.

        A new run writes nothing, since its folder may still hold another one.
        """
        if not self.start.is_new:
            self.status.update()
            self.presence.on_end = self.status.end
        with exits.loading_explained(self.ranks.rank, self.memory_settings):
            yield

    @contextlib.contextmanager
    def recording(
        self,
        state: TrainState,
        identity: Mapping[str, Any],
        measurements: ExtraMeasurements,
        *,
        total_steps: int,
    ) -> Iterator["StepRecorder"]:
        """Supervise the block, in which the run trains and saves its result.

        identity: stored in its checkpoints.
        """
        config = self.config
        path = self.folder.path
        is_rank_0 = self.ranks.is_rank_0
        self.status.update(total_steps=total_steps)
        self.presence.on_end = self.status.end
        sinks = SinkOptions(
            path,
            total_steps,
            resolved_options(config),
            self.start.run_id,
            is_continued=not self.start.is_new,
        )
        saver = Saver(
            path / CHECKPOINTS,
            state,
            self.ranks,
            identity=identity,
            save_total_limit=config.save_total_limit,
            saved_step=self.start.saved_step,
            saved_eval_step=self.start.progress.get("last_eval_step", -1),
            max_failing_seconds=60 * max(_MIN_FAILING_MINUTES, 3 * self.save_minutes),
        )
        reporting = exits.reporting_failures(self.watchdog, memory_settings=self.memory_settings)
        # From here on a signal asks all ranks to stop after a step; before, it ends the start.
        self.control.signals.is_starting = False
        # `reporting` is the inner block: others hear of a failure before anything is closed.
        with contextlib.ExitStack() as closed_last, reporting:
            if is_rank_0:  # metrics.jsonl ends at the checkpoint that the run starts from
                progress = Progress.from_dict(self.start.progress)
                if self.start.folder and self.start.is_new:
                    copy_records(Path(self.start.folder).parents[1], path)
                cut_metrics(path, progress.step, progress.last_eval_step)
            metrics = closed_last.enter_context(
                open_metric_log(config.log_to, sinks, is_rank_0=is_rank_0)
            )
            store = self.folder.mirror if is_rank_0 else None
            mirror = closed_last.enter_context(contextlib.closing(Mirror(path, store)))
            closed_last.enter_context(contextlib.closing(saver))
            closed_last.callback(measurements.close)
            closed_last.push(self._report)  # called first: the mirror's last copy may take minutes
            self.facts.mark("loading")
            yield StepRecorder(self, saver, metrics, mirror, measurements)
        self.status.end("finished", None)

    def beat_while_saving(self) -> None:
        """Show the watchdog that a save goes on: one of a large model takes minutes."""
        self.control.heartbeat.beat(self.control.heartbeat.step, "save")

    def restore(self, state: TrainState) -> Progress:
        """Load the checkpoint to start from, if there is one; returns its progress."""
        if self.start.folder:
            # Rank 0 has verified the files. What another rank cannot read is its machine's fault.
            try:
                state.load(Path(self.start.folder), self.start.tensors)
            except DamagedCheckpoint as error:
                raise RankError(
                    f"Rank {self.ranks.rank} cannot read the checkpoint, though rank 0 could: "
                    f"{error}."
                ) from error
        return Progress.from_dict(self.start.progress)

    def _report(self, error: object, *_: object) -> None:
        """Write the report, for every kind of ending."""
        self.facts.mark("saving")
        if self.ranks.is_rank_0:
            self.facts.write()
            write_at_end(self.folder.path, state=None if error else "finished")


class StepRecorder:
    """Keeps metrics, samples, checkpoints and their mirror. Implements training.loop.Observer."""

    def __init__(
        self,
        supervisor: RunSupervisor,
        saver: Saver,
        metrics: MetricLog,
        mirror: Mirror,
        measurements: ExtraMeasurements,
    ) -> None:
        self.supervisor = supervisor
        self.saver = saver
        self.metrics = metrics
        self.mirror = mirror
        self.measurements = measurements
        self.config = supervisor.config
        self.control = supervisor.control
        self.facts = supervisor.facts
        # The ranks exchange this flag in each step: a checkpoint is whole when no rank writes.
        self.control.is_writing = lambda: saver.is_writing

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the training in the block for hangs and lost ranks."""
        if self.supervisor.start.saved_step >= 0:
            self.mirror.copy_later()  # the previous start may have been killed before the copy
        self.facts.mark("loading")
        with self.supervisor.watchdog.watching():
            yield

    def stepped(self, progress: Progress, record: dict[str, Any]) -> None:
        self.metrics.step(record)
        self.facts.mark("steps")
        if self.measurements.measured:
            self.facts.describe(partial(self.measurements.measured.stepped, record))
        # A start after a lack of memory recomputes more blocks than this one.
        if "recompute" in record:
            self.supervisor.status.values["recompute"] = record["recompute"]
        if self.saver.is_unfinished and self.control.is_written:
            self._note_save(self.saver.saved_step, self.saver.finish)
        self._keep_status(progress)

    def evaluated(self, progress: Progress, record: dict[str, Any]) -> None:
        beat = partial(self.control.heartbeat.beat, progress.step, "evaluate")
        samples = self.measurements.samples
        tasks = {}
        if self.measurements.measure_tasks:
            tasks = {"eval_tasks": self.measurements.measure_tasks(beat=beat)}
        self.metrics.evaluation(record | tasks)
        if samples:
            samples.write(progress.step, beat)
        if samples or tasks:
            # What answers took is not the next step's.
            release_cached_memory(self.supervisor.ranks.device)
        self.facts.mark("evaluation")

    def is_save_due(self, step: int) -> bool:
        every = self.supervisor.save_steps
        return self.config.save_model and every > 0 and step % every == 0

    def save(self, progress: Progress, *, wait: bool = True) -> None:
        if not self.config.save_model:
            return
        self.control.heartbeat.beat(progress.step, "save")
        self.metrics.flush()  # a checkpoint must not outlive the records before it
        self._note_save(
            self.saver.saved_step, partial(self.saver.save, progress, until_published=wait)
        )
        self._keep_status(progress)

    def _note_save(self, before: int, save: Callable[[], object]) -> None:
        """Record the time of a save, and mirror a new checkpoint.

        before: the step of the last checkpoint.
        """
        started = time.monotonic()
        save()
        self.metrics.save_seconds = max(self.metrics.save_seconds, time.monotonic() - started)
        self.control.saved(self.saver.seconds)
        self.facts.mark("saving")
        self.facts.write()
        # A save that goes on beside the training is published by a later call.
        if self.saver.saved_step != before:
            self.mirror.copy_later()

    def describe_saved(self) -> str:
        if not self.config.save_model or self.saver.saved_step < 0:
            return "no checkpoint was saved"
        saved = self.saver.saved_step
        root = self.saver.root
        return f"the checkpoint of step {saved} is in {root}; the same command resumes from it"

    def _keep_status(self, progress: Progress) -> None:
        self.supervisor.status.keep(
            step=progress.step,
            saved_step=self.saver.saved_step,
            seconds=self.control.used_seconds(),
            reserve_seconds=self.control.reserve_seconds(),
        )
