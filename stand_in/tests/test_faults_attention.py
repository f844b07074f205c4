"""Which of SDPA's kernels is taken: torch's own choice, which needs no GPU but a card's number."""

import pytest

from stand_in import environment
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags

# train.py, and then the operators that computed attention backward.
LOOK = """
import sys
import torch
import train

with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    status = train.main(sys.argv[1:])
keys = sorted(event.key for event in profile.key_averages())
print("took", *(key for key in keys if "attention_backward" in key))
sys.exit(status)
"""
EFFICIENT = {
    "aten::_efficient_attention_backward",
    "aten::_scaled_dot_product_efficient_attention_backward",
}
VARLEN = {"aten::_flash_attention_backward"}
FLASH = {*VARLEN, "aten::_scaled_dot_product_flash_attention_backward"}
REPEATED = ", keys and values repeated for each head"


@pytest.mark.parametrize(
    ("capability", "precision", "padding", "words", "operators"),
    [
        (
            75,
            "fp16",
            False,
            f"torch's memory-efficient kernel{REPEATED}, a row at a time",
            EFFICIENT,
        ),
        (80, "bf16", False, "torch's flash kernel for rows of any lengths", VARLEN),
        pytest.param(86, "bf16", True, "torch's flash kernel\n", FLASH, marks=pytest.mark.slow),
        (75, "fp16", True, f"torch's memory-efficient kernel{REPEATED}\n", EFFICIENT),
    ],
)
def test_no_kernel_that_keeps_all_scores_is_taken(
    capability, precision, padding, words, operators, models, tmp_path
):
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    options = {
        "train_type": "qlora",
        "max_steps": 1,
        "batch_size": 2,
        "context_length": 256,
        "quant_cache": "off",
    }
    options |= {
        "dataset": rows,
        "precision": precision,
        "batching": "padded" if padding else "padding_free",
        "output_dir": tmp_path / "out",
        "verbose": True,
    }
    argv = flags(model_name=models("llama"), **options)
    (tmp_path / "look.py").write_text(LOOK)
    (ended,) = environment.run(
        [tmp_path / "look.py", *argv], tmp_path / "logs", settings={"PHANTOM_CC": capability}
    )
    assert ended.status == 0, ended.output[-3000:]
    assert f"Attention: {words}" in ended.output
    assert "Rows are padded with this model" not in ended.output
    assert set(ended.output.rpartition("took ")[2].split()) == operators


def test_heads_that_the_varlen_kernel_does_not_take_go_to_sdpa(models, tmp_path):
    """SDPA pads heads of 12 to 16 for its flash kernel; torch's operator for rows of any lengths
    raises.
    """
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    options = {
        "train_type": "qlora",
        "max_steps": 1,
        "batch_size": 2,
        "context_length": 256,
        "quant_cache": "off",
    }
    options |= {
        "dataset": rows,
        "precision": "bf16",
        "output_dir": tmp_path / "out",
        "verbose": True,
    }
    argv = flags(model_name=models("llama", head_dim=12), **options)
    (ended,) = environment.run(["train.py", *argv], tmp_path / "logs")
    assert ended.status == 0, ended.output[-3000:]
    assert "Attention: torch's flash kernel, a row at a time" in ended.output


@pytest.mark.slow
def test_heads_too_wide_for_flash_go_to_sdpa_and_all_others_do_not(models, tmp_path):
    """As in gemma4: each sixth block has heads of 512. Losses are those of the CPU, on rows one
    after another.
    """
    kinds = ["sliding_attention", "full_attention"]
    sizes = {
        "num_hidden_layers": 2,
        "layer_types": kinds,
        "sliding_window": 64,
        "global_head_dim": 512,
    }
    model = models("gemma4_text", **sizes, hidden_size_per_layer_input=0)
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    options = {
        "train_type": "lora",
        "max_steps": 2,
        "batch_size": 4,
        "context_length": 256,
        "quant_cache": "off",
    }
    options |= {
        "dataset": rows,
        "precision": "bf16",
        "verbose": True,
        "lora_target_modules": "all-linear",
    }
    (tmp_path / "look.py").write_text(LOOK)
    losses = []
    for place, settings in (("cpu", {"CUDA_VISIBLE_DEVICES": ""}), ("card", {"PHANTOM_VALUES": 1})):
        argv = flags(model_name=model, **options, output_dir=tmp_path / place)
        (ended,) = environment.run(
            [tmp_path / "look.py", *argv], tmp_path / f"{place} logs", settings=settings
        )
        assert ended.status == 0, ended.output[-3000:]
        losses.append(read_metrics(tmp_path / place))
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert "Attention: torch's flash kernel for rows of any lengths" in ended.output
    assert set(ended.output.rpartition("took ")[2].split()) == VARLEN | EFFICIENT
