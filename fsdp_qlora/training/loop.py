"""The loop over steps: train, log, evaluate, save, stop. One for all train types; a step is `Trainer.train_step`."""

import logging
from collections.abc import Callable

from fsdp_qlora.checkpointing.progress import Progress
from fsdp_qlora.checkpointing.saving import Saver
from fsdp_qlora.control.stops import Stop
from fsdp_qlora.data.prepare import RunData
from fsdp_qlora.errors import NotFinite, RunStopped, TrainingError
from fsdp_qlora.metrics.metric_log import MetricLog
from fsdp_qlora.metrics.profiling import MemoryLog, Profiler
from fsdp_qlora.training.trainer import Trainer

log = logging.getLogger("fsdp_qlora")

_MIN_SKIPPED = 10  # or a hundredth of the steps: as many may be skipped


def train(
    trainer: Trainer,
    data: RunData,
    metrics: MetricLog,
    progress: Progress,
    saver: Saver | None,
    *,
    learning_rate: Callable[[int], float],
    eval_steps: int,
    profiler: Profiler,
    memory: MemoryLog,
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Run the optimizer steps that are left; evaluate before the first, every `eval_steps` and after the last.

    Args:
        progress: where to begin; it is kept up to date.
        saver: None where no checkpoints are wanted.
        on_step: called after each step and each save.
    Raises:
        RunStopped: all ranks have agreed to stop, and saved.
        TrainingError: the run cannot go on.
    """
    schedule, control = trainer.schedule, trainer.control
    most_skipped = max(_MIN_SKIPPED, schedule.total_steps // 100)

    def is_eval_due(step: int) -> bool:
        at_an_end = step in (0, schedule.total_steps)
        return len(data.eval_rows) > 0 and (at_an_end or (eval_steps > 0 and step % eval_steps == 0))

    def evaluate() -> bool:
        """Whether it is worth a checkpoint."""
        result = trainer.evaluate(progress.step, data.evaluation, data.eval_rows)
        if result is None:
            return False
        metrics.evaluation({"step": progress.step, "epoch": progress.step / schedule.steps_per_epoch, **result})
        return progress.add_evaluation(result["eval_loss"])

    def save() -> None:
        if saver is not None:
            trainer.heartbeat.beat(progress.step, "save")
            saver.save(progress)
            control.saved(saver.seconds)
            on_step(progress)

    def stop_if_asked() -> None:
        if control.stop:
            save()
            raise RunStopped(control.stop.state, _describe_stop(control.stop, progress, saver))

    if progress.loss_scale:
        trainer.loss_scale.load_state(progress.loss_scale)
    if is_eval_due(progress.step) and progress.last_eval_step != progress.step:
        evaluate()
        stop_if_asked()
    for step, rows in schedule.rows_of_steps(data.train_rows, first=progress.step):
        try:
            record = trainer.train_step(step, rows, learning_rate(step))
        except NotFinite:
            save()  # of the step before, so that nothing is lost to what is tried next
            raise
        progress.loss_scale = trainer.loss_scale.state()
        metrics.step(record)
        if (usual := progress.add_step(record)) is not None:
            log.warning(
                "Step %d: the loss jumped to %.4f from about %.4f, with samples %s of the dataset.",
                progress.step, record["loss"], usual, trainer.sample_numbers(rows),
            )  # fmt: skip
        if progress.num_skipped > most_skipped:
            raise TrainingError(f"{progress.num_skipped} steps were skipped as not finite. More would be no training.")
        profiler.step()
        memory.record(f"after step {progress.step}")
        on_step(progress)
        is_best = not control.stop and is_eval_due(progress.step) and evaluate()
        stop_if_asked()
        if is_best or control.save or (saver is not None and saver.is_due(progress.step)):
            save()
    save()


def _describe_stop(stop: Stop, progress: Progress, saver: Saver | None) -> str:
    saved = "no checkpoint was saved"
    if saver is not None and saver.saved_step >= 0:
        saved = f"the checkpoint of step {saver.saved_step} is in {saver.root}; the same command goes on from it"
    return f"Stopped after step {progress.step} ({stop.reason}): {saved}."
