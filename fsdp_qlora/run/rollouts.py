"""Opens the source of rows of a run that learns from its own answers: engine, reward functions, rollouts.jsonl."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.schedule import RowSource
from fsdp_qlora.export.save_results import save_adapter
from fsdp_qlora.model.adapters.first_values import LiveValues
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.sharding.parallelize import kept_gathered
from fsdp_qlora.training.forward import token_logprobs
from fsdp_qlora.training.generation.generate import SamplingOptions, Stops, TextGenerator
from fsdp_qlora.training.generation.questions import PromptFormat
from fsdp_qlora.training.rl.client import Server
from fsdp_qlora.training.rl.embedded import EmbeddedEngine
from fsdp_qlora.training.rl.engine import Engine
from fsdp_qlora.training.rl.records import RolloutFile
from fsdp_qlora.training.rl.rewards import Scorer
from fsdp_qlora.training.rl.server import ServerEngine
from fsdp_qlora.training.rl.source import Rollouts
from fsdp_qlora.training.trainer import Trainer
from fsdp_qlora.utils.run_files import ADAPTERS


def open_source(config: TrainConfig, plan: Plan, trainer: Trainer, folder: Path, *, run_id: str) -> RowSource:
    """The source of a run's rows: its data, or answers to its prompts."""
    if not plan.data.prompts:
        return plan.data.source
    stops = stops_of(plan.model.tokenizer, trainer.model, plan.data.provenance["prompt"])
    seconds = 60 * config.hang_minutes or 1e7  # 0 is no limit
    looks_back = config.num_iterations > 1 or config.rollout_url
    return Rollouts(
        data=plan.data,
        engine=open_engine(config, plan, trainer, stops, folder / ADAPTERS / run_id),
        scorer=Scorer(plan.rewards, zero_on_error=config.on_reward_error == "zero", seconds=seconds),
        file=RolloutFile(folder),
        ranks=trainer.ranks,
        control=trainer.control,
        text_of=stops.text_of,
        logprobs=partial(token_logprobs, trainer.forward) if looks_back else None,
        scale_rewards=config.scale_rewards,
    )


def open_engine(config: TrainConfig, plan: Plan, trainer: Trainer, stops: Stops, adapters: Path) -> Engine:
    """The engine that answers prompts. adapters: where those for a server go, with the beginning of their names."""
    options = SamplingOptions(config.max_completion_length, config.temperature, seed=config.seed)
    model, generation, adapter = trainer.model, plan.generation, plan.model.adapter
    if config.rollout_url:
        assert adapter is not None
        values = LiveValues(model, keeps=trainer.ranks.is_rank_0)
        return ServerEngine(
            Server(config.rollout_url, (config.model_name, config.base_name), 60 * config.hang_minutes or 1e7),
            lambda folder: save_adapter(model, adapter, None, folder, values=values),
            adapters,
            trainer.ranks,
            trainer.control,
            stops,
            options,
            vocab_size=model.get_input_embeddings().num_embeddings,
        )
    assert generation is not None
    return EmbeddedEngine(
        partial(TextGenerator, model, trainer.ranks, plan.model.precision, stops),
        trainer.ranks,
        trainer.control,
        options,
        generation.at_a_time,
        partial(kept_gathered, model) if generation.gathered else contextlib.nullcontext,
    )


def stops_of(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, record: dict[str, Any]) -> Stops:
    """When an answer ends, by the model and the text around prompts, as of data/text/rendering.py."""
    prompt_format = PromptFormat(tokenizer, record)
    prompt_format.close()
    return Stops(tokenizer, model, prompt_format.stop_text)
