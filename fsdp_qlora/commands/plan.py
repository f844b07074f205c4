"""Plans a run on GPUs that may be elsewhere: whether it fits, with which settings, how long, for how much."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from fsdp_qlora.config.options import DEFAULTS, TrainConfig
from fsdp_qlora.config.text import value_text
from fsdp_qlora.errors import UserError
from fsdp_qlora.loading import hub
from fsdp_qlora.model.models import load_config
from fsdp_qlora.output.text import GIB
from fsdp_qlora.planning.blocks import BlockBytes, measure_blocks
from fsdp_qlora.planning.gpus import Gpu
from fsdp_qlora.planning.known_models import close_names, known_config
from fsdp_qlora.planning.plan import Machine, ModelPlan, PlacedModel, build_plan, place
from fsdp_qlora.planning.speed import count_work, seconds, size_of
from fsdp_qlora.ranks.distributed import SHARDING_STRATEGIES, Ranks
from fsdp_qlora.sharding.model_parts import count_parameters

# CUDA's context, NCCL's buffers and what the driver keeps (docs/gpu.md: 0.6 to 0.8 GiB), until a card has measured it.
CONTEXT = int(0.9 * GIB)
_LARGEST = 10  # things that --explain names
_BAR = 34  # columns


class Request(NamedTuple):
    """The GPUs, and what is to be told. tokens: to train on, in all epochs. price: US dollars per hour of all GPUs."""

    gpu: Gpu
    num_gpus: int
    host_ram_gib: float | None
    tokens: float
    price: float | None


class Outlook(NamedTuple):
    """A planned run: where it fits and how fast it is."""

    config: TrainConfig
    plan: PlacedModel
    request: Request
    tokens_per_second: float

    @property
    def needed(self) -> int:
        return self.plan.memory.reserved + CONTEXT

    @property
    def host_bytes(self) -> int:
        """Of all ranks."""
        return self.request.num_gpus * sum(self.plan.memory.host.values())

    @property
    def fits_gpu(self) -> bool:
        return self.needed <= self.request.gpu.memory_gib * GIB

    @property
    def fits_host(self) -> bool:
        most = self.request.host_ram_gib
        return most is None or self.host_bytes <= 0.9 * most * GIB  # the rest is the system's and the loader's

    @property
    def fits(self) -> bool:
        return self.fits_gpu and self.fits_host

    @property
    def hours(self) -> float:
        return self.request.tokens / self.tokens_per_second / 3600


def find_config(name: str, *, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration of a model: of a folder, a config.json, a well-known name, or from the hub.

    Raises:
        UserError: there is none.
    """
    path = Path(name).expanduser()
    if path.name.endswith(".json") and path.is_file():
        path = path.parent
    if path.is_dir():
        return load_config(path, name, trust_remote_code=trust_remote_code)
    if (known := known_config(name)) is not None:
        return known
    try:
        folder = hub.find_model_folder(name, with_weights=False, with_code=trust_remote_code, is_preview=True)
    except UserError as error:
        near = close_names(name)
        hint = f" Sizes that come along and are named like it: {', '.join(near)}." if near else ""
        raise UserError(f"{error}{hint}") from error
    return load_config(folder, name, trust_remote_code=trust_remote_code)


def outlook(
    config: TrainConfig,
    request: Request,
    model: ModelPlan | None = None,
    blocks: Sequence[BlockBytes] | None = None,
) -> Outlook:
    """Plan a run.

    Args:
        model: built already, with options that differ in the placement and the micro-batch alone. blocks: as measured.
    """
    plan = place(config, model or build(config, request), blocks=blocks)
    work = count_work(
        size_of(plan.meta.parts),
        [config.context_length] * config.batch_size,
        num_shards=plan.num_shards,
        recomputed_share=plan.memory.recomputing / len(plan.meta.parts.blocks),
        host_share=plan.placement.offload.blocks / len(plan.meta.parts.blocks),
        frees_blocks=SHARDING_STRATEGIES[plan.placement.sharding_strategy][1],
    )
    tokens = request.num_gpus * config.batch_size * config.context_length
    return Outlook(config, plan, request, tokens / seconds(work, request.gpu))


def build(config: TrainConfig, request: Request) -> ModelPlan:
    """The model without weights, for the request's GPUs."""
    ranks = Ranks(0, 0, request.num_gpus, request.num_gpus, torch.device("cpu"))
    free = int(request.gpu.memory_gib * GIB) - CONTEXT
    machine = Machine(torch.device("cuda"), request.num_gpus, ranks, free)
    model_config = find_config(config.model, trust_remote_code=config.trust_remote_code)
    tokenizer: Any = SimpleNamespace(eos_token_id=0)
    return build_plan(config, machine, Path(config.model), model_config, tokenizer)


# --- what would make it fit ---


def ways_to_fit(found: Outlook) -> Iterator[Outlook]:
    """Settings with which a run fits that does not, the mildest first."""
    config, model = found.config, found.plan
    base = {field.name: getattr(model, field.name) for field in dataclasses.fields(ModelPlan)}
    for changes in _changes(config):
        changed = outlook(dataclasses.replace(config, **changes), found.request, ModelPlan(**base))
        if changed.fits:
            yield changed


def _changes(config: TrainConfig) -> Iterator[dict[str, Any]]:
    accumulation = config.gradient_accumulation_steps
    fewer = {"batch_size": 1, "gradient_accumulation_steps": config.batch_size * accumulation}
    options: list[dict[str, Any]] = [{"recompute": "all"}, {**fewer, "recompute": "all"}]
    options += [{**each, "use_cpu_offload": True, "sharding_strategy": "full_shard"} for each in options]
    yield from options
    yield {**options[-1], "use_activation_cpu_offload": True}
    if config.context_length > 512:
        yield {**options[-1], "context_length": config.context_length // 2}


# --- the fastest settings ---


def fastest(config: TrainConfig, request: Request) -> list[Outlook]:
    """Settings with the same global batch by speed, those that fit first; the rest nearest to fitting first."""
    model = build(config, request)
    blocks = len(model.meta.parts.blocks)
    rows = config.batch_size * config.gradient_accumulation_steps
    found = []
    places: list[tuple[str, bool | int]] = [("full_shard", False), ("full_shard", blocks // 2), ("full_shard", True)]
    places += [("ddp", False)] * (request.num_gpus > 1)
    batches = [size for size in (1, 2, 4, 8, 16) if size <= rows and rows % size == 0]
    recomputed = ("none", blocks // 2, "all")
    parts, precision, length = model.meta.parts, model.precision, config.context_length
    measured = {size: measure_blocks(parts, precision, [length] * size, model.documents) for size in batches}
    for batch, (strategy, offload), recompute in itertools.product(batches, places, recomputed):
        changes: dict[str, Any] = {
            "batch_size": batch,
            "gradient_accumulation_steps": rows // batch,
            "sharding_strategy": strategy,
            "use_cpu_offload": offload,
            "recompute": recompute,
        }
        found.append(outlook(dataclasses.replace(config, **changes), request, model, measured[batch]))
    fitting = sorted((each for each in found if each.fits), key=lambda each: -each.tokens_per_second)
    others = sorted((each for each in found if not each.fits), key=lambda each: each.needed)
    return [*fitting, *others]


# --- words ---


def describe(found: Outlook, *, explain: bool) -> Iterator[str]:
    """The plan in lines of at most 80 columns."""
    request, memory = found.request, found.plan.memory
    gpu, share = request.gpu, found.needed / (request.gpu.memory_gib * GIB)
    billions = count_parameters(found.plan.meta.parts)["total"] / 1e9
    yield f"{found.config.model} ({billions:.1f}B), {found.config.train_type}, on {request.num_gpus} x {gpu.name}"
    verdict = "fits" if found.fits else "does not fit"
    yield f"{verdict}: {found.needed / GIB:.1f} of {gpu.memory_gib:g} GiB on each GPU ({share:.0%})"
    host = found.host_bytes / GIB
    beside = f" of {request.host_ram_gib:g}" if request.host_ram_gib else ""
    yield f"host memory: {host:.1f}{beside} GiB" + ("" if found.fits_host else ", too much")
    yield ""
    resident = sum(memory.resident.values()) + memory.overhead + CONTEXT
    for name, sizes in memory.phases.items():
        yield _bar(name, resident, sum(sizes.values()), gpu.memory_gib * GIB)
    yield "  '#' stays there, '+' comes and goes, '|' is the end of the card"
    yield ""
    if explain:
        parts = {**memory.resident, **memory.phases[memory.peak]}
        parts |= {"torch's allocator": memory.overhead, "CUDA, NCCL and driver": CONTEXT}
        for name, count in sorted(parts.items(), key=lambda item: -item[1])[:_LARGEST]:
            yield f"  {count / GIB:6.2f} GiB  {name}"
        yield ""
    yield from _speed_lines(found)
    if not found.fits:
        way = next(ways_to_fit(found), None)
        yield "it would fit with:" if way else "nothing that was tried makes it fit: take more or larger GPUs"
        if way:
            yield f"  {command_line(way)}"
            yield from _speed_lines(way)
    else:
        yield f"  {command_line(found)}"


def _bar(name: str, stays: int, comes: int, memory: float) -> str:
    columns = [round(_BAR * min(part / memory, 1.5)) for part in (stays, stays + comes)]
    drawn = "#" * columns[0] + "+" * (columns[1] - columns[0])
    drawn = f"{drawn[:_BAR]:{_BAR}}|{drawn[_BAR:]}"
    return f"  {name:15} {drawn} {(stays + comes) / GIB:.1f} GiB"


def _speed_lines(found: Outlook) -> Iterator[str]:
    request = found.request
    cost = f", {found.hours * request.price:,.2f} US dollars" if request.price else ""
    yield (
        f"about {found.tokens_per_second:,.0f} tokens/s: {found.hours:,.1f} hours for "
        f"{request.tokens / 1e6:,.1f} million tokens{cost}"
    )


def command_line(found: Outlook) -> str:
    """The settings that `train` takes: what the options say, and the placement that was chosen."""
    config, chosen = found.config, found.plan.placement.options
    given = {name: value for name, value in vars(config).items() if value != getattr(DEFAULTS, name)}
    given |= {"world_size": found.request.num_gpus, **chosen}
    for name in ("dry_run", "nproc_per_node"):
        given.pop(name, None)
    words = [f"--{name} {value_text(value)}" for name, value in given.items() if value is not None]
    return f"fsdp-qlora train {' '.join(words)}"


def as_json(found: Outlook) -> Mapping[str, Any]:
    """The plan for programs; bytes are of one rank, but host_bytes."""
    memory, request = found.plan.memory, found.request
    return {
        "fits": found.fits,
        "gpu": request.gpu.name,
        "num_gpus": request.num_gpus,
        "gpu_bytes": int(request.gpu.memory_gib * GIB),
        "needed_bytes": found.needed,
        "reserved_bytes": memory.reserved,
        "host_bytes": found.host_bytes,
        "resident": memory.resident,
        "phases": memory.phases,
        "tokens_per_second": round(found.tokens_per_second, 1),
        "hours": round(found.hours, 3),
        "cost_usd": round(found.hours * request.price, 2) if request.price else None,
        "command": command_line(found),
    }


def describe_fastest(found: Sequence[Outlook]) -> Iterator[str]:
    """The fastest three settings that fit with their margins, and why the next three do not."""
    fitting, others = [each for each in found if each.fits], [each for each in found if not each.fits]
    faster = [each for each in others if not fitting or each.tokens_per_second > fitting[0].tokens_per_second]
    for title, group in (("the fastest that fit:", fitting[:3]), ("faster, but too large:", faster[:3])):
        if group:
            yield title
        for each in group:
            free = each.request.gpu.memory_gib - each.needed / GIB
            margin = f"{free:.1f} GiB free" if free >= 0 else f"{-free:.1f} GiB short"
            words = {name: getattr(each.config, name) for name in _SEARCHED}
            yield f"  {each.tokens_per_second:7,.0f} tokens/s, {margin}: " + ", ".join(
                f"{name} {value_text(value)}" for name, value in words.items()
            )


_SEARCHED = ("batch_size", "sharding_strategy", "use_cpu_offload", "recompute")
