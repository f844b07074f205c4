"""Rope types whose frequencies depend on a row's length take that of each row alone, whatever is
beside or before.
"""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.metrics import read_metrics
from tests.helpers.models import Models
from tests.helpers.reference import batch_loss, encode
from tests.helpers.rounding import SGD
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, run_ranks, train_ok

LENGTH = 150  # up to which the frequencies are those of any row; of 8 rows three are longer
ROPES = {
    "dynamic": ("llama", {"max_position_embeddings": LENGTH}, {}),
    "longrope": (
        "phi3",
        {"original_max_position_embeddings": LENGTH, "pad_token_id": 0},
        {
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": LENGTH,
        },
    ),
}


def make(kind: str, models: Models, length: int = LENGTH) -> Path:
    family, sizes, more = (
        {name: length if size == LENGTH else size for name, size in part.items()}
        if isinstance(part, dict)
        else part
        for part in ROPES[kind]
    )
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, **more}
    return models(family, rope_parameters=rope, **sizes)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("dynamic", marks=pytest.mark.slow),
        pytest.param("longrope", marks=pytest.mark.nightly),
    ],
)
def test_losses_and_bytes_do_not_depend_on_neighbours(kind, models, tmp_path):
    folder = make(kind, models)
    rows = make_rows(8)
    options = {
        "model_name": folder,
        "dataset": write_rows(tmp_path / "rows.jsonl", rows),
        "num_epochs": 2,
        **SGD,
    }
    options |= {"train_type": "lora", "precision": "fp32", "context_length": 256}
    alone, evaluated, stopped = (tmp_path / name for name in ("alone", "evaluated", "stopped"))
    train_ok(1, evaluated, **options, batch_size=4, eval_dataset=options["dataset"], eval_steps=1)
    options |= {"batch_size": 1, "gradient_accumulation_steps": 2}
    train_ok(2, alone, **options)
    assert read_metrics(evaluated) == pytest.approx(read_metrics(alone), rel=1e-5)

    statuses, _ = run_ranks(
        2,
        flags(output_dir=stopped, quant_cache="off", max_hours=1e-7, **options),
        tmp_path / "logs",
    )
    assert statuses == [3, 3] and len(read_metrics(stopped)) == 1
    train_ok(2, stopped, **options)
    adapter = "adapter_model.safetensors"
    assert (stopped / adapter).read_bytes() == (alone / adapter).read_bytes()

    documents = encode(folder, rows)
    assert (
        min(ids.shape[1] for ids, _ in documents)
        < LENGTH
        < max(ids.shape[1] for ids, _ in documents)
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():  # the model keeps what a long row has changed
        sums = [
            batch_loss(copy.deepcopy(model), [row]) * (row[1][:, 1:] != -100).sum()
            for row in documents
        ]
    mean = sum(sums).item() / sum(int((labels[:, 1:] != -100).sum()) for _, labels in documents)
    assert read_metrics(evaluated, "eval_loss")[0] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("kind", ROPES)
def test_a_model_for_rows_shorter_than_the_probes_is_not_padded(kind, models, tmp_path):
    folder = make(kind, models, length=32)
    rows = make_rows(8)
    options = {
        "model_name": folder,
        "dataset": write_rows(tmp_path / "rows.jsonl", rows),
        "max_steps": 1,
    }
    output = train_ok(
        1,
        tmp_path / "out",
        **options,
        train_type="lora",
        precision="fp32",
        batch_size=8,
        lora_dropout=0,
    )
    assert "Rows are padded" not in output and "Rope type" not in output
    documents = encode(folder, rows)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        sums = [
            batch_loss(copy.deepcopy(model), [row]) * (row[1][:, 1:] != -100).sum()
            for row in documents
        ]
    mean = sum(sums).item() / sum(int((labels[:, 1:] != -100).sum()) for _, labels in documents)
    assert read_metrics(tmp_path / "out")[0] == pytest.approx(mean, rel=1e-5)


def test_a_warning_comes_where_a_trial_finds_that_rows_must_be_padded(models, tmp_path):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    folder = models("stablelm", rope_parameters=rope, max_position_embeddings=32)
    options = {
        "model_name": folder,
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        "max_steps": 1,
    }
    output = train_ok(1, tmp_path / "out", **options, train_type="lora")
    assert ("Rows are padded with this model") in output and output.count(
        "Rope type dynamic changes with"
    ) == 1


@pytest.mark.quick
def test_rows_that_are_padded_or_divided_are_not_promised_that(models, tmp_path):
    options = {
        "model_name": make("longrope", models),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4)),
    }
    options |= {"train_type": "lora", "dry_run": True, "context_length": 256}
    says = (
        "Rope type longrope changes with the longest row of a padded batch once one has more "
        f"than {LENGTH} tokens"
    )
    assert says in train_ok(1, tmp_path / "padded", batching="padded", **options)
    assert "Rope type" not in train_ok(1, tmp_path / "plain", **options)
    argv = flags(output_dir=tmp_path / "out", context_parallel_size=2, **options)
    statuses, output = run_ranks(2, argv, tmp_path / "logs")
    assert (
        statuses == [2, 2]
        and ("its rope type longrope depends on the length of whole rows") in output
    )
