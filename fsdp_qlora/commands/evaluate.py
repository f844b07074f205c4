"""Measures a model as it was trained, sharded in the same way: its loss on rows, and tasks of lm-eval."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas
import torch

from fsdp_qlora.commands.generate import load_trained
from fsdp_qlora.config.objectives import OBJECTIVES
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.prepare import RunData, prepare_data
from fsdp_qlora.data.sources import parse_eval_names
from fsdp_qlora.errors import UserError
from fsdp_qlora.loading.hub import first_line
from fsdp_qlora.planning.plan import PlacedModel
from fsdp_qlora.planning.run_plan import Plan, data_options, make_schedule
from fsdp_qlora.ranks.distributed import Ranks, gather_texts
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
    manager = load_tasks(tasks) if tasks else None
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
    if tasks:
        found |= run_tasks(plan, ranks, tasks, task_manager=manager, batch_size=config.batch_size, **options)
    return found


def load_tasks(names: list[str]) -> Any:
    """lm-eval's index, with tasks (names, or YAML files) and their rows loaded. Raises UserError if one cannot be."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=not all(Path(name).is_file() for name in names))  # 15 s for 14,000 of them
    try:
        manager.load(names)
    except Exception as error:  # what it raises is not documented
        raise UserError(f"lm-eval cannot load the tasks {', '.join(names)}: {first_line(error)}.") from error
    return manager


def run_tasks(plan: PlacedModel, ranks: Ranks, names: list[str], *, batch_size: int, **options: Any) -> dict[str, Any]:
    """The metrics of each task and group of lm-eval, on rank 0. Called on every rank. options: as for lm-eval."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    class ShardedLM(HFLM):  # type: ignore[misc]  # the library has no types
        """Every rank is asked everything, and all run through the model equally often, each for as many requests."""

        def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = False, **options: Any) -> list[Any]:
            dealt = [*requests, *requests[:1] * (-len(requests) % ranks.world_size)][ranks.rank :: ranks.world_size]
            own = super()._loglikelihood_tokens(dealt, disable_tqdm=not ranks.is_rank_0, **options)
            parts = map(json.loads, gather_texts(json.dumps(own), torch.device("cpu")))
            return [tuple(answer) for turn in zip(*parts, strict=True) for answer in turn][: len(requests)]

    autocast = plan.precision.compute_dtype if plan.precision.autocast else None
    model, dtypes = plan.meta.model, {"softmax_dtype": torch.float32, "mixed_precision_dtype": autocast}
    # A cache of logits would make the number of batches depend on a rank's requests.
    lm = ShardedLM(model, "causal", tokenizer=plan.tokenizer, batch_size=batch_size, logits_cache=False, **dtypes)
    lm._device = ranks.device  # offloaded weights are elsewhere
    until_all_end = {"synced_gpus": True}  # all ranks write all answers, which may differ by rounding
    found = simple_evaluate(lm, tasks=names, gen_kwargs=until_all_end, log_samples=False, **options)
    return {
        task: {name.removesuffix(",none"): value for name, value in metrics.items() if isinstance(value, float)}
        for task, metrics in ({**found["results"], **found.get("groups", {})} if found else {}).items()
    }


def describe(results: dict[str, Any]) -> str:
    """A table with a line for each name; what one of them lacks is left empty."""
    table = pandas.DataFrame.from_dict(results, orient="index").convert_dtypes()
    return str(table.astype(object).fillna("").to_string(float_format="{:.5f}".format))
