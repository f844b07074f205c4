"""What a report shows of a planned run: its environment, its data and its memory."""

from typing import Any

import numpy as np

from fsdp_qlora.data.prepare import RunData
from fsdp_qlora.data.schedule import Schedule
from fsdp_qlora.output.environment import describe_environment
from fsdp_qlora.planning.run_plan import Plan

_MOST_BARS = 40


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
