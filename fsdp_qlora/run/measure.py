"""Measures a trained model: its loss on datasets, and tasks of lm-eval."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.data.sources.dataset_name import parse_eval_names
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.reading import earlier_run, read_planned_rows
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.planning.run_rows import make_schedule
from fsdp_qlora.run.build_trainer import build_trainer
from fsdp_qlora.run.open_model import load_trained
from fsdp_qlora.run.session import Session
from fsdp_qlora.training.generation.tasks import Tasks


def measure(
    config: TrainConfig,
    session: Session,
    folder: Path | None,
    datasets: Sequence[str],
    tasks: Tasks | None,
    **options: Any,
) -> dict[str, Any]:
    """The loss and perplexity of each dataset, and the metrics of each task on rank 0. Called on
    every rank.

    Args:
        folder: as for `load_trained`. datasets: named as in --eval_dataset. options: as for
        lm-eval.
    """
    ranks = session.ranks
    sets: dict[str, RunData] = {}

    def read(placed: PlacedModel) -> None:
        for name, dataset in parse_eval_names(datasets).items():
            sets[name] = read_evaluation(config, folder, dataset, placed)

    # Rows are read before weights are fetched: a wrong dataset is refused at once.
    placed = load_trained(config, session, folder, read)
    results = {}
    for name, data in sets.items():
        # auto decides a length for each dataset.
        config = dataclasses.replace(config, context_length=data.context_length)
        schedule = make_schedule(config, data, placed.layout.data_size)
        trainer = build_trainer(config, Plan(placed, data, schedule, warmup_steps=0), ranks)
        result = trainer.evaluate(0, data.train, data.train_rows) or {}
        results[name] = {"loss": result.pop("eval_loss")} | result | {"rows": len(data.train)}
    if tasks:
        plan = placed.model
        size = config.batch_size
        results |= tasks.measure(
            plan.meta.model, plan.tokenizer, plan.precision, ranks, batch_size=size, **options
        )
    return results


def read_evaluation(
    config: TrainConfig, folder: Path | None, dataset: str, placed: PlacedModel
) -> RunData:
    """The rows of a dataset, all of them to evaluate on, with the prompts of the training."""
    config = dataclasses.replace(
        config,
        dataset=(dataset,),
        eval_dataset=(),
        eval_fraction=0.0,
        resume="off",
        adapter=str(folder) if folder else None,  # whose record has the form of its prompts
    )
    decisions = earlier_run(config).decisions()
    _, data = read_planned_rows(config, placed.model, decisions)
    return data
