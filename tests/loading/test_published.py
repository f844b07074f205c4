"""Models published in MXFP4, NVFP4 and FP8, as compressed-tensors, modelopt and transformers save
them, trained as they are.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

from fsdp_qlora.__main__ import main
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags, train_ok
from tests.loading.test_prequantized import save_fp8, save_mxfp4, set_config
from tests.parity.test_experts import FAMILIES

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
RUN = {"lr": 1e-2, "precision": "fp32", "lora_rank": 4, "num_epochs": 3}
SCHEMES = {
    "nvfp4": {
        "num_bits": 4,
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": torch.float8_e4m3fn,
    },
    "mxfp4": {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    "fp8 whole": {"num_bits": 8, "strategy": "tensor"},
    "fp8 rows": {"num_bits": 8, "strategy": "channel"},
    "fp8 blocks": {"num_bits": 8, "strategy": "block", "block_structure": [32, 48]},
}
INTEGERS: dict[str, dict] = {
    "int4 groups": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "int4 zeros": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    "int3 rows": {"num_bits": 3, "strategy": "channel", "symmetric": False},
    "int8 rows": {"num_bits": 8, "strategy": "channel"},
    "int8 whole": {"num_bits": 8, "strategy": "tensor", "symmetric": False},
}


# What configs say of layers in NVFP4.
OF_NVFP4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
LEFT_OUT = ("lm_head", "re:.*layers.1.mlp.down_proj")


def save_compressed(
    source: Path, folder: Path, form: str, ignore: Sequence[str] = LEFT_OUT
) -> None:
    """Quantize the blocks' linear layers but one with compressed-tensors, and save as people
    publish it.
    """
    save_groups(source, folder, {form: ["Linear"]}, ignore)


def save_groups(
    source: Path, folder: Path, groups: Mapping[str, list[str]], ignore: Sequence[str]
) -> None:
    """Quantize linear layers with compressed-tensors. groups: form -> its targets."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    schemes = {}
    for form, targets in groups.items():
        kind = "int" if form in INTEGERS else "float"
        given = {"type": kind, "symmetric": True, **(SCHEMES | INTEGERS)[form]}
        weights = QuantizationArgs(dynamic=False, **given)
        unpacked = {"format": "int-quantized"} if form.startswith("int8") else {}
        name = f"group_{len(schemes)}"
        schemes[name] = QuantizationScheme(targets=targets, weights=weights, **unpacked)
    config = QuantizationConfig(config_groups=schemes, ignore=list(ignore))
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weight = module.weight.detach()
        arguments = module.quantization_scheme.weights
        block = arguments.block_structure
        if block:
            rows, columns = (
                -(-size // side) for size, side in zip(weight.shape, block, strict=True)
            )
            padded = torch.zeros(rows * block[0], columns * block[1])
            padded[: weight.shape[0], : weight.shape[1]] = weight
            values = padded.view(rows, block[0], columns, block[1]).transpose(1, 2).flatten(2)
        else:
            size = arguments.group_size or weight.shape[1]
            is_whole = arguments.strategy == "tensor"
            shape = (1, 1, -1) if is_whole else (weight.shape[0], -1, size)
            values = weight.view(shape)
        is_nvfp4 = arguments.strategy == "tensor_group"
        of_all = generate_gparam(weight.min(), weight.max()) if is_nvfp4 else None
        scale, zero_point = calculate_qparams(
            values.amin(-1), values.amax(-1), arguments, global_scale=of_all
        )
        module.weight_scale.data = scale.reshape(-1) if arguments.strategy == "tensor" else scale
        if not arguments.symmetric:
            module.weight_zero_point.data = zero_point.view_as(module.weight_scale)
        if of_all is not None:
            module.weight_global_scale.data = of_all
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def save_modelopt(source: Path, folder: Path) -> None:
    """Save NVFP4 in the form that modelopt writes."""
    save_compressed(source, folder, "nvfp4")
    tensors = load_file(folder / "model.safetensors")
    changed = {}
    for name, value in tensors.items():
        if name.endswith("_global_scale"):
            name = name.replace("_global_scale", "_scale_2")
            value = 1 / value.view(())
            changed[name.replace("weight_scale_2", "input_scale")] = torch.ones(())
        changed[name.replace("weight_packed", "weight")] = value.contiguous()
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    group = {**OF_NVFP4, "input_activations": {"num_bits": 4}}
    about = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": group}}
    about["ignore"] = ["lm_head", "model.layers.1.mlp.down_proj*"]
    set_config(folder, quantization_config=about)


def save_experts_in_nvfp4(source: Path, folder: Path) -> None:
    """Save a mixture's linear layers and experts, each a matrix of its own, in compressed-tensors'
    NVFP4.
    """
    shutil.copytree(source, folder)
    stored = {}
    for name, value in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = value
            continue
        groups = value.view(value.shape[0], -1, 16)
        of_all = 448 * 6 / value.abs().max()
        scale = (of_all * groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
        values = (groups / (scale.float() / of_all)[..., None]).flatten(1)
        codes = (values[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
        base = name.removesuffix(".weight")
        stored[f"{base}.weight_packed"] = codes[:, ::2] | codes[:, 1::2] << 4
        stored |= {f"{base}.weight_scale": scale, f"{base}.weight_global_scale": of_all.view(1)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    about = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    about |= {"config_groups": {"0": OF_NVFP4}, "ignore": ["lm_head", "re:.*mlp.gate$"]}
    set_config(folder, quantization_config=about)


def decode(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a published model in float32, by the formats' own definitions."""
    tensors = load_file(folder / "model.safetensors")
    decoded = {}
    for name, value in tensors.items():
        base = name.removesuffix("_packed")
        scale = next(
            (tensors[base + end] for end in ("_scale", "_scale_inv") if base + end in tensors), None
        )
        if "_scale" in name or scale is None:
            decoded |= {} if "_scale" in name else {name: value.float()}
        elif value.dtype == torch.uint8:
            values = E2M1[torch.stack([value % 16, value // 16], dim=-1).long()].flatten(-2)
            scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
            scale = scale / tensors.get(f"{base}_global_scale", 1)
            scale = scale * tensors.get(f"{base}_scale_2", 1)
            decoded[base] = values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)
        else:
            config = json.loads((folder / "config.json").read_text())
            settings = config.get("quantization_config", {})
            rows, columns = value.shape
            if "weight_block_size" in settings or (scale.dim() == 2 and scale.shape[1] > 1):
                rows, columns = (
                    settings.get("weight_block_size") or SCHEMES["fp8 blocks"]["block_structure"]
                )
            elif scale.numel() > 1:
                rows = 1
            grid = (
                scale.view(-(-value.shape[0] // rows), -1)
                .repeat_interleave(rows, 0)
                .repeat_interleave(columns, 1)
            )
            decoded[name] = value.float() * grid[: value.shape[0], : value.shape[1]]
    return decoded


def save_plain(source: Path, folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(source, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


FORMS = {
    **{form: partial(save_compressed, form=form) for form in SCHEMES},
    "modelopt's nvfp4": save_modelopt,
    "transformers' fp8": partial(save_fp8, form="blocks"),
}


@pytest.mark.parametrize("form", all_slow_but("nvfp4", FORMS, nightly=["modelopt's nvfp4"]))
def test_a_published_model_trains_as_its_decoded_weights(form, models, tmp_path):
    source = models("llama")
    folder = tmp_path / "model"
    FORMS[form](source, folder)
    plain = save_plain(source, tmp_path / "plain", decode(folder))
    common = {**RUN, "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(6))}
    train_ok(1, tmp_path / "plain_out", model_name=plain, train_type="lora", **common, batch_size=6)
    for world_size in (1, 2, 3) if form == "nvfp4" else (3,):
        out = tmp_path / f"out{world_size}"
        # one of 14 is left out
        options = {"batch_size": 6 // world_size, "allow_unquantized": True, **common}
        output = train_ok(world_size, out, model_name=folder, **options)
        for key in ("loss", "grad_norm"):
            expected = read_metrics(tmp_path / "plain_out", key)
            assert read_metrics(out, key) == pytest.approx(expected, rel=1e-6)
        assert "its weights are trained on as they are" in output
        assert "a layer is bit-identical to its weight in the file" in output


MIXTURES = {
    "qwen3_moe in nvfp4": ("qwen3_moe", save_experts_in_nvfp4),
    "qwen3_moe in fp8": ("qwen3_moe", partial(save_fp8, form="blocks")),
    "gpt_oss": ("gpt_oss", save_mxfp4),
}


@pytest.mark.parametrize("case", all_slow_but("", MIXTURES))
def test_a_published_mixture_trains_as_its_decoded_weights(case, models, tmp_path):
    (family, save) = MIXTURES[case]
    folder = tmp_path / "model"
    source = models(family, **FAMILIES[family])
    save(source, folder)
    common = {**RUN, "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(6))}
    if family == "gpt_oss":  # as it is, decoded by transformers
        kind = Mxfp4Config(dequantize=True)
        weights = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=kind
        )
        names = [*load_file(source / "model.safetensors")]
        plain = save_plain(
            source, tmp_path / "plain", {name: weights.state_dict()[name] for name in names}
        )
    else:
        plain = save_plain(source, tmp_path / "plain", decode(folder))
    experts = {"lora_target_parameters": "experts.down_proj"}
    own = {"model_name": plain, "train_type": "lora", "batch_size": 6}
    train_ok(1, tmp_path / "plain_out", **own, **common, **experts)
    for world_size, options in ((2, {}), (3, {"use_cpu_offload": True, "recompute": "all"})):
        out = tmp_path / f"out{world_size}"
        options = {**options, **common, **experts, "allow_unquantized": True}
        output = train_ok(world_size, out, model_name=folder, batch_size=6 // world_size, **options)
        for key in ("loss", "grad_norm"):
            expected = read_metrics(tmp_path / "plain_out", key)
            assert read_metrics(out, key) == pytest.approx(expected, rel=1e-5)
        assert "its weights are trained on as they are" in output


def test_training_on_a_published_model_resumes_and_is_merged(models, tmp_path):
    source = models("llama")
    folder = tmp_path / "model"
    out = tmp_path / "out"
    save_modelopt(source, folder)
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    common = {**RUN, "model_name": folder, "dataset": rows, "precision": "bf16", "batch_size": 2}
    common |= {"gradient_accumulation_steps": 2, "allow_unquantized": True}
    train_ok(2, tmp_path / "whole", save_every=2, **common)
    (checkpoint,) = (tmp_path / "whole" / "checkpoints").glob("*2")
    train_ok(2, tmp_path / "resumed", resume=checkpoint, **common)
    adapters = [tmp_path / run / "adapter_model.safetensors" for run in ("whole", "resumed")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "- Base: model, in NVFP4 as it is stored\n" in card
    assert main(["merge", *flags(adapter=tmp_path / "whole", out=out, dtype="bf16")]) == 0
    stored = load_file(folder / "model.safetensors")
    decoded = {
        name: value.to(torch.bfloat16 if f"{name}_scale" in stored else value.dtype)
        for name, value in decode(folder).items()
    }
    plain = save_plain(source, tmp_path / "plain", decoded)
    base = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, tmp_path / "whole").merge_and_unload().state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(out).state_dict().items():
        torch.testing.assert_close(value, expected[name].bfloat16(), atol=0, rtol=2**-7)
