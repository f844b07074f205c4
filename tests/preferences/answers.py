"""Sampled answers and their rewards for the tests of grpo, the cases that are compared with TRL,
and steps on them.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from fsdp_qlora.data.batches.rows import TokenizedRows
from tests.helpers.models import SIZES
from tests.helpers.run import flags

# of SGD: see tests/helpers/rounding.py
STEPS = 5
LR = 0.3
PROMPTS = 4
ANSWERS = 3
LONGEST = 8
END = SIZES["eos_token_id"]
_TWICE = {"num_iterations": 2, "beta": 0.2}
# Name -> (model family, options).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dapo": ("llama", {}),
    "dapo, warm": ("llama", {"temperature": 0.7, "beta": 0.04, "scale_rewards": "batch"}),
    "grpo": ("qwen2", {"loss_type": "grpo", "beta": 0.04}),
    "dr_grpo": ("llama", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "two iterations": ("llama", {"num_iterations": 2, "epsilon": "0.05,0.1", "beta": 0.2}),
    "two iterations, grpo": ("qwen2", {"num_iterations": 2, "loss_type": "grpo", "epsilon": 0.02}),
    "corrected": ("llama", {"rollout_url": "http://localhost:1"}),
    "gspo": ("llama", {"loss_type": "gspo", "epsilon": "0.005,0.01", **_TWICE}),
    "gspo, corrected": ("qwen2", {"loss_type": "gspo", "rollout_url": "http://localhost:1"}),
    "cispo": ("llama", {"loss_type": "cispo", "epsilon": "1.01", **_TWICE}),
}


class Answer(NamedTuple):
    """A prompt and an answer to it, as token ids; what an engine says of each token's
    log-probability.
    """

    prompt: list[int]
    completion: list[int]
    logps: list[float]

    @property
    def reward(self) -> float:
        return len(self.completion) % 3 + self.completion[0] / 100


def sample(generation: int, prompt: int, number: int) -> Answer:
    """Random tokens of uneven lengths; the longest do not end by themselves."""
    shared = np.random.default_rng([generation, prompt])
    question = shared.integers(2, 318, shared.integers(2, 9)).tolist()
    own = np.random.default_rng([generation, prompt, number])
    tokens = own.integers(2, 318, own.integers(1, LONGEST + 3)).tolist()
    completion = tokens if len(tokens) == LONGEST else [*tokens, END]
    completion = completion[:LONGEST]
    return Answer(question, completion, own.uniform(-7.0, -4.0, len(completion)).tolist())


def answers(generation: int) -> list[Answer]:
    """All answers of a step, those to a prompt beside each other."""
    return [
        sample(generation, prompt, number) for prompt in range(PROMPTS) for number in range(ANSWERS)
    ]


def table_of(found: Sequence[Answer], advantages: Sequence[float]) -> TokenizedRows:
    ids = [[*each.prompt, *each.completion] for each in found]
    learned = [[False] * len(each.prompt) + [True] * len(each.completion) for each in found]
    sampled = [[0.0] * len(each.prompt) + each.logps for each in found]
    table = TokenizedRows(
        np.concatenate(ids).astype(np.int32),
        np.concatenate(learned),
        np.cumsum([0, *map(len, ids)]),
        np.arange(len(found)) // ANSWERS,
    )
    sampled_logps = np.concatenate(sampled).astype(np.float32)
    table = table.with_columns(
        "row",
        advantages=np.array(advantages, np.float32),
        prompt_tokens=np.array([len(each.prompt) - 1 for each in found]),
    )
    return table.with_columns("token", sampled_logps=sampled_logps)


def make_adapter(base: Path, folder: Path) -> Path:
    """An adapter to start from that changes what the base says."""
    config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    model.save_pretrained(folder)
    return folder


def run_on(base: Path, start: Path, output: Path, **changed: Any) -> dict[str, Any]:
    """The options of a run whose steps have all answers."""
    own = {
        "batch_size": PROMPTS * ANSWERS,
        "num_generations": ANSWERS,
        "max_completion_length": LONGEST,
    }
    own |= {
        "objective": "grpo",
        "rewards": "length",
        "train_type": "lora",
        "precision": "fp32",
        "adapter": start,
    }
    usual = {
        "optimizer": "sgd",
        "lr": LR,
        "lr_scheduler": "constant",
        "context_length": 64,
        "quant_cache": "off",
    }
    return {
        "model_name": base,
        "output_dir": output,
        "num_epochs": STEPS,
        **own,
        **usual,
        **changed,
    }


def learn(runs: Sequence[dict[str, Any]], advantages: Sequence[Sequence[Sequence[float]]]) -> int:
    """Take the steps of some runs, given by their options, on every rank; what they find goes to
    output_dir.

    Args:
        advantages: of each run, generation and answer.
    """
    from fsdp_qlora.commands.run_config import parse_train_config
    from fsdp_qlora.data.run_data import RunData
    from fsdp_qlora.distributed.process_group import (
        connect,
        start_process_group,
        stop_process_group,
    )
    from fsdp_qlora.distributed.ranks import read_ranks, set_up_logging
    from fsdp_qlora.distributed.supervision.stops import Control
    from fsdp_qlora.planning.machine import Machine
    from fsdp_qlora.planning.placement import place
    from fsdp_qlora.planning.plan import plan_model
    from fsdp_qlora.planning.run_plan import Plan
    from fsdp_qlora.planning.run_rows import make_schedule
    from fsdp_qlora.run.build_trainer import build_trainer
    from fsdp_qlora.run.load_model import fetch_weights, load_model

    ranks = read_ranks("cpu")
    set_up_logging(ranks, verbose=False)
    store = connect(ranks)
    ready = []
    for options in runs:
        config = parse_train_config(flags(**options))
        placed = place(config, plan_model(config, Machine.of(config, ranks), store), store=store)
        ready.append((config, placed, fetch_weights(config, placed.model, ranks, store)))
    start_process_group(ranks, store)
    for (config, placed, weights), own in zip(ready, advantages, strict=True):
        load_model(config, placed, weights, ranks)
        table = table_of(answers(0), own[0])
        data = RunData(table, np.arange(len(table)))
        schedule = make_schedule(
            dataclasses.replace(config, objective="sft"), data, placed.layout.data_size
        )
        schedule = dataclasses.replace(schedule, num_generations=ANSWERS)
        trainer = build_trainer(
            config, Plan(placed, data, schedule, warmup_steps=0), ranks, Control()
        )
        take_steps(trainer, config, own)
    stop_process_group()
    return 0


def take_steps(trainer: Any, config: Any, advantages: Sequence[Sequence[float]]) -> None:
    from fsdp_qlora.data.batches.schedule import StepRows
    from fsdp_qlora.training.forward import token_logprobs

    records = []
    for step in range(STEPS):
        generation, is_again = divmod(step, config.num_iterations)
        if not is_again:
            table = table_of(answers(generation), advantages[generation])
            if config.num_iterations > 1 or config.rollout_url:
                old_logps = token_logprobs(trainer.forward, table)
                table = table.with_columns("token", old_logps=old_logps)
        records.append(trainer.train_step(StepRows(step, table, np.arange(len(table)))))
    save_trained(trainer, records, Path(config.output_dir))


def save_trained(trainer: Any, records: Sequence[dict[str, Any]], folder: Path) -> None:
    """Save the metrics of steps and the adapter. Called on every rank."""
    from fsdp_qlora.export.values import LiveValues, saved_parameters

    found = dict(saved_parameters(trainer.model, LiveValues(keeps=True)))
    if trainer.ranks.is_rank_0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.json").write_text(json.dumps(records))
        save_file(
            {name: value.contiguous() for name, value in found.items()},
            folder / "adapter_model.safetensors",
        )
