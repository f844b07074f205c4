"""Reads the rows of a run as its options, its model and the run that continues ask for."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.checkpoint.decisions import Decisions, EarlierRun
from fsdp_qlora.config.learn import read_learn
from fsdp_qlora.config.marks import REPLACE
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.text import TOWERS
from fsdp_qlora.data.held_out import PromptSets, held_out_prompts
from fsdp_qlora.data.learning_model import LearningModel, options_for
from fsdp_qlora.data.options import DataOptions, TextOptions
from fsdp_qlora.data.run_data import RunData, read_rows
from fsdp_qlora.data.taken_rows import NeededRows
from fsdp_qlora.data.text.chat_template import ChatTemplate
from fsdp_qlora.data.text.image_processor import NO_FILES, ImageProcessor
from fsdp_qlora.data.text.templates import find_template
from fsdp_qlora.data.text.turn_parts import has_end_of_reasoning
from fsdp_qlora.model.architecture.config import most_positions
from fsdp_qlora.model.architecture.rope import changing_rope
from fsdp_qlora.planning.plan import ModelPlan
from fsdp_qlora.planning.run_rows import needed_rows
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")


def earlier_run(config: TrainConfig, num_ranks: int | None = None) -> EarlierRun:
    """The run that may be continued, and what the options leave open.

    Args:
        num_ranks: the ranks of this start; None if no settings are chosen for them.
    """
    leaves_settings = config.auto or config.context_parallel_size == "auto"
    return config.pick(
        EarlierRun,
        replaces=config.resume.endswith(REPLACE),
        num_ranks=num_ranks if leaves_settings else None,
    )


def with_kept_rows(config: TrainConfig, decisions: Decisions) -> TrainConfig:
    """The options with what the run that continues has decided about its rows.

    A context_length of auto becomes its length, and it keeps learning what it has learned.
    """
    learn = read_learn(config.learn)
    kept = learn.keeping_empty()
    if decisions.keeps_empty and kept != learn and not config.samples_answers:
        config = dataclasses.replace(config, learn=tuple(kept.text.split()))
    if decisions.context_length is None:
        return config
    log.info("Context: %s tokens, with which the run was started", f"{decisions.context_length:,}")
    return dataclasses.replace(config, context_length=decisions.context_length)


def say_kept_learning(
    asked: TrainConfig, kept: TrainConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Say that empty blocks for reasoning are learned, where by default they would not be.

    Args:
        asked: the options as they are given.
        kept: the same of `with_kept_rows`.
    """
    chat_template = ChatTemplate(tokenizer, find_template(kept.prompt_template).chat)
    writes_blocks = has_end_of_reasoning(chat_template.source)
    by_default, learn = (
        read_learn(config.learn).resolved(writes_blocks=writes_blocks) for config in (asked, kept)
    )
    if learn != by_default:
        log.info("Learn: %s, with which the run was started", read_learn(kept.learn).text)


Tools = Mapping[str, list[dict[str, Any]]]


def pick_data(
    config: TrainConfig,
    image_processor: ImageProcessor | None = None,
    tools: Tools | None = None,
) -> DataOptions:
    """The options of the rows as they are given.

    Args:
        image_processor: the model's, if it has one.
        tools: of the run's environments, as in `TextOptions`.
    """
    text = config.pick(
        TextOptions,
        learn=read_learn(config.learn).text,
        row_kind=config.objective_row.kind_of_rows(config),
        image_processor=image_processor,
        tools=tools,
    )
    return config.pick(DataOptions, text=text)


def needed_of(config: TrainConfig, decisions: Decisions, data_size: int) -> NeededRows | None:
    """The rows that the run takes, if it is not sure to take all. Arguments as of `needed_rows`."""
    count = needed_rows(config, data_size)
    return None if count is None else NeededRows(count, decisions.taken)


def read_planned_rows(
    config: TrainConfig,
    plan: ModelPlan,
    decisions: Decisions,
    tools: Tools | None = None,
    *,
    data_size: int | None = None,
) -> tuple[TrainConfig, RunData]:
    """Read the rows for a model that is planned.

    Args:
        tools: of the run's environments, as in `TextOptions`.
        data_size: ranks that get other rows than each other, for a run that takes the rows of its
            steps alone; None to read all rows.
    Returns:
        The options with the context_length that the rows decide, and the rows.
    Raises:
        UserError: as of `read_rows`.
    """
    model = _learning(config, plan)
    options = options_for(
        pick_data(config, tools=tools), model, keeps_template=decisions.fills_template
    )
    if model.takes_images and options.text.image_processor is None:
        log.info("Images cannot be used: the folder of %s %s.", model.name, NO_FILES)
    data = read_rows(
        plan.tokenizer,
        options,
        vocab_size=plan.meta.model.get_input_embeddings().num_embeddings,
        longest=most_positions(plan.config),
        needed=None if data_size is None else needed_of(config, decisions, data_size),
    )
    _check_served(config, plan)
    _check_images(config, plan, data)
    if plan.documents is None or (data.have_images and plan.pads_images):
        warn_of_padded_rope(plan, data)
    return dataclasses.replace(config, context_length=data.context_length), data


def _check_served(config: TrainConfig, plan: ModelPlan) -> None:
    """Make sure that a server computes images as the run does.

    Raises:
        UserError: --adapter has adapters for images, and a server is to answer prompts.
    """
    if config.rollout_url and plan.meta.parts.tower_adapters:
        raise UserError(
            f"--rollout_url: --adapter {config.adapter} has adapters for images, "
            "which a server may leave out. Leave out --rollout_url, so that the model in training "
            "answers prompts."
        )


def _check_images(config: TrainConfig, plan: ModelPlan, data: RunData) -> None:
    """Make sure that layers that compute images learn from some.

    Raises:
        UserError: the options name such layers, and no row to train on has an image.
    """
    if (
        not plan.meta.parts.tower_adapters
        or len(data.train.images)
        or len(data.prompts.rows.images)
    ):
        return
    words = ",".join(name for name in config.lora_target_modules if name in TOWERS)
    if words:
        raise UserError(
            f"--lora_target_modules {words}: layers that compute images learn from rows with "
            "images, and no row to train on has one. Leave the words out, or give rows with images."
        )
    log.warning("No row to train on has an image: adapters for images do not learn.")


def read_held_out(
    config: TrainConfig, plan: ModelPlan, data: RunData, decisions: Decisions
) -> PromptSets:
    """Read the held-out rows of a run as prompts; none without --eval_rewards.

    config: with the context_length of the rows.

    Raises:
        UserError: too many of the rows have no prompt.
    """
    if not config.eval_rewards:
        return {}
    options = options_for(
        pick_data(config), _learning(config, plan), keeps_template=decisions.fills_template
    )
    return held_out_prompts(
        plan.tokenizer,
        options,
        data,
        vocab_size=plan.meta.model.get_input_embeddings().num_embeddings,
        longest=most_positions(plan.config),
    )


def _learning(config: TrainConfig, plan: ModelPlan) -> LearningModel:
    """The model as the text of its rows depends on it."""
    return LearningModel(
        name=config.model_name,
        folder=plan.folder,
        tokenizer=plan.tokenizer,
        takes_images=bool(plan.meta.parts.towers),
    )


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
