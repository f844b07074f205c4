"""Adapters in vision towers and projectors train as PEFT's do in a plain loop."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from fsdp_qlora.config.text import TOWERS
from fsdp_qlora.data.text.image_processor import ImageProcessor
from tests.helpers.metrics import read_metrics
from tests.helpers.reference import LINEARS
from tests.helpers.rows import write_rows
from tests.helpers.run import flags, run_ranks, train_ok
from tests.parity.test_images import OPTIONS, PROCESSORS, check_as_plain, make_chats, plain
from tests.parity.test_multimodal import make_multimodal

# Paths of the layers that `vision,projector` stands for.
LAYERS = {
    "qwen3_vl": r"visual\.(blocks|merger|deepstack).*(qkv|proj|fc\d)",
    "gemma3": r"vision_tower\.encoder.*(_proj|fc\d)",
    "gemma4": r"vision_tower\.encoder.*linear|embed_vision.*_projection",
}
WORDS = {"gemma3": ["vision"]}  # its projector has no linear layer
DECODER = r"language_model.*(q|k|v|o|gate|up|down)_proj"


def fill_zeros(folder: Path) -> None:
    """Give gemma3's projection values: with its initial zeros no gradient reaches the tower."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if "input_projection" in name:
            weight.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> Path:
        folder = make_multimodal(tmp_path_factory.mktemp(family), family)
        fill_zeros(folder)
        PROCESSORS[family](folder)
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, make_chats(folder)[0])) + "\n")
        return folder

    return make


@pytest.mark.parametrize(
    ("family", "ranks", "recompute"),
    [
        ("qwen3_vl", 2, "all"),
        ("gemma3", 1, "none"),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (("qwen3_vl", 1, "none"), ("gemma3", 2, "none"), ("gemma4", 2, "all"))
        ),
    ],
)
def test_towers_train_as_in_a_plain_loop_of_peft(family, ranks, recompute, folders, tmp_path):
    folder = folders(family)
    train_ok(
        ranks,
        tmp_path / "out",
        model_name=folder,
        dataset=folder / "rows.jsonl",
        batch_size=1,
        gradient_accumulation_steps=8 // ranks,
        lora_target_modules=",".join((*LINEARS, *WORDS.get(family, TOWERS))),
        recompute=recompute,
        **OPTIONS,
    )
    layers = rf"model\.({DECODER}|{LAYERS[family]})"
    check_as_plain(tmp_path / "out", plain(family, folder, layers))


@pytest.mark.parametrize("targets", ["all,vision", pytest.param("vision", marks=pytest.mark.slow)])
def test_16_bits_train_towers_with_rows_without_images(targets, folders, tmp_path):
    folder = folders("gemma3")
    chats = make_chats(folder)[0]
    # Row 1 is the longest, so it comes first: micro-batches without images on both ranks, then on
    # one of them, and a step without any.
    rows = [json.dumps(chats[n]) for n in (1, 1, 1, 1, 2, 3, 4, 5, 1, 3, 1, 5, 7, 7, 7, 7)]
    dataset = folder / "text_first.jsonl"
    dataset.write_text("\n".join(rows) + "\n")
    losses = []
    for ranks, precision in ((1, "fp32"), (2, "bf16"), (1, "bf16")):
        options = {
            **OPTIONS,
            "precision": precision,
            "gradient_accumulation_steps": 8 // ranks,
            "batch_size": 1,
            "lora_target_modules": targets,
        }
        out = tmp_path / f"{precision}_{ranks}"
        train_ok(ranks, out, model_name=folder, dataset=dataset, **options)
        losses.append(read_metrics(out))
    # bf16 has 8 bits
    for of_bf16 in losses[1:]:
        assert of_bf16 == pytest.approx(losses[0], rel=2e-2) and of_bf16 != losses[0]


def test_adapters_for_images_without_images_are_refused(folders, tmp_path):
    folder = folders("gemma3")
    chats = make_chats(folder)[0]
    write_rows(tmp_path / "text.jsonl", [chats[1], chats[7]] * 8)
    options = {
        **OPTIONS,
        "model_name": folder,
        "batch_size": 1,
        "num_epochs": 1,
        "lora_target_modules": "all,vision",
    }
    argv = flags(output_dir=tmp_path / "refused", dataset=tmp_path / "text.jsonl", **options)
    statuses, output = run_ranks(1, argv, tmp_path / "refused_logs")
    assert statuses != [0]
    assert "--lora_target_modules vision: layers that compute images learn from" in output
    # An adapter that has them can learn from text further.
    train_ok(1, tmp_path / "first", dataset=folder / "rows.jsonl", **options)
    further = {name: value for name, value in options.items() if "lora" not in name}
    output = train_ok(
        1,
        tmp_path / "further",
        adapter=tmp_path / "first",
        dataset=tmp_path / "text.jsonl",
        **further,
    )
    assert "No row to train on has an image" in output


def test_all_of_a_decoder_trains_on_ranks_with_and_without_images(folders, tmp_path):
    folder = folders("qwen3_vl")
    options = {
        **{name: value for name, value in OPTIONS.items() if "lora" not in name},
        "model_name": folder,
        "dataset": folder / "rows.jsonl",
        "train_type": "full",
        "lr": 1e-3,
        "num_epochs": 2,
    }
    found = {}
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        train_ok(ranks, out, gradient_accumulation_steps=4 // ranks, batch_size=1, **options)
        found[ranks] = read_metrics(out)
        # The result is the whole model, with the processor of its images.
        AutoModelForImageTextToText.from_pretrained(out)
        assert ImageProcessor.find(out, str(out)) is not None
    assert found[2] == pytest.approx(found[1], rel=1e-5)
    whole, base = (load_file(each / "model.safetensors") for each in (out, folder))
    changed = {name for name in base if not whole[name].equal(base[name])}
    assert changed and not any("visual" in name for name in changed)
