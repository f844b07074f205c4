"""Plans a run on GPUs that are offered elsewhere: whether it fits, with which settings, how long,
for how much.
"""

import dataclasses
import logging
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import try_to_load_from_cache
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from fsdp_qlora.config.options import DEFAULTS, TrainConfig
from fsdp_qlora.config.text import value_text
from fsdp_qlora.data.batches.taught import bytes_per_token
from fsdp_qlora.model.architecture.models import at_most_positions, load_config, load_tokenizer
from fsdp_qlora.model.model_parts import count_parameters
from fsdp_qlora.planning.known_models import hub_name, known_sizes, names_near
from fsdp_qlora.planning.placement import adapter_bytes
from fsdp_qlora.planning.plan import build_plan, notes_of
from fsdp_qlora.planning.run_rows import plan_generation
from fsdp_qlora.planning.search import GpuOffer, PlannedRun, Planner
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import GIB, format_bytes, format_count

log = logging.getLogger("fsdp_qlora")

_SEARCHED = ("batch_size", "sharding_strategy", "use_cpu_offload", "recompute")


def make_planner(config: TrainConfig, request: GpuOffer, tokens: float | None = None) -> Planner:
    """Make a planner for the request's GPUs: the model is built without weights, and the rows are
    read if they can be.

    tokens: to train on, if not those of the rows.
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
    # most plans need no rows, and this takes a while
    from fsdp_qlora.planning.run_plan import read_rows

    config, data = read_rows(config, model)
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
    """The model's tokenizer, for the rows; None if no dataset is given, or there is no tokenizer,
    as a line says.
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


# --- words ---


def describe(planner: Planner, run: PlannedRun, *, explain: bool) -> Iterator[str]:
    """The plan in lines of at most 80 columns. explain: name the largest things at the peak."""
    request = run.request
    report = run.report
    gpu_gib = run.request.gpu.memory_gib
    billions = count_parameters(run.placed.model.meta.parts)["total"] / 1e9
    name = f"{run.config.model_name} ({billions:.1f}B), {run.config.train_type}"
    yield f"{name}, on {request.num_gpus} x {request.gpu.name}"
    verdict = "does not fit" if not run.fits else "fits" if run.fits_with_margin else "fits barely"
    share = report.needed / request.bytes
    yield f"{verdict}: {report.needed / GIB:.1f} of {gpu_gib:g} GiB on each GPU ({share:.0%})"
    beside = f" of {request.host_ram_gib:g}" if request.host_ram_gib else ""
    yield (f"host memory: {run.host_bytes / GIB:.1f}{beside} GiB") + (
        "" if run.fits_host else ", too much"
    )
    yield from (
        *report.details(),
        *_generation_lines(run),
        *_teacher_lines(planner, run),
        "",
        *report.chart(),
        "",
    )
    if explain:
        yield from (*report.largest(), "")
        if run.config.kind.adapter == "lora":
            yield (
                f"served: {format_bytes(adapter_bytes(run.placed))} of host memory a rank for "
                "each adapter in memory"
            )
    yield _speed_line(run)
    if run.fits:
        yield f"  {command_line(run)}"
    elif way := next(planner.ways_to_fit(), None):
        yield from ("it would fit with:", f"  {command_line(way)}", _speed_line(way))
    else:
        yield "nothing that was tried makes it fit: take more or larger GPUs"


def _generation_lines(run: PlannedRun) -> list[str]:
    """How the model answers prompts, where a run learns from its own answers. The speed does not
    count it.
    """
    config = run.config
    request = run.request
    if not config.row_kind.is_sampled or config.rollout_url:
        return []
    answers = run.rows * request.num_gpus
    free = int(request.bytes) - sum(run.report.beside_torch.values())
    longest = config.longest_row
    most_new = config.max_completion_length
    generation = plan_generation(run.placed, answers, longest, most_new, free, request.gpu)
    line = generation.describe(answers // config.answers_per_prompt, config.answers_per_prompt, 0)
    return textwrap.wrap(f"{line}; this time comes on top", 80, subsequent_indent="  ")


def _teacher_lines(planner: Planner, run: PlannedRun) -> list[str]:
    """The pass of another model over the rows before training, as it is planned; nothing without
    one.
    """
    config = run.config
    tokens = run.tokens / run.config.num_epochs
    if not config.teacher or config.teacher_url:
        return []
    from fsdp_qlora.planning.run_plan import teacher_config

    teacher = make_planner(teacher_config(config), run.request)
    asked = teacher.as_asked()
    hours = tokens / asked.tokens_per_second / 3600
    learned = planner.data.train.num_targets.sum() if planner.data else tokens
    line = (
        f"teacher: {config.teacher}, about {hours:,.1f} hours for {format_count(tokens)} tokens "
        "before training, "
    )
    line += (
        f"{asked.report.needed / GIB:.1f} GiB of each GPU, {asked.host_bytes / GIB:.1f} of the "
        "host; "
    )
    line += f"{format_bytes(learned * bytes_per_token(config.top_k))} of files"
    return textwrap.wrap(line, 80, subsequent_indent="  ")


def _speed_line(run: PlannedRun) -> str:
    cost = f", {run.cost:,.2f} US dollars" if run.request.price_per_hour else ""
    speed = f"about {run.tokens_per_second:,.0f} tokens/s: {run.hours:,.1f} hours"
    return f"{speed} for {format_count(run.tokens)} tokens{cost}"


def command_line(run: PlannedRun) -> str:
    """The command that trains so, for a shell: the model, the rows, what the options say, and the
    chosen placement.
    """
    config = run.config
    chosen = run.placed.placement.options
    options: dict[str, Any] = {
        "model_name": trained_name(config.model_name),
        "dataset": config.dataset,
    }
    options |= {
        name: value for name, value in vars(config).items() if value != getattr(DEFAULTS, name)
    } | options
    if config.teacher:
        options["teacher"] = trained_name(config.teacher)
    options |= {"nproc_per_node": run.request.num_gpus} | chosen
    options.pop("dry_run", None)
    words = [
        f"--{name} {shlex.quote(value_text(value))}"
        for name, value in options.items()
        if value is not None
    ]
    return f"fsdp-qlora train {' '.join(words)}"


def as_json(run: PlannedRun) -> Mapping[str, Any]:
    """The plan for programs; bytes are of one rank, but host_bytes."""
    request = run.request
    memory = run.placed.memory
    return {
        "fits": run.fits,
        "gpu": request.gpu.name,
        "num_gpus": request.num_gpus,
        "gpu_bytes": int(request.bytes),
        "needed_bytes": run.report.needed,
        "reserved_bytes": memory.reserved,
        "resident": memory.resident,
        "phases": memory.phases,
        "host_bytes": run.host_bytes,
        "tokens": round(run.tokens),
        "tokens_per_second": round(run.tokens_per_second, 1),
        "hours": round(run.hours, 3),
        "price_per_hour": request.price_per_hour,
        "cost_usd": round(run.cost, 2) if request.price_per_hour else None,
        "command": command_line(run),
    }


def describe_fastest(runs: Sequence[PlannedRun]) -> Iterator[str]:
    """The fastest three settings that fit with their margins, and why the next three do not."""
    fitting = [run for run in runs if run.fits_with_margin]
    others = [run for run in runs if not run.fits_with_margin]
    faster = [
        run for run in others if not fitting or run.tokens_per_second > fitting[0].tokens_per_second
    ]
    for title, group in (
        ("the fastest that fit:", fitting[:3]),
        ("faster, but without a margin:", faster[:3]),
    ):
        if group:
            yield title
        for run in group:
            free = run.request.gpu.memory_gib - run.report.needed / GIB
            margin = f"{free:.1f} GiB free" if free >= 0 else f"{-free:.1f} GiB too large"
            words = ", ".join(
                f"{name} {value_text(getattr(run.config, name))}" for name in _SEARCHED
            )
            rows = f"{run.request.num_gpus} x {run.rows} rows per step"
            cost = f", ${run.cost:,.2f}" if run.request.price_per_hour else ""
            yield (
                f"  {run.tokens_per_second:,.0f} tokens/s, {run.hours:,.1f} hours{cost}, {rows}, "
                f"{margin}"
            )
            yield f"    {words}"
            if run.config.context_size > 1:
                yield f"    context_parallel_size {run.config.context_size}"


# --- the model ---


def known_config(name: str) -> PretrainedConfig | None:
    """The configuration of a well-known model by its name, with or without owner and suffix; None
    of another.
    """
    sizes = known_sizes(name)
    return None if sizes is None else config_of(sizes)


def config_of(sizes: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration of an entry of the table of well-known models. Raises UserError if
    transformers is too old.
    """
    kind = sizes["model_type"]
    if kind not in CONFIG_MAPPING:
        too_old = f"transformers {transformers.__version__} does not know model type {kind!r}"
        raise UserError(f"{too_old}. `pip install --upgrade transformers`.")
    usual = {"tie_word_embeddings": False, "max_position_embeddings": 131072}
    return AutoConfig.for_model(
        **usual | {name: size for name, size in sizes.items() if name != "hub"}
    )


def trained_name(name: str) -> str:
    """The --model_name with which a model that was planned is trained: a folder, or the hub's name
    with its owner.
    """
    path = Path(name).expanduser()
    if path.is_file():  # a config.json
        return str(path.parent)
    return name if path.is_dir() else hub_name(name)


def find_model(name: str, *, trust_remote_code: bool) -> tuple[PretrainedConfig, Path | None]:
    """The configuration of a model, and its folder: a folder, a config.json, a well-known name, or
    from the hub.

    A well-known model has a folder if it is in the hub's cache.

    Raises:
        UserError: there is none.
    """
    path = Path(name).expanduser()
    if path.name.endswith(".json") and path.is_file():
        return load_config(path, name, trust_remote_code=trust_remote_code), path.parent
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
        near = names_near(name)
        hint = f" Models of that family whose sizes come along: {', '.join(near)}." if near else ""
        raise UserError(f"{error}{hint}") from error
    return load_config(path, name, trust_remote_code=trust_remote_code), path
