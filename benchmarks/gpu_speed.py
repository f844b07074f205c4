"""The speed of the whole 8B beside its peers, and of the ways to compute its parts beside each
other: parts of gpu.py.
"""

import argparse
from typing import Any

import numpy as np
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts import (
    at_least,
    median_seconds,
    note,
    peak,
    process_group,
    release,
    reset_peak,
    row,
    work_of,
)
from benchmarks.gpu_steps import Batch, Timed, make_config, make_rows, measure
from benchmarks.peers import measure_peers
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.sharding.recompute import set_recompute


def measure_speed(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """The whole 8B shape with and without recompute, how busy the card is, and the installed peers
    on the same rows.
    """
    work = work_of(args, ranks, "8b", (Batch(4, 2048), Batch(2, 2048)), layers=args.layers)
    batch, small = work.batches
    with process_group(ranks):
        ours, train = measure(work, ranks)
        tokens = batch.rows * batch.length
        speeds = {}
        speeds["recompute all"] = tokens / _median(ours["batches"][str(batch)])
        memory = dict(ours["memory_bytes"])
        _, of_batch = make_rows((batch, small), make_config(work).vocab_size)
        busy = busy_share(train, of_batch[1])
        set_recompute(train.run.trainer.model, 0)
        release(ranks.device)
        reset_peak(ranks.device)
        speeds["recompute none"] = tokens / median_seconds(train, of_batch[0])
        memory["recompute none"] = {"peak_allocated": peak(ranks.device)}
        busy_none = busy_share(train, of_batch[1])
        planned = train.planned
        del train
    release(ranks.device)
    rows = [
        row(
            f"speed, 8B, {batch}",
            "tokens/s",
            speeds,
            aim=aim,
            holds=at_least(speeds[name] / limit, 1.0),
        )
        for name, limit, aim in (
            ("recompute all", 11_000, "at least 11,000 with recompute on an H200"),
            ("recompute none", 15_000, "at least 15,000 without recompute on an H200"),
        )
    ]
    if ranks.device.type == "cuda":
        shares = {"recompute all": busy, "recompute none": busy_none}
        holds = at_least(busy, 0.95)
        rows.append(
            row(
                f"GPU busy, 8B, {small}",
                "share of the step",
                shares,
                aim="at least 0.95",
                holds=holds,
            )
        )
    found = {**ours, "memory_bytes": memory, "rows": rows, "planned": planned}
    if "losses" in ours["batches"][str(batch)]:
        note(args, found)  # for the case that time runs out
        peers = measure_peers(work, ours, ranks.device)
        found |= {"peers": peers["peers"], "rows": [*rows, *beside_peers(peers, batch)]}
    return found


def beside_peers(found: dict[str, Any], batch: Batch) -> list[dict[str, Any]]:
    """Our speed divided by the speed of the fastest peer that does the same work."""
    speeds = {
        name: batch.rows * batch.length / record["median_step_seconds"]
        for name, record in found["peers"].items()
        if "error" not in record and record["same_work"] is not False
    }
    gain = speeds["ours"] / max(
        [speed for name, speed in speeds.items() if name != "ours"], default=float("nan")
    )
    aim = "at least 1.25 times the fastest peer"
    return [
        row(
            f"beside peers, 8B, {batch}",
            "tokens/s",
            speeds,
            aim=aim,
            holds=at_least(gain, 1.25),
            ratio=gain,
        )
    ]


def _median(batch: dict[str, Any]) -> float:
    return float(batch.get("median_step_seconds", "nan"))


def busy_share(train: Timed, step_rows: np.ndarray) -> float:
    """The time in which a kernel or copy runs, as a share of a step's; not a number on a CPU.

    The time of the kernels is from a step under the profiler, the step's from others.
    """
    if train.device.type != "cuda":
        return float("nan")
    seconds = median_seconds(train, step_rows)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        train.one(step_rows)
    assert profiler.profiler is not None
    events = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
    ]
    return (
        covered([(event.start_ns(), event.start_ns() + event.duration_ns()) for event in events])
        / 1e9
        / seconds
    )


def covered(spans: list[tuple[int, int]]) -> int:
    """The length of what some spans cover together."""
    found = end = 0
    for first, last in sorted(spans):
        found += max(0, last - max(first, end))
        end = max(end, last)
    return found
