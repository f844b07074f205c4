"""Models that bitsandbytes has quantized to 4 bits, as transformers saves them, trained without
decoding them.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedModel,
)

from fsdp_qlora.model.formats.methods import take_format
from fsdp_qlora.model.formats.published import PublishedFormat
from fsdp_qlora.planning.offers.find_model import known_config
from fsdp_qlora.sharding.loading.load_weights import match_tensors
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.errors import UserError
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, run_ranks, train_ok
from tests.parity.test_experts import FAMILIES

# Weights that do not fill blocks of 64, blocks that 2 and 3 ranks cannot share equally.
UNEVEN = {"intermediate_size": 100, "hidden_size": 60, "head_dim": 10, "num_attention_heads": 6}
RUN = {"lr": 1e-3, "precision": "fp32", "lora_rank": 4}


def save_4bit(source: Path, folder: Path, **options: object) -> Path:
    """Quantize with transformers and bitsandbytes, and save as people publish it."""
    quantization = BitsAndBytesConfig(load_in_4bit=True, **options)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=quantization, device_map="cpu"
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def nf4(nested: bool, storage: torch.dtype = torch.uint8) -> dict[str, object]:
    return {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": storage,
    }


@pytest.mark.parametrize(
    ("options", "ranks", "same"),
    [
        (nf4(True), [1, 2, 3], {}),
        (nf4(False, torch.bfloat16), [2], {"double_quant": False}),
        (nf4(True, torch.float32), [2], {}),
        ({**nf4(True), "bnb_4bit_quant_type": "fp4"}, [2], {"quant_type": "fp4"}),
    ],
    ids=["nested uint8", "bf16", "nested fp32", "nested fp4"],
)
def test_a_saved_4bit_model_trains_like_quantizing_at_load(options, ranks, same, models, tmp_path):
    source = models("llama", **UNEVEN)
    folder = save_4bit(source, tmp_path / "model", **options)
    common = {**RUN, "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(6))}
    for world_size in ranks:
        ours = tmp_path / f"ours{world_size}"
        theirs = tmp_path / f"theirs{world_size}"
        train_ok(world_size, ours, model_name=source, **same, **common)
        other = {"quant_type": "nf4"} if "quant_type" in same else {}  # which is overruled
        output = train_ok(world_size, theirs, model_name=folder, **other, **common)
        assert read_metrics(theirs) == read_metrics(ours)  # to the last bit
        assert len(set(read_metrics(ours))) == len(read_metrics(ours)) >= 2
        adapter = "adapter_model.safetensors"
        assert (theirs / adapter).read_bytes() == (ours / adapter).read_bytes()
        assert "bit-identical to its weight in the file" in output
        overruled = [f"--{name}" for name in same]
        assert ("has no effect" in output) == bool(overruled)
        assert all(flag in output for flag in overruled)


def test_layers_skipped_by_the_4bit_checkpoint_stay_unquantized(models, tmp_path):
    folder = save_4bit(
        models(), tmp_path / "model", **nf4(True), llm_int8_skip_modules=["lm_head", "up_proj"]
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    data = write_rows(tmp_path / "rows.jsonl", make_rows(4))
    output = train_ok(
        2, tmp_path / "out", model_name=folder, dataset=data, allow_unquantized=True, **RUN
    )
    quantized = sum(
        module.in_features * module.out_features
        for name, module in reference.named_modules()
        if type(module).__name__ == "Linear4bit" and "up_proj" not in name
    )
    total = sum(
        weight.numel() for weight in AutoModelForCausalLM.from_pretrained(models()).parameters()
    )
    assert f"{100 * quantized / total:.1f}% quantized" in output


REFUSED = {
    "8-bit bitsandbytes": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "AQLM": {"quant_method": "aqlm"},
    "auto-round": {"quant_method": "auto-round", "bits": 4},
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_quantized_formats_are_refused_by_name(name):
    config = PretrainedConfig(quantization_config=REFUSED[name])
    said = f"is quantized as {name}, which is not supported. Give the model with 16- or"
    with pytest.raises(UserError, match=said):
        take_format(config, "m")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("deepseek-v3", "FP8"),
        ("kimi-k2", "FP8"),
        ("minimax-m2", "FP8"),
        ("kimi-k2-thinking", "INT4"),
        ("gpt-oss-20b", "MXFP4"),
    ],
)
def test_known_models_are_planned_in_their_published_format(name, form):
    config = known_config(name)
    found = take_format(config, name) if config else None
    assert found is not None and found.name == form
    assert found.is_kept("bnb_4bit", "auto") == (form != "INT4")


FP8_FORMS = {"blocks": (32, 32), "uneven blocks": (48, 40), "rows": None, "whole": None}


def save_fp8(source: Path, folder: Path, form: str) -> dict[str, torch.Tensor]:
    """Write a model's linear layers in FP8 as they are published; returns all its weights as they
    are meant.
    """
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    block = FP8_FORMS[form]
    meant = {}
    stored = {}
    for name, value in tensors.items():
        stored[name] = meant[name] = value.bfloat16()
        if "_proj" not in name and ".experts." not in name:
            continue
        rows, columns = block or {"rows": (1, value.shape[1]), "whole": value.shape}[form]
        scales = F.max_pool2d(value.abs()[None], (rows, columns), ceil_mode=True)[0] / 448
        grid = scales.repeat_interleave(rows, 0)[: value.shape[0]].repeat_interleave(columns, 1)[
            :, : value.shape[1]
        ]
        stored[name] = (value / grid).to(torch.float8_e4m3fn)
        meant[name] = (stored[name].float() * grid).bfloat16()
        stored[f"{name}_scale_inv" if block else f"{name}_scale"] = (
            scales if form != "whole" else scales.view(())
        )
    stored["model.layers.0.self_attn.q_proj.input_scale"] = torch.ones(())
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    about = {"quant_method": "fp8", **({"weight_block_size": list(block)} if block else {})}
    set_config(folder, dtype="bfloat16", quantization_config=about)
    return meant


def save_mxfp4(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Write a gpt_oss with random experts in MXFP4; what they mean is left to transformers."""
    shutil.copytree(source, folder)
    stored = {}
    for name, value in load_file(source / "model.safetensors").items():
        stored[name] = value.bfloat16()
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = value.shape
            del stored[name]
            groups = (experts, rows, columns // 32)
            blocks = torch.randint(256, (*groups, 16))
            stored[f"{name}_blocks"] = blocks.to(torch.uint8)
            stored[f"{name}_scales"] = torch.randint(119, 123, groups).to(torch.uint8)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_config(folder, dtype="bfloat16", quantization_config={"quant_method": "mxfp4"})
    return {}


def format_of(folder: Path) -> PublishedFormat:
    found = take_format(AutoConfig.from_pretrained(folder), "m")
    assert found is not None
    return found


def meta_model(folder: Path) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_moe", "blocks"),
        ("qwen3", "uneven blocks"),
        ("llama", "rows"),
        ("llama", "whole"),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_fp8_and_mxfp4_train_as_their_decoded_weights(family, form, models, tmp_path):
    source = models(family, **FAMILIES.get(family, {}))
    folder = tmp_path / "model"
    decoded = tmp_path / "decoded"
    meant = expected = (
        save_fp8(source, folder, form) if form in FP8_FORMS else save_mxfp4(source, folder)
    )
    if form in ("blocks", "mxfp4"):  # what transformers decodes itself
        kind = (Mxfp4Config if form == "mxfp4" else FineGrainedFP8Config)(dequantize=True)
        expected = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=kind
        ).state_dict()
    weight_files = WeightFiles(folder, stored := format_of(folder))
    sources = match_tensors(meta_model(source), weight_files).sources
    expected = {
        name: value for name, value in expected.items() if name.endswith(("_proj", "_proj.weight"))
    }
    assert len(expected) > 3
    for name, value in expected.items():
        count = value.numel()
        for start, stop in ((0, count), (count // 3, count // 2 + 5), (count - 1, count)):
            found = weight_files.read_flat(sources[name], start, stop)
            assert torch.equal(found, value.flatten()[start:stop]), (name, start)
    if form not in ("blocks", "mxfp4"):
        return
    if form == "mxfp4":
        shape = weight_files.shape
        meant = {name: weight_files.read_rows(at, 0, shape(at)[0]) for name, at in sources.items()}
    shutil.copytree(source, decoded)
    save_file(meant, decoded / "model.safetensors", metadata={"format": "pt"})
    common = {**RUN, "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4))}
    cache = {"quant_cache": tmp_path / "cache"} if form == "mxfp4" else {}
    for ranks, train_type in ((2, "qlora"), (1, "qlora") if cache else (2, "lora")):
        theirs = tmp_path / f"{ranks}{train_type}_stored"
        ours = tmp_path / f"{ranks}{train_type}_decoded"
        again = {"quant_type": "nf4"} if train_type == "qlora" else {}
        options = {"train_type": train_type, **again, **common}
        output = train_ok(ranks, theirs, model_name=folder, verbose=True, **options, **cache)
        train_ok(ranks, ours, model_name=decoded, **options)
        assert read_metrics(theirs) == read_metrics(ours)
        assert f"The model is stored in {stored.name}: its weights are decoded to bf16" in output
    assert ("come from the cache" in output) == bool(cache)


def test_a_rank_reads_its_part_of_an_fp8_weight(models, tmp_path):
    save_fp8(models("llama"), tmp_path / "model", "blocks")
    weight_files = WeightFiles(tmp_path / "model", format_of(tmp_path / "model"))
    name = "model.layers.0.mlp.down_proj.weight"  # [64, 128]
    weight_files.read_flat(name, 0, 32 * 128)
    assert weight_files.bytes_read == 32 * 128 + 4 * 4


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({}, "is in FP8 and has no scale"),
        ({"_scale_inv": torch.ones(3, 3)}, "in FP8 has scales [3, 3], which do not fit its shape"),
    ],
)
def test_wrong_fp8_scales_are_refused_by_name(scales, words, models, tmp_path):
    save_fp8(models("llama"), tmp_path / "model", "blocks")
    file = tmp_path / "model" / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    del tensors[f"{name}_scale_inv"]
    save_file(tensors | {name + suffix: value for suffix, value in scales.items()}, file)
    with pytest.raises(UserError, match=re.escape(words)) as error:
        WeightFiles(tmp_path / "model", format_of(tmp_path / "model"))
    assert name in str(error.value)


UP = "model.layers.0.mlp.up_proj.weight"
ABSMAX = f"{UP}.absmax"
OF_9 = f"wrong shape: {ABSMAX} in model.safetensors is [9]"
NESTED = f"{UP}.nested_absmax"
OUTSIDE = "lm_head.weight is a 4-bit weight outside the decoder blocks"
UNTRAINED = "quantized to 4 bits, which train_type lora cannot train. Use --train"
UNUSABLE_STATE = "describes a 4-bit weight that cannot be used"
NF4_STATE = f"{UP}.quant_state.bitsandbytes__nf4"
# How it was quantized, tensors that are replaced (None removes one), the run's options, and what is
# said.
UNUSABLE: list[tuple[dict, dict, dict, str]] = [
    ({"llm_int8_skip_modules": ["norm"]}, {}, {}, OUTSIDE),
    ({}, {}, {"train_type": "lora"}, UNTRAINED),
    ({}, {ABSMAX: torch.zeros(9).to(torch.uint8)}, {}, OF_9),
    ({}, {f"{UP}.quant_map": torch.zeros(16)}, {}, f"{UP}.quant_map is not bitsandbytes' table"),
    ({}, {NESTED: torch.full([1], torch.nan)}, {}, f"Weight {NESTED} has values that are not"),
    ({}, {NF4_STATE: {"blocksize": 128}}, {}, f"{NF4_STATE} {UNUSABLE_STATE}"),
    ({}, {NESTED: None}, {}, f"missing: {NESTED}"),
]


@pytest.mark.parametrize(("quantized", "tensors", "options", "words"), UNUSABLE)
def test_unsupported_4bit_models_are_refused_by_name(
    quantized, tensors, options, words, models, tmp_path
):
    folder = save_4bit(models(), tmp_path / "model", **nf4(True), **quantized)
    file = folder / "model.safetensors"
    stored = load_file(file) | tensors
    if isinstance(changed := stored.get(NF4_STATE), dict):
        state = json.loads(bytes(load_file(file)[NF4_STATE].tolist())) | changed
        stored[NF4_STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file({name: value for name, value in stored.items() if value is not None}, file)
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(4))
    argv = flags(model_name=folder, dataset=rows, output_dir=tmp_path / "out", **options)
    statuses, output = run_ranks(1, argv, tmp_path / "logs")
    assert statuses == [2] and "Traceback" not in output, output
    assert words in output.partition("error: ")[2]


def set_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
