"""Settings that only a GPU sees, and what happens when its memory runs out."""

from pathlib import Path
from typing import Any

import pytest

from stand_in import environment
from tests.helpers.models import Models
from tests.helpers.rows import write_rows
from tests.helpers.run import flags

# The run itself is replaced: what it would find is printed.
LOOK = """
import sys
import types
from pathlib import Path

import train

def run(config, *others):
    import torch
    from fsdp_qlora.sharding.optimizer import ShardedOptimizer

    torch.empty(1, device="cuda")
    print("expandable:", torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
    for device in ("cuda", "cpu"):
        linear = torch.nn.Linear(4, 4, device=device)
        optimizer = ShardedOptimizer(linear, "adamw", lr=0.1, weight_decay=0.0)
        print(device, "fused:", bool(optimizer.optimizer.param_groups[0]["fused"]))

sys.modules["fsdp_qlora.run.train"] = types.SimpleNamespace(run=run)
folder = Path(__file__).parent
(folder / "config.json").write_text('{"model_type": "llama"}')
sys.exit(train.main(["--model_name", str(folder)]))
"""


@pytest.mark.parametrize(
    ("settings", "is_expandable"),
    [
        ({}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, False),
        ({"PYTORCH_ALLOC_CONF": ""}, False),
    ],
)
def test_segments_expand_unless_told_otherwise_and_adamw_is_fused_on_a_gpu(
    settings, is_expandable, tmp_path
):
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    (ended,) = environment.run([script], tmp_path / "logs", settings=settings)
    assert ended.status == 0, ended.output[-3000:]
    assert f"expandable: {is_expandable}" in ended.output
    assert "cuda fused: True" in ended.output
    assert "cpu fused: False" in ended.output


def _train_with_less(
    left: float, models: Models, folder: Path, *, ranks: int = 1, **options: Any
) -> list[environment.Rank]:
    """Three steps of long rows; after the first the last rank's GPU has only a share left of what a
    step needs.
    """
    row = {"instruction": "write", "input": "", "output": "water river " * 700}
    options = {
        "model_name": models(
            num_hidden_layers=8, intermediate_size=4096, max_position_embeddings=2048
        ),
        "dataset": write_rows(folder / "rows.jsonl", [row] * 12 * ranks),
        "output_dir": folder / "out",
        "train_type": "qlora",
        "max_steps": 3,
        "batch_size": 2,
        "context_length": 2048,
        "precision": "bf16",
        "gradient_accumulation_steps": 2,
        "quant_cache": "off",
        "log_to": "stdout",
        "save_every": "none",
        "verbose": True,
        **options,
    }
    arguments = flags(**options)
    program = "stand_in/programs/less_memory.py"
    of_last: dict[int, dict[str, object]] = {ranks - 1: {"LEFT": left}}
    return environment.run(
        [program, *arguments], folder / "logs", ranks=ranks, settings_of_rank=of_last
    )


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {"use_cpu_offload": True}), (2, {"sharding_strategy": "full_shard"})],
    ids=["1 rank, offload", "2 ranks"],
)
def test_restarts_after_out_of_memory_recompute_more_until_it_fits(
    ranks, options, models, tmp_path
):
    options = {**options, "save_every": 1}
    *others, last = _train_with_less(0.6, models, tmp_path, ranks=ranks, **options)
    first = [*others, last][0]
    assert [rank.status for rank in (*others, last)] == [1] * ranks, last.output[-3000:]
    assert "Recompute: 0 of 8 blocks" in first.output
    said = f"Rank {ranks - 1} ran out of GPU memory in step 2 (compute)"
    assert f"error: {said}" in last.output and "What helps: a smaller --batch_size" in last.output
    assert all(f"Ended because of rank {ranks - 1}: {said}" in rank.output for rank in others)
    # Now there is what a step with more recompute needs.
    *others, last = _train_with_less(1.1, models, tmp_path, ranks=ranks, **options)
    assert [rank.status for rank in (*others, last)] == [0] * ranks, last.output[-3000:]
    assert "Resuming at step 1" in [*others, last][0].output
    assert "Recompute: 4 of 8 blocks" in [*others, last][0].output
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
