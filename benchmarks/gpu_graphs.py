"""Blocks as CUDA graphs beside the same steps without: the part `graphs` of gpu.py."""

import argparse
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts import (
    BLOCKS,
    at_least,
    build,
    median_seconds,
    note,
    process_group,
    ratio_of,
    release,
    row,
    work_of,
)
from benchmarks.gpu_steps import Batch, Timed
from fsdp_qlora.data.batches.graph_lengths import MOST_TOKENS
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.adapters.insert import adapter_parameters
from fsdp_qlora.model.architecture.attention import reads_bounds
from fsdp_qlora.model.kernels.in_use import GRAPHS, LEAN, PLAIN, Ways, using_ways
from fsdp_qlora.sharding.graphed import GraphedBlocks
from fsdp_qlora.sharding.recompute import set_graphs

_STEPS = 4  # whose bits are compared


def measure_graphs(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Blocks of the 8B: are captures possible, and losses, norms and adapters of the first steps
    the same; milliseconds of a step; memory of the graphs.
    """
    batches = (Batch(1, 2048), Batch(2, 2048), Batch(8, 512))
    work = work_of(args, ranks, "8b", batches, layers=args.layers or BLOCKS)
    found: dict[str, Any] = {"ms": {}, "rows": []}
    results: dict[str, list[Any]] = {}
    with process_group(ranks), using_ways(Ways(linears=LEAN)):
        for way in (PLAIN, GRAPHS):
            train, of_batch = build(work, ranks, recompute="all")
            graphs = GraphedBlocks(MOST_TOKENS, by_bounds=_reads_bounds(train))
            if way == GRAPHS:
                set_graphs(train.run.trainer.model, graphs)
            results[way] = _first_steps(train, of_batch[0])
            for batch, rows in zip(batches, of_batch, strict=True):
                found["ms"].setdefault(str(batch), {})[way] = 1e3 * median_seconds(train, rows)
                note(args, found)  # for the case that time runs out
            if way == GRAPHS:
                found |= _memory_of(graphs)
            del train, graphs
            release(ranks.device)
    found["same_bits"] = results[PLAIN] == results[GRAPHS]
    found["rows"] = [_row(name, figures, found) for name, figures in found["ms"].items()]
    return found


def _reads_bounds(train: Timed) -> bool:
    forward = train.run.trainer.forward
    return reads_bounds(forward.model.config, forward.attention)


def _first_steps(train: Timed, rows: np.ndarray) -> list[Any]:
    """Losses and gradient norms, then the bytes of the adapters."""
    records = [train.one(rows, is_measured=False)[0] for _ in range(_STEPS)]
    numbers = [(record["loss"], record["grad_norm"]) for record in records]
    weights = [
        parameter.detach().cpu().view(torch.int32).sum(dtype=torch.int64).item()
        for _, parameter in adapter_parameters(train.run.trainer.model)
    ]
    return [numbers, weights]


def _memory_of(graphs: GraphedBlocks) -> dict[str, Any]:
    """The reasons of blocks without graphs, and the bytes of static tensors and of the pool."""
    pool = 0
    if torch.cuda.is_available():
        segments = torch.cuda.memory_snapshot()
        pool = sum(each["total_size"] for each in segments if each["segment_pool_id"] != (0, 0))
    return {"not_captured": graphs.reasons, "static_bytes": graphs.nbytes, "pool_bytes": pool}


def _row(name: str, figures: dict[str, float], found: dict[str, Any]) -> dict[str, Any]:
    ratio = ratio_of(figures, PLAIN, GRAPHS)
    is_right = found["same_bits"] and not found["not_captured"]
    return row(
        f"graphs, 8B blocks, {name}",
        "ms per step",
        figures,
        aim="the same bits, and not slower",
        holds=at_least(ratio, 1.0) and is_right,
        ratio=ratio,
    )
