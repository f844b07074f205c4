"""Scripted turns in an environment beside TRL's GRPOTrainer: tokens, masks, rewards, and steps."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_qlora.data.batches.schedule import epoch_order
from fsdp_qlora.training.episodes.played_episode import Episode
from fsdp_qlora.training.episodes.rounds import Rounds
from fsdp_qlora.training.generation.sampling import Completion
from tests.episodes.agent import (
    ANSWERS,
    LONGEST,
    LR,
    PROMPTS,
    STEPS,
    digest,
    make_agent,
    scripted,
    token_ids,
    write_inputs,
)
from tests.helpers.rows import read_rows
from tests.helpers.run import flags, on_ranks
from tests.preferences.answers import make_adapter
from tests.preferences.pairs import sketch

TRL = json.loads(Path(__file__).with_name("trl_episodes.json").read_text())
OFF = 1e-5


class Script:
    """Writes the turns of the script as a `TurnEngine`."""

    def __init__(self, model: Path) -> None:
        self.model = model

    def __call__(self, episodes: Sequence[Episode], generation: int, version: int) -> None:
        if not episodes:
            return
        rounds = Rounds(episodes)
        while requests := rounds.next():
            completions = []
            for request in requests:
                text = scripted(generation, request.place, request.turn)
                completions.append(Completion(token_ids(self.model, text), is_done=True))
            rounds.take(requests, completions)


def options_of(folder: Path, ranks: int) -> dict[str, Any]:
    base = make_agent(folder / "base")
    environment, rows = write_inputs(folder)
    in_order = [*range(PROMPTS)]
    seeds = (
        seed
        for seed in range(1000)
        if all(
            epoch_order(np.arange(PROMPTS), seed=seed, epoch=epoch).tolist() == in_order
            for epoch in range(STEPS)
        )
    )
    return {
        "model_name": base,
        "adapter": make_adapter(base, folder / "start"),
        "dataset": rows,
        "output_dir": folder / "out",
        "objective": "grpo",
        "environment": f"{environment}:Shelf",
        "train_type": "lora",
        "precision": "fp32",
        "optimizer": "sgd",
        "lr": LR,
        "lr_scheduler": "constant",
        "num_epochs": STEPS,
        "num_generations": ANSWERS,
        "batch_size": ANSWERS,
        "gradient_accumulation_steps": PROMPTS // ranks,
        "max_completion_length": LONGEST,
        "context_length": 2048,
        "quant_cache": "off",
        "seed": next(seeds),
    }


def learn(options: dict[str, Any]) -> int:
    """Take all steps of a run whose turns are the script's. On every rank."""
    from fsdp_qlora.commands.run_config import parse_train_config
    from fsdp_qlora.distributed.process_group import (
        connect,
        start_process_group,
        stop_process_group,
    )
    from fsdp_qlora.distributed.ranks import read_ranks, set_up_logging
    from fsdp_qlora.distributed.supervision.stops import Control
    from fsdp_qlora.run.build_trainer import build_trainer, open_source
    from fsdp_qlora.run.load_model import fetch_weights, load_model
    from fsdp_qlora.run.prepare import prepare_run
    from tests.preferences.answers import save_trained

    ranks = read_ranks("cpu")
    set_up_logging(ranks, verbose=False)
    store = connect(ranks)
    config = parse_train_config(flags(**options))
    run = prepare_run(config, ranks, store)
    config = run.config
    weights = fetch_weights(config, run.plan.model, ranks, store)
    start_process_group(ranks, store)
    load_model(config, run.plan.placed, weights, ranks)
    trainer = build_trainer(config, run.plan, ranks, Control())
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    source: Any = open_source(config, run.plan, run.setup, trainer, folder, "run", None)
    answerer = source.answerer
    script = Script(Path(config.model_name))
    answerer.episodes = dataclasses.replace(answerer.episodes, engine=script)
    records = [trainer.train_step(rows) | rows.metrics for rows in source.steps(run.plan.schedule)]
    save_trained(trainer, records, folder)
    stop_process_group()
    return 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_episodes_and_their_steps_match_trl(ranks, tmp_path):
    options = options_of(tmp_path, ranks)
    statuses, said = on_ranks(ranks, learn, (options,), tmp_path / "logs")
    assert statuses == [0] * ranks, said[-5000:]
    lines = read_rows(tmp_path / "out" / "rollouts.jsonl")
    assert len(lines) == len(TRL["rows"]) == STEPS * PROMPTS * ANSWERS
    for ours, theirs in zip(lines, TRL["rows"], strict=True):
        mask = [1] * len(ours["token_ids"])
        for start, end in ours["episode"]["environment_spans"]:
            mask[start:end] = [0] * (end - start)
        found = {
            "prompt": digest(ours["prompt_ids"]),
            "completion": digest(ours["token_ids"]),
            "mask": digest(mask),
        }
        assert found == theirs, ours
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    for ours, theirs in zip(found, TRL["steps"], strict=True):
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=OFF, abs=OFF)
    assert sketch(tmp_path / "out") == pytest.approx(TRL["adapter"], rel=OFF, abs=OFF)
