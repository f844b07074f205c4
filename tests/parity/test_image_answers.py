"""Answers to prompts with images, against transformers' own generation with its processor."""

import functools
import inspect
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, PreTrainedModel

from fsdp_qlora.data.batches.image_inputs import ImageInputs
from fsdp_qlora.data.batches.row_images import NO_IMAGES, RowImages
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.data.text.image_store import keep_all
from fsdp_qlora.model.architecture.image_positions import positions_of_rows
from fsdp_qlora.sharding.recompute import wrap_blocks
from fsdp_qlora.training.generation.model_cache import shares_prompts
from fsdp_qlora.training.generation.passes import Batch, Passes
from fsdp_qlora.training.generation.prompt_images import ShownImages
from fsdp_qlora.training.generation.token_graphs import why_not_graphed
from tests.helpers.run import all_slow_but
from tests.parity.test_image_rows import ALIKE, FAMILIES, FURTHER, make_family
from tests.parity.test_images import picture

if hasattr(AutoImageProcessor, "_backends"):
    pytest.skip(
        "images need torchvision with this release of transformers", allow_module_level=True
    )
NEW_TOKENS = 8
# Their caches are not of a block's keys and values alone, or their experts' rows differ in number.
NOT_GRAPHED = {"qwen3_5", "qwen3_5_moe", "gemma4", "gemma4 as E4B", "gemma4 as 26B"}
NOT_GRAPHED |= {"qwen3_vl_moe", "kimi_k25"}


class Case(NamedTuple):
    """A prompt by its text, in which IMAGE stands for the next image, and its images by number."""

    text: str
    images: tuple[int, ...] = ()


# Text alone, equal texts with images of equal sizes, several images, and prompts more than once.
CASES = [
    Case("user:\nname the river\nassistant:\n"),
    Case("user:\nIMAGE so what is it\nassistant:\n", (0,)),
    Case("user:\nIMAGE so what is it\nassistant:\n", (1,)),
    Case("user:\ntell me about IMAGE and IMAGE\nassistant:\n", (2, 0)),
    Case("user:\nIMAGE so what is it\nassistant:\n", (0,)),
    Case("water"),
    Case("user:\nname the river\nassistant:\n"),
]
SIZES = [(56, 28), (56, 28), (30, 60)]


class Asked(NamedTuple):
    """What the processor makes of the cases."""

    inputs: list[dict[str, torch.Tensor]]
    prompts: list[list[int]]
    images: list[RowImages]


def _ask(processor: ImageProcessor, shown: str) -> Asked:
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    asked = Asked([], [], [])
    for text, numbers in CASES:
        chosen = [pictures[number] for number in numbers]
        inputs = processor._processor(
            text=[text.replace("IMAGE", shown)],
            images=[chosen] if chosen else None,
            return_tensors="pt",
        )
        asked.inputs.append(dict(inputs))
        asked.prompts.append(inputs["input_ids"][0].tolist())
        asked.images.append(_kept(chosen))
    return asked


def _kept(pictures: list[Any]) -> RowImages:
    if not pictures:
        return NO_IMAGES
    names, _ = keep_all([_png(each) for each in pictures])
    return RowImages(
        np.frombuffer(b"".join(names), np.uint8).reshape(-1, 16), np.array([[len(names), 0]])
    )


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _model(folder: Path) -> PreTrainedModel:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        # The initial weights of a tiny model repeat one token, and see little of an image.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


class Answers(NamedTuple):
    """Greedy answers, int64 [B, T], and the logits of their tokens, [B, T, V]."""

    tokens: torch.Tensor
    logits: torch.Tensor


def _expected(model: PreTrainedModel, asked: Asked) -> Answers:
    made = [
        model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for inputs in asked.inputs
    ]
    return Answers(
        torch.cat([each.sequences[:, -NEW_TOKENS:] for each in made]),
        torch.cat([torch.stack(each.logits, dim=1) for each in made]),
    )


def _answers(
    model: PreTrainedModel, asked: Asked, shown: ShownImages, most: int | None = None
) -> Answers:
    batch = Batch.of(asked.prompts, shares_prompts=shares_prompts(model), images=asked.images)
    assert len(batch.prompts) == 5
    passes = Passes(model, batch, torch.device("cpu"), [], most, shown)
    with torch.no_grad():
        logits = [passes.prompts()]
        while len(logits) < NEW_TOKENS:
            logits.append(passes.next(logits[-1].argmax(dim=-1)))
    all_logits = torch.stack(logits, dim=1)
    return Answers(all_logits.argmax(dim=-1), all_logits)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> Path:
        return make_family(tmp_path_factory.mktemp(family), family)

    return make


@pytest.mark.parametrize(
    "family", all_slow_but("qwen2_5_vl", FAMILIES | FURTHER, nightly=ALIKE | {*FURTHER})
)
def test_answers_to_images_are_those_that_transformers_generates(family, folders):
    folder = folders(family)
    processor = ImageProcessor(folder, family)
    asked = _ask(processor, (FAMILIES | FURTHER)[family].shown)
    model = _model(folder)
    inputs = ImageInputs(
        processor, inspect.signature(type(model).forward).parameters, positions_of_rows(model)
    )
    answers = _answers(model, asked, ShownImages(inputs))
    expected = _expected(model, asked)
    assert torch.equal(answers.tokens, expected.tokens)
    assert torch.allclose(answers.logits, expected.logits, atol=1e-4)
    # The same text with another image of the same size.
    assert not torch.allclose(answers.logits[1], answers.logits[2], atol=1e-2)
    # By graphs, whose captured functions run again without a GPU; and with what transformers'
    # generation has left in the model.
    wrap_blocks(model, offload=False)
    is_graphed = not why_not_graphed(model, 100)
    assert is_graphed != (family in NOT_GRAPHED)
    if is_graphed:
        graphed = _answers(model, asked, ShownImages(inputs), NEW_TOKENS)
        assert torch.equal(graphed.tokens, expected.tokens)
