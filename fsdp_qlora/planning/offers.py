"""Plans a run on GPUs that are offered elsewhere, from a model's name and the rows."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import try_to_load_from_cache
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from fsdp_qlora.checkpoint.decisions import Decisions
from fsdp_qlora.config.options import DEFAULTS, TrainConfig
from fsdp_qlora.model.architecture.config import at_most_positions, load_config
from fsdp_qlora.model.architecture.tokenizer import load_tokenizer
from fsdp_qlora.planning.known_models import hub_name, known_sizes, names_near
from fsdp_qlora.planning.plan import build_plan, notes_of
from fsdp_qlora.planning.reading import earlier_run, read_planned_rows
from fsdp_qlora.planning.search import GpuOffer, PlannedRun, Planner
from fsdp_qlora.planning.teacher import teacher_config
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import format_count

log = logging.getLogger("fsdp_qlora")


def make_planner(config: TrainConfig, request: GpuOffer, tokens: float | None = None) -> Planner:
    """Make a planner for the request's GPUs.

    The model is built without weights, and the rows are read if they can be.

    Args:
        tokens: number of tokens to train on, if not those of the rows.
    """
    model_config, folder = find_model(config.model_name, trust_remote_code=config.trust_remote_code)
    tokenizer = _find_tokenizer(config, folder)
    model = build_plan(
        config, request.machine, folder or Path(config.model_name), model_config, tokenizer
    )
    for note in notes_of(config, model):
        log.info("%s", note)
    if tokenizer is None:
        if config.context_length == "auto":
            most = at_most_positions(model_config, config.longest_row)
            log.info(
                "Context: rows of %s tokens, the most that auto takes; with --dataset they decide",
                f"{most:,}",
            )
            config = dataclasses.replace(config, context_length=most)
        return Planner(config, request, model, tokens=tokens)
    # Of an earlier run only the prompts matter, which change the rows' lengths.
    earlier = earlier_run(config)
    decisions = Decisions(fills_template=earlier.fills_template({}))
    config, data = read_planned_rows(config, model, decisions)
    planner = Planner(config, request, model, data, tokens)
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
            raise UserError(f"{config.model_name} comes along without a tokenizer.")
        return load_tokenizer(folder, config.model_name, trust_remote_code=config.trust_remote_code)
    except UserError as error:
        log.info("Planned without the rows of --dataset: %s", error)
        return None


def plan_teacher_pass(run: PlannedRun) -> PlannedRun | None:
    """Plan the pass of a teacher over the rows before training; None if no teacher is loaded."""
    config = run.config
    if not config.teacher or config.teacher_url:
        return None
    return make_planner(teacher_config(config), run.request).as_asked()


# --- the model ---


def known_config(name: str) -> PretrainedConfig | None:
    """The configuration of a well-known model by its name, with or without owner and suffix.

    None for other models.
    """
    sizes = known_sizes(name)
    return None if sizes is None else config_of(sizes)


def config_of(sizes: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration for an entry of the table of well-known models.

    Raises:
        UserError: transformers is too old for the model.
    """
    kind = sizes["model_type"]
    if kind not in CONFIG_MAPPING:
        too_old = f"transformers {transformers.__version__} does not know model type {kind!r}"
        raise UserError(f"{too_old}. `pip install --upgrade transformers`.")
    # the usual values, which the table leaves out
    settings = {"tie_word_embeddings": False, "max_position_embeddings": 131072, **sizes}
    settings.pop("hub", None)
    return AutoConfig.for_model(**settings)


def find_model(name: str, *, trust_remote_code: bool) -> tuple[PretrainedConfig, Path | None]:
    """Find a model's configuration, and its folder if it has one here.

    name: a folder, a config.json, a well-known model, or a name on the hub. A well-known model has
    a folder if it is in the hub's cache.

    Raises:
        UserError: there is none.
    """
    path = Path(name).expanduser()
    if path.name.endswith(".json") and path.is_file():
        return load_config(path, name, trust_remote_code=trust_remote_code), path.parent
    # A folder of the same name is meant before the table's entry. The table needs no network; the
    # cache is asked first, since a tokenizer may be there as well.
    config = None if path.is_dir() else known_config(name)
    if config is not None:
        cached = try_to_load_from_cache(hub_name(name), "config.json")
        if not isinstance(cached, str):
            return config, None
        path = Path(cached).parent
    try:
        if not path.is_dir():
            path = hub.find_model_folder(
                name, with_weights=False, with_code=trust_remote_code, is_preview=True
            )
    except UserError as error:
        near = ", ".join(names_near(name))
        hint = f" Models of that family whose sizes come along: {near}." if near else ""
        raise UserError(f"{error}{hint}") from error
    return load_config(path, name, trust_remote_code=trust_remote_code), path
