"""The training loop: the remaining steps of a run, its evaluations and checkpoints, in order."""

import contextlib
import gc
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from fsdp_qlora.checkpoint.progress import Progress
from fsdp_qlora.data.batches.schedule import RowSource, StepRows
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.idle import IdleSteps
from fsdp_qlora.training.reward_gap import RewardGap
from fsdp_qlora.training.rl.held_out import HeldOutScores
from fsdp_qlora.training.trainer import Trainer
from fsdp_qlora.utils.errors import NotFinite, RolloutError, RunStopped, TrainingError

log = logging.getLogger("fsdp_qlora")

# So many steps, or a hundredth of all if that is more, may be skipped for numbers that are not
# finite.
_MIN_SKIPPED = 10


class Observer(Protocol):
    """Receives the numbers of each step, and saves checkpoints."""

    def stepped(self, progress: Progress, record: dict[str, Any]) -> None:
        """Handle an optimizer step's record."""

    def evaluated(self, progress: Progress, record: dict[str, Any]) -> None:
        """Handle an evaluation's record."""

    def is_save_due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""

    def save(self, progress: Progress, *, wait: bool = True) -> None:
        """Save a checkpoint of this step, unless there is one already with the same evaluations.

        wait: return when it is on the disk.
        """

    def describe_saved(self) -> str:
        """Where the newest checkpoint is, in words."""


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Hide the objects that exist now from Python's garbage collector.

    Model, libraries and data stay until the end. A collection in the middle of a step would walk
    them all, on each rank at another time, and the other ranks would wait.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@gc_frozen()
def train(
    trainer: Trainer,
    data: RunData,
    source: RowSource,
    progress: Progress,
    observer: Observer,
    scores: HeldOutScores | None = None,
) -> None:
    """Run the remaining optimizer steps, with their evaluations and checkpoints.

    Evaluates before the first step, every `eval_steps` and after the last one.

    Args:
        data: has the rows to evaluate on.
        source: gives the rows to train on.
        progress: where to start; updated after each step.
        observer: gets the numbers of each step, and saves checkpoints.
        scores: of answers to the held-out prompts, if they are scored.
    Raises:
        RunStopped: all ranks have agreed to stop and have saved a checkpoint.
        TrainingError: the run cannot continue.
    """
    schedule = trainer.schedule
    idle = _restore(trainer, progress)
    evaluations = _Evaluations(trainer, data, progress, observer, scores)
    try:
        evaluations.begin()
        for rows in source.steps(schedule, first=progress.step, position=progress.stream):
            # Asked before the step, so that it also ends a run that was killed in saving this end.
            if _is_no_longer_improving(trainer, progress):
                break
            record = trainer.train_step(rows)
            # `progress` describes the run after this step as a whole before it can be saved.
            usual_loss = progress.add_step(record)
            progress.stream = dict(rows.position)
            progress.loss_scale = trainer.loss_scale.state()
            _count_idle(idle, progress, record)
            evaluations.stepped(record)
            observer.stepped(progress, record)
            _warn_of_jump(rows, record["loss"], usual_loss, progress.step)
            _check_skipped(progress, schedule.total_steps)

            # A run that is asked to stop does so at once, without the evaluation that is due.
            is_best = False
            if not trainer.control.stop and evaluations.are_due:
                is_best = evaluations.evaluate()
            _stop_if_asked(trainer.control, progress, observer)
            if is_best or trainer.control.save or observer.is_save_due(progress.step):
                # The file is written while the next step computes.
                observer.save(progress, wait=False)
            # Making the next rows may take long, such as sampling answers: the heartbeat names it.
            trainer.heartbeat.beat(progress.step, "rows")
    except (NotFinite, RolloutError, RunStopped):
        # The weights are fine: no update has followed the previous step. So they are saved before
        # the run ends.
        observer.save(progress)
        raise
    observer.save(progress)


def _restore(trainer: Trainer, progress: Progress) -> IdleSteps:
    """Take up what a checkpoint has of the loop: the loss scale, and the steps without learning."""
    if progress.loss_scale:
        trainer.loss_scale.load_state(progress.loss_scale)
    longest = trainer.objective.settings.max_completion_length
    idle = IdleSteps(trainer.schedule.total_steps, longest)
    idle.load_state(progress.idle)
    return idle


def _count_idle(idle: IdleSteps, progress: Progress, record: dict[str, Any]) -> None:
    """Count a step that may have learned nothing, and say so when it is time."""
    warning = idle.add(record)
    if warning:
        log.warning("%s", warning)
    progress.idle = idle.state()


def _warn_of_jump(rows: StepRows, loss: float, usual_loss: float | None, step: int) -> None:
    """Name the samples of a step whose loss is far above the usual one, if there is one."""
    # A policy's loss on answers that it has sampled is near 0, whatever the rows are.
    if usual_loss is None or rows.metrics:
        return
    log.warning(
        "Step %d: the loss jumped to %.4f from about %.4f, with samples %s of the dataset.",
        step,
        loss,
        usual_loss,
        rows.table.describe_numbers(rows.rows),
    )


def _check_skipped(progress: Progress, total_steps: int) -> None:
    """Raise TrainingError if too many steps were skipped."""
    most_skipped = max(_MIN_SKIPPED, total_steps // 100)
    if progress.num_skipped > most_skipped:
        raise TrainingError(
            f"{progress.num_skipped} steps were skipped because their loss or gradient was not "
            f"finite; at most {most_skipped} may be. Lower --lr, or try --precision bf16 or fp32."
        )


def _is_no_longer_improving(trainer: Trainer, progress: Progress) -> bool:
    """Whether early stopping ends the run here."""
    most = trainer.options.early_stopping
    if not 0 < most <= progress.num_evals_without_best:
        return False
    log.info(
        "Stopped early after step %d: %d evaluations without %s.",
        progress.step,
        progress.num_evals_without_best,
        progress.describe_best(),
    )
    return True


@dataclass(eq=False)
class _Evaluations:
    """The evaluations of a run: the held-out loss, and the scores of answers."""

    trainer: Trainer
    data: RunData
    progress: Progress
    observer: Observer
    scores: HeldOutScores | None
    gap: RewardGap = field(default_factory=RewardGap)

    def __post_init__(self) -> None:
        self.gap.load_state(self.progress.reward_gap)
        if self.scores and self.scores.chooses_best:
            self.progress.best_by = self.scores.chosen

    @property
    def are_due(self) -> bool:
        """Whether an evaluation is due after the last step."""
        if not len(self.data.eval_rows):
            return False
        step = self.progress.step
        every = self.trainer.options.eval_steps
        is_at_an_end = step in (0, self.trainer.schedule.total_steps)
        return is_at_an_end or (every > 0 and step % every == 0)

    def begin(self) -> None:
        """Evaluate before the first step, if it is due. Raises RunStopped as the loop does."""
        # A resumed run may have evaluated here before it was stopped.
        if self.are_due and self.progress.last_eval_step != self.progress.step:
            is_best = self.evaluate()
            _stop_if_asked(self.trainer.control, self.progress, self.observer)
            if is_best:
                self.observer.save(self.progress, wait=False)

    def stepped(self, record: dict[str, Any]) -> None:
        """Count a step's reward."""
        if self.scores:
            self.gap.stepped(record)
            self.progress.reward_gap = self.gap.state()

    def evaluate(self) -> bool:
        """Evaluate; returns whether the result is the best so far.

        The first of several sets counts. False if all ranks have agreed to stop instead.
        """
        progress = self.progress
        results = {}
        for name in self.data.eval_sets:
            result = self._measure(name)
            if result is None:
                return False
            results[name] = result
        first = next(iter(results.values()))
        record: dict[str, Any] = {
            "step": progress.step,
            "epoch": progress.step / self.trainer.schedule.steps_per_epoch,
        }
        record |= first
        if len(results) > 1:
            record["eval_sets"] = results
        self.observer.evaluated(progress, record)
        score = None
        if self.scores:
            score = self.scores.score_in(first)
            warning = self.gap.evaluated(first["eval_reward"])
            progress.reward_gap = self.gap.state()
            if warning:
                log.warning("%s", warning)
        return progress.add_evaluation(progress.step, first.get("eval_loss"), score)

    def _measure(self, name: str) -> dict[str, Any] | None:
        """The loss and the scores of a set; None if all ranks have agreed to stop."""
        step = self.progress.step
        result: dict[str, Any] = {}
        # Prompts alone have no right tokens, of which there would be a loss.
        if not self.data.prompts:
            rows = self.data.eval_sets[name]
            losses = self.trainer.evaluate(step, self.data.evaluation, rows)
            if losses is None:
                return None
            result |= losses
        if self.scores:
            result |= self.scores.measure(name, step)
        return result


def _stop_if_asked(control: Control, progress: Progress, observer: Observer) -> None:
    if control.stop:
        observer.save(progress)
        raise RunStopped(
            control.stop.state,
            f"Stopped after step {progress.step} ({control.stop.reason}): "
            f"{observer.describe_saved()}.",
        )
