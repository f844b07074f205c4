"""Noise on the embeddings (NEFTune): its size in rows of any layout, and the same bytes after a
kill.
"""

import filecmp
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_qlora.training.forward import ForwardPass
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_is_as_large_as_the_length_of_a_row_says(dtype):
    lengths = torch.tensor([40.0] * 40 + [10.0] * 10)[:, None]
    forward: Any = SimpleNamespace(
        model=SimpleNamespace(training=True), neftune_alpha=5.0, _lengths=lengths
    )
    output = torch.zeros(1, 50, 64, dtype=dtype)
    hidden = 64
    noise = ForwardPass._add_noise(forward, torch.nn.Identity(), (), output)
    assert noise.dtype == dtype
    for rows, length in ((noise[:, :40], 40), (noise[:, 40:], 10)):
        most = 5 / (length * hidden) ** 0.5  # as TRL's: alpha / sqrt(tokens * hidden size)
        assert 0.95 * most < rows.float().abs().max() < 1.01 * most
        assert rows.float().abs().mean() == pytest.approx(most / 2, rel=0.1)
    forward.model.training = False
    assert ForwardPass._add_noise(forward, torch.nn.Identity(), (), output) is output


@pytest.mark.parametrize(
    "batching", ["padding_free", pytest.param("padded", marks=pytest.mark.slow)]
)
def test_a_resumed_run_draws_the_same_noise(batching, models, tmp_path):
    options = {"model_name": models(), "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(8))}
    options |= {
        "train_type": "lora",
        "neftune_alpha": 5,
        "save_every": 1,
        "gradient_accumulation_steps": 2,
    }
    options |= {"batching": batching, "context_length": 256}
    train_ok(2, tmp_path / "whole", **options)
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "step_000001", tmp_path / "step")
    train_ok(2, tmp_path / "resumed", resume=tmp_path / "step", **options)
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("whole", "resumed")]
    assert filecmp.cmp(*files, shallow=False)
    train_ok(2, tmp_path / "plain", **{**options, "neftune_alpha": 0})
    noisy, plain = (read_metrics(tmp_path / name)[0] for name in ("whole", "plain"))
    assert 1e-5 < abs(noisy - plain) < 0.5
