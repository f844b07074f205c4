"""Vision modules of further families train as in a plain loop of PEFT."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText, AutoTokenizer

from fsdp_qlora.config.text import TOWERS
from fsdp_qlora.data.text.image_processor import ImageProcessor
from tests.helpers.reference import LINEARS, load_base, train_plainly
from tests.helpers.run import all_slow_but, train_ok
from tests.parity.test_image_rows import ALIKE, FAMILIES, FURTHER, make_family
from tests.parity.test_images import OPTIONS, check_as_plain, encode, make_chats

# Paths of the layers that `vision,projector` stands for.
_QWEN3 = r"visual\.(blocks|merger).*(qkv|proj|fc\d)"
_PROJECTOR = r"multi_modal_projector\.linear_\d"
LAYERS = {
    "qwen2_5_vl": r"visual\.(blocks.*(qkv|proj)|merger\.mlp\.[02])",
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_vl_moe": r"visual\.(blocks|merger|deepstack).*(qkv|proj|fc\d)",
    "glm4v": r"visual\.(blocks|merger).*(qkv|proj)",
    "internvl": rf"vision_tower\.encoder.*(_proj|projection_layer|fc\d)|{_PROJECTOR}",
    "llava": rf"vision_tower.*(_proj|fc\d)|{_PROJECTOR}",
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
NAMES = {"glm4v": [*ATTENTION, "gate_up_proj", "down_proj"], "qwen3_vl_moe": ATTENTION}


def plain(family: str, folder: Path) -> Any:
    """Losses, norms and the adapter of a plain loop, with the processor of transformers."""
    processor = ImageProcessor(folder, family)._processor
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = load_base(folder, four_bit=False, auto=AutoModelForImageTextToText)
    taken = {*inspect.signature(type(base).forward).parameters}
    batches = []
    for row, images in zip(*make_chats(folder), strict=True):
        inputs = encode(processor, tokenizer, row, images, (FAMILIES | FURTHER)[family].shown)
        batches.append({name: value for name, value in inputs.items() if name in taken})
    decoder = "|".join(NAMES.get(family, LINEARS))
    layers = rf"model\.(language_model.*({decoder})|{LAYERS[family]})"
    return train_plainly(base, batches, layers)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "family", all_slow_but("glm4v", LAYERS, nightly=ALIKE - {"llava"} | {*FURTHER})
)
def test_vision_modules_train_as_in_a_plain_loop(family, ranks, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    make_family(folder, family)
    train_ok(
        ranks,
        tmp_path / "out",
        model_name=folder,
        dataset=folder / "rows.jsonl",
        batch_size=1,
        gradient_accumulation_steps=8 // ranks,
        lora_target_modules=",".join((*NAMES.get(family, LINEARS), *TOWERS)),
        **OPTIONS,
    )
    check_as_plain(tmp_path / "out", plain(family, folder))
