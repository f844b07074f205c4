"""Measures a trained model: its loss on datasets, scores of its answers, and tasks of lm-eval."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.held_out import PromptSets
from fsdp_qlora.data.prompts import NO_PROMPTS
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.data.sources.dataset_name import parse_eval_names
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.reading import earlier_run, read_held_out, read_planned_rows
from fsdp_qlora.planning.run_plan import HeldOutPlan, Plan, plan_evaluation
from fsdp_qlora.planning.run_rows import make_schedule
from fsdp_qlora.run.build_trainer import build_trainer
from fsdp_qlora.run.extra_measurements import open_scores
from fsdp_qlora.run.open_model import load_trained
from fsdp_qlora.run.session import Session
from fsdp_qlora.training.generation.tasks import Tasks
from fsdp_qlora.training.setup import Setup, SetupOptions, open_setup


class Evaluated(NamedTuple):
    """A dataset to measure a model on."""

    data: RunData
    held_out: HeldOutPlan | None
    """The prompts of its rows, whose answers are scored."""
    setup: Setup


def measure(
    config: TrainConfig,
    session: Session,
    folder: Path | None,
    datasets: Sequence[str],
    tasks: Tasks | None,
    **options: Any,
) -> dict[str, Any]:
    """The loss and perplexity of each dataset with the scores of answers to its prompts, and the
    metrics of each task on rank 0. Called on every rank.

    Args:
        folder: as for `load_trained`. datasets: named as in --eval_dataset. options: as for
        lm-eval.
    """
    ranks = session.ranks
    none: dict[str, Any] = {
        "rewards": (),
        "environment": (),
        "sample_prompts": None,
        "eval_tasks": (),
    }
    setup = open_setup(config.pick(SetupOptions, **none), ranks, session.store)
    sets: dict[str, Evaluated] = {}

    def read(placed: PlacedModel) -> None:
        for name, dataset in parse_eval_names(datasets).items():
            data, held_out = read_evaluation(config, folder, dataset, placed, session)
            prompts = held_out.prompts if held_out else {}
            with_rows = setup.with_rows(data, prompts, placed.model.tokenizer)
            sets[name] = Evaluated(data, held_out, with_rows)

    # Rows are read before weights are fetched: a wrong dataset is refused at once.
    placed = load_trained(config, session, folder, read)
    results = {}
    for name, each in sets.items():
        result = {} if each.data.prompts else _measure_loss(config, placed, each.data, ranks)
        scores = open_scores(
            config,
            placed,
            each.held_out,
            each.setup,
            ranks,
            Control(),
            each.data.image_processor,
        )
        if scores:
            for key, value in scores.measure("", 0).items():
                result[key.removeprefix("eval_")] = value
        results[name] = result | {"rows": len(each.data.known_rows)}
    setup.eval_scorer.close()
    if tasks:
        plan = placed.model
        size = config.batch_size
        results |= tasks.measure(
            plan.meta.model, plan.tokenizer, plan.precision, ranks, batch_size=size, **options
        )
    return results


def _measure_loss(
    config: TrainConfig, placed: PlacedModel, data: RunData, ranks: Ranks
) -> dict[str, Any]:
    """The loss of a dataset's rows. Called on every rank."""
    # auto decides a length for each dataset.
    config = dataclasses.replace(config, context_length=data.context_length)
    schedule = make_schedule(
        config, data, placed.layout.data_size, pads_images=placed.model.pads_images
    )
    trainer = build_trainer(config, Plan(placed, data, schedule, warmup_steps=0), ranks)
    result = trainer.evaluate(0, data.train, data.train_rows) or {}
    return {"loss": result.pop("eval_loss")} | result


def read_evaluation(
    config: TrainConfig, folder: Path | None, dataset: str, placed: PlacedModel, session: Session
) -> tuple[RunData, HeldOutPlan | None]:
    """The rows of a dataset, all of them to evaluate on, with the prompts of the training.

    With them the plan of the answers to their prompts, if these are scored.
    """
    config = dataclasses.replace(
        config,
        dataset=(dataset,),
        eval_dataset=(),
        eval_fraction=0.0,
        resume="off",
        adapter=str(folder) if folder else None,  # whose record has the form of its prompts
    )
    decisions = earlier_run(config).decisions()
    config, data = read_planned_rows(config, placed.model, decisions)
    prompts = data.prompts
    if not prompts:
        all_held_out = dataclasses.replace(data, eval_sets={"": data.train_rows})
        prompts = read_held_out(config, placed.model, all_held_out, decisions).get("", NO_PROMPTS)
    sets: PromptSets = {"": prompts} if prompts else {}
    return data, plan_evaluation(config, placed, sets, session.store_of(f"scores of {dataset}"))
