"""The command `evaluate`: a model's loss on rows, and tasks of lm-eval."""

import argparse
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_qlora.commands.generate import with_model
from fsdp_qlora.config.conflicts import NEEDS_LM_EVAL
from fsdp_qlora.config.objectives import OBJECTIVES
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.utils.errors import UserError

if TYPE_CHECKING:
    from fsdp_qlora.data.run_data import RunData
    from fsdp_qlora.distributed.ranks import Ranks
    from fsdp_qlora.planning.placement import PlacedModel


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", metavar="DIR", help="as for generate; without it the base is measured")
    parser.add_argument("--dataset", nargs="+", metavar="ROWS", default=[], help="as in training, or NAME=ROWS")
    parser.add_argument(
        "--tasks", type=lambda text: text.split(","), default=[], help="names of lm-eval's, with commas"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first questions of each task, this many")
    parser.add_argument("--num_fewshot", type=int, metavar="N", help="examples before a question (default: the task's)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int | None:
    """Measure a base, an adapter or a merged model: loss per token (in nats) and perplexity on each dataset, and tasks
    of lm-eval. The model is loaded as `generate` does, sharded over all GPUs, and rows are read as in training. Every
    option of training may be given too, such as --model_name, --nproc_per_node, --dataset_samples, --context_length and
    --batch_size.
    """
    if not args.dataset and not args.tasks:
        raise UserError("Give --dataset ROWS, --tasks NAMES, or both.")
    if args.tasks and importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"--tasks {NEEDS_LM_EVAL}")
    args.training_options += ["--dataset", *args.dataset] if args.dataset else []

    def show(config: TrainConfig, ranks: "Ranks", folder: Path | None) -> None:
        of_tasks = {"limit": args.limit, "num_fewshot": args.num_fewshot}
        found = measure(config, ranks, folder, args.dataset, args.tasks, **of_tasks)
        if ranks.is_rank_0:
            print(json.dumps(found, indent=2) if args.json else describe(found))

    return with_model("evaluate", args, show)


def measure(
    config: TrainConfig, ranks: "Ranks", folder: Path | None, datasets: list[str], tasks: list[str], **options: Any
) -> dict[str, Any]:
    """The loss and perplexity of each dataset, and the metrics of each task on rank 0. Called on every rank.

    Args:
        folder: as for `load_trained`. datasets: named as in --eval_dataset. options: as for lm-eval.
    """
    from fsdp_qlora.data.run_data import prepare_data
    from fsdp_qlora.data.sources.dataset_name import parse_eval_names
    from fsdp_qlora.model.architecture.models import most_positions
    from fsdp_qlora.planning.run_plan import Plan, data_options
    from fsdp_qlora.planning.run_rows import make_schedule
    from fsdp_qlora.run.load_model import build_trainer
    from fsdp_qlora.run.open_model import load_trained
    from fsdp_qlora.training.generation.tasks import Tasks

    if OBJECTIVES[config.objective].has_reference:
        raise UserError(f"--objective {config.objective} compares with the start of a run: see its own --eval_dataset.")
    loaded = Tasks(tasks) if tasks else None
    sets: dict[str, RunData] = {}

    def read(placed: "PlacedModel") -> None:
        plan = placed.model
        vocab_size = plan.meta.model.get_input_embeddings().num_embeddings
        for name, dataset in parse_eval_names(datasets).items():
            own = dataclasses.replace(config, dataset=(dataset,), eval_dataset=(), eval_fraction=0.0, streaming=False)
            own = dataclasses.replace(own, resume="off", adapter=str(folder) if folder else None)
            rows_as = data_options(own, plan.folder, plan.tokenizer)
            longest = most_positions(plan.config)
            sets[name] = prepare_data(plan.tokenizer, rows_as, vocab_size=vocab_size, longest=longest)

    placed, found = load_trained(config, ranks, folder, read), {}
    for name, data in sets.items():
        config = dataclasses.replace(config, context_length=data.context_length)
        schedule = make_schedule(config, data, placed.layout.data_size)
        trainer = build_trainer(config, Plan(placed, data, schedule, warmup_steps=0), ranks)
        result = trainer.evaluate(0, data.train, data.train_rows) or {}
        found[name] = {"loss": result.pop("eval_loss"), **result, "rows": len(data.train)}
    if loaded:
        plan, size = placed.model, config.batch_size
        found |= loaded.measure(plan.meta.model, plan.tokenizer, plan.precision, ranks, batch_size=size, **options)
    return found


def describe(results: dict[str, Any]) -> str:
    """A table with a line for each name; what one of them lacks is left empty."""
    import pandas

    table = pandas.DataFrame.from_dict(results, orient="index").convert_dtypes()
    return str(table.astype(object).fillna("").to_string(float_format="{:.5f}".format))
