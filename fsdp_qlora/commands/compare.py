"""The rent table: one run on each offer of a price table, with the settings that are fastest there."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from fsdp_qlora.commands.plan import speed_text
from fsdp_qlora.config.marks import PLANNABLE
from fsdp_qlora.config.text import PlainLoader, read_options, value_text
from fsdp_qlora.errors import UserError
from fsdp_qlora.output.text import GIB, printable
from fsdp_qlora.planning.describe import format_count
from fsdp_qlora.planning.gpus import find_gpu
from fsdp_qlora.planning.search import GpuOffer, PlannedRun, Planner

EXAMPLE = Path(__file__).parent / "prices.yaml"


def read_offers(path: Path) -> tuple[str, list[GpuOffer]]:
    """The date of a price table, and its offers.

    Raises:
        UserError: it cannot be read, has no offers, or one of a GPU that is not known.
    """
    try:
        table = yaml.load(read_options(path, "it"), PlainLoader)
        offers = [GpuOffer(**row | {"gpu": find_gpu(str(row["gpu"]))}) for row in table["offers"]]
        numbers = [(row.num_gpus, row.price_per_hour or 0, row.host_ram_gib) for row in offers]
        if not offers or not all(map(PLANNABLE.accepts, itertools.chain(*numbers))):
            raise ValueError("it has no offers, or one whose GPUs, price or memory are not above 0 and at most 1e9")
        return printable(" ".join(str(table["date"]).split())), offers
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"--compare {path}: {reason}. A price table has a date and offers, each with gpu, num_gpus and "
            f"price_per_hour, if known also host_ram_gib and where, as in {EXAMPLE}."
        ) from error


def compare(
    planner: Planner, requests: Sequence[GpuOffer], *, by_time: bool, keeps_rows: bool = True
) -> list[PlannedRun]:
    """The fastest settings on each offer; those that fit come first, the cheapest or fastest first.

    keeps_rows: else steps may have more of them.
    """
    planners = [planner.on(request) for request in requests]
    found = [(each.fastest() if keeps_rows else each.fastest_of_more_rows())[0] for each in planners]
    return sorted(found, key=lambda each: (not each.fits_with_margin, each.hours if by_time else each.cost))


def describe(date: str, found: Sequence[PlannedRun]) -> Iterator[str]:
    """The table in lines of at most 80 columns."""
    config, fitting = found[0].config, [each for each in found if each.fits_with_margin]
    steps = [each.rows for each in fitting or found]
    rows = f"{min(steps)}" + f" to {max(steps)}" * (max(steps) > min(steps))
    yield f"{config.model_name}, {config.train_type}, {format_count(found[0].tokens)} tokens"
    yield f"{rows} x {config.context_length} tokens per GPU and step; prices of {date}"
    yield f"\n{'GPUs':21} {'$/hour':>7} {'hours':>7} {'dollars':>8}  rows strategy    host recompute"
    for each in found:
        request, settings = each.request, each.config
        line = f"{f'{request.num_gpus} x {request.gpu.name}':21.21} {request.price_per_hour:7.2f}"
        if each.fits_with_margin:
            on_host = {"true": "all", "false": "-"}.get(host := value_text(settings.use_cpu_offload), host)
            yield (
                f"{line} {each.hours:7,.1f} {each.cost:8,.2f}  {settings.batch_size:4} "
                f"{settings.sharding_strategy:10} {on_host:>5} {settings.recompute}"
            )
        elif each.fits_host:
            yield f"{line}  needs {each.needed / GIB:.1f} of {request.gpu.memory_gib:g} GiB on each GPU, and a margin"
        else:
            yield f"{line}  needs {each.host_bytes / GIB:.0f} of {request.host_ram_gib:g} GiB of host memory"
    for name, best in (("cheapest", lambda each: each.cost), ("fastest", lambda each: each.hours)):
        if fitting:
            each = min(fitting, key=best)
            yield f"the {name}: {each.request.num_gpus} x {each.request.gpu.name}, {speed_text(each)}"
