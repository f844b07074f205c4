"""Rope types that depend on the batch are named where the rows are long enough for that."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import make_rows, train_ok, write_rows

Models = Callable[..., Path]
LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
ROPES = {
    "dynamic": ("llama", {"max_position_embeddings": 64}, {}),
    "longrope": ("phi3", {"original_max_position_embeddings": 64, "pad_token_id": 0}, LONGROPE),
    "yarn": ("llama", {}, {"original_max_position_embeddings": 64}),
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_rope_that_depends_on_the_batch_is_named(kind: str, models: Models, tmp_path: Path) -> None:
    family, sizes, more = ROPES[kind]
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, **more}
    options = {"model_name": models(family, rope_parameters=rope, **sizes), "train_type": "lora", "dry_run": True}
    options["dataset"] = write_rows(tmp_path / "rows.jsonl", make_rows(4))
    says = f"Rope type {kind} changes with the longest row of a batch once one has more than 64 tokens"
    assert (says in train_ok(1, tmp_path / "out", context_length=256, **options)) == (kind != "yarn")
