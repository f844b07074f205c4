"""Settings that only a GPU sees."""

from pathlib import Path

import pytest

from tests.phantom import environment

# The run itself is replaced: what it would find is printed.
LOOK = """
import sys
import types

import train

def run(config):
    import torch
    from fsdp_qlora.optimizers.sharded import ShardedOptimizer

    torch.empty(1, device="cuda")
    print("expandable:", torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
    for device in ("cuda", "cpu"):
        optimizer = ShardedOptimizer(torch.nn.Linear(4, 4, device=device), "adamw", lr=0.1, weight_decay=0.0)
        print(device, "fused:", bool(optimizer.optimizer.param_groups[0]["fused"]))

sys.modules["fsdp_qlora.run"] = types.SimpleNamespace(run=run)
sys.exit(train.main([]))
"""


@pytest.mark.parametrize(
    ("settings", "is_expandable"),
    [({}, True), ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, False), ({"PYTORCH_ALLOC_CONF": ""}, False)],
)
def test_segments_expand_unless_told_otherwise_and_adamw_is_fused_on_a_gpu(
    settings: dict[str, object], is_expandable: bool, tmp_path: Path
) -> None:
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    (ended,) = environment.run([script], tmp_path / "logs", settings=settings)
    assert ended.status == 0, ended.output[-3000:]
    assert f"expandable: {is_expandable}" in ended.output
    assert "cuda fused: True" in ended.output
    assert "cpu fused: False" in ended.output
