"""`fsdp-qlora quantize | cache`: what is saved against transformers' own; the cache listed and
pruned.
"""

import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
)

from fsdp_qlora.__main__ import main
from fsdp_qlora.export import model_folder
from fsdp_qlora.utils import safetensors_files
from tests.helpers.metrics import read_metrics
from tests.helpers.models import PROBE
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok
from tests.loading.test_published import save_compressed
from tests.parity.test_experts import FAMILIES

UNEVEN = {"intermediate_size": 100, "hidden_size": 60, "head_dim": 10, "num_attention_heads": 6}


@pytest.mark.parametrize(
    ("quant_type", "double_quant", "tied"),
    [("nf4", True, True), ("nf4", False, False), ("fp4", True, False)],
)
def test_the_saved_model_is_the_one_that_transformers_quantizes(
    quant_type, double_quant, tied, models, tmp_path, monkeypatch
):
    source = models("llama", tie_word_embeddings=tied, **UNEVEN)
    out = tmp_path / "out"
    monkeypatch.setattr(safetensors_files, "_FILE_BYTES", 50_000)  # several files
    argv = ["--quant_type", quant_type, "--double_quant", str(double_quant).lower()]
    assert main(["quantize", str(source), "--out", str(out), *argv]) == 0
    assert len(list(out.glob("*.safetensors"))) > 1 and not list(tmp_path.glob("*.partial"))
    options = {"bnb_4bit_quant_type": quant_type, "bnb_4bit_use_double_quant": double_quant}
    # bfloat16 is what ours writes into config.json.
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **options
    )
    common = {"dtype": torch.float32, "device_map": "cpu"}
    expected = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=quantization, **common
    )
    saved = AutoModelForCausalLM.from_pretrained(out, **common)
    state = saved.state_dict()
    expected_state = expected.state_dict()
    assert state.keys() == expected_state.keys()
    for name, value in expected_state.items():
        if "quant_state" not in name:  # JSON, padded in ours
            assert torch.equal(state[name].cpu(), value.cpu()), name
    # in eval mode bitsandbytes repacks weights for some CPUs, and fails on these shapes
    with torch.no_grad():
        assert torch.equal(saved.train()(PROBE).logits, expected.train()(PROBE).logits)
    assert AutoTokenizer.from_pretrained(out)("sort the list") == AutoTokenizer.from_pretrained(
        source
    )("sort the list")


# tests/loading/test_prequantized.py trains models of the form that transformers writes too.
@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("mixtral", marks=pytest.mark.nightly)])
def test_saved_experts_train_as_the_weights_they_were_made_of(
    family, models, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(model_folder, "_PIECE_BYTES", 8192)  # weights in several pieces
    source = models(family, **FAMILIES[family])
    out = tmp_path / "model"
    caplog.set_level("INFO", "fsdp_qlora")
    assert main(["quantize", str(source), "--out", str(out)]) == 0
    assert "training can load the saved model, transformers cannot" in caplog.text
    common = {
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(6)),
        "lr": 1e-3,
        "precision": "fp32",
    }
    ours = train_ok(2, tmp_path / "ours", model_name=source, **common)
    saved = train_ok(2, tmp_path / "saved", model_name=out, **common)
    assert read_metrics(tmp_path / "saved") == read_metrics(tmp_path / "ours")
    # What is quantized and how much of it.
    assert (
        re.findall("^Model: .*$", saved, re.MULTILINE)
        == re.findall("^Model: .*$", ours, re.MULTILINE)
        != []
    )


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "fp8"])
def test_a_saved_published_format_is_the_one_of_its_library(form, models, tmp_path, monkeypatch):
    monkeypatch.setattr(model_folder, "_PIECE_BYTES", 4096)  # weights in several pieces
    source = models("llama")
    out = tmp_path / "out"
    reference = tmp_path / "reference"
    assert main(["quantize", str(source), "--out", str(out), "--format", form]) == 0
    save_compressed(source, reference, "fp8 rows" if form == "fp8" else form, ignore=["lm_head"])
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, reference))
    assert ours.keys() == theirs.keys() and len(ours) > 30
    for name, value in theirs.items():
        found = ours[name]
        assert found.shape == value.shape and torch.equal(
            found.view(torch.uint8), value.view(torch.uint8)
        ), name
    # transformers' forward pass with what the library decodes.
    kind = {
        "dtype": torch.float32,
        "quantization_config": CompressedTensorsConfig(run_compressed=False),
    }
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, **kind)(PROBE).logits
        for folder in (out, reference)
    ]
    assert torch.equal(*logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "family"),
    [
        ("mxfp4", "qwen3_moe"),
        ("nvfp4", "llama"),
        pytest.param("fp8", "qwen3_moe", marks=pytest.mark.nightly),
    ],
)
def test_a_saved_published_format_is_trained_as_it_is(form, family, models, tmp_path):
    source = models(family, **FAMILIES.get(family, {}))
    out = tmp_path / "model"
    assert main(["quantize", str(source), "--out", str(out), "--format", form]) == 0
    common = {
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(6)),
        "lr": 1e-3,
        "precision": "bf16",
    }
    train_ok(2, tmp_path / "ours", model_name=source, quant_type=form, **common)
    assert "trained on as they are" in train_ok(2, tmp_path / "saved", model_name=out, **common)
    assert read_metrics(tmp_path / "saved") == read_metrics(tmp_path / "ours")


def test_quantize_refuses_bad_input_and_leaves_nothing(models, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for argv, words in {
        ("quantize",): "Give MODEL and --out DIR",
        ("quantize", str(models()), "--out", str(tmp_path / "full")): "full exists already and is "
        "not empty",
        ("quantize", "./absent", "--out", str(tmp_path / "out")): "there is no such folder",
        ("expand", str(models()), "--out", str(tmp_path / "out")): "would add 0 blocks to the "
        "model's 2",
    }.items():
        assert main(list(argv)) == 2
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
