"""Embeddings and head share a tensor where transformers shares it: the weight files decide, not the
configuration.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from fsdp_qlora.__main__ import main
from fsdp_qlora.export.expand import expand_model
from tests.helpers.metrics import read_metrics
from tests.helpers.models import PROBE, SIZES, edit_weights, make_model
from tests.helpers.reference import batch_loss, encode, load_adapter, peft_model
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, train_ok
from tests.loading.test_prequantized import set_config
from tests.parity.test_multimodal import make_multimodal

ROWS = make_rows(8, seed=3)
ONE_STEP = {
    "max_steps": 2,
    "lr": 1e-2,
    "warmup": 0,
    "lr_scheduler": "constant",
    "precision": "fp32",
    "batch_size": 8,
}


def add_head(weights: dict[str, torch.Tensor], name: str = "lm_head.weight") -> None:
    weights[name] = torch.randn(
        SIZES["vocab_size"], SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)
    )
    weights[name] *= 0.1


def tied_model(folder: Path, family: str = "llama", edit: Callable[..., object] = add_head) -> Path:
    """A model whose config.json ties embeddings and head, with other weights than it says."""
    return edit_weights(make_model(folder, family, tie_word_embeddings=True), edit)


def as_published(folder: Path, family: str) -> Path:
    """A model for images and text whose config.json leaves the setting out, on both levels, and
    which has a head.
    """
    folder.mkdir()
    if family == "ministral3":
        make_multimodal(folder, "mistral3", family)
    else:
        make_multimodal(folder, family)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    config["text_config"].pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_model(folder: Path, auto: Any = AutoModelForCausalLM) -> torch.nn.Module:
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return read_model(folder)(input_ids=PROBE).logits


def is_tied(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", True))


def head_alone(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")


def same_head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


MADE: dict[str, tuple[Callable[[Path], Path], Any]] = {
    "llama": (tied_model, AutoModelForCausalLM),
    "qwen2, the head alone": (
        lambda folder: tied_model(folder, "qwen2", head_alone),
        AutoModelForCausalLM,
    ),
    **{
        family: (
            lambda folder, family=family: as_published(folder, family),
            AutoModelForImageTextToText,
        )
        for family in ("mistral3", "ministral3", "internvl", "kimi_k25")
    },
}


@pytest.mark.parametrize(
    "case",
    ["llama", *(pytest.param(case, marks=pytest.mark.slow) for case in MADE if case != "llama")],
)
def test_a_model_trains_with_the_head_that_transformers_reads(case, tmp_path):
    make, auto = MADE[case]
    folder = make(tmp_path / "model")
    options = {
        "model_name": folder,
        "dataset": write_rows(tmp_path / "rows.jsonl", ROWS),
        "train_type": "lora",
    }
    ranks = 2 if case == "mistral3" else 1
    output = train_ok(
        ranks, tmp_path / "out", **options, **ONE_STEP, eval_dataset=options["dataset"]
    )
    batch = encode(folder, ROWS)
    with torch.no_grad():
        expected = batch_loss(read_model(folder, auto), batch).item()
        trained = batch_loss(load_adapter(read_model(folder, auto), tmp_path / "out"), batch).item()
    assert read_metrics(tmp_path / "out")[0] == pytest.approx(expected, rel=1e-5)
    assert read_metrics(tmp_path / "out", "eval_loss")[-1] == pytest.approx(trained, rel=1e-5)
    assert ("have a separate head" in output) == (case != "qwen2, the head alone")


@pytest.mark.parametrize(
    "train_type", ["full", pytest.param("bnb_llama_pro", marks=pytest.mark.slow)]
)
def test_a_trained_model_keeps_its_head(train_type, tmp_path):
    base = tied_model(tmp_path / "model")
    if train_type != "full":
        expand_model(str(base), tmp_path / "expanded", expansion_rate=0.5)
        assert torch.equal(logits(base), logits(tmp_path / "expanded"))
        base = tmp_path / "expanded"
        set_config(base, tie_word_embeddings=True)
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    options = {"model_name": base, "dataset": rows, "eval_dataset": rows, "train_type": train_type}
    train_ok(1, tmp_path / "out", **options, **ONE_STEP)
    assert not is_tied(tmp_path / "out")
    before, after = (
        load_file(folder / "model.safetensors")["lm_head.weight"]
        for folder in (base, tmp_path / "out")
    )
    assert torch.equal(before, after) == (train_type != "full")
    if train_type == "full":
        with torch.no_grad():
            loss = batch_loss(read_model(tmp_path / "out"), encode(base, ROWS)).item()
        assert read_metrics(tmp_path / "out", "eval_loss")[-1] == pytest.approx(loss, rel=1e-5)


def peft_adapter(base: Path, folder: Path, **options: object) -> torch.nn.Module:
    """An adapter as PEFT saves it, with random values, on the base as transformers reads it."""
    torch.manual_seed(2)
    model = peft_model(read_model(base), r=2, **options)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return model.eval()


def test_what_merge_and_quantize_write_has_the_models_own_head(tmp_path):
    base = tied_model(tmp_path / "model")
    with torch.no_grad():
        expected = peft_adapter(base, tmp_path / "adapter")(input_ids=PROBE).logits
    merged = tmp_path / "merged"
    assert main(["merge", *flags(adapter=tmp_path / "adapter", model_name=base, out=merged)]) == 0
    assert not is_tied(merged) and (logits(merged) - expected).abs().max() < 1e-4
    head = load_file(base / "model.safetensors")["lm_head.weight"]
    for quant_type in ("nf4", "nvfp4"):
        out = tmp_path / quant_type
        assert main(["quantize", str(base), *flags(out=out, quant_type=quant_type)]) == 0
        assert not is_tied(out) and torch.equal(
            load_file(out / "model.safetensors")["lm_head.weight"], head
        )


@pytest.mark.parametrize("edit", [same_head, head_alone])
def test_new_tokens_are_merged_into_both_ends_of_a_tied_model(edit, tmp_path):
    base = tied_model(tmp_path / "model", edit=edit)
    with torch.no_grad():
        tokens = {"embed_tokens": [2, 3]}
        expected = peft_adapter(base, tmp_path / "adapter", trainable_token_indices=tokens)(
            input_ids=PROBE
        ).logits
    merged = tmp_path / "merged"
    assert main(["merge", *flags(adapter=tmp_path / "adapter", model_name=base, out=merged)]) == 0
    assert is_tied(merged) and (logits(merged) - expected).abs().max() < 1e-4


def test_new_tokens_need_a_config_that_peft_reads_as_transformers(tmp_path, capsys):
    base = tied_model(tmp_path / "model")
    options = {
        "model_name": base,
        "dataset": write_rows(tmp_path / "rows.jsonl", ROWS),
        "add_tokens": "<new>",
    }
    assert main(["train", *flags(output_dir=tmp_path / "out", nproc_per_node=1, **options)]) == 2
    assert "Set tie_word_embeddings to false in config.json" in capsys.readouterr().err
    set_config(base, tie_word_embeddings=False)
    assert (
        main(
            [
                "train",
                *flags(output_dir=tmp_path / "out", nproc_per_node=1, dry_run=True, **options),
            ]
        )
        == 0
    )


# (config's setting, the index names a head, the text model's setting) -> the head is counted
PLANS = {
    "tied, no files": (True, None, 0),
    "tied, no head": (True, False, 0),
    "tied, a head": (True, True, 0),
    "not said, a head": (None, True, 1),
    "not said, no files": (None, None, 1),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_without_weights_says_which_head_it_counts(case, tmp_path, capsys):
    setting, has_head, heads = PLANS[case]
    folder = as_published(tmp_path / "model", "mistral3")
    names = load_file(folder / "model.safetensors").keys()
    (folder / "model.safetensors").unlink()
    if has_head is not None:
        kept = [name for name in names if has_head or "lm_head" not in name]
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(kept, "a.safetensors")})
        )
    if setting is not None:
        set_config(folder, tie_word_embeddings=setting)
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    status = main(
        ["train", *flags(model_name=folder, dataset=rows, dry_run=True, nproc_per_node=1)]
    )
    said = "".join(capsys.readouterr())
    assert status == 0, said
    form = "a head of its own" if heads else "one tensor for embeddings and head"
    decides = "The configuration decides" in said
    assert decides == (case != "tied, no head")
    assert (f"no weights are here: {form}" in said) == decides
