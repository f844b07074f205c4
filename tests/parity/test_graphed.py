"""Blocks that run as graphs train to the same bits as without. On a CPU captured functions are
called again, on the same static memory.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.metrics import read_metrics
from tests.helpers.rows import write_rows
from tests.helpers.run import flags, on_ranks, train_rank

# Rows of one length, so that micro-batches have the form of those before.
ROWS = [
    {"instruction": f"say {first}", "output": f"{second} {first} {second}"}
    for first in ("red", "blue", "green", "one")
    for second in ("two", "three", "four", "five")
]


def graphed_rank(argv: list[str], notes: Path) -> int:
    """A rank of a run with graphs, whose static memory is spoilt whenever it is filled."""
    from fsdp_qlora.model.kernels.in_use import GRAPHS
    from fsdp_qlora.run.ways import TriedKernels
    from fsdp_qlora.sharding import block_graphs, graphed

    choose = TriedKernels.choose
    TriedKernels.choose = lambda *args: choose(*args)._replace(blocks=GRAPHS)  # type: ignore[method-assign]
    graphed._PASSES_BEFORE = 0
    stage = block_graphs.BlockGraphs._stage
    replays = []

    def spoil_and_stage(self: Any, *args: Any) -> None:
        memory = self._memory
        for tensor in (memory.x, memory.grad_y, memory.result, *memory.gradients.tensors):
            tensor.fill_(float("nan"))
        memory.weights.memory.fill_(255)
        replays.append(self)
        stage(self, *args)

    block_graphs.BlockGraphs._stage = spoil_and_stage  # type: ignore[method-assign]
    status = train_rank(argv)
    notes.write_text(f"{len(replays)} {len({*map(id, replays)})}")
    return status


Result = tuple[list[float], list[float], dict[str, torch.Tensor]]


def results_of(out: Path) -> Result:
    return read_metrics(out), read_metrics(out, "grad_norm"), load_file(
        out / "adapter_model.safetensors"
    )


def trained(model: Path, folder: Path, world_size: int, **options: Any) -> tuple[Result, Result]:
    """The losses, gradient norms and adapters of a run without graphs and of one with them."""
    common = {
        "model_name": model,
        "dataset": write_rows(folder / "rows.jsonl", options.pop("rows", ROWS)),
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "recompute": "all",
        "context_length": 256,
        "lr": 1e-2,
        "quant_cache": "off",
        "log_to": "stdout",
    }
    argv = flags(**{**common, **options})
    for name, target, args in (
        ("plain", train_rank, ()),
        ("graphs", graphed_rank, (folder / "notes",)),
    ):
        out = folder / name
        statuses, output = on_ranks(
            world_size,
            target,
            ([*argv, *flags(output_dir=out)], *args),
            folder / f"{name}_logs",
        )
        assert statuses == [0] * world_size, output
        print(output)
    return results_of(folder / "plain"), results_of(folder / "graphs")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("train_type", ["qlora", "lora", "hqq_lora", "int8_lora"])
def test_graphed_blocks_train_to_the_same_bits(train_type, precision, models, tmp_path):
    plain, graphed = trained(
        models(), tmp_path, 1, train_type=train_type, precision=precision
    )
    assert plain[:2] == graphed[:2]
    assert all(torch.equal(values, graphed[2][name]) for name, values in plain[2].items())
    replays, graphs = map(int, (tmp_path / "notes").read_text().split())
    print(replays, graphs)
    assert graphs >= 1 and replays > 20


@pytest.mark.parametrize(
    "options",
    [
        {"sharding_strategy": "full_shard"},
        {"sharding_strategy": "ddp"},
        {"use_cpu_offload": True},
        {"recompute": "offload"},
    ],
    ids=["full_shard", "ddp", "offloaded base", "offloaded activations"],
)
def test_graphed_blocks_of_two_ranks_train_to_the_same_bits(options, models, tmp_path):
    plain, graphed = trained(models(), tmp_path, 2, precision="bf16", **options)
    assert plain[:2] == graphed[:2]
    assert all(torch.equal(values, graphed[2][name]) for name, values in plain[2].items())
