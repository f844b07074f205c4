"""Runs of four steps whose losses and results are compared to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.helpers.metrics import read_metrics
from tests.helpers.models import Models
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks
from tests.preferences.pairs import make_pairs


def options_of(
    changes: dict[str, Any], models: Models, folder: Path, *, num_blocks: int
) -> dict[str, Any]:
    """The options of a run on few rows. family: of the model, among the changes."""
    rows: Any = make_pairs(16) if "objective" in changes else make_rows(16)
    model = models(changes.get("family", "llama"), num_hidden_layers=num_blocks)
    options = {
        "model_name": model,
        "dataset": write_rows(folder / "rows.jsonl", rows),
        "context_length": 256,
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "lr": 1e-2,
        **changes,
    }
    options.pop("family", None)
    return options


def trained(
    ranks: int,
    folder: Path,
    options: dict[str, Any],
    train_rank: Callable[[list[str], bool], int],
    argument: bool,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a run, and its result.

    train_rank, argument: the program of a rank, and what it gets besides the words.
    """
    argv = flags(output_dir=folder, quant_cache="off", log_to="jsonl", **options)
    statuses, output = on_ranks(ranks, train_rank, (argv, argument), folder.parent / "logs")
    assert statuses == [0] * ranks, output[-4000:]
    name = "model" if options.get("train_type") == "full" else "adapter_model"
    return read_metrics(folder), load_file(folder / f"{name}.safetensors")
