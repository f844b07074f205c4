"""Which of SDPA's kernels is taken: torch's own choice, which needs no GPU but a card's number."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.phantom import environment
from tests.tiny import flags, make_rows, write_rows

# train.py, and then the operators that computed attention.
LOOK = """
import sys
import torch
import train

with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    status = train.main(sys.argv[1:])
print("took", *sorted(event.key for event in profile.key_averages() if "scaled_dot_product" in event.key))
sys.exit(status)
"""
MATH = "aten::_scaled_dot_product_attention_math"


@pytest.mark.parametrize(
    ("capability", "precision", "words"),
    [
        (75, "fp16", "torch's memory-efficient kernel, keys and values repeated for each head"),
        (86, "fp32", "torch's memory-efficient kernel, keys and values repeated for each head"),
        (86, "bf16", "torch's flash kernel"),
        (90, "bf16", "torch's flash kernel"),
    ],
)
def test_grouped_keys_and_values_take_no_kernel_that_keeps_all_scores(
    capability: int, precision: str, words: str, models: Callable[..., Path], tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    options = {"train_type": "qlora", "max_steps": 1, "batch_size": 2, "context_length": 256, "quant_cache": "off"}
    argv = flags(model_name=models("llama"), dataset=rows, precision=precision, output_dir=tmp_path / "out", **options)
    (tmp_path / "look.py").write_text(LOOK)
    (ended,) = environment.run([tmp_path / "look.py", *argv], tmp_path / "logs", settings={"PHANTOM_CC": capability})
    assert ended.status == 0, ended.output[-3000:]
    assert f"Attention: {words}" in ended.output
    assert "took aten::_scaled_dot_product" in ended.output and MATH not in ended.output
