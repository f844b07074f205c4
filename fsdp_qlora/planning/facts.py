"""What a report shows of a planned run: its environment, its data, its memory, and what a GPU measured of it."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from fsdp_qlora.data.prepare import RunData
from fsdp_qlora.data.schedule import Schedule
from fsdp_qlora.output.environment import describe_environment
from fsdp_qlora.output.text import GIB
from fsdp_qlora.planning.memory import estimate_memory
from fsdp_qlora.planning.plan import PlacedModel
from fsdp_qlora.planning.run_plan import Plan

log = logging.getLogger("fsdp_qlora")

_MOST_BARS = 40
_FAR, _FAR_GIB = 0.05, 0.25  # of what is planned, and at least: what a small model reserves is mostly rounding


class Measured:
    """The GPU memory of the fullest rank and the speed as they are, beside the plan; warns once if it was far off."""

    def __init__(self, plan: PlacedModel) -> None:
        self._plan, self._memory, self._has_warned = plan, plan.memory, False

    def stepped(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The facts after a step, for the report. record: from `Trainer.train_step`."""
        number = record.get("recompute", self._memory.recomputing)
        if number != self._memory.recomputing:
            step = dataclasses.replace(self._plan.step, recomputing=number)
            self._memory = estimate_memory(self._plan.meta.parts, self._plan.blocks, step)
        measured = {name: max(record["memory_gib"][name]) for name in ("allocated", "reserved")}
        planned = {name: round(getattr(self._memory, name) / GIB, 3) for name in measured}
        off = measured["reserved"] - planned["reserved"]  # less is no fault: of a stream the longest rows are not known
        if off > max(_FAR * planned["reserved"], _FAR_GIB) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "The plan said %.1f GiB of GPU memory, and the fullest rank has reserved %.1f. Please report it with "
                "the run's facts.json: the plan is to be within 5%%.",
                planned["reserved"], measured["reserved"],
            )  # fmt: skip
        found = {"planned_gib": planned, "measured_gib": measured, "recompute": number}
        return {"measured": {**found, "tokens_per_second": round(record["tokens_per_second"], 1)}}


def run_facts(plan: Plan) -> dict[str, Any]:
    """Heading -> facts, all of them JSON's."""
    return {
        "environment": describe_environment(),
        "data": data_facts(plan.data, plan.schedule),
        "memory": plan.model.memory.weights,
    }


def data_facts(data: RunData, schedule: Schedule) -> dict[str, Any]:
    """Counts of rows and tokens, the rows' lengths as a histogram, and the share of padding in what is computed."""
    lengths = data.train.lengths[data.train_rows]
    longest = int(lengths.max())
    counts, edges = np.histogram(lengths, bins=min(_MOST_BARS, longest), range=(0, longest))
    return {
        "rows": len(data.train_rows),
        "held_out": len(data.eval_rows),
        "tokens": int(lengths.sum()),
        "learned": int(data.train.num_targets[data.train_rows].sum()),
        "longest": longest,
        "truncated": sum(report.num_truncated for report in data.reports),
        "tokens_cut": sum(report.num_tokens_cut for report in data.reports),
        "rejected": len(data.rejected),
        "padding_share": 1 - schedule.first_useful_shares(data.train_rows, data.train.lengths)[0],
        "lengths": {"counts": counts.tolist(), "edges": np.round(edges).astype(int).tolist()},
    }
