"""Plans the teacher of a distillation: another model, which goes over the rows before training."""

import dataclasses
import logging
from pathlib import Path

import torch.distributed as dist

from fsdp_qlora.config.marks import OF_ADAPTER
from fsdp_qlora.config.options import DEFAULTS, TrainConfig, names_marked
from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.data.batches.teacher_cache import bytes_per_token
from fsdp_qlora.data.batches.teacher_folder import TeacherFolder
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.model.adapters.peft_folder import read_adapter
from fsdp_qlora.planning.placement import PlacedModel, place
from fsdp_qlora.planning.plan import ModelPlan, log_plan, plan_model, read_model
from fsdp_qlora.planning.report import PlanReport
from fsdp_qlora.training.probes import head_loss_blocker
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import fit_line, format_bytes

log = logging.getLogger("fsdp_qlora")

# of its keys in the store: it may be the student's model, whose keys are the same
TEACHER = "teacher"


def teacher_config(config: TrainConfig) -> TrainConfig:
    """The options to load the teacher with: the student's, without its adapter and optimizer."""
    # A train type with LoRA, whose base is frozen and quantized as the student's. The table's own
    # quantizers are compared: `config.kind` has the one that --quant_type puts in place of
    # bitsandbytes, which no row of the table has.
    quantizer = TRAIN_TYPES[config.train_type].quantizer
    [train_type, *_] = [
        name
        for name, kind in TRAIN_TYPES.items()
        if kind.adapter == "lora" and kind.quantizer == quantizer
    ]
    options = {name: getattr(DEFAULTS, name) for name in names_marked(OF_ADAPTER)}
    options |= {
        "model_name": config.teacher,
        "adapter": config.teacher_adapter,
        "train_type": train_type,
        "lora_rank": 1,
        "objective": "sft",
        "teacher": None,
        "base_name": None,
        "recompute": "all",
        "optimizer": "",
    }
    if config.teacher_adapter:
        options |= read_adapter(Path(config.teacher_adapter).expanduser()).options
    return dataclasses.replace(config, **options, gradient_accumulation_steps=1)


def refuse_whole_logits(plan: ModelPlan) -> None:
    """Raise UserError for a model of which no divergence can be computed in chunks."""
    reason = head_loss_blocker(plan.meta.model)
    if reason:
        raise UserError(f"Distillation compares distributions in chunks of tokens, but {reason}.")


def _refuse_other_settings(config: TrainConfig, student: ModelPlan, folder: TeacherFolder) -> None:
    """Raise UserError if the files of a teacher's folder are for another temperature or student."""
    vocabulary = student.meta.model.get_input_embeddings().num_embeddings
    differences = [
        *folder.differences({"temperature": config.temperature, "vocabulary": vocabulary})
    ]
    if differences:
        raise UserError(
            f"--teacher {config.teacher} is for other settings: {', '.join(differences)}. Run "
            "`fsdp-qlora teach` with the options of this run."
        )


def plan_teacher(
    config: TrainConfig,
    student: ModelPlan,
    data: RunData,
    longest: Lengths,
    store: dist.Store | None,
) -> PlacedModel | None:
    """Plan the teacher as a separate model for the same rows, and log the plan.

    None for a teacher that is not loaded here.

    Raises:
        UserError: it cannot be planned, has another tokenizer, or rows have images.
    """
    if data.have_images:
        raise UserError(
            "--teacher: another model teaches on text alone, and some rows have images. Leave out "
            "--teacher, so that the model itself teaches by teacher_prompt or teacher_system."
        )
    teacher_options = teacher_config(config)
    store = dist.PrefixStore(TEACHER, store) if store else None
    log.info("%s", fit_line("Teacher: ", config.teacher or ""))
    folder = Path(config.teacher or "").expanduser()
    # A folder that `teach` has written is read later: no model has to be planned.
    said_before = None if config.teacher_url else TeacherFolder.read(folder, "teacher")
    if said_before:
        _refuse_other_settings(config, student, said_before)
        return None
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(
            f"--teacher {config.teacher} has neither the config.json of a model nor the "
            "teacher.json of `fsdp-qlora teach`. Give another folder."
        )
    # A server's model is not planned: its tokenizer is all that has to fit.
    plan = None if config.teacher_url else plan_model(teacher_options, student.machine, store)
    tokenizer = plan.tokenizer if plan else read_model(teacher_options)[2]
    if not student.tokenizer.get_vocab().items() <= tokenizer.get_vocab().items():
        raise UserError(
            f"--teacher {config.teacher} has another tokenizer than {config.model_name}: token ids "
            "differ or are missing. Give a teacher with the same tokenizer."
        )
    if not plan:
        return None
    refuse_whole_logits(plan)
    teacher = place(teacher_options, plan, longest, store)
    count = int(data.train.num_targets.sum())
    size = bytes_per_token(config.top_k)
    log.info(
        "Teacher: %s learned tokens, %d bytes each (%s)",
        f"{count:,}",
        size,
        format_bytes(count * size),
    )
    log_plan(config, *PlanReport.of(teacher).lines())
    return teacher
