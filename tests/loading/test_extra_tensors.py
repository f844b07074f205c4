"""Tensors of a model's files that its class does not build take no part, as in transformers, and a
line names them.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fsdp_qlora.__main__ import main
from tests.helpers.metrics import read_metrics
from tests.helpers.models import edit_weights, make_model
from tests.helpers.reference import batch_loss, encode, peft_model
from tests.helpers.rows import write_rows
from tests.helpers.run import flags, train_ok
from tests.loading.test_heads import ONE_STEP, ROWS, read_model

SAYS = (
    "Qwen3ForCausalLM does not build: model.layers.2.a.weight, model.layers.2.b.weight, "
    "mtp.c.weight (4 in all)"
)


def with_more(folder: Path) -> Path:
    """A model with a layer behind its last, and with what predicts a second token."""
    more = {
        f"{prefix}.weight": torch.ones(2, 2)
        for prefix in ("model.layers.2.a", "model.layers.2.b", "mtp.c", "mtp.d")
    }
    return edit_weights(make_model(folder, "qwen3"), lambda weights: weights.update(more))


def test_extra_tensors_change_nothing_and_a_line_names_them(tmp_path):
    folder = with_more(tmp_path / "model")
    options = {
        "model_name": folder,
        "dataset": write_rows(tmp_path / "rows.jsonl", ROWS),
        "train_type": "lora",
    }
    assert SAYS in train_ok(1, tmp_path / "out", **options, **ONE_STEP)
    with torch.no_grad():
        expected = batch_loss(read_model(folder), encode(folder, ROWS)).item()
    assert read_metrics(tmp_path / "out")[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("command", ["merge", "nf4", "nvfp4", "expand"])
def test_a_line_says_whether_a_result_has_the_extra_tensors(command, tmp_path, capsys):
    folder = with_more(tmp_path / "model")
    out = tmp_path / "out"
    if command == "merge":
        peft_model(AutoModelForCausalLM.from_pretrained(folder), r=2).save_pretrained(
            tmp_path / "adapter"
        )
        argv = ["merge", *flags(adapter=tmp_path / "adapter", model_name=folder, out=out)]
    elif command == "expand":
        argv = ["expand", str(folder), *flags(out=out, expansion_rate=0.5)]
    else:
        argv = ["quantize", str(folder), *flags(out=out, quant_type=command)]
    assert main(argv) == 0
    said = "".join(capsys.readouterr())
    has_them = command in ("merge", "nvfp4")
    assert (
        SAYS in said and ("as they are." in said) == has_them and ("lacks them" in said) != has_them
    )
    assert ("mtp.c.weight" in load_file(out / "model.safetensors")) == has_them
