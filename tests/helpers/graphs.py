"""Runs whose blocks are graphs, and runs with the same micro-batches and none."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any


def train_with_graphs(argv: list[str]) -> int:
    """A rank of a run whose blocks are graphs, as no CPU would choose it by itself."""
    import train
    from fsdp_qlora.model.kernels.in_use import GRAPHS
    from fsdp_qlora.run.ways import TriedKernels

    choose = TriedKernels.choose

    def with_graphs(*args: Any) -> Any:
        return choose(*args)._replace(blocks=GRAPHS)

    TriedKernels.choose = with_graphs  # type: ignore[method-assign]
    return train.main(argv)


def plain_rank(argv: list[str]) -> int:
    """A rank with the same micro-batches, filled up as for graphs, but without any."""
    from fsdp_qlora.run import build_trainer

    build_trainer.set_graphs = lambda *_: None
    return train_with_graphs(argv)


def graphed_rank(argv: list[str], notes: Path) -> int:
    """A rank with graphs, whose static memory is spoilt whenever it is filled."""
    from fsdp_qlora.sharding import block_graphs, graphed

    stage = block_graphs.BlockGraphs._stage
    staged: Counter[int] = Counter()

    def spoil_and_stage(self: Any, *args: Any) -> None:
        memory = self._memory
        shared = memory.shared
        for tensor in (shared.x, shared.grad_y, shared.result, *memory.gradients.tensors):
            tensor.fill_(float("nan"))
        memory.weights.memory.fill_(255)
        staged[id(self)] += 1
        stage(self, *args)

    block_graphs.BlockGraphs._stage = spoil_and_stage  # type: ignore[method-assign]
    graphed._PASSES_BEFORE = 0
    status = train_with_graphs(argv)
    notes.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps([*staged.values()]))
    return status


def reading_rank(argv: list[str], notes: Path) -> int:
    """A rank with graphs whose MLPs read a number on the host, which no capture allows."""
    from fsdp_qlora.model.architecture.gated_mlp import GatedMlp

    forward = GatedMlp.forward

    def read_and_compute(self: Any, x: Any) -> Any:
        assert x.abs().max().item() >= 0
        return forward(self, x)

    GatedMlp.forward = read_and_compute  # type: ignore[method-assign]
    return graphed_rank(argv, notes)


def choosing_rank(argv: list[str], notes: Path) -> int:
    """A rank that takes graphs at its start wherever they are right, however long they take.

    One that continues takes them only as a run does.
    """
    import train
    from fsdp_qlora.model.kernels.in_use import GRAPHS
    from fsdp_qlora.run import ways

    fastest = ways.fastest

    def prefer_graphs(found: Any, kept: str | None = None) -> str:
        is_right = GRAPHS in found.milliseconds
        return GRAPHS if is_right and kept is None else fastest(found, kept)

    ways.fastest = prefer_graphs
    return train.main(argv)
