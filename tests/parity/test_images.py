# ruff: noqa: E501
"""Rows with images train as in a plain loop of transformers' processor and model with PEFT's
adapter.
"""

import functools
import io
import json
import os
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Processor,
    PreTrainedTokenizerFast,
    Qwen3VLProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.helpers.metrics import read_metrics
from tests.helpers.reference import LINEARS, load_base, train_plainly
from tests.helpers.run import flags, on_ranks, train_ok
from tests.helpers.tokenizers import make_tokenizer
from tests.parity.test_multimodal import make_multimodal

Image = pytest.importorskip("PIL.Image")
if hasattr(AutoImageProcessor, "_backends"):
    pytest.skip(
        "images need torchvision with this release of transformers", allow_module_level=True
    )
LORA = "model.language_model.*(q|k|v|o|gate|up|down)_proj"
OPTIONS = {
    "train_type": "lora",
    "precision": "fp32",
    "lr": 1e-2,
    "lr_scheduler": "constant",
    "warmup": 0,
    "wd": 0,
    "grad_norm": 1,
    "lora_rank": 4,
    "lora_alpha": 6,
    "lora_dropout": 0,
    "seed": 5,
    "num_epochs": 3,
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ 'IMAGE' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"


class Qwen3VL(Qwen3VLProcessor):
    """Without its part for video, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None


def qwen3_vl(folder: Path) -> Any:
    tokens = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
    }
    if not (folder / "preprocessor_config.json").exists():
        save_tokenizer(folder, tokens, "<|vision_start|><|image_pad|>")
        Qwen2VLImageProcessorPil(
            patch_size=14, min_pixels=28 * 28, max_pixels=56 * 56
        ).save_pretrained(folder)
    return Qwen3VL(
        AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    )


def gemma3(folder: Path) -> Any:
    tokens = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    if not (folder / "processor_config.json").exists():
        tokenizer = save_tokenizer(folder, tokens, "<start_of_image>")
        images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
        Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)
    return Gemma3Processor.from_pretrained(folder)


def gemma4(folder: Path) -> Any:
    # Earlier releases of transformers cannot import these without torchvision.
    from transformers import Gemma4Processor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    class Gemma4(Gemma4Processor):
        """Without its part for video, which needs torchvision, and that for sound."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None

    tokens = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    sounds = {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    images = Gemma4ImageProcessorPil(patch_size=14, pooling_kernel_size=2, max_soft_tokens=70)
    if not (folder / "preprocessor_config.json").exists():
        tokenizer = save_tokenizer(folder, tokens | sounds, "<|image|>")
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(folder)
        images.save_pretrained(folder)
    return Gemma4(None, images, AutoTokenizer.from_pretrained(folder), None)


def save_tokenizer(folder: Path, tokens: dict[str, str], shown: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with tokens for images, whose ids are in the model's config too."""
    make_tokenizer(folder)
    plain = AutoTokenizer.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=tokens,
        chat_template=TEMPLATE.replace("IMAGE", shown),
    )
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()
    }
    config |= {
        f"{name[:3]}_token_index": config[f"{name}_id"] for name in tokens if name[1:3] == "oi"
    }
    if "mm_tokens_per_image" in config:
        config |= {"mm_tokens_per_image": 4, "image_token_index": config["image_token_id"]}
    (folder / "config.json").write_text(json.dumps(config))
    return tokenizer


def picture(width: int, height: int, seed: int) -> Any:
    numbers = torch.randint(
        256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    return Image.fromarray(numbers.numpy())


def png(image: Any) -> bytes:
    image.save(file := io.BytesIO(), "png")
    return file.getvalue()


def make_chats(folder: Path) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """Chats, and the images of each: by `<image>`, in parts, in base64, in a list alone; and some
    without images.
    """
    images = [picture(40 + 9 * n, 60 - 5 * n, seed=n) for n in range(6)]
    for number, image in enumerate(images):
        (folder / f"{number}.png").write_bytes(png(image))
    link = "data:image/png;base64," + b64encode(png(images[3])).decode()

    def chat(*contents: Any) -> list[dict[str, Any]]:
        return [
            {"role": ("user", "assistant")[n % 2], "content": each}
            for n, each in enumerate(contents)
        ]

    parts = [
        {"type": "image_url", "image_url": {"url": link}},
        {"type": "text", "text": "name the colour"},
    ]
    rows: list[tuple[dict[str, Any], list[int]]] = [
        (
            {
                "messages": chat("<image>name it<image>", "red river", "and<image>", "blue"),
                "images": ["0.png", "1.png", "2.png"],
            },
            [0, 1, 2],
        ),
        ({"messages": chat("write seven words " * 8, "water mountain answer question")}, []),
        ({"messages": chat(parts, "green")}, [3]),
        ({"messages": chat("sort", "list name")}, []),
        (
            {
                "messages": chat("which number", "seven"),
                "images": [{"path": str(folder / "4.png")}],
            },
            [4],
        ),
        ({"messages": chat("please", "blue", "again", "red")}, []),
        (
            {
                "messages": chat(
                    [{"type": "image", "path": "5.png"}, {"type": "text", "text": "so"}], "river"
                )
            },
            [5],
        ),
        ({"messages": chat("list water", "name")}, []),
    ]
    return [row for row, _ in rows], [[images[n] for n in shown] for _, shown in rows]


def encode(
    processor: Any, tokenizer: Any, row: dict[str, Any], images: list[Any], shown: str = ""
) -> dict[str, torch.Tensor]:
    """What the processor gives for a chat, and labels: the tokens of what the assistant says.

    shown: what stands for an image in a text of this processor.
    """
    images_shown = {"Qwen3VL": "<|vision_start|><|image_pad|>", "Gemma4": "<|image|>"}
    shown = shown or images_shown.get(type(processor).__name__, "<start_of_image>")

    def text_of(content: Any) -> str:
        return (
            content
            if isinstance(content, str)
            else "".join(part.get("text", "<image>") for part in content)
        )

    said = [text_of(message["content"]) for message in row["messages"]]
    if images and "<image>" not in "".join(said):
        said[0] = "<image>" + said[0]
    turns = [
        f"assistant:\n{each}</s>" if n % 2 else f"\nuser:\n{each}\n" for n, each in enumerate(said)
    ]
    turns = ["<s>" + turns[0].lstrip(), *turns[1:]]

    def tokens(number: int, more: str = "") -> dict[str, torch.Tensor]:
        text = "".join(turns[:number]).replace("<image>", shown) + more
        own = images[: text.count(shown)]
        return dict(
            processor(
                text=[text],
                images=[own] if own else None,
                add_special_tokens=False,
                return_tensors="pt",
            )
        )

    found = tokens(len(turns), "\n")
    labels = torch.full_like(found["input_ids"], -100)
    for turn in range(1, len(turns), 2):
        start = tokens(turn, "assistant:\n")["input_ids"].shape[1]
        end = tokens(turn + 1)["input_ids"].shape[1]
        labels[:, start:end] = found["input_ids"][:, start:end]
    return {**found, "labels": labels}


PROCESSORS = {"qwen3_vl": qwen3_vl, "gemma3": gemma3, "gemma4": gemma4}


@functools.cache
def plain(family: str, folder: Path, lora: Any = LORA) -> Any:
    """A plain loop of PEFT. lora: as of `train_plainly`."""
    processor = PROCESSORS[family](folder)
    rows, images = make_chats(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batches = [encode(processor, tokenizer, *each) for each in zip(rows, images, strict=True)]
    base = load_base(folder, four_bit=False, auto=AutoModelForImageTextToText)
    return train_plainly(base, batches, lora)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> Path:
        folder = make_multimodal(tmp_path_factory.mktemp(family), family)
        PROCESSORS[family](folder)
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, make_chats(folder)[0])) + "\n")
        return folder

    return make


def check_as_plain(folder: Path, expected: tuple[Any, Any, dict[str, torch.Tensor]]) -> None:
    """Compare a run's losses, gradient norms and adapter with those of a plain loop."""
    losses, norms, adapter = expected
    assert read_metrics(folder) == pytest.approx(losses, rel=1e-5)
    assert read_metrics(folder, "grad_norm") == pytest.approx(norms, rel=1e-4)
    saved = load_file(folder / "adapter_model.safetensors")
    assert saved.keys() == adapter.keys()
    for name, value in saved.items():
        # Adam divides by the root of tiny squares: of gemma4, one matrix (a gate's B) is off by
        # 1.3e-4 since sums have another order than PEFT's, all others by less than 2e-5.
        assert (value - adapter[name]).norm() <= 2e-4 * adapter[name].norm()


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen3_vl", 2),
        ("gemma3", 1),
        pytest.param("gemma4", 2, marks=pytest.mark.slow),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (("qwen3_vl", 1), ("gemma3", 2), ("gemma4", 1))
        ),
    ],
)
def test_images_train_as_in_a_plain_loop_of_peft(family, ranks, folders, tmp_path):
    folder = folders(family)
    output = train_ok(
        ranks,
        tmp_path / "out",
        model_name=folder,
        dataset=folder / "rows.jsonl",
        batch_size=1,
        gradient_accumulation_steps=8 // ranks,
        lora_target_modules=",".join(LINEARS),
        **OPTIONS,
    )
    check_as_plain(tmp_path / "out", plain(family, folder))
    # Tokens of gemma's images see later ones.
    assert ("Rows are padded" in output) == family.startswith("gemma")


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_a_step_in_16_bits_may_begin_with_rows_without_images(family, folders, tmp_path):
    folder = folders(family)
    chats = make_chats(folder)[0]
    # row 1 is the longest, so it comes first
    rows = [json.dumps(chats[n]) for n in (1, 1, 1, 1, 2, 3, 4, 5)]
    dataset = folder / "text_first.jsonl"
    dataset.write_text("\n".join(rows) + "\n")
    losses = []
    for precision in ("fp32", "bf16"):
        options = {
            **OPTIONS,
            "precision": precision,
            "gradient_accumulation_steps": 2,
            "batch_size": 2,
        }
        train_ok(2, tmp_path / precision, model_name=folder, dataset=dataset, **options)
        losses.append(read_metrics(tmp_path / precision))
    # bf16 has 8 bits
    assert losses[1] == pytest.approx(losses[0], rel=2e-2) and losses[0] != losses[1]


def _count_towers(argv: list[str], file: Path) -> int:
    """A run of one rank; writes how often its vision tower computed, and whether with a gradient."""
    import train

    calls = []

    def note(module: torch.nn.Module, args: Any, output: Any) -> None:
        if not type(module).__name__.endswith("Qwen3VLVisionModel"):
            return
        tensors = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        # The plan computes shapes on the meta device.
        if not tensors[0].is_meta:
            calls.append(any(each.requires_grad for each in tensors))

    with torch.nn.modules.module.register_module_forward_hook(note):
        status = train.main(argv)
    file.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(calls))
    return status


def test_a_tower_computes_once_a_row_and_a_resumed_run_is_the_same(folders, tmp_path):
    folder = folders("qwen3_vl")
    options = {
        **OPTIONS,
        "model_name": folder,
        "dataset": folder / "rows.jsonl",
        "gradient_accumulation_steps": 4,
        "recompute": "all",
        "save_every": 1,
        "lora_dropout": 0.1,
        "save_total_limit": 9,
        "context_length": 512,
    }
    argv = flags(output_dir=tmp_path / "whole", quant_cache="off", log_to="stdout", **options)
    statuses, output = on_ranks(2, _count_towers, (argv, tmp_path / "calls"), tmp_path / "logs")
    assert statuses == [0, 0], output
    calls = [json.loads((tmp_path / f"calls.{rank}").read_text()) for rank in range(2)]
    # Four of the eight rows have images, in three epochs; of the others one rank has some beside
    # them. Before that each rank computes two micro-batches to try rows without padding.
    assert sum(map(len, calls)) == 12 + 2 * 2 and not any(calls[0] + calls[1])
    assert len(calls[0]) != len(calls[1])
    train_ok(2, tmp_path / "resumed", resume=tmp_path / "whole/checkpoints/step_000001", **options)
    first, second = (
        (tmp_path / name / "adapter_model.safetensors").read_bytes()
        for name in ("whole", "resumed")
    )
    assert first == second
