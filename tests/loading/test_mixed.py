"""Models whose linear layers are in several formats, as Red Hat and NVIDIA publish them: each layer
is trained as it is, in the format of its group.
"""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.__main__ import main
from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.model.adapters.insert import LoraOptions
from fsdp_qlora.model.architecture.precision import PRECISIONS
from fsdp_qlora.model.build_model import LayerOptions, build_model
from fsdp_qlora.model.formats.methods import take_format
from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags, train_ok
from tests.loading.test_prequantized import set_config
from tests.loading.test_published import (
    OF_NVFP4,
    decode,
    save_experts_in_nvfp4,
    save_groups,
    save_plain,
)
from tests.parity.test_experts import FAMILIES

RUN = {"lr": 1e-2, "precision": "fp32", "lora_rank": 4, "num_epochs": 3}
# Targets overlap: names come before patterns, and patterns before classes. q_proj, k_proj and
# v_proj, which have one input, are in three formats.
GROUPS = {
    "nvfp4": ["Linear"],
    "fp8 rows": ["re:.*self_attn.[ko]_proj$"],
    "fp8 whole": ["re:.*self_attn.v_proj$", "model.layers.1.self_attn.o_proj"],
    "fp8 blocks": ["re:.*layers.1.mlp.up_proj"],
    "mxfp4": ["model.layers.0.mlp.down_proj"],
}
IGNORED = ["lm_head", "re:.*layers.1.mlp.down_proj"]


def save_mixed(source: Path, folder: Path) -> None:
    save_groups(source, folder, GROUPS, IGNORED)


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """The weights as compressed-tensors decompresses each, with the scheme that it finds."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    config = AutoConfig.from_pretrained(folder)
    about = config.quantization_config
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    apply_quantization_config(model, QuantizationConfig.model_validate(about))
    tensors = load_file(folder / "model.safetensors")
    decoded = {}
    for path, module in model.named_modules():
        own = {
            name.removeprefix(f"{path}."): tensors.pop(name)
            for name in [*tensors]
            if name.rpartition(".")[0] == path
        }
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and "weight_scale" in own:
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            own = {"weight": compressor.decompress(own, scheme)["weight"]}
        decoded |= {f"{path}.{name}": value.float().contiguous() for name, value in own.items()}
    return decoded


def save_modelopt_mixed(source: Path, folder: Path, layers: dict[str, str]) -> None:
    """Save NVFP4 and FP8 in the form that modelopt writes. layers: path -> quant_algo."""
    by_form = {
        form: [path for path, algorithm in layers.items() if algorithm == name]
        for form, name in (("nvfp4", "NVFP4"), ("fp8 whole", "FP8"))
    }
    save_groups(source, folder, by_form, ["lm_head"])
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith("_global_scale"):
            tensors[name.replace("_global_scale", "_scale_2")] = 1 / value.view(())
        elif value.numel() == 1:
            tensors[name] = value.view(())
        else:
            tensors[name.replace("weight_packed", "weight")] = value.contiguous()
    for path in layers:
        tensors[f"{path}.input_scale"] = torch.ones(())
        if path.endswith("k_proj"):
            tensors[f"{path}.k_scale"] = torch.ones(())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    about = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
        "quantized_layers": {
            path: {"quant_algo": name, **({"group_size": 16} if name == "NVFP4" else {})}
            for path, name in layers.items()
        },
    }
    content = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": about}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))


def save_mixture(source: Path, folder: Path) -> None:
    """Save a mixture's experts in NVFP4, and its other linear layers in FP8 with scales of rows."""
    save_experts_in_nvfp4(source, folder)
    plain = load_file(source / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    for name, value in plain.items():
        if "self_attn" not in name or not name.endswith("_proj.weight"):
            continue
        scale = value.abs().amax(1, keepdim=True) / 448
        tensors[name] = (value / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale.bfloat16()
        for ending in ("_packed", "_global_scale"):
            del tensors[name + ending]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rows = {"num_bits": 8, "type": "float", "strategy": "channel"}
    about = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    about["config_groups"] = {
        "group_0": {**OF_NVFP4, "format": "nvfp4-pack-quantized"},
        "group_1": {"targets": ["re:.*attn.*"], "weights": rows, "format": "float-quantized"},
    }
    set_config(folder, quantization_config=about)


CASES = {
    "llama": (save_mixed, "NVFP4 and FP8 and MXFP4"),
    "qwen3_moe": (save_mixture, "NVFP4 and FP8"),
}


@pytest.mark.parametrize("family", all_slow_but("llama", CASES))
def test_each_layer_trains_in_the_format_of_its_group(family, models, tmp_path):
    source = models(family, **FAMILIES.get(family, {}))
    folder = tmp_path / "model"
    save, names = CASES[family]
    save(source, folder)
    meant = decode(folder)
    if family == "llama":
        # compressed-tensors rounds some of the values to bf16.
        for name, value in decompressed(folder).items():
            assert torch.equal(value.bfloat16(), meant[name].bfloat16()), name
    plain = save_plain(source, tmp_path / "plain", meant)
    common = {**RUN, "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(6))}
    train_ok(1, tmp_path / "plain_out", model_name=plain, train_type="lora", **common, batch_size=6)
    for world_size in (1, 2):
        out = tmp_path / f"out{world_size}"
        options = {"batch_size": 6 // world_size, "allow_unquantized": True, **common}
        output = train_ok(world_size, out, model_name=folder, **options)
        for key in ("loss", "grad_norm"):
            expected = read_metrics(tmp_path / "plain_out", key)
            assert read_metrics(out, key) == pytest.approx(expected, rel=1e-5)
        assert f"stored in {names}: its weights are trained on as they" in output
        assert "a layer is bit-identical to its weight in the file" in output


def test_modelopts_mixed_model_resumes_and_is_merged_as_published(models, tmp_path):
    source = models("llama")
    folder = tmp_path / "model"
    layers = {
        f"model.layers.{block}.{path}_proj": "FP8" if "attn" in path else "NVFP4"
        for block in range(2)
        for path in (*(f"self_attn.{name}" for name in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
    }
    save_modelopt_mixed(source, folder, layers)
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    common = {**RUN, "dataset": rows, "precision": "bf16", "gradient_accumulation_steps": 2}
    meant = decode(folder)
    plain = save_plain(source, tmp_path / "plain", meant)
    whole = tmp_path / "whole"
    train_ok(1, tmp_path / "plain_out", model_name=plain, train_type="lora", batch_size=4, **common)
    common |= {"model_name": folder, "batch_size": 2}
    output = train_ok(2, whole, save_every=2, **common)
    assert "is stored in FP8 and NVFP4: its weights are trained on as they are" in output
    expected = read_metrics(tmp_path / "plain_out")
    assert read_metrics(whole) == pytest.approx(expected, rel=0.02)
    (checkpoint,) = (whole / "checkpoints").glob("*2")
    train_ok(2, tmp_path / "resumed", resume=checkpoint, **common)
    adapters = [path / "adapter_model.safetensors" for path in (whole, tmp_path / "resumed")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    out = tmp_path / "out"
    assert main(["merge", *flags(adapter=whole, out=out, format="same")]) == 0
    for name in ("config.json", "hf_quant_config.json"):
        assert json.loads((out / name).read_text()) == json.loads((folder / name).read_text())
    before = load_file(folder / "model.safetensors")
    after = load_file(out / "model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, whole).merge_and_unload().state_dict()
    written = decode(out)
    for name, value in before.items():
        assert (after[name].shape, after[name].dtype) == (value.shape, value.dtype)
        if name.removesuffix(".weight") in layers:
            assert not torch.equal(after[name].view(torch.uint8), value.view(torch.uint8))
            # FP8 with one scale clips what has grown, so that only the sum is nearer.
            error = (written[name] - merged[name]).norm()
            assert error < (meant[name] - merged[name]).norm()


def test_integers_beside_floats_are_decoded_as_compressed_tensors_does(models, tmp_path):
    folder = tmp_path / "model"
    groups = {
        "int4 groups": ["Linear"],
        "int8 rows": ["re:.*self_attn.[ko]_proj$"],
        "int4 zeros": ["model.layers.0.mlp.down_proj"],
        "fp8 rows": ["re:.*self_attn.v_proj$"],
    }
    save_groups(models("llama"), folder, groups, IGNORED)
    published = take_format(AutoConfig.from_pretrained(folder), "m", folder)
    assert published is not None and published.name == "INT4 and INT8 and FP8"
    assert not published.is_kept("bnb_4bit", "auto")
    files = WeightFiles(folder, published)
    expected = decompressed(folder)
    assert files.files.keys() == expected.keys()
    for name, value in expected.items():
        found = files.read_flat(name, 0, value.numel()).view(value.shape)
        assert torch.equal(found.float(), value.to(found.dtype).float()), name


def layers_of(folder: Path, name: str) -> dict[str, tuple[type, int]]:
    """Parameter of the quantized model -> its module's class, and its bytes."""
    config = AutoConfig.from_pretrained(folder)
    packed = take_format(config, name, folder)
    meta = build_model(
        config,
        TRAIN_TYPES["qlora"],
        PRECISIONS["bf16"],
        torch.device("cpu"),
        LayerOptions(LoraOptions(), prequantized=packed),
        attn_implementation="auto",
    )
    return {
        f"{path}.{leaf}": (type(module), parameter.nbytes)
        for path, module in meta.model.named_modules()
        if isinstance(module, QuantizedWeight)
        for leaf, parameter in module.named_parameters(recurse=False)
    }


@pytest.mark.parametrize("family", CASES)
def test_a_plan_before_the_download_has_each_layers_own_bytes(family, models, tmp_path):
    folder = tmp_path / "model"
    CASES[family][0](models(family, **FAMILIES.get(family, {})), folder)
    with_files = layers_of(folder, "m")
    (folder / "model.safetensors").rename(tmp_path / "away.safetensors")
    assert layers_of(folder, "m") == with_files
    stored = load_file(tmp_path / "away.safetensors")
    codes = sum(
        value.nbytes
        for name, value in stored.items()
        if f"{name.removesuffix('_packed')}_scale" in stored
    )
    own = sum(size for name, (_, size) in with_files.items() if name.endswith("weight"))
    assert own == codes
