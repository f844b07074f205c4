"""Which layers of a published model are quantized: the files tell, and not the names in its
quantization_config.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.run.load_model import open_weights
from fsdp_qlora.run.prepare import prepare_run
from fsdp_qlora.sharding.loading.load_weights import quantized_layers
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, train_ok
from tests.loading.test_prequantized import nf4, save_4bit, save_fp8, set_config
from tests.loading.test_published import decode, save_plain

ALONE = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
DOWN = "model.layers.0.mlp.down_proj"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
RUN = {"lr": 1e-2, "precision": "fp32", "lora_rank": 4}


def settings_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text())["quantization_config"])


def unquantize(folder: Path, weight: str = f"{DOWN}.weight") -> None:
    """Store one weight in bf16, as its codes and scales mean it."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    plain = decode(folder)[weight].bfloat16()
    kept = {name: value for name, value in stored.items() if not name.startswith(weight)}
    save_file({**kept, weight: plain}, file, metadata={"format": "pt"})


def opened(folder: Path, tmp_path: Path, train_type: str = "qlora") -> set[str]:
    """The quantized weights of a run that has opened its files."""
    argv = {
        "model_name": folder,
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(2)),
        "dry_run": True,
    }
    share = {"allow_unquantized": True} if train_type == "qlora" else {}
    run = prepare_run(
        parse_train_config(flags(train_type=train_type, **argv, **share)), ALONE, None
    )
    open_weights(run.plan.model)
    return set(quantized_layers(run.plan.model.meta.model))


LISTS: list[dict[str, Any]] = [
    {"modules_to_not_convert": ["model.language_model.layers.0.mlp.down_proj"]},
    {"modules_to_not_convert": ["language_model.model.layers.0.mlp.down_proj", "lm_head"]},
    {"modules_to_not_convert": []},
    {"modules_to_not_convert": None},
    {"ignored_layers": [DOWN]},
    {"modules_to_not_convert": ["0.mlp.down"]},
    {"modules_to_not_convert": ["model.layers.1.mlp.up_proj"]},  # which is quantized
    {"modules_to_not_convert": ["re:(.*.*)*(.*.*)*(.*)*#", "re:("]},
]


@pytest.mark.parametrize("names", LISTS, ids=[str(index) for index in range(len(LISTS))])
def test_the_files_tell_which_layers_are_quantized(names, models, tmp_path):
    folder = tmp_path / "model"
    save_fp8(models("llama"), folder, "blocks")
    unquantize(folder)
    set_config(folder, quantization_config={**BLOCKS, **names})
    assert len(opened(folder, tmp_path)) == 13
    assert f"{DOWN}.weight" not in opened(folder, tmp_path)


@pytest.mark.slow
def test_a_model_with_other_names_trains_as_its_decoded_weights(models, tmp_path):
    folder = tmp_path / "model"
    source = models("llama")
    save_fp8(source, folder, "blocks")
    unquantize(folder)
    set_config(folder, quantization_config={**BLOCKS, **LISTS[0]})
    plain = save_plain(source, tmp_path / "plain", decode(folder))
    common = {**RUN, "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4))}
    train_ok(1, tmp_path / "plain_out", model_name=plain, train_type="lora", batch_size=2, **common)
    train_ok(2, tmp_path / "out", model_name=folder, batch_size=1, allow_unquantized=True, **common)
    assert read_metrics(tmp_path / "out") == pytest.approx(
        read_metrics(tmp_path / "plain_out"), rel=1e-5
    )


def test_layers_of_bitsandbytes_are_told_by_the_files(models, tmp_path):
    folder = save_4bit(
        models(), tmp_path / "model", **nf4(True), llm_int8_skip_modules=["lm_head", "up_proj"]
    )
    set_config(
        folder,
        quantization_config={**settings_of(folder), "llm_int8_skip_modules": ["(((", "down_proj"]},
    )
    assert {name.split(".")[-2] for name in opened(folder, tmp_path)} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "down_proj",
    }


@pytest.mark.parametrize(
    "settings", [BLOCKS, {"quant_method": "bitsandbytes", "load_in_4bit": True}]
)
@pytest.mark.parametrize("train_type", ["qlora", "lora"])
def test_16_bit_weights_with_settings_left_over_are_16_bit_weights(
    settings, train_type, models, tmp_path
):
    shutil.copytree(models("llama"), tmp_path / "model")
    set_config(tmp_path / "model", quantization_config=settings)
    assert len(opened(tmp_path / "model", tmp_path, train_type)) == (
        14 if train_type == "qlora" else 0
    )
