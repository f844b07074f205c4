"""Rows with images that are concatenated train as padded ones, to rounding."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest
from safetensors.torch import load_file
from transformers import AutoImageProcessor

from tests.helpers.metrics import read_metrics
from tests.helpers.rows import write_rows
from tests.helpers.run import all_slow_but, flags, on_ranks, train_ok
from tests.parity.test_images import OPTIONS, make_chats, save_tokenizer
from tests.parity.test_multimodal import make_multimodal
from tests.preferences.image_pairs import write_image_pairs

if hasattr(AutoImageProcessor, "_backends"):
    pytest.skip(
        "images need torchvision with this release of transformers", allow_module_level=True
    )


# Of each structure one family is trained in continuous integration.
ALIKE = {"qwen3_vl", "glm4v", "internvl", "llava", "gemma3"}
NEED_TORCHVISION = {"mistral3", "kimi_k25"}


class Family(NamedTuple):
    """A model's processor: tokens by the names that it knows, and how a chat template shows an
    image.
    """

    images: Callable[[], Any]
    tokens: dict[str, str]
    shown: str
    image_token: str  # whose id is in config.json
    settings: Mapping[str, Any] = MappingProxyType({})
    model: str = ""  # in test_multimodal.py, if it has another name
    text: Mapping[str, Any] = MappingProxyType({})  # of the text model's config.json
    sees_whole: bool = False  # tokens of an image see later ones of it


def qwen_images(**options: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=14, min_pixels=28 * 28, max_pixels=56 * 56, **options
    )


def glm_images() -> Any:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    return Glm4vImageProcessorPil(
        patch_size=14, size={"shortest_edge": 28 * 28, "longest_edge": 2 * 56 * 56}
    )


def tiled_images() -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    return GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=False)


def pixtral_images() -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=14)


def clip_images() -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})


def siglip_images() -> Any:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": 28, "width": 28})


def kimi_images() -> Any:
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor

    return Kimi_K25ImageProcessor(patch_size=14, merge_size=2, max_patches=16)


def gemma3_images() -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size={"height": 28, "width": 28})


def gemma4_images() -> Any:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(patch_size=14, pooling_kernel_size=2, max_soft_tokens=70)


QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
}
SHOWN = "<|vision_start|><|image_pad|>"
KIMI = {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"}
GLM = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "begin_of_video_token": "<|begin_of_video|>",
    "end_of_video_token": "<|end_of_video|>",
}
INTERN = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}
PIXTRAL = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
GEMMA3 = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
GEMMA4 = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
GEMMA4 |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
FAMILIES = {
    "qwen3_vl": Family(qwen_images, QWEN, SHOWN, "<|image_pad|>"),
    "qwen2_5_vl": Family(qwen_images, QWEN, SHOWN, "<|image_pad|>"),
    "qwen3_5": Family(qwen_images, QWEN, SHOWN, "<|image_pad|>"),
    "glm4v": Family(glm_images, GLM, "<|image|>", "<|image|>"),
    "internvl": Family(
        tiled_images, INTERN, "<IMG_CONTEXT>", "<IMG_CONTEXT>", {"image_seq_length": 1}
    ),
    "mistral3": Family(
        pixtral_images, PIXTRAL, "[IMG]", "[IMG]", {"patch_size": 14, "spatial_merge_size": 2}
    ),
    "llava": Family(
        clip_images,
        {"image_token": "<image>"},
        "<image>",
        "<image>",
        {
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    ),
    "gemma3": Family(
        gemma3_images,
        GEMMA3,
        "<start_of_image>",
        "<image_soft_token>",
        {"image_seq_length": 4},
        sees_whole=True,
    ),
    "gemma4": Family(gemma4_images, GEMMA4, "<|image|>", "<|image|>", sees_whole=True),
    "gemma4 as E4B": Family(
        gemma4_images,
        GEMMA4,
        "<|image|>",
        "<|image|>",
        model="gemma4",
        text={"use_bidirectional_attention": None},
    ),
}
# Families of answers and of a plain loop alone.
FURTHER = {
    "gemma4 as 26B": Family(gemma4_images, GEMMA4, "<|image|>", "<|image|>", sees_whole=True),
    **{
        family: Family(qwen_images, QWEN, SHOWN, "<|image_pad|>")
        for family in ("qwen3_vl_moe", "qwen3_5_moe")
    },
    "kimi_k25": Family(kimi_images, KIMI, "<|media_pad|>", "<|media_pad|>"),
}


def make_family(folder: Path, family: str) -> Path:
    """A tiny model with its processor, and rows of mixed lengths with and without images."""
    if family in NEED_TORCHVISION:
        pytest.importorskip("torchvision", reason="its processor needs torchvision")
    row = (FAMILIES | FURTHER)[family]
    make_multimodal(folder, row.model or family)
    tokenizer = save_tokenizer(folder, row.tokens, row.shown)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    row.images().save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(dict(row.settings)))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    number = tokenizer.convert_tokens_to_ids(row.image_token)
    config |= {name: number for name in ("image_token_id", "image_token_index") if name in config}
    config["text_config"] |= row.text
    path.write_text(json.dumps(config))
    chats = make_chats(folder)[0]
    write_rows(folder / "rows.jsonl", chats)
    write_rows(folder / "held_out.jsonl", chats[2:7])
    write_image_pairs(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> Path:
        return make_family(tmp_path_factory.mktemp(family), family)

    return make


@pytest.mark.parametrize("family", all_slow_but("qwen2_5_vl", FAMILIES, nightly=ALIKE))
def test_concatenated_rows_with_images_train_as_padded_ones(family, folders, tmp_path):
    options = {"dataset": "rows.jsonl", "eval_dataset": "held_out.jsonl"}
    useful = _train_as_padded(family, folders, tmp_path, **options)
    assert (min(useful) > 0.97) != FAMILIES[family].sees_whole


@pytest.mark.parametrize("family", all_slow_but("qwen3_5", FAMILIES, nightly=ALIKE))
def test_pairs_with_images_share_prompts_and_train_as_padded_ones(family, folders, tmp_path):
    options = {"dataset": "pairs.jsonl", "eval_dataset": "pairs.jsonl", "objective": "dpo"}
    useful = _train_as_padded(family, folders, tmp_path, **options)
    # Of both answers with their prompt, which is computed once.
    assert (min(useful) > 1.5) != FAMILIES[family].sees_whole


def _train_as_padded(
    family: str, folders: Callable[[str], Path], output: Path, **options: str
) -> list[float]:
    """Compare a run with one whose rows are padded. Returns its tokens per computed one."""
    folder = folders(family)
    run = {
        **OPTIONS,
        **options,
        "model_name": folder,
        "dataset": folder / options["dataset"],
        "eval_dataset": folder / options["eval_dataset"],
        "batch_size": 4,
        "gradient_accumulation_steps": 2,
    }
    said = train_ok(1, output / "free", **run)
    train_ok(1, output / "padded", batching="padded", **run)
    for name in ("loss", "grad_norm", "eval_loss"):
        free, padded = (read_metrics(output / each, name) for each in ("free", "padded"))
        assert free == pytest.approx(padded, rel=1e-5)
    free, padded = (
        load_file(output / each / "adapter_model.safetensors") for each in ("free", "padded")
    )
    for name, value in free.items():
        assert (value - padded[name]).norm() < 2e-4 * padded[name].norm()
    assert ("Rows are padded" in said) == FAMILIES[family].sees_whole
    return read_metrics(output / "free", "useful_of_computed")


def test_rows_with_images_are_packed_as_they_fit(folders, tmp_path):
    folder = folders("qwen2_5_vl")
    options = {
        **OPTIONS,
        "model_name": folder,
        "dataset": folder / "rows.jsonl",
        "context_length": 128,
        "batch_size": 1,
        "gradient_accumulation_steps": 8,
    }
    records = []
    for batching in ("padding_free", "packed"):
        train_ok(1, tmp_path / batching, batching=batching, **options)
        records.append(read_metrics(tmp_path / batching))
    assert records[1] == pytest.approx(records[0], rel=1e-5)


def _no_positions(tokens: Any, inputs: Any) -> Any:
    return inputs["a size that this processor does not give"]


def _train_with_positions(argv: list[str], positions: Any) -> int:
    import train

    with mock.patch("fsdp_qlora.training.image_inputs.positions_of_rows", lambda model: positions):
        return train.main(argv)


@pytest.mark.parametrize(
    ("positions", "reason"),
    [(None, "a second row with images differs"), (_no_positions, "KeyError: 'a size that")],
)
def test_rows_are_padded_where_positions_of_images_are_wrong(positions, reason, folders, tmp_path):
    folder = folders("qwen2_5_vl")
    options = {**OPTIONS, "model_name": folder, "dataset": folder / "rows.jsonl", "max_steps": 1}
    argv = flags(output_dir=tmp_path / "out", quant_cache="off", log_to="stdout", **options)
    args = (argv, positions)
    statuses, output = on_ranks(1, _train_with_positions, args, tmp_path / "logs")
    assert statuses == [0], output
    assert f"Rows are padded with this model: {reason}" in output
