"""The plan of a run on offered GPUs, in words and as JSON: memory, speed, price and command."""

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fsdp_qlora.config.options import DEFAULTS
from fsdp_qlora.config.text import value_text
from fsdp_qlora.data.batches.teacher_cache import bytes_per_token
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.model.model_parts import count_parameters
from fsdp_qlora.planning.generation import AnswerSize, plan_generation
from fsdp_qlora.planning.known_models import trained_name
from fsdp_qlora.planning.placement import adapter_bytes
from fsdp_qlora.planning.report import PlanReport
from fsdp_qlora.planning.search import PlannedRun, Planner
from fsdp_qlora.utils.text import GIB, format_bytes, format_count

_OF_A_STEP = (
    "batch_size",
    "gradient_accumulation_steps",
    "context_parallel_size",
    "sharding_strategy",
    "use_cpu_offload",
)
_WORTH = 1.05  # times as fast: what is proposed
_SEARCHED = ("batch_size", "sharding_strategy", "use_cpu_offload", "recompute")


class Offer(NamedTuple):
    """The plans for GPUs at a price."""

    planner: Planner
    """Plans runs on these GPUs."""
    price_per_hour: float | None = None
    """US dollars for all GPUs; None if no price is known."""

    def cost(self, run: PlannedRun) -> float | None:
        """US dollars of a run."""
        return run.hours * self.price_per_hour if self.price_per_hour else None


def describe(
    offer: Offer, run: PlannedRun, teacher: PlannedRun | None = None, *, explain: bool
) -> Iterator[str]:
    """The plan in lines of at most 80 columns.

    Args:
        teacher: the pass of another model over the rows, if the run needs one.
        explain: name the largest things at the peak.
    """
    report = PlanReport(run.placed, run.gpus.bytes, run.beside_torch)
    yield from _verdict_lines(run)
    yield from report.details()
    yield from _generation_lines(run)
    if teacher:
        yield from _teacher_lines(offer.planner.data, run, teacher)
    yield ""
    yield from report.chart()
    yield ""
    if explain:
        yield from report.largest()
        yield ""
        if run.config.kind.adapter == "lora":
            yield (
                f"served: {format_bytes(adapter_bytes(run.placed))} of host memory a rank for "
                "each adapter in memory"
            )
    yield _speed_line(run, offer.cost(run))
    yield from _host_lines(offer.planner, run)
    if run.fits:
        yield f"  {command_line(run)}"
        return
    # The first is the mildest: other variants are not even planned then.
    way = next(offer.planner.ways_to_fit(), None)
    if way is None:
        yield "no settings make it fit: take more or larger GPUs"
        return
    yield "it would fit with:"
    yield f"  {command_line(way)}"
    yield _speed_line(way, offer.cost(way))


def _verdict_lines(run: PlannedRun) -> Iterator[str]:
    """Model and GPUs, whether the run fits, and how much GPU and host memory it takes."""
    gpus = run.gpus
    gpu = gpus.gpu
    billions = count_parameters(run.placed.model.meta.parts)["total"] / 1e9
    model = f"{run.config.model_name} ({billions:.1f}B), {run.config.train_type}"
    yield f"{model}, on {gpus.num_gpus} x {gpu.name}"
    if not run.fits:
        verdict = "does not fit"
    elif run.fits_with_margin:
        verdict = "fits"
    else:
        verdict = "fits barely"
    share = run.needed / gpus.bytes
    yield f"{verdict}: {run.needed / GIB:.1f} of {gpu.memory_gib:g} GiB on each GPU ({share:.0%})"
    of_host = f" of {gpus.host_ram_gib:g}" if gpus.host_ram_gib else ""
    too_much = "" if run.fits_host else ", too much"
    yield f"host memory: {run.host_bytes / GIB:.1f}{of_host} GiB{too_much}"
    if gpu.shared:
        yield "GPU and host share it: --use_cpu_offload and --recompute host free none"


def _generation_lines(run: PlannedRun) -> list[str]:
    """Describe how the model answers prompts, where a run learns from its own answers.

    The speed of the run does not include this time.
    """
    config = run.config
    gpus = run.gpus
    if not config.objective_row.kind_of_rows(config).is_sampled or config.rollout_url:
        return []
    answers = run.rows * gpus.num_gpus
    free = int(gpus.bytes) - sum(run.beside_torch.values())
    size = AnswerSize(config.longest_row, config.max_completion_length)
    generation = plan_generation(run.placed, answers, size, free, gpus.gpu)
    per_prompt = config.objective_row.answers_per_prompt(config)
    line = generation.describe(answers // per_prompt, per_prompt, 0)
    return textwrap.wrap(f"{line}; in addition to the time above", 80, subsequent_indent="  ")


def _teacher_lines(data: RunData | None, run: PlannedRun, teacher: PlannedRun) -> list[str]:
    """The pass of another model over the rows before training, as it is planned."""
    config = run.config
    # The teacher sees each row once, however many epochs the student trains: the files are kept.
    tokens = run.tokens / config.num_epochs
    hours = tokens / teacher.tokens_per_second / 3600
    learned = data.train.num_targets.sum() if data else tokens
    line = (
        f"teacher: {config.teacher}, about {hours:,.1f} hours for {format_count(tokens)} tokens "
        f"before training, {teacher.needed / GIB:.1f} GiB of each GPU, "
        f"{teacher.host_bytes / GIB:.1f} of the host; "
        f"{format_bytes(learned * bytes_per_token(config.top_k))} of files"
    )
    return textwrap.wrap(line, 80, subsequent_indent="  ")


def _speed_line(run: PlannedRun, cost: float | None) -> str:
    price = "" if cost is None else f", {cost:,.2f} US dollars"
    speed = f"about {run.tokens_per_second:,.0f} tokens/s: {run.hours:,.1f} hours"
    return f"{speed} for {format_count(run.tokens)} tokens{price}"


def _host_lines(planner: Planner, run: PlannedRun) -> Iterator[str]:
    """How fast activations in host memory are beside recomputing, where one of them is planned."""
    config = run.config
    if run.gpus.gpu.shared:
        return
    moves = config.recompute == "host"
    if not moves and (config.recompute not in ("auto", "all") or not run.placed.memory.recomputing):
        return
    same = {name: getattr(config, name) for name in _OF_A_STEP}
    other = planner.planned(**same, recompute="all" if moves else "host")
    ratio = run.tokens_per_second / other.tokens_per_second
    link = f"the host's link of {run.gpus.gpu.host_link:g} GB/s"
    if moves:
        slower = "" if ratio > 1 else ": too slow"
        yield f"by {link} {ratio:.2f} times as fast as --recompute all{slower}"
    elif other.fits_with_margin and 1 / ratio > _WORTH:
        yield f"by {link} {1 / ratio:.2f} times as fast with --recompute host"


def command_line(run: PlannedRun) -> str:
    """Return the shell command of this run: model, rows, given options and chosen placement."""
    config = run.config
    # A table's short name, such as llama-2-70b, is no folder and no name on the hub.
    options: dict[str, Any] = {
        "model_name": trained_name(config.model_name),
        "dataset": config.dataset,
    }
    for name, value in vars(config).items():
        if value != getattr(DEFAULTS, name) and name not in options:
            options[name] = value
    if config.teacher:
        options["teacher"] = trained_name(config.teacher)
    options["nproc_per_node"] = run.gpus.num_gpus
    options |= run.placed.placement.options
    options.pop("dry_run", None)
    words = [
        f"--{name} {shlex.quote(value_text(value))}"
        for name, value in options.items()
        if value is not None
    ]
    return f"fsdp-qlora train {' '.join(words)}"


def as_json(offer: Offer, run: PlannedRun) -> Mapping[str, Any]:
    """The plan for programs; bytes are of one rank, but host_bytes."""
    gpus = run.gpus
    cost = offer.cost(run)
    memory = run.placed.memory
    return {
        "fits": run.fits,
        "gpu": gpus.gpu.name,
        "num_gpus": gpus.num_gpus,
        "gpu_bytes": int(gpus.bytes),
        "needed_bytes": run.needed,
        "reserved_bytes": memory.reserved,
        "resident": memory.resident,
        "phases": memory.phases,
        "host_bytes": run.host_bytes,
        "tokens": round(run.tokens),
        "tokens_per_second": round(run.tokens_per_second, 1),
        "hours": round(run.hours, 3),
        "price_per_hour": offer.price_per_hour,
        "cost_usd": None if cost is None else round(cost, 2),
        "command": command_line(run),
    }


def describe_fastest(offer: Offer, runs: Sequence[PlannedRun]) -> Iterator[str]:
    """The fastest three settings that fit with their margins, and why the next three do not.

    Args:
        runs: the fastest first, as `Planner.fastest` returns them.
    """
    fitting = [run for run in runs if run.fits_with_margin]
    faster = [run for run in runs if not run.fits_with_margin]
    if fitting:  # a slower one without a margin is of no use
        fastest = fitting[0].tokens_per_second
        faster = [run for run in faster if run.tokens_per_second > fastest]
    for title, group in (
        ("the fastest that fit:", fitting[:3]),
        ("faster, but without a margin:", faster[:3]),
    ):
        if group:
            yield title
        for run in group:
            yield from _settings_lines(run, offer.cost(run))


def _settings_lines(run: PlannedRun, cost: float | None) -> Iterator[str]:
    """Speed, time, cost and memory of a run, and below them the settings that were searched."""
    free = run.gpus.gpu.memory_gib - run.needed / GIB
    margin = f"{free:.1f} GiB free" if free >= 0 else f"{-free:.1f} GiB too large"
    rows = f"{run.gpus.num_gpus} x {run.rows} rows per step"
    price = "" if cost is None else f", ${cost:,.2f}"
    speed = f"{run.tokens_per_second:,.0f} tokens/s, {run.hours:,.1f} hours"
    yield f"  {speed}{price}, {rows}, {margin}"
    settings = [f"{name} {value_text(getattr(run.config, name))}" for name in _SEARCHED]
    yield f"    {', '.join(settings)}"
    if run.config.context_size > 1:
        yield f"    context_parallel_size {run.config.context_size}"
