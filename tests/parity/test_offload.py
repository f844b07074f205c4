"""Weights and block inputs in host memory do not change a bit of what a run on one rank does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import flags, make_rows, read_metrics, run_ranks, train_ok, write_rows

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


@pytest.mark.parametrize(
    "options",
    [
        {"train_type": "full"},
        {"train_type": "qlora", "modules_to_save": "embed_tokens,lm_head"},
        {"train_type": "lora"},
    ],
    ids=["full", "modules_to_save", "adapters"],
)
def test_a_run_continues_with_another_offload(
    models: Callable[..., Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    options |= {
        "model_name": models(num_hidden_layers=3),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(20)),
        "max_steps": 4,
        "lr": 1e-2,
    }
    one_go, parts = tmp_path / "one_go", tmp_path / "parts"
    train_ok(1, one_go, **options)
    for number, offload in enumerate((False, 2, True)):  # each but the last ends after a step
        argv = flags(output_dir=parts, log_to="stdout", quant_cache="off", **options, use_cpu_offload=offload)
        stop = ["--max_hours", "1e-7"] if number < 2 else []
        [status], output = run_ranks(1, [*argv, *stop], tmp_path / f"logs{number}")
        assert status == (3 if stop else 0), output
    saved = [[path.read_bytes() for path in sorted(out.glob("*.safetensors"))] for out in (one_go, parts)]
    assert saved[0] and saved[0] == saved[1]
