"""The plan of a run in words: its memory, its speed and the command that trains so."""

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_qlora.config.options import DEFAULTS
from fsdp_qlora.config.text import value_text
from fsdp_qlora.data.batches.taught import bytes_per_token
from fsdp_qlora.model.architecture.chunking import count_pieces
from fsdp_qlora.model.architecture.fused import Mlp
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.model_parts import count_parameters
from fsdp_qlora.planning.known_models import trained_name
from fsdp_qlora.planning.placement import PlacedModel, adapter_bytes
from fsdp_qlora.planning.plan import Machine
from fsdp_qlora.planning.run_rows import plan_generation
from fsdp_qlora.planning.search import PlannedRun, Planner
from fsdp_qlora.planning.speed import exchanged_bytes, size_of
from fsdp_qlora.utils.text import GIB, format_bytes, format_count, plural

_LARGEST = 10  # items that --explain names
_BAR = 34  # columns of a card's memory
_SEARCHED = ("batch_size", "sharding_strategy", "use_cpu_offload", "recompute")


@dataclass(frozen=True)
class PlanReport:
    """The memory that a placed model needs.

    Attributes:
        gpu_bytes: memory of a GPU, if it is known.
        beside_torch: bytes of it that torch's allocator does not get, by what they are.
    """

    placed: PlacedModel
    gpu_bytes: float | None = None
    beside_torch: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, placed: PlacedModel) -> "PlanReport":
        """The report for the machine that the model is placed on."""
        gpu_memory = placed.model.machine.gpu_memory
        return cls(placed, gpu_memory[1] if gpu_memory else None)

    @property
    def needed(self) -> int:
        """Bytes of a GPU."""
        return self.placed.memory.reserved + sum(self.beside_torch.values())

    def lines(self) -> Iterator[str]:
        """For the log: bytes per rank on the GPU and the host, then by what they are."""
        memory = self.placed.memory
        machine = self.placed.model.machine
        placement = self.placed.placement.describe()
        yield f"Memory: each rank needs {self._needs()}; {_describe_device(machine)}, {placement}"
        yield f"  {_named(memory.weights)}"
        peak = f"  most at the {memory.peak}: {_named(memory.phases[memory.peak])}"
        if self.placed.step.trains:
            peak += f"; each block without recompute keeps {format_bytes(memory.block)} more"
        yield peak
        yield from (f"  {line}" for line in self.details())

    def _needs(self) -> str:
        """The bytes of a rank, compared with the GPU's memory where that is known."""
        memory = self.placed.memory
        # On a CPU tensors are host memory, and no caching allocator reserves more than they take.
        if self.placed.model.machine.device.type != "cuda":
            return f"about {format_bytes(memory.allocated)}"
        needs = f"about {format_bytes(self.needed)}"
        if self.gpu_bytes:
            needs = f"{self.needed / GIB:.1f} of {self.gpu_bytes / GIB:.0f} GiB"
        host = sum(memory.host.values())
        if host:
            needs += f" of the GPU, {format_bytes(host)} of the host"
        return needs

    def details(self) -> Iterator[str]:
        """Lines about how long rows are computed, where they are divided."""
        parts = self.placed.model.meta.parts
        memory = self.placed.memory
        num_tokens = self.placed.step.num_tokens
        hidden = block_shapes(parts.model.config)[0].hidden
        mlps = [module for module in parts.blocks.modules() if isinstance(module, Mlp)]
        counts = [count_pieces(num_tokens, hidden=hidden, inner=mlp.inner) for mlp in mlps]
        pieces = max(counts, default=1)
        # An MLP is only divided inside a block that recomputes: others keep all of its activations.
        if memory.recomputing and pieces > 1:
            yield f"long rows: MLPs in {pieces} pieces of tokens"
        ranks = self.placed.layout.context_size
        if ranks > 1:
            per_block = exchanged_bytes(size_of(parts), num_tokens, ranks) / len(parts.blocks)
            yield (
                f"{ranks} ranks share rows: {num_tokens:,} tokens each, "
                f"{format_bytes(int(per_block))} sent per block and pass"
            )

    def chart(self) -> Iterator[str]:
        """A bar for each phase of a step, beside the GPU's memory."""
        stays = sum(self._resident().values())
        for name, sizes in self.placed.memory.phases.items():
            whole = stays + sum(sizes.values())
            most = self.gpu_bytes or whole
            # A bar may end half of the card's width behind the card, so that lines keep to 80
            # columns; the number behind it is exact.
            stays_until, whole_until = (
                round(_BAR * min(size / most, 1.5)) for size in (stays, whole)
            )
            drawn = "#" * stays_until + "+" * (whole_until - stays_until)
            bar = f"{drawn[:_BAR]:{_BAR}}|{drawn[_BAR:]}"
            yield f"  {name:15} {bar} {whole / GIB:.1f} GiB"
        yield "  '#' stays allocated, '+' is temporary, '|' is the memory of the card"

    def largest(self) -> Iterator[str]:
        """The largest items at the peak."""
        items = self._resident() | self.placed.memory.phases[self.placed.memory.peak]
        by_size = sorted(items.items(), key=lambda item: -item[1])
        for name, count in by_size[:_LARGEST]:
            yield f"  {count / GIB:6.2f} GiB  {name}"

    def _resident(self) -> dict[str, int]:
        """Bytes of a GPU that are in use in each phase."""
        memory = self.placed.memory
        return memory.resident | {"torch's allocator": memory.overhead} | dict(self.beside_torch)


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in sizes.items() if count)


def _describe_device(machine: Machine) -> str:
    """The number of ranks and their device."""
    device = machine.device
    if device.type != "cuda":
        name = "the CPU"
    elif torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
    else:
        name = "GPUs that are not here (--device cpu plans for the CPU)"
    return f"{plural(machine.world_size, 'rank')} on {name}"


# --- a run on GPUs that are offered ---


def describe(
    planner: Planner, run: PlannedRun, teacher: PlannedRun | None = None, *, explain: bool
) -> Iterator[str]:
    """The plan in lines of at most 80 columns.

    Args:
        teacher: the pass of another model over the rows, if the run needs one.
        explain: name the largest things at the peak.
    """
    report = PlanReport(run.placed, run.request.bytes, run.beside_torch)
    yield from _verdict_lines(run)
    yield from report.details()
    yield from _generation_lines(run)
    if teacher:
        yield from _teacher_lines(planner, run, teacher)
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
    yield _speed_line(run)
    if run.fits:
        yield f"  {command_line(run)}"
        return
    # The first is the mildest: other variants are not even planned then.
    way = next(planner.ways_to_fit(), None)
    if way is None:
        yield "nothing that was tried makes it fit: take more or larger GPUs"
        return
    yield "it would fit with:"
    yield f"  {command_line(way)}"
    yield _speed_line(way)


def _verdict_lines(run: PlannedRun) -> Iterator[str]:
    """Model and GPUs, whether the run fits, and how much GPU and host memory it takes."""
    request = run.request
    gpu = request.gpu
    billions = count_parameters(run.placed.model.meta.parts)["total"] / 1e9
    model = f"{run.config.model_name} ({billions:.1f}B), {run.config.train_type}"
    yield f"{model}, on {request.num_gpus} x {gpu.name}"
    if not run.fits:
        verdict = "does not fit"
    elif run.fits_with_margin:
        verdict = "fits"
    else:
        verdict = "fits barely"
    share = run.needed / request.bytes
    yield f"{verdict}: {run.needed / GIB:.1f} of {gpu.memory_gib:g} GiB on each GPU ({share:.0%})"
    of_host = f" of {request.host_ram_gib:g}" if request.host_ram_gib else ""
    too_much = "" if run.fits_host else ", too much"
    yield f"host memory: {run.host_bytes / GIB:.1f}{of_host} GiB{too_much}"


def _generation_lines(run: PlannedRun) -> list[str]:
    """Describe how the model answers prompts, where a run learns from its own answers.

    The speed of the run does not include this time.
    """
    config = run.config
    request = run.request
    if not config.row_kind.is_sampled or config.rollout_url:
        return []
    answers = run.rows * request.num_gpus
    free = int(request.bytes) - sum(run.beside_torch.values())
    generation = plan_generation(
        run.placed, answers, config.longest_row, config.max_completion_length, free, request.gpu
    )
    line = generation.describe(answers // config.answers_per_prompt, config.answers_per_prompt, 0)
    return textwrap.wrap(f"{line}; this time comes on top", 80, subsequent_indent="  ")


def _teacher_lines(planner: Planner, run: PlannedRun, teacher: PlannedRun) -> list[str]:
    """The pass of another model over the rows before training, as it is planned."""
    config = run.config
    # The teacher sees each row once, however many epochs the student trains: the files are kept.
    tokens = run.tokens / config.num_epochs
    hours = tokens / teacher.tokens_per_second / 3600
    learned = planner.data.train.num_targets.sum() if planner.data else tokens
    line = (
        f"teacher: {config.teacher}, about {hours:,.1f} hours for {format_count(tokens)} tokens "
        f"before training, {teacher.needed / GIB:.1f} GiB of each GPU, "
        f"{teacher.host_bytes / GIB:.1f} of the host; "
        f"{format_bytes(learned * bytes_per_token(config.top_k))} of files"
    )
    return textwrap.wrap(line, 80, subsequent_indent="  ")


def _speed_line(run: PlannedRun) -> str:
    cost = f", {run.cost:,.2f} US dollars" if run.request.price_per_hour else ""
    speed = f"about {run.tokens_per_second:,.0f} tokens/s: {run.hours:,.1f} hours"
    return f"{speed} for {format_count(run.tokens)} tokens{cost}"


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
    options["nproc_per_node"] = run.request.num_gpus
    options |= run.placed.placement.options
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
        "needed_bytes": run.needed,
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
            yield from _settings_lines(run)


def _settings_lines(run: PlannedRun) -> Iterator[str]:
    """Speed, time, cost and memory of a run, and below them the settings that were searched."""
    free = run.request.gpu.memory_gib - run.needed / GIB
    margin = f"{free:.1f} GiB free" if free >= 0 else f"{-free:.1f} GiB too large"
    rows = f"{run.request.num_gpus} x {run.rows} rows per step"
    cost = f", ${run.cost:,.2f}" if run.request.price_per_hour else ""
    speed = f"{run.tokens_per_second:,.0f} tokens/s, {run.hours:,.1f} hours"
    yield f"  {speed}{cost}, {rows}, {margin}"
    settings = [f"{name} {value_text(getattr(run.config, name))}" for name in _SEARCHED]
    yield f"    {', '.join(settings)}"
    if run.config.context_size > 1:
        yield f"    context_parallel_size {run.config.context_size}"
