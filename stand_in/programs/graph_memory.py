"""Steps of an 8B's blocks as graphs: `graph_memory.py ROWS LENGTHS [WAYS]`.

Micro-batches of ROWS rows have 2,048 tokens in each, and those of LENGTHS - 1 other lengths fewer.
WAYS: `plain` kernels, as the plan counts them, or those that are `chosen` on a card.

The last line is JSON: what the plan says of graphs and of all memory, and what they took.
"""

import json
import sys
from typing import Any

import torch

from benchmarks.common import random_rows_of
from benchmarks.standin_memory import build
from fsdp_qlora.data.batches.graph_lengths import filled_multiple
from fsdp_qlora.data.batches.schedule import StepRows
from fsdp_qlora.model.kernels.in_use import GRAPHS, use_ways, ways_of_option
from fsdp_qlora.sharding.recompute import recomputed_blocks
from stand_in.kernels import chosen_ways

ROW = 2048
# of a length: without graphs, captured, and by its graphs
STEPS = 3


def reserved_bytes(*, by_graphs: bool) -> int:
    """Bytes reserved by the pools of graphs, or by other streams than the default one."""
    segments = torch.cuda.memory_snapshot()
    if by_graphs:
        return sum(each["total_size"] for each in segments if each["segment_pool_id"] != (0, 0))
    return sum(
        each["total_size"]
        for each in segments
        if each["segment_pool_id"] == (0, 0) and each["stream"]
    )


def argument_bytes(graphs: Any) -> tuple[int, int]:
    """Bytes of the static arguments of all graphs, and the number of their lengths."""
    forms: list[Any] = []
    for structure in graphs._structures.values():
        forms += structure.forms._graphs.values()
    tensors = [leaf for form in forms for leaf in form._arguments if torch.is_tensor(leaf)]
    return sum(tensor.nbytes for tensor in tensors), len(forms)


def main(rows: int, num_lengths: int, ways: str = "plain") -> None:
    chosen = chosen_ways() if ways == "chosen" else ways_of_option("auto")
    use_ways(chosen._replace(blocks=GRAPHS))
    trainer, placed, all_rows = build(shape="8b", layers=3, recompute="all", batch_size=rows)
    step = filled_multiple(rows * ROW)

    def train(fewer: int) -> None:
        lengths = [ROW - fewer // rows] * rows
        table = random_rows_of(lengths, 1000, masked=0, seed=1)
        trainer.train_step(StepRows(0, table, all_rows.rows))

    # The longest first, as a run does.
    for place in range(num_lengths):
        for _ in range(STEPS):
            train(step * place)
    # Another length runs without graphs at first, beside the memory of those that are made.
    train(step * num_lengths)
    graphs: Any = recomputed_blocks(trainer.model)[0].graphs
    planned = placed.memory.resident
    arguments, forms = argument_bytes(graphs)
    found = {
        "reasons": graphs.reasons,
        "lengths": forms,
        "static": [graphs.nbytes, planned["static tensors of graphs"]],
        "arguments": [arguments, planned["arguments of graphs"]],
        "pool": [reserved_bytes(by_graphs=True), planned["graphs' pool"]],
        "workspaces": [reserved_bytes(by_graphs=False), planned["workspaces of captures"]],
        "reserved": [torch.cuda.max_memory_reserved(), placed.memory.reserved],
        "peak": placed.memory.peak,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
