"""Chooses at the start of a run how the parts of its model are computed, and says it in one line.

Linear layers are computed together wherever --kernels is auto: that follows from the model alone,
so two runs of one configuration have the same bits.
"""

import logging
from collections.abc import Mapping

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.model.kernels.in_use import PLAIN, Ways

log = logging.getLogger("fsdp_qlora")

LEAN = "lean"


def choose_ways(config: TrainConfig, before: Mapping[str, str] | None = None) -> Ways:
    """The ways of a run with these options.

    Args:
        before: those that the run has taken so far, as `Start.ways`.
    """
    ways = Ways() if config.kernels == PLAIN else Ways(linears=LEAN)
    if before is not None:
        change = describe_change(before, ways, config.kernels)
        if change:
            log.info("%s", change)
    return ways


def describe_change(before: Mapping[str, str], ways: Ways, option: str) -> str:
    """A line for a run whose parts were computed in other ways before; empty if none was.

    Args:
        before: as `Start.ways`; parts without a name in it were plain.
        option: the value of --kernels now.
    """
    # A later version may know other parts: whatever they were, here they are plain.
    known = Ways()._asdict() | dict(before)
    now = dict.fromkeys(known, PLAIN) | ways._asdict()
    changes = [
        f"{part} {known[part]} then, {now[part]} now" for part in known if known[part] != now[part]
    ]
    if not changes:
        return ""
    end = ", as --kernels plain asks."
    if option != PLAIN:
        end = (
            ". Results are as accurate, but other sums are rounded; --kernels plain has none of it."
        )
    return f"The run continues with other kernels: {'; '.join(changes)}{end}"
