"""Measures a model as it was trained, sharded in the same way: its loss on rows, and tasks of lm-eval."""

import dataclasses
from pathlib import Path
from typing import Any

import pandas

from fsdp_qlora.commands.generate import load_trained
from fsdp_qlora.config.objectives import OBJECTIVES
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.prepare import RunData, prepare_data
from fsdp_qlora.data.sources import parse_eval_names
from fsdp_qlora.errors import UserError
from fsdp_qlora.generation.tasks import Tasks
from fsdp_qlora.planning.plan import PlacedModel
from fsdp_qlora.planning.run_plan import Plan, data_options
from fsdp_qlora.planning.run_rows import make_schedule
from fsdp_qlora.ranks.ranks import Ranks
from fsdp_qlora.run.load_model import build_trainer


def measure(
    config: TrainConfig, ranks: Ranks, folder: Path | None, datasets: list[str], tasks: list[str], **options: Any
) -> dict[str, Any]:
    """The loss and perplexity of each dataset, and the metrics of each task on rank 0. Called on every rank.

    Args:
        folder: as for `load_trained`. datasets: named as in --eval_dataset. options: as for lm-eval.
    """
    if OBJECTIVES[config.objective].has_reference:
        raise UserError(f"--objective {config.objective} compares with the start of a run: see its own --eval_dataset.")
    loaded = Tasks(tasks) if tasks else None
    sets: dict[str, RunData] = {}

    def read(plan: PlacedModel) -> None:
        vocab_size = plan.meta.model.get_input_embeddings().num_embeddings
        for name, dataset in parse_eval_names(datasets).items():
            own = dataclasses.replace(config, dataset=(dataset,), eval_dataset=(), eval_fraction=0.0, streaming=False)
            own = dataclasses.replace(own, resume="off", adapter=str(folder) if folder else None)
            rows_as = data_options(own, plan.folder, plan.tokenizer)
            sets[name] = prepare_data(plan.tokenizer, rows_as, vocab_size=vocab_size)

    plan, found = load_trained(config, ranks, folder, read), {}
    for name, data in sets.items():
        schedule = make_schedule(config, data, ranks.world_size)
        trainer = build_trainer(config, Plan(plan, data, schedule, warmup_steps=0), ranks)
        result = trainer.evaluate(0, data.train, data.train_rows) or {}
        found[name] = {"loss": result.pop("eval_loss"), **result, "rows": len(data.train)}
    if loaded:
        model, tokenizer, size = plan.meta.model, plan.tokenizer, config.batch_size
        found |= loaded.measure(model, tokenizer, plan.precision, ranks, batch_size=size, **options)
    return found


def describe(results: dict[str, Any]) -> str:
    """A table with a line for each name; what one of them lacks is left empty."""
    table = pandas.DataFrame.from_dict(results, orient="index").convert_dtypes()
    return str(table.astype(object).fillna("").to_string(float_format="{:.5f}".format))
