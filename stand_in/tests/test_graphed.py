"""Blocks of a run are captured on the stand-in, and train to the bits of the same run without."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stand_in.environment import run
from tests.helpers.metrics import read_metrics
from tests.helpers.models import Models
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, flags

PROGRAM = ROOT / "stand_in/programs/graphed_blocks.py"
OPTIONS: dict[str, Any] = {
    "train_type": "qlora",
    "precision": "bf16",
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "recompute": "all",
    "context_length": 512,
    "quant_cache": "off",
    "log_to": "stdout",
    "kernels": "auto",
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_captured_blocks_train_to_the_same_bits(ranks: int, models: Models, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", make_rows(32))
    words = flags(**OPTIONS, model_name=models(), dataset=tmp_path / "rows.jsonl")
    settings: dict[str, object] = {"PHANTOM_VALUES": 1, "PHANTOM_CC": 90}
    for way in ("plain", "graphs"):
        out = flags(output_dir=tmp_path / way)
        arguments = [PROGRAM, way, tmp_path / "notes", *words, *out]
        ended = run(arguments, tmp_path / f"of_{way}", ranks=ranks, settings=settings)
        assert [rank.status for rank in ended] == [0] * ranks, ended[0].output[-4000:]
        assert "Graphs: not" not in ended[0].output
    plain, graphs = (tmp_path / way for way in ("plain", "graphs"))
    for entry in ("loss", "grad_norm"):
        assert read_metrics(plain, entry) == read_metrics(graphs, entry)
    adapter = load_file(graphs / "adapter_model.safetensors")
    for name, values in load_file(plain / "adapter_model.safetensors").items():
        assert torch.equal(values, adapter[name]), name
    for rank in range(ranks):
        filled = json.loads((tmp_path / f"notes.{rank}").read_text())
        # Documents have other lengths in each micro-batch, and yet share graphs.
        assert len(filled) < 4 and sum(filled) > 2 * 2 * 2 * 4
