"""Opens the source of rows of a run that learns from its own answers: engine, reward functions, rollouts.jsonl."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.schedule import RowSource
from fsdp_qlora.generation.generate import Answer, SamplingOptions, Stops
from fsdp_qlora.generation.prompts import PromptFormat
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.rollouts.embedded import EmbeddedEngine
from fsdp_qlora.rollouts.engine import Engine
from fsdp_qlora.rollouts.prompts import PromptData
from fsdp_qlora.rollouts.records import RolloutFile
from fsdp_qlora.rollouts.rewards import Scorer
from fsdp_qlora.rollouts.source import Rollouts
from fsdp_qlora.sharding.parallelize import kept_gathered
from fsdp_qlora.training.policy import token_logprobs
from fsdp_qlora.training.trainer import Trainer


def open_source(config: TrainConfig, plan: Plan, trainer: Trainer, folder: Path) -> RowSource:
    """The source of a run's rows: its data, or answers to its prompts."""
    if not isinstance(plan.data, PromptData):
        return plan.data.source
    stops = stops_of(plan.model.tokenizer, trainer.model, plan.data.provenance["prompt"])
    looks_back = config.num_iterations > 1 or config.correct_mismatch
    return Rollouts(
        plan.data,
        open_engine(config, plan, trainer, stops),
        Scorer(plan.rewards, zero_on_error=config.on_reward_error == "zero", seconds=config.reward_timeout),
        RolloutFile(folder),
        trainer.ranks,
        lambda tokens: stops.text_of(Answer(0, [], tokens)),
        partial(token_logprobs, trainer.forward) if looks_back else None,
        config.scale_rewards,
    )


def open_engine(config: TrainConfig, plan: Plan, trainer: Trainer, stops: Stops) -> Engine:
    generation = plan.generation
    assert generation is not None
    return EmbeddedEngine(
        trainer.model,
        trainer.ranks,
        plan.model.precision,
        stops,
        SamplingOptions(config.max_completion_length, config.temperature, seed=config.seed),
        config.num_generations,
        generation.at_a_time,
        partial(kept_gathered, trainer.model) if generation.gathered else contextlib.nullcontext,
        trainer.heartbeat,
    )


def stops_of(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, record: dict[str, Any]) -> Stops:
    """When an answer ends, by the model and the text around prompts, as of data/rendering.py."""
    prompt_format = PromptFormat(tokenizer, record)
    prompt_format.close()
    return Stops(tokenizer, model, prompt_format.stop_text)
