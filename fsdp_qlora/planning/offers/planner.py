"""Plans a run on GPUs that are offered elsewhere, from a model's name and the rows."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from fsdp_qlora.checkpoint.decisions import Decisions
from fsdp_qlora.config.options import DEFAULTS, TrainConfig
from fsdp_qlora.model.architecture.config import at_most_positions
from fsdp_qlora.model.architecture.tokenizer import load_tokenizer
from fsdp_qlora.planning.offers.find_model import find_model
from fsdp_qlora.planning.plan import build_plan, notes_of
from fsdp_qlora.planning.reading import earlier_run, read_planned_rows
from fsdp_qlora.planning.search import GpuSet, PlannedRun, Planner
from fsdp_qlora.planning.teacher import teacher_config
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import format_count

log = logging.getLogger("fsdp_qlora")


def make_planner(config: TrainConfig, gpus: GpuSet, tokens: float | None = None) -> Planner:
    """Make a planner for these GPUs.

    The model is built without weights, and the rows are read if they can be.

    Args:
        tokens: number of tokens to train on, if not the rows'.
    """
    model_config, folder = find_model(config.model_name, trust_remote_code=config.trust_remote_code)
    tokenizer = _find_tokenizer(config, folder)
    model = build_plan(
        config, gpus.machine, folder or Path(config.model_name), model_config, tokenizer
    )
    for note in notes_of(config, model):
        log.info("%s", note)
    if tokenizer is None:
        if config.context_length == "auto":
            most = at_most_positions(model_config, config.longest_row)
            log.info(
                "Context: rows of %s tokens, the maximum of auto; with --dataset, its rows decide",
                f"{most:,}",
            )
            config = dataclasses.replace(config, context_length=most)
        return Planner(config, gpus, model, tokens=tokens)
    # Of an earlier run only the prompts matter, which change the rows' lengths.
    earlier = earlier_run(config)
    decisions = Decisions(fills_template=earlier.fills_template({}))
    config, data = read_planned_rows(config, model, decisions)
    planner = Planner(config, gpus, model, data, tokens)
    num_rows = data.rows_per_epoch
    longest = data.lengths[data.train_rows].max()
    total = format_count(planner.rows(config).tokens)
    log.info(
        "The dataset: %s rows of at most %s tokens, %s in all epochs.",
        f"{num_rows:,}",
        f"{longest:,}",
        total,
    )
    return planner


def _find_tokenizer(config: TrainConfig, folder: Path | None) -> Any:
    """The model's tokenizer, for the rows.

    None if no dataset is given, or, as a log line says, if there is no tokenizer.
    """
    if config.dataset == DEFAULTS.dataset:
        return None
    try:
        if folder is None:
            raise UserError(f"The package has no tokenizer for {config.model_name}.")
        return load_tokenizer(folder, config.model_name, trust_remote_code=config.trust_remote_code)
    except UserError as error:
        log.info("Planned without the rows of --dataset: %s", error)
        return None


def plan_teacher_pass(run: PlannedRun) -> PlannedRun | None:
    """Plan the pass of a teacher over the rows before training; None if no teacher is loaded."""
    config = run.config
    if not config.teacher or config.teacher_url:
        return None
    return make_planner(teacher_config(config), run.gpus).as_asked()


# --- the model ---
