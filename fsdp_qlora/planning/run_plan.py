"""The plan of a run, made before a weight is read."""

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.checkpoint.checkpoint import STATE
from fsdp_qlora.checkpoint.mirror import open_store
from fsdp_qlora.checkpoint.run_folder import is_finished
from fsdp_qlora.config.marks import OF_ADAPTER, REPLACE
from fsdp_qlora.config.options import DEFAULTS, TrainConfig, names_marked
from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.data.batches.schedule import Schedule
from fsdp_qlora.data.batches.taught import bytes_per_token
from fsdp_qlora.data.batches.teacher_folder import TeacherFolder
from fsdp_qlora.data.batches.tokenization import sample_line
from fsdp_qlora.data.content import PromptContent
from fsdp_qlora.data.options import DataOptions, TextOptions
from fsdp_qlora.data.run_data import RunData, prepare_data
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.data.text.rendering import CHAT, TEMPLATE, describe_default, describe_lack
from fsdp_qlora.distributed.layout import SHARDING_STRATEGIES
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.store import all_gather_via_store
from fsdp_qlora.model.adapters.peft_folder import read_adapter
from fsdp_qlora.model.architecture.config import most_positions
from fsdp_qlora.model.architecture.rope import changing_rope
from fsdp_qlora.model.architecture.tokenizer import is_made_for_chats
from fsdp_qlora.model.model_parts import count_bytes
from fsdp_qlora.observability.metric_log import refuse_sinks
from fsdp_qlora.planning.gpus import gpu_of
from fsdp_qlora.planning.placement import PlacedModel, least_free, place
from fsdp_qlora.planning.plan import Machine, ModelPlan, log_plan, plan_model, read_model
from fsdp_qlora.planning.report import PlanReport
from fsdp_qlora.planning.run_rows import Generation, RunRows, make_schedule, plan_generation
from fsdp_qlora.planning.search import choose_settings
from fsdp_qlora.sharding.optimizer import check_optimizer, check_shard_sizes
from fsdp_qlora.training.generation.prompt_format import PromptFormat, read_questions
from fsdp_qlora.training.generation.tasks import Tasks
from fsdp_qlora.training.probes import head_loss_blocker
from fsdp_qlora.training.rl.rewards import Scorer, check_answers
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_json
from fsdp_qlora.utils.run_files import RECORD, RUN
from fsdp_qlora.utils.text import fit_line, format_bytes

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True)
class Plan:
    """The decisions of a run before a weight is read.

    Attributes:
        questions: the prompts of --sample_prompts.
        scored_by: on rank 0, the reward functions with hashes of their files.
        stop_text: as in PromptFormat, for a run that answers its prompts.
        generation: how the run's own model answers its prompts.
        chosen: options that auto replaces, and the context_length that the rows decide.
        teacher: the model that goes over the rows before training.
    """

    placed: PlacedModel
    data: RunData
    schedule: Schedule
    warmup_steps: int
    questions: tuple[PromptContent, ...] = ()
    tasks: Tasks | None = None
    scorer: Scorer | None = None
    scored_by: list[str] = field(default_factory=list)
    stop_text: str = ""
    generation: Generation | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)
    teacher: PlacedModel | None = None

    @property
    def model(self) -> ModelPlan:
        return self.placed.model


def make_plan(config: TrainConfig, ranks: Ranks, store: dist.Store | None) -> Plan:
    """Build the model without weights, tokenize the rows, and describe the run.

    Args:
        store: of `distributed.connect`; None for a dry run, which is one process.
    """
    machine = Machine.of(config, ranks)
    machine.data_size(config.context_size)  # before any long work
    check_optimizer(config.optimizer, machine.device)
    refuse_sinks(config.log_to)
    scorer = Scorer(
        config.rewards, zero_on_error=config.on_reward_error == "zero", seconds=config.hang_seconds
    )
    scored_by = scorer.start() if ranks.is_rank_0 else []
    named_questions = read_questions(Path(config.sample_prompts)) if config.sample_prompts else []
    questions = tuple(question for _, question in named_questions)
    tasks = Tasks(config.eval_tasks) if config.eval_tasks else None
    config = with_kept_context(config, ranks, store)
    model = plan_model(config, machine, store)
    if config.distills:
        _refuse_whole_logits(model)
    # Before the process group starts, so that no collective waits for the tokenizer.
    config, data = read_rows(config, model)
    stop_text = ""
    tokenizer = model.tokenizer
    prompt = data.provenance["prompt"]
    if data.prompts:
        check_answers(scorer.rewards, [row.for_rewards for row in data.prompts])
        with contextlib.closing(PromptFormat(tokenizer, prompt)) as prompt_format:
            stop_text = prompt_format.stop_text
    ends = data.ends(tokenizer, stop_text)
    if ends:
        prompt["ends"] = ends
        end = " or ".join(ends)
        own = tokenizer.eos_token
        log.info(
            "Answers end with %s, not with the tokenizer's %s: generation_config.json will name "
            "both.",
            end,
            own,
        )
    prompts = describe_default(data.reports[0].dataset_format, data.provenance["prompt"])
    if prompts and config.prompt_template is None and model.tokenizer.chat_template:
        log.info("%s", prompts)
    lack = describe_lack(prompt, tokenizer)
    if lack:
        log.warning("%s", lack)
    is_open = config.auto or config.context_parallel_size == "auto"
    chosen = choose_settings(config, model, data, store) if is_open else {}
    chosen |= {"context_length": config.context_length}
    config = dataclasses.replace(config, **chosen)
    schedule = make_schedule(config, data, machine.data_size(config.context_size))
    longest_rows = RunRows(config, data, schedule, model.documents).longest()
    placed = place(config, model, longest_rows, store)
    check_shard_sizes(config.optimizer, model.meta.model, placed.layout.num_shards)
    teacher = plan_teacher(config, model, data, longest_rows, store) if config.teacher else None
    generation = None
    if data.prompts and not config.rollout_url:
        free = least_free(machine, "the memory for generation", store)
        card = (
            gpu_of(torch.cuda.get_device_properties(ranks.device))
            if ranks.device.type == "cuda"
            else None
        )
        longest = int(data.lengths.max())
        most_new = config.max_completion_length
        generation = plan_generation(
            placed, schedule.global_batch_size, longest, most_new, free, card
        )
    warmup_steps = num_warmup_steps(config, schedule)
    scoring = scorer, scored_by, stop_text
    plan = Plan(
        placed,
        data,
        schedule,
        warmup_steps,
        questions,
        tasks,
        *scoring,
        generation,
        chosen,
        teacher,
    )
    _log_plan(config, plan)
    if not config.dry_run:
        log.info(fit_line("Output: ", config.output_dir))
    return plan


def teacher_config(config: TrainConfig) -> TrainConfig:
    """The options by which the teacher is loaded: as the student, without its adapter, and without
    an optimizer.
    """
    kinds = [name for name, kind in TRAIN_TYPES.items() if kind.adapter == "lora"]
    train_type = next(
        name
        for name in kinds
        if TRAIN_TYPES[name].quantizer == TRAIN_TYPES[config.train_type].quantizer
    )
    options = {name: getattr(DEFAULTS, name) for name in names_marked(OF_ADAPTER)}
    options |= {
        "model_name": config.teacher,
        "adapter": config.teacher_adapter,
        "train_type": train_type,
        "lora_rank": 1,
    }
    options |= {
        "objective": "sft",
        "teacher": None,
        "base_name": None,
        "recompute": "all",
        "optimizer": "",
    }
    if config.teacher_adapter:
        options |= read_adapter(Path(config.teacher_adapter).expanduser()).options
    return dataclasses.replace(config, **options, gradient_accumulation_steps=1)


def _refuse_whole_logits(plan: ModelPlan) -> None:
    """Raise UserError for a model of which no divergence can be computed in chunks."""
    reason = head_loss_blocker(plan.meta.model)
    if reason:
        raise UserError(f"Distillation compares distributions in chunks of tokens, but {reason}.")


def _refuse_other_settings(config: TrainConfig, student: ModelPlan, kept: TeacherFolder) -> None:
    """Raise UserError if the files of a teacher's folder are for another temperature or student."""
    vocabulary = student.meta.model.get_input_embeddings().num_embeddings
    differences = [*kept.differences({"temperature": config.temperature, "vocabulary": vocabulary})]
    if differences:
        raise UserError(
            f"--teacher {config.teacher} is for other settings: {', '.join(differences)}. Run "
            "`fsdp-qlora teach` with "
            "the options of this run."
        )


def plan_teacher(
    config: TrainConfig,
    student: ModelPlan,
    data: RunData,
    longest: Lengths,
    store: dist.Store | None,
) -> PlacedModel | None:
    """Plan the teacher as a model of its own, for the same rows, and log it; None for one that is
    not loaded here.

    Raises:
        UserError: it cannot be planned, has another tokenizer, or rows have images.
    """
    if data.have_images:
        raise UserError(
            "--teacher: rows with images can be learned as they are alone, with --objective sft."
        )
    own = teacher_config(config)
    store = dist.PrefixStore("teacher", store) if store else None
    log.info("%s", fit_line("Teacher: ", config.teacher or ""))
    folder = Path(config.teacher or "").expanduser()
    if not config.teacher_url and (kept := TeacherFolder.read(folder, "teacher")):
        _refuse_other_settings(config, student, kept)
        return None
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(
            f"--teacher {config.teacher} has no config.json, as the folder of a model, and no "
            "teacher.json, as one "
            "that `fsdp-qlora teach` has written."
        )
    plan = None if config.teacher_url else plan_model(own, student.machine, store)
    tokenizer = plan.tokenizer if plan else read_model(own)[2]
    if not student.tokenizer.get_vocab().items() <= tokenizer.get_vocab().items():
        raise UserError(
            f"--teacher {config.teacher} has another tokenizer than {config.model_name}: tokens "
            "have other ids or none."
        )
    if not plan:
        return None
    _refuse_whole_logits(plan)
    teacher = place(own, plan, longest, store)
    count = int(data.train.num_targets.sum())
    size = bytes_per_token(config.top_k)
    log.info(
        "Teacher: %s learned tokens, %d bytes each (%s)",
        f"{count:,}",
        size,
        format_bytes(count * size),
    )
    log_plan(
        config,
        *PlanReport(teacher, student.machine.gpu_memory and student.machine.gpu_memory[1]).lines(),
    )
    return teacher


def read_rows(config: TrainConfig, model: ModelPlan) -> tuple[TrainConfig, RunData]:
    """The options with the context_length that the rows decide, and the rows. Raises UserError as
    `prepare_data`.
    """
    vocab_size = model.meta.model.get_input_embeddings().num_embeddings
    options = data_options(config, model.folder, model.tokenizer)
    longest = most_positions(model.config)
    if not model.meta.parts.towers:
        options = dataclasses.replace(
            options, text=dataclasses.replace(options.text, image_processor=None)
        )
    data = prepare_data(model.tokenizer, options, vocab_size=vocab_size, longest=longest)
    if model.documents is None or data.have_images:
        warn_of_padded_rope(model, data)
    return dataclasses.replace(config, context_length=data.context_length), data


def warn_of_padded_rope(model: ModelPlan, data: RunData) -> None:
    """Say if values of padded rows depend on the longest of them."""
    rope = changing_rope(model.config)
    if rope and data.context_length > rope[1]:
        log.warning(
            "Rope type %s changes with the longest row of a padded batch once one has more than "
            "%d tokens. --batch_size 1 or --context_length %d avoids that.",
            rope[0],
            rope[1],
            rope[1],
        )


def with_kept_context(config: TrainConfig, ranks: Ranks, store: dist.Store | None) -> TrainConfig:
    """The options, where context_length is auto with that of the run that continues, which rank 0
    reads for all.
    """
    if config.context_length != "auto":
        return config
    kept = json.dumps(_recorded_context(config) if ranks.is_rank_0 else None)
    if store is not None:
        kept = all_gather_via_store(kept, "the context_length of the run", ranks, store)[0]
    context_length = json.loads(kept)
    if context_length:
        log.info("Context: %s tokens, with which the run was started", f"{context_length:,}")
    return dataclasses.replace(config, context_length=context_length or "auto")


def _recorded_context(config: TrainConfig) -> int | None:
    """The context_length of the run in a folder or on its mirror, or of a checkpoint; None if there
    is none.

    A run that may be another one, to be replaced or not touched, counts if it is unfinished and of
    the same --dataset.
    """
    continues = config.start_from == "auto"
    folder = Path(config.output_dir if continues else config.start_from).expanduser()
    record = read_json(folder / RUN) or read_json(folder / STATE).get("about", {})
    if not record and continues and config.mirror:
        with contextlib.suppress(OSError):  # said when the run resumes
            record = open_store(config.mirror).run()
    options = record.get("options", {})
    is_other = continues and (is_finished(folder) or options.get("dataset") != list(config.dataset))
    if is_other and (config.resume.endswith(REPLACE) or config.is_preview):
        return None
    context_length = options.get("context_length")
    return context_length if isinstance(context_length, int) else None


def data_options(
    config: TrainConfig, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> DataOptions:
    """The options of the rows. By default instructions are filled into the chat template of a model
    made for chats.

    A run of this model that continues, and an adapter that is trained further, keep their prompts.
    """
    options = pick_data(config, ImageProcessor.find(folder, config.model_name))
    continued = config.output_dir if config.start_from == "auto" else config.start_from
    before = [Path(path).expanduser() for path in (continued, config.adapter) if path]
    records = [read_json(path / name) for path in before for name in (RUN, STATE, RECORD)]
    own = [
        record
        for record in records
        if record.get("options", {}).get("model_name") in (None, config.model_name)
    ]
    is_plain = any(
        (record.get("about", record).get("prompt") or {}).get("kind") == TEMPLATE for record in own
    )
    if config.prompt_template is None and not is_plain and is_made_for_chats(folder, tokenizer):
        return dataclasses.replace(
            options, text=dataclasses.replace(options.text, prompt_template=CHAT)
        )
    return options


def pick_data(config: TrainConfig, image_processor: ImageProcessor | None = None) -> DataOptions:
    """The options of the rows as they are given. image_processor: the model's, if it has one."""
    return config.pick(DataOptions, text=config.pick(TextOptions, image_processor=image_processor))


def _log_plan(config: TrainConfig, plan: Plan) -> None:
    """Log rows, steps and memory."""
    placed = plan.placed
    data = plan.data
    machine = plan.model.machine
    log_plan(config, sample_line(data.train, int(data.train_rows[0]), plan.model.tokenizer))
    if data.have_images:
        log.info("Rows are padded, as with --batching padded: some have images.")
    for line in filter(None, (plan.schedule.describe(plan.warmup_steps), placed.reduction)):
        log.info("%s", line)
    if plan.generation:
        num_prompts = plan.schedule.global_batch_size // plan.schedule.num_generations
        num_left = len(data.train_rows) % num_prompts
        log.info(
            "%s", plan.generation.describe(num_prompts, plan.schedule.num_generations, num_left)
        )
    report = PlanReport(placed, machine.gpu_memory and machine.gpu_memory[1])
    log_plan(config, *report.lines(), placed.reason)
    for line in data.describe_left_out():
        log.warning("%s", line)
    num_nodes = machine.ranks.world_size // machine.ranks.local_world_size
    if num_nodes > 1:
        log.info("%s", _describe_link(placed, num_nodes=num_nodes))


def _describe_link(placed: PlacedModel, *, num_nodes: int) -> str:
    """One line: about how much each of several nodes sends to the others in a step."""
    meta = placed.model.meta
    (sharded_over, frees_blocks) = SHARDING_STRATEGIES[placed.placement.sharding_strategy]
    sizes = {
        name: count.total for name, count in count_bytes(meta.parts.kinds(meta.model), 1).items()
    }
    size = format_bytes(2 * sizes.pop("trainable") * (num_nodes - 1) // num_nodes)
    line = (
        f"Between {num_nodes} nodes: each sends about {size} per step, gradients of trainable "
        "weights"
    )
    if sharded_over == "all":
        gathered = sum(sizes.values()) * (2 if frees_blocks else 1) * (num_nodes - 1) // num_nodes
        line += f", and {format_bytes(gathered)} per micro-batch, gathered weights"
    return line


def num_warmup_steps(config: TrainConfig, schedule: Schedule) -> int:
    warmup = config.warmup
    return warmup if isinstance(warmup, int) else math.ceil(warmup * schedule.total_steps)


def continued(config: TrainConfig, plan: Plan, global_batch_size: int | None) -> Plan:
    """The plan with the rows per step that the run was started with; None for a new run."""
    if global_batch_size in (None, plan.schedule.global_batch_size):
        return plan
    schedule = make_schedule(
        config, plan.data, plan.schedule.data_size, rows_per_step=global_batch_size
    )
    plan = dataclasses.replace(
        plan, schedule=schedule, warmup_steps=num_warmup_steps(config, schedule)
    )
    log.info(schedule.describe(plan.warmup_steps))
    return plan
