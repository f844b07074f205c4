"""Steps of an 8B's blocks as graphs: `graph_memory.py ROWS` of 2,048 tokens in a micro-batch.

The last line is JSON: what the plan says of graphs and of all memory, and what they took.
"""

import json
import sys
from typing import Any

import torch

from benchmarks.common import random_rows_of
from benchmarks.standin_memory import build
from fsdp_qlora.data.batches.schedule import StepRows
from fsdp_qlora.model.kernels.in_use import GRAPHS, use_ways
from fsdp_qlora.sharding.recompute import recomputed_blocks
from stand_in.kernels import chosen_ways

ROW = 2048


def pool_bytes() -> int:
    """Bytes reserved by the pools of graphs."""
    segments = torch.cuda.memory_snapshot()
    return sum(each["total_size"] for each in segments if each["segment_pool_id"] != (0, 0))


def main(rows: int) -> None:
    use_ways(chosen_ways()._replace(blocks=GRAPHS))
    trainer, placed, all_rows = build(shape="8b", layers=3, recompute="all", batch_size=rows)
    for _ in range(4):
        trainer.train_step(StepRows(0, *all_rows))
    # Inputs of another form run without a graph at first, beside the memory of those that are made.
    lengths = [ROW] * (rows - 1) + [ROW - rows * ROW // 16]
    table = random_rows_of(lengths, 1000, masked=0, seed=1)
    trainer.train_step(StepRows(0, table, all_rows.rows))
    graphs: Any = recomputed_blocks(trainer.model)[0].graphs
    planned = placed.memory.resident
    found = {
        "reasons": graphs.reasons,
        "static": [graphs.nbytes, planned["static tensors of graphs"]],
        "pool": [pool_bytes(), planned["graphs' pool"]],
        "reserved": [torch.cuda.max_memory_reserved(), placed.memory.reserved],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
