"""A quantization_config of compressed-tensors, GPTQ and modelopt: what is one format, and what is
said of others.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from fsdp_qlora.model.formats.methods import take_format
from fsdp_qlora.utils.errors import UserError
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok
from tests.loading.test_prequantized import save_fp8
from tests.loading.test_published import decode, save_modelopt, save_plain

RUN = {"lr": 1e-2, "precision": "fp32", "lora_rank": 4}
NVFP4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
CHANNEL = {"type": "float", "num_bits": 8, "strategy": "channel"}
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}


def compressed(layout: str, *groups: dict[str, Any], **others: Any) -> dict[str, Any]:
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": named,
        **others,
    }


def group(weights: dict[str, Any] | None, *targets: str, **others: Any) -> dict[str, Any]:
    return {"targets": [*targets], "weights": weights, **others}


ONE_SCHEME: list[tuple[dict[str, Any], str]] = [
    (compressed("nvfp4-pack-quantized", group(NVFP4, "re:.*self_attn.*", "re:.*mlp.*")), "NVFP4"),
    (
        compressed(
            "nvfp4-pack-quantized", group(NVFP4, "re:.*self_attn.*"), group(NVFP4, "re:.*mlp.*")
        ),
        "NVFP4",
    ),
    (
        compressed(
            "float-quantized",
            group(CHANNEL, "model.layers.0.mlp.up_proj"),
            group(CHANNEL, "Linear"),
        ),
        "FP8",
    ),
    (
        compressed(
            "float-quantized", group({**CHANNEL, "strategy": "tensor"}, "a"), group(CHANNEL, "b")
        ),
        "FP8",
    ),
    (
        compressed(
            "pack-quantized",
            group(INT4, "re:.*q_proj"),
            group({**INT4, "group_size": 128}, "Linear"),
        ),
        "INT4",
    ),
    (compressed("mixed-precision", group(NVFP4, "Linear", format="nvfp4-pack-quantized")), "NVFP4"),
    (
        compressed("nvfp4-pack-quantized", group(NVFP4, "Linear"), group(None, "LlamaAttention")),
        "NVFP4",
    ),
    (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*attn.*": {}, "+:.*up.*": {"bits": 8}}},
        "GPTQ",
    ),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, "FP8"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
]


@pytest.mark.parametrize(("settings", "name"), ONE_SCHEME)
def test_one_scheme_with_several_targets_is_read(settings, name):
    found = take_format(PretrainedConfig(quantization_config=settings), "m")
    assert found is not None and found.name == name
    assert found.layer_options() is not None or name in ("FP8", "INT4", "GPTQ")


def modelopt_mixed(**layers: str) -> dict[str, Any]:
    """modelopt's settings in config.json, whose groups have the activations' types, too.

    layers: algorithm -> a layer.
    """
    eight_bits = {"dynamic": False, "num_bits": 8, "type": "float"}
    groups = {
        f"group_{index}": {"weights": eight_bits, "targets": [layer]}
        for index, layer in enumerate(layers.values())
    }
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "config_groups": groups,
        "quantized_layers": {layer: {"quant_algo": name} for name, layer in layers.items()},
    }


OTHERS: list[tuple[dict[str, Any], str]] = [
    (
        compressed("mixed-precision", group(NVFP4, "re:.*mlp.*"), group(INT4, "re:.*attn.*")),
        "group_1 has integers in another format than pack-quantized",
    ),
    (
        modelopt_mixed(NVFP4="model.layers.0.mlp.up_proj", W4A8_AWQ="model.layers.0.mlp.gate_proj"),
        "quant_algo W4A8_AWQ of model.layers.0.mlp.gate_proj changes activations too",
    ),
    (
        modelopt_mixed(FP8="lm_head", MXFP8="model.layers.1.mlp.up_proj"),
        "quantized_layers has model.layers.1.mlp.up_proj in quant_algo MXFP8, which is not one of",
    ),
    (
        compressed(
            "float-quantized", group({**CHANNEL, "group_size": 32, "strategy": "group"}, "Linear")
        ),
        "group_0 has weights of type float, num_bits 8, group_size 32",
    ),
    (
        compressed("pack-quantized", group(INT4, "a"), transform_config={"a": 1}),
        "transform_config says",
    ),
    (
        compressed("marlin-24", group(INT4, "a")),
        "group_0 has integers in another format than pack-quantized",
    ),
    (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": {"format": "marlin"}}},
        "dynamic gives the layers '+:a'",
    ),
    ({"quant_method": "gptq"}, "bits must be 2 or 3 or 4 or 8, and config.json has none"),
    (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        "quant_algo W4A8_AWQ changes activations too",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        "quant_algo FP8_PB_WO is not one of FP8, ",
    ),
    ({"quant_method": "modelopt"}, "quant_algo none is not one of FP8, "),
]


@pytest.mark.parametrize(("settings", "words"), OTHERS)
def test_what_cannot_be_read_is_said_and_not_recommended(settings, words):
    with pytest.raises(UserError) as error:
        take_format(PretrainedConfig(quantization_config=settings), "m")
    assert words in str(error.value)
    _, _, advice = str(error.value).partition("Give the model")
    assert advice == " with 16- or 32-bit weights (train_type qlora quantizes it while loading)."


def to_modelopt_file(folder: Path, algorithm: str, excluded: list[str]) -> None:
    """Leave the settings to modelopt's own file."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    content = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": algorithm, "exclude_modules": excluded},
    }
    (folder / "hf_quant_config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("algorithm", ["NVFP4", pytest.param("FP8", marks=pytest.mark.nightly)])
def test_modelopts_own_file_alone_tells_the_format(algorithm, models, tmp_path):
    folder = tmp_path / "model"
    source = models("llama")
    if algorithm == "NVFP4":
        save_modelopt(source, folder)
        excluded = ["lm_head", "*.layers.1.mlp.down_proj"]
    else:
        excluded = ["lm_head"]
        save_fp8(source, folder, "whole")
    meant = decode(folder)
    to_modelopt_file(folder, algorithm, excluded)
    common = {**RUN, "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(2))}
    plain = save_plain(source, tmp_path / "plain", meant)
    train_ok(1, tmp_path / "plain_out", model_name=plain, train_type="lora", **common)
    output = train_ok(1, tmp_path / "out", model_name=folder, allow_unquantized=True, **common)
    assert f"The model is stored in {algorithm}: its weights are trained on as they are" in output
    assert read_metrics(tmp_path / "out") == pytest.approx(
        read_metrics(tmp_path / "plain_out"), rel=1e-5
    )


@pytest.mark.parametrize(
    "content", ["[]", "{", '"x"', '{"quantization": []}', '{"quantization": {"quant_algo": 8}}']
)
def test_a_damaged_file_of_modelopt_is_refused_by_name(content, models, tmp_path):
    (tmp_path / "hf_quant_config.json").write_text(content)
    with pytest.raises(UserError, match=r"hf_quant_config\.json"):
        take_format(PretrainedConfig(), "m", tmp_path)
