"""Weights and block inputs in host memory do not change a bit of what a run on one rank does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_rows, read_metrics, train_ok, write_rows

BOTH = {"use_cpu_offload": True, "use_activation_cpu_offload": True}


@pytest.mark.parametrize(
    ("train_type", "tied", "offloads"),
    [
        ("qlora", False, [{"use_cpu_offload": True}, BOTH, {"use_cpu_offload": True, "recompute": "none"}]),
        ("lora", True, [{"use_cpu_offload": True}, {"use_cpu_offload": 2}]),
        ("hqq_dora", False, [BOTH]),
    ],
)
def test_a_run_with_offload_is_the_one_without(
    models: Callable[..., Path], tmp_path: Path, train_type: str, tied: bool, offloads: list[dict[str, Any]]
) -> None:
    options = {
        "model_name": models(tie_word_embeddings=tied, num_hidden_layers=3),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(20)),
        "train_type": train_type,
        "eval_fraction": 0.2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "lr": 1e-2,
    }
    results = []
    for number, offload in enumerate([{}, *offloads]):
        out = tmp_path / str(number)
        train_ok(1, out, **options, **offload)
        adapter = (out / "adapter_model.safetensors").read_bytes()
        results.append((read_metrics(out), read_metrics(out, "eval_loss"), adapter))
    assert all(result == results[0] for result in results)
