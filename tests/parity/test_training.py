"""Whole runs of train.py on several ranks, against independent references and against
each other.
"""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.metrics import read_metrics
from tests.helpers.models import Models
from tests.helpers.reference import batch_loss, encode, load_adapter, load_base
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags, on_ranks, run_ranks, train_ok

Plain = tuple[dict[str, object], list[float]]
FULL_BATCH = {
    "batch_size": 2,
    "lr": 1e-3,
    "lr_scheduler": "constant",
    "warmup": 0,
    "precision": "fp32",
}


FAMILIES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {"tie_word_embeddings": False},
}
# Of each structure one family is trained in continuous integration.
ALIKE = ("llama", "llama tied", "mistral", "qwen2", "qwen3", "gemma3_text", "olmo2", "smollm3")


@pytest.mark.parametrize("family", all_slow_but("phi3", FAMILIES, nightly=ALIKE))
def test_every_family_trains_on_two_ranks_and_peft_loads_it(family, models, tmp_path):
    folder = models(family.split()[0], **FAMILIES[family])
    rows = make_rows(12, seed=1)
    held_out = make_rows(3, seed=2)
    train_ok(
        2,
        tmp_path / "out",
        model_name=folder,
        dataset=write_rows(tmp_path / "rows.jsonl", rows),
        eval_dataset=write_rows(tmp_path / "held_out.jsonl", held_out),
        num_epochs=1,
        **FULL_BATCH,
    )
    before, after = read_metrics(tmp_path / "out", "eval_loss")
    batch = encode(folder, held_out)
    base = load_base(folder, four_bit=True)
    with torch.no_grad():
        assert batch_loss(base, batch).item() == pytest.approx(before, rel=1e-4)
        reloaded = load_adapter(base, tmp_path / "out")
        assert batch_loss(reloaded, batch).item() == pytest.approx(after, rel=1e-4)
    assert len(read_metrics(tmp_path / "out")) == 3 and abs(after - before) > 1e-3


def test_full_training_leaves_a_model_that_transformers_loads(models, tmp_path):
    folder = models("llama", tie_word_embeddings=True)
    rows = make_rows(4, seed=3)
    held_out = make_rows(3, seed=2)
    others = make_rows(4, seed=5)
    first, second = (
        write_rows(tmp_path / f"{name}.jsonl", held)
        for name, held in (("a", held_out), ("b", others))
    )
    train_ok(
        2,
        tmp_path / "out",
        model_name=folder,
        dataset=write_rows(tmp_path / "rows.jsonl", rows),
        eval_dataset=f"{first},more={second}",
        train_type="full",
        num_epochs=3,
        **FULL_BATCH,
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    AutoTokenizer.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        losses = [batch_loss(model, encode(folder, held)).item() for held in (held_out, others)]
    last = {
        name: read_metrics(tmp_path / "out", name)[-1]
        for name in ("eval_loss", "perplexity", "eval_sets")
    }
    by_name = {
        name: (result["eval_loss"], result["perplexity"])
        for name, result in last["eval_sets"].items()
    }
    assert by_name["a"] == (last["eval_loss"], last["perplexity"])
    for name, loss in zip(("a", "more"), losses, strict=True):
        assert by_name[name] == (
            pytest.approx(loss, rel=1e-5),
            pytest.approx(math.exp(loss), rel=1e-4),
        )


@pytest.fixture(scope="module")
def plain(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Options, and the losses that a run with nothing else has."""
    folder = tmp_path_factory.mktemp("plain")
    data = write_rows(folder / "rows.jsonl", make_rows(8))
    options = {"model_name": models(), "dataset": data, "num_epochs": 2, **FULL_BATCH}
    train_ok(2, folder / "out", **options)
    return options, read_metrics(folder / "out")


@pytest.mark.parametrize(
    "options",
    [{"sharding_strategy": "hybrid_full_shard"}, {"optimizer": "fused_adamw"}],
    ids=lambda options: "-".join(options),
)
def test_memory_options_do_not_change_the_losses(options, plain, tmp_path):
    train_ok(2, tmp_path / "out", **{**plain[0], **options})
    assert read_metrics(tmp_path / "out") == pytest.approx(plain[1], rel=1e-5)


def _train_reducing_in_each_micro_batch(argv: list[str]) -> int:
    import train
    from fsdp_qlora.planning import placement

    candidates = placement.candidates

    def reducing(*args: Any, **options: Any) -> Any:
        return [each._replace(accumulates=False) for each in candidates(*args, **options)]

    with mock.patch.object(placement, "candidates", reducing):
        return train.main(argv)


def test_gradients_reduced_in_each_micro_batch_are_those_reduced_once(plain, tmp_path):
    turns: dict[str, Any] = {**plain[0], "batch_size": 1, "gradient_accumulation_steps": 2}
    argv = flags(
        output_dir=tmp_path / "out", quant_cache="off", log_to="jsonl", save_every="none", **turns
    )
    statuses, output = on_ranks(2, _train_reducing_in_each_micro_batch, (argv,), tmp_path / "logs")
    assert statuses == [0, 0], output[-3000:]
    assert read_metrics(tmp_path / "out") == pytest.approx(plain[1], rel=1e-5)


def test_a_run_continues_with_another_placement_and_recompute(plain, tmp_path):
    # stops after a step
    first = {"sharding_strategy": "full_shard", "recompute": "all", "max_hours": 1e-7}
    argv = flags(
        output_dir=tmp_path / "out",
        quant_cache="off",
        **{"context_length": 512, **plain[0]},
        **first,
    )
    statuses, output = run_ranks(2, argv, tmp_path / "logs")
    assert set(statuses) not in ({0}, {1}) and len(read_metrics(tmp_path / "out")) == 1, output[
        -3000:
    ]
    said = train_ok(2, tmp_path / "out", sharding_strategy="ddp", recompute=1, **plain[0])
    assert "each rank holds a whole copy" in said
    assert read_metrics(tmp_path / "out") == pytest.approx(plain[1], rel=1e-5)


def test_dropout_changes_the_losses(plain, tmp_path):
    train_ok(2, tmp_path / "out", lora_dropout=0.3, **plain[0])
    assert read_metrics(tmp_path / "out")[1:] != pytest.approx(plain[1][1:], rel=1e-4)
