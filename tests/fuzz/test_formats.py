"""Hostile quantization_configs: each is read, or refused in one sentence, in time."""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from fsdp_qlora.model.architecture.config import load_config
from fsdp_qlora.model.formats import patterns
from fsdp_qlora.model.formats.integers import IntegerFormat
from fsdp_qlora.model.formats.methods import take_format
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import DTYPES
from tests.fuzz.harness import VALUES, damaged_value, fuzz
from tests.helpers.models import SIZES, Models
from tests.loading.test_integers import save_awq, save_gptq
from tests.loading.test_prequantized import save_fp8, save_mxfp4
from tests.loading.test_published import save_modelopt
from tests.parity.test_experts import FAMILIES

CASES = int(os.environ.get("FUZZ_CASES", "300"))
MOST_CHARACTERS = 1000  # of a message
PATHS = [
    f"model.layers.{i}.{name}"
    for i in range(3)
    for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.gate")
]


def _group(**weights: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": weights, "input_activations": None}


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    ignore = ["lm_head", "re:.*mlp.gate$", "model.layers.0.self_attn.q_proj"]
    about = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ignore,
        "version": "0.12.2",
    }
    return {**about, "config_groups": {"group_0": _group(**weights)}}


# As the programs write them.
PUBLISHED: list[dict[str, Any]] = [
    {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head"],
    },
    {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["model.layers.0.mlp.gate"],
    },
    {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head"],
    },
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    _compressed("float-quantized", type="float", num_bits=8, strategy="channel", symmetric=True),
    _compressed(
        "float-quantized", type="float", num_bits=8, strategy="block", block_structure=[128, 128]
    ),
    _compressed(
        "nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16
    ),
    _compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32),
    _compressed(
        "pack-quantized", type="int", num_bits=4, strategy="group", group_size=128, symmetric=False
    ),
    _compressed("int-quantized", type="int", num_bits=8, strategy="channel", symmetric=True),
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "dynamic": {"-:.*attn.*": {}},
    },
    {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head", "model.layers.0*"],
        "config_groups": {"group_0": _group(type="float", num_bits=4, group_size=16)},
    },
    {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    },
    {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_skip_modules": ["lm_head"],
    },
]
HOSTILE = [
    4.0,
    "4",
    float("inf"),
    float("nan"),
    -128,
    [128],
    [0, 128],
    [128, -1],
    ["128", "128"],
    [[128, 128]],
    "128x128",
    ["re:("],
    ["re:(.*.*)*(.*.*)*(.*)*#"],
    ["*a*" * 300 + "#"],
    ["x" * 10**6],
    ["re:" + "(" * 900],
    [None, "lm_head"],
    {"a": 1},
    {"weights": []},
    "line\nbreak\x1b[2J",
    {"line\nbreak" * 99: {"weights": {"num_bits": "x\ny"}}},
    json.loads("[" * 300 + "]" * 300),
    {"group_0": {"weights": {"type": "float", "num_bits": 10**30}}},
]


SAVED: Mapping[str, Callable[[Path, Path], Any]] = {
    "fp8": partial(save_fp8, form="blocks"),
    "nvfp4": save_modelopt,
    "mxfp4": save_mxfp4,
    "awq": save_awq,
    "gptq": save_gptq,
}


def hostile(rng: random.Random) -> Any:
    """A published configuration of which one to three values are others."""
    changed: Any = copy.deepcopy(rng.choice(PUBLISHED))
    for _ in range(rng.choice([1, 1, 2, 3])):
        if rng.random() < 0.5:
            changed = damaged_value(rng, changed)
        elif isinstance(changed, dict) and changed:
            _replace(rng, changed, copy.deepcopy(rng.choice([*HOSTILE, *VALUES])))
    return changed


def _replace(rng: random.Random, value: dict[str, Any], other: Any) -> None:
    """Replace a value somewhere inside."""
    key = rng.choice(sorted(value))
    inner = value[key]
    if isinstance(inner, dict) and inner and rng.random() < 0.7:
        _replace(rng, inner, other)
    else:
        value[key] = other


@pytest.mark.parametrize(
    "published", PUBLISHED, ids=[str(index) for index in range(len(PUBLISHED))]
)
def test_published_settings_are_read(published):
    assert (
        take_format(PretrainedConfig(quantization_config=copy.deepcopy(published)), "m") is not None
    )


@pytest.mark.parametrize("pattern", ["re:(.*.*)*(.*.*)*(.*)*#", "re:(", "re:" + "(" * 900])
def test_patterns_that_cannot_be_used_are_refused(pattern, monkeypatch):
    monkeypatch.setattr(patterns, "_SECONDS", 1.0)
    for names in ({"ignore": [pattern]}, {"llm_int8_skip_modules": [pattern.removeprefix("re:")]}):
        about = PUBLISHED[-1] if "ignore" not in names else PUBLISHED[0]
        packed = take_format(PretrainedConfig(quantization_config={**about, **names}), "m")
        assert packed is not None
        with pytest.raises(UserError, match=r"config\.json has"):
            packed.chosen(PATHS, [])


def test_hostile_settings_are_read_or_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(patterns, "_SECONDS", 1.0)

    def case(rng: random.Random, place: Path) -> None:
        where = {"text_config": {"quantization_config": hostile(rng)}} if rng.random() < 0.1 else {}
        content = {"model_type": "llama", **SIZES, "quantization_config": hostile(rng), **where}
        (place / "config.json").write_text(json.dumps(content))
        try:
            packed = take_format(load_config(place, "m"), "m", place)
            if packed:
                packed.chosen(PATHS, [])
        except UserError as error:
            assert "\n" not in str(error) and str(error).isprintable(), str(error)
            assert len(str(error)) < MOST_CHARACTERS, str(error)
            raise

    fuzz(case, tmp_path, cases=CASES)


def published_models(models: Models, folder: Path) -> list[Path]:
    """A tiny model in each format."""
    made = []
    for name, save in SAVED.items():
        family = "gpt_oss" if name == "mxfp4" else "llama"
        save(models(family, **FAMILIES.get(family, {})), folder / name)
        made.append(folder / name)
    return made


def hostile_tensor(rng: random.Random, value: torch.Tensor) -> torch.Tensor:
    """A tensor of another type, shape or content."""
    generator = torch.Generator().manual_seed(rng.randrange(99))
    changes: list[Callable[[], torch.Tensor]] = [
        lambda: value.float().to(rng.choice([*DTYPES.values()])),
        lambda: value.flatten(),
        lambda: value.mT if value.dim() > 1 else value[None],
        lambda: value[: len(value) // 2] if value.dim() else value[None],
        lambda: value[:0] if value.dim() else value,
        lambda: value[..., None],
        lambda: torch.zeros((), dtype=value.dtype),
        lambda: torch.full_like(
            value.float(), rng.choice([torch.nan, torch.inf, -1.0, 0.0, 1e38])
        ).to(value.dtype),
        lambda: (
            torch.randint(256, (value.nbytes,), generator=generator)
            .to(torch.uint8)
            .view(value.dtype)
        ),
        lambda: (
            value - 1
            if value.dtype in (torch.int32, torch.int8)
            else (-value.float()).to(value.dtype)
        ),
    ]
    return rng.choice(changes)().contiguous()


@pytest.mark.slow
def test_hostile_tensors_are_read_or_refused_in_one_sentence(models, tmp_path):
    folders = published_models(models, tmp_path)
    stored = [load_file(folder / "model.safetensors") for folder in folders]

    def case(rng: random.Random, place: Path) -> None:
        index = rng.randrange(len(folders))
        tensors = dict(stored[index])
        quantized = [
            name for name in sorted(tensors) if any(word in name for word in ("_proj", "experts"))
        ]
        for name in rng.sample(quantized, rng.choice([1, 1, 2])):
            value = tensors.pop(name)
            if rng.random() < 0.9:
                tensors[name] = hostile_tensor(rng, value)
            if rng.random() < 0.1:
                tensors[
                    name
                    + rng.choice(["_scale", "_scale_inv", ".g_idx", "_blocks", "_scale_2", "\n"])
                ] = value.clone()
        shutil.copyfile(folders[index] / "config.json", place / "config.json")
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        packed = take_format(load_config(place, "m"), "m", place)
        if packed and not isinstance(packed, IntegerFormat) and rng.random() < 0.5:
            files = WeightFiles(place, packed=packed)
        else:
            files = WeightFiles(place, packed)
        for name in files.files:
            files.read_flat(name, 0, files.shape(name).numel())

    fuzz(case, tmp_path / "cases", cases=CASES)
