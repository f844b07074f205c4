"""What a run leaves at its end: its result, or the newest and the best adapter; and its upload."""

import logging

from fsdp_qlora import distributed
from fsdp_qlora.adapters.first_values import LiveValues
from fsdp_qlora.checkpointing.progress import Progress
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.text import identity_settings, resolved_options
from fsdp_qlora.errors import RunStopped, TrainingError
from fsdp_qlora.planning.plan import (
    ModelPlan,
    adapter_config,
)
from fsdp_qlora.results.record import Base
from fsdp_qlora.results.upload import upload
from fsdp_qlora.results.write import ResultForm
from fsdp_qlora.supervision import Supervision
from fsdp_qlora.training.trainer import Trainer

log = logging.getLogger("fsdp_qlora")


def result_form(config: TrainConfig, plan: ModelPlan) -> ResultForm:
    """The form of the run's results."""
    settings, changed = identity_settings(resolved_options(config))
    return ResultForm(plan, adapter_config(config, plan), Base.of(config.model, config.base_name), settings, changed)


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
