"""Measures a model as it was trained, sharded in the same way."""

import dataclasses
from pathlib import Path
from typing import Any

import pandas

from fsdp_qlora.commands.generate import load_trained
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.prepare import DataOptions, RunData, prepare_data
from fsdp_qlora.data.sources import parse_eval_names
from fsdp_qlora.planning.plan import PlacedModel
from fsdp_qlora.planning.run_plan import Plan, make_schedule
from fsdp_qlora.ranks.distributed import Ranks
from fsdp_qlora.run.load_model import build_trainer

Results = dict[str, dict[str, Any]]


def measure(config: TrainConfig, ranks: Ranks, folder: Path | None) -> Results:
    """The number of rows, target tokens, loss and perplexity of each dataset. Called on every rank.

    Args:
        folder: as for `load_trained`.
    """
    options = dataclasses.replace(config.pick(DataOptions), eval_dataset=(), eval_fraction=0.0, streaming=False)
    each = {
        name: dataclasses.replace(options, dataset=(one,)) for name, one in parse_eval_names(config.dataset).items()
    }
    sets: dict[str, RunData] = {}

    def read(plan: PlacedModel) -> None:
        vocab_size = plan.meta.model.get_input_embeddings().num_embeddings
        for name, one in each.items():
            sets[name] = prepare_data(plan.tokenizer, one, vocab_size=vocab_size)

    plan, found = load_trained(config, ranks, folder, read), {}
    for name, data in sets.items():
        schedule = make_schedule(config, data, ranks.world_size)
        trainer = build_trainer(config, Plan(plan, data, schedule, warmup_steps=0), ranks)
        result = trainer.evaluate(0, data.train, data.train_rows) or {}
        found[name] = {"loss": result.pop("eval_loss"), **result, "rows": len(data.train)}
    return found


def describe(results: Results) -> str:
    """A table with a line for each name."""
    table = pandas.DataFrame.from_dict(results, orient="index").convert_dtypes()
    return str(table.to_string(na_rep="", float_format="{:.5f}".format))
