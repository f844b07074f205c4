"""A measured part of gpu.py: activations in host memory beside recomputing them."""

import argparse
from typing import Any

import numpy as np

from benchmarks.gpu_parts import (
    BLOCKS,
    at_least,
    build,
    median_seconds,
    note,
    peak,
    process_group,
    ratio_of,
    release,
    reset_peak,
    row,
    work_of,
)
from benchmarks.gpu_steps import GIB, Batch
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.planning.fit_host import measure_link
from fsdp_qlora.sharding.recompute import recomputed_blocks, set_recompute

# of the step with recomputation, where the link hides: 3 of 4 passes, and some waiting
_AIM = 0.85


def measure_host_activations(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Blocks of the 70B shape: what they save in host memory, all or half of it, or computed again.

    The last block keeps its activations where others have theirs on the host.
    """
    layers = 2 if args.tiny else args.layers or BLOCKS
    work = work_of(args, ranks, "70b", (Batch(2, 2048), Batch(4, 2048)), layers=layers)
    found: dict[str, Any] = {"host_gib": {}, "peak_gib": {}, "rows": []}
    if ranks.device.type == "cuda":
        found["link_gb_s"] = measure_link(ranks.device) / 1e9
        note(args, found)
    leaving = layers - 1
    choices = {
        "recomputed": (layers, 0),
        "host": (leaving, leaving),
        "half": (leaving, -(-leaving // 2)),
        "kept": (0, 0),
    }
    with process_group(ranks):
        train, of_batch = build(work, ranks, recompute="host")
        model = train.run.trainer.model
        for batch, step_rows in zip(work.batches, of_batch, strict=True):
            figures: dict[str, float] = {}
            for name, (number, on_host) in choices.items():
                set_recompute(model, number, on_host=on_host)
                release(ranks.device)
                reset_peak(ranks.device)
                figures[name] = 1e3 * median_seconds(train, step_rows)
                label = f"{batch}, {name}"
                found["peak_gib"][label] = peak(ranks.device) / GIB
                store = recomputed_blocks(model)[0].activations
                found["host_gib"][label] = store.total / GIB if store else 0.0
            less = ratio_of(figures, "host", "recomputed")
            holds = at_least(_AIM, less) if np.isfinite(less) else None
            aim = f"on the host at most {_AIM:g} times recomputed"
            item = f"activations, 70B blocks, {batch}"
            found["rows"].append(
                row(item, "ms per step", figures, aim=aim, holds=holds, ratio=less)
            )
            note(args, found)  # for the case that time runs out
        found["planned"] = train.planned
    return found
