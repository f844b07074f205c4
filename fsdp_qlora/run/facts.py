"""Facts of a run for its report, and how its memory and speed turn out beside the plan."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.schedule import Schedule
from fsdp_qlora.data.batches.shared_tokens import RowTokens
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.model.kernels.in_use import GRAPHS, ways_in_use
from fsdp_qlora.planning.estimate import estimate_memory
from fsdp_qlora.planning.gpus import Gpu
from fsdp_qlora.planning.memory import Step
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.program_speed import Parts, expected_ways
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.planning.run_rows import RunRows
from fsdp_qlora.planning.speed import size_of, tokens_per_second
from fsdp_qlora.sharding.recompute import keeps_attention
from fsdp_qlora.utils.environment import describe_environment
from fsdp_qlora.utils.text import GIB, format_count

log = logging.getLogger("fsdp_qlora")

_MOST_BARS = 40  # of the histogram of lengths
# Of what is planned, and at least: what a small model reserves is mostly rounding.
_FAR = 0.05
_FAR_GIB = 0.25


class Measured:
    """Measures the fullest rank's GPU memory and the speed, and compares them with the plan.

    Warns once of far more memory.

    Speed is planned on `gpu` for the lengths of the first steps' rows, and measured in all steps of
    this start: rows come in random order, so both are of the same work.
    """

    def __init__(self, config: TrainConfig, plan: Plan, gpu: Gpu) -> None:
        self._config = config
        self._plan = plan
        self._gpu = gpu
        self._placed = plan.placed
        self._has_warned = False
        self._planned_speed = self._tokens = self._seconds = 0.0
        # They are chosen after the run is planned.
        if ways_in_use().blocks == GRAPHS:
            self._estimate_again(plan.placed.step)

    def _estimate_again(self, step: Step) -> None:
        """Estimate the memory of another step."""
        placed = self._placed
        memory = estimate_memory(placed.model.meta.parts, placed.blocks, step)
        self._placed = dataclasses.replace(placed, memory=memory, step=step)

    def stepped(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The facts after a step, for the report. record: from `Trainer.train_step`."""
        placed = self._placed
        recomputing = record.get("recompute", placed.memory.recomputing)
        moving = sum(getattr(block, "moves", False) for block in placed.model.meta.parts.blocks)
        on_host = placed.step.on_host._replace(
            blocks=moving, attention=keeps_attention(placed.model.meta.model)
        )
        step = dataclasses.replace(placed.step, recomputing=recomputing, on_host=on_host)
        # After a trial or a lack of memory other blocks recompute than the plan said.
        if step != placed.step:
            self._estimate_again(step)
            self._planned_speed = 0.0
        self._planned_speed = self._planned_speed or planned_speed(
            self._config, self._plan, self._placed, self._gpu
        )
        self._tokens += record["num_tokens"]
        self._seconds += record["step_seconds"]
        measured = {name: max(record["memory_gib"][name]) for name in ("allocated", "reserved")}
        planned = {name: round(getattr(self._placed.memory, name) / GIB, 3) for name in measured}
        # Less is no fault: of a stream the longest rows are not known.
        excess = measured["reserved"] - planned["reserved"]
        if excess > max(_FAR * planned["reserved"], _FAR_GIB) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "The plan estimated %.1f GiB of GPU memory, and the fullest rank has reserved "
                "%.1f. Please report it with the run's facts.json: the plan is to be within 5%%.",
                planned["reserved"],
                measured["reserved"],
            )
        facts = {"planned_gib": planned, "measured_gib": measured, "recompute": recomputing}
        speeds = {
            "planned_tokens_per_second": self._planned_speed,
            "tokens_per_second": self._tokens / self._seconds,
        }
        return {"measured": facts | {name: round(speed, 1) for name, speed in speeds.items()}}


def planned_speed(config: TrainConfig, plan: Plan, placed: PlacedModel, gpu: Gpu) -> float:
    """Tokens per second of the run's first steps."""
    shares_tokens = placed.model.shares_tokens(config.context_size)
    rows = RunRows(config, plan.data, plan.schedule, shares_tokens=shares_tokens)
    micro_batch = rows.mean_micro_batch()
    size = size_of(placed.model.meta.parts)
    ways = expected_ways(config, gpu, Parts.of(placed.model, of_equal_lengths=False))
    return tokens_per_second(placed, size, micro_batch, gpu, ways)


def run_facts(plan: Plan) -> dict[str, Any]:
    """Heading -> facts, all of them JSON's."""
    return {
        "environment": describe_environment(),
        "data": data_facts(plan.data, plan.schedule, fills_up=ways_in_use().blocks == GRAPHS),
        "memory": plan.placed.memory.weights,
    }


def data_facts(data: RunData, schedule: Schedule, *, fills_up: bool = False) -> dict[str, Any]:
    """Counts of rows and tokens, a histogram of lengths, and the share of computed padding.

    fills_up: as for `Schedule.useful_shares`.
    """
    lengths_of_all = data.lengths
    lengths = lengths_of_all[data.train_rows]
    longest = int(lengths.max())
    # Of the first steps, whose rows are in random order, as all of them are.
    steps = schedule.rounds_of_first_steps(data.train_rows, lengths_of_all)
    computed = RowTokens(lengths_of_all, data.known_rows.row_numbers)
    useful = [
        schedule.useful_shares(step, lengths_of_all, computed, fills_up=fills_up)[0]
        for step in steps
    ]
    # Of each length once: there are fewer than rows.
    counts, edges = np.histogram(
        np.arange(longest + 1),
        bins=min(_MOST_BARS, longest),
        range=(0, longest),
        weights=np.bincount(lengths),
    )
    return {
        "rows": len(data.train_rows),
        "held_out": len(data.eval_rows),
        "tokens": int(lengths.sum()),
        "learned": int(data.known_rows.num_targets[data.train_rows].sum()),
        "longest": longest,
        "truncated": sum(report.num_truncated for report in data.reports),
        "tokens_cut": sum(report.num_tokens_cut for report in data.reports),
        "rejected": len(data.rejected),
        "padding_share": 1 - float(np.mean(useful)),
        "lengths": {"counts": counts.tolist(), "edges": np.round(edges).astype(int).tolist()},
    }


def describe_result(
    summary: dict[str, float], output_dir: Path, seconds: float, *, saved: bool
) -> str:
    """The end of a run: losses, speed and where the files are."""
    lines = [f"Finished in {seconds:.0f} s: last training loss {summary['loss']:.4f}"]
    if "eval_loss" in summary:
        ends = f"{summary['first_eval_loss']:.4f} -> {summary['eval_loss']:.4f}"
        if summary.get("best_eval_loss", math.inf) < summary["eval_loss"]:
            ends += (
                f", lowest trained {summary['best_eval_loss']:.4f} at step "
                f"{summary['best_eval_step']:.0f}"
            )
        lines.append(f"  held-out loss {ends}")
    if "eval_score" in summary:
        ends = f"{summary['first_eval_score']:.4f} -> {summary['eval_score']:.4f}"
        if summary.get("best_eval_score", -math.inf) > summary["eval_score"]:
            ends += (
                f", highest trained {summary['best_eval_score']:.4f} at step "
                f"{summary['best_eval_step']:.0f}"
            )
        lines.append(f"  held-out score {ends}")
    rate = summary["num_tokens"] / max(summary["train_seconds"], 1e-9)
    lines.append(f"  {format_count(summary['num_tokens'])} tokens, {rate:.0f} tokens/s")
    # A rank on another machine may not see the folder; its log is not shown, either.
    entries = output_dir.iterdir() if output_dir.is_dir() else ()
    files = sorted(
        path.name for path in entries if path.is_file() and not path.name.startswith(".")
    )
    what = "Saved" if saved else "Nothing saved, metrics only"
    lines.append(f"  {what}: {output_dir}/ ({', '.join(files)})")
    return "\n".join(lines)
