"""The benchmarks' own logic, on shapes too small to measure anything."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import common, dora, gpu, overhead


def _run(main: Any, *argv: str, output: Path) -> tuple[int, dict[str, Any]]:
    status = main([*argv, "--output", str(output)])
    return status, json.loads(output.read_text())


def test_our_loop_and_the_hand_written_ones_do_the_same_work(tmp_path: Path) -> None:
    shape = ["--hidden", "128", "--layers", "1", "--vocab", "128", "--length", "24"]
    # Far too small to be fast, so the exit status does not count.
    _, result = _run(overhead.main, *shape, "--steps", "2", "--warmup_steps", "1", output=tmp_path / "out.json")
    assert len(result["loops"]) == 3
    assert result["loss_difference"] < overhead.LOSS_TOLERANCE
    assert all(math.isfinite(row["ratio"]) and row["ratio"] > 0 for row in result["loops"].values())
    assert result["loops"]["ours"]["last_loss"] < result["loops"]["ours"]["first_loss"]


def test_dora_benchmark_measures_time_and_memory_of_all_four_layers(tmp_path: Path) -> None:
    shape = ["--in_features", "256", "--out_features", "512", "--tokens", "64", "--steps", "1"]
    _, result = _run(dora.main, *shape, output=tmp_path / "out.json")
    assert list(result["layers"]) == ["lora", "dora", "peft lora", "peft dora"]
    # At least the output of the layer; what DoRA keeps beyond LoRA is one more of these, and no weight.
    assert result["layers"]["lora"]["peak_bytes"] > 64 * 512 * 4
    assert result["extra_peak_bytes"] < 2 * 64 * 512 * 4 < result["decoded_weight_bytes"]


def test_gpu_benchmark_trains_random_weights_with_the_base_in_place_and_offloaded(tmp_path: Path) -> None:
    status, result = _run(gpu.main, "--tiny", "--steps", "3", "--precision", "bf16", output=tmp_path / "out.json")
    assert status == 0, result
    in_place, offloaded = [case for case in result["cases"] if case["attention"] == "sdpa"]
    assert offloaded["losses"] == pytest.approx(in_place["losses"], rel=1e-3)
    assert {"codes", "statistics", "frozen", "trainable"} < set(in_place["account_bytes"])
    assert set(offloaded["account_bytes"]) == {"trainable", "optimizer state"}
    # The account's estimate of the optimizer's state, against the state itself (and its step counters).
    assert in_place["optimizer_state_bytes"] == pytest.approx(in_place["account_bytes"]["optimizer state"], rel=0.01)
    assert list(in_place["memory_bytes"]) == ["before", "planned", "loaded and verified", "first steps", "steps"]


def test_gpu_benchmark_says_so_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_random_weights_are_the_same_however_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_CHUNK", 1000)
    name = "model.layers.0.mlp.up_proj.weight"
    source = common.RandomWeights(LlamaConfig(**gpu.SHAPES["tiny"]), torch.float32, torch.device("cpu"))
    whole = source.read_rows(name, 0, 256)
    assert whole.shape == source.shape(name) and whole.std().item() == pytest.approx(0.02, rel=0.02)
    assert torch.equal(source.read_rows(name, 3, 77), whole[3:77])
    assert torch.equal(source.read_flat(name, 999, 2001), whole.view(-1)[999:2001])
    assert not torch.equal(whole, source.read_rows(name.replace("up", "gate"), 0, 256))


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA GeForce RTX 3090", 71.0), ("NVIDIA L40S", 362.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("RTX A1000", None)],
)
def test_the_peak_is_that_of_the_longest_name_that_fits(name: str, peak: float | None) -> None:
    assert gpu.peak_tflops(name) == peak


def test_flops_of_a_7b_step_are_those_counted_by_hand() -> None:
    config = LlamaConfig(**gpu.SHAPES["7b"])
    linear = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    total, recomputed = gpu.flops_per_step(
        config, linear_weights=linear, lora_weights=0, num_rows=1, length=1000, num_targets=1000
    )
    attention = 32 * 32 * 2 * (1000 * 1000 / 2 * 128 * 2)  # layers, heads, products, a multiply-add per pair and dim
    assert recomputed == pytest.approx(2 * linear * 1000 + attention)
    assert total == pytest.approx(3 * recomputed + attention + 4 * 32000 * 4096 * 1000)
