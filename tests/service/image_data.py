"""A tiny model for images, data with images as the client sends them, and PEFT's loop on them."""

import inspect
import io
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from tinker import types
from torch import Tensor
from transformers import AutoModelForImageTextToText

from fsdp_qlora.data.text.image_processor import ImageProcessor
from tests.parity.test_images import Image, picture, png, qwen3_vl
from tests.parity.test_multimodal import make_multimodal
from tests.service.harness import Plain

# Tokens of text, below those that stand for images.
_TEXT = 300
# Arguments that say which tokens stand for images.
_KINDS = ("mm_token_type_ids", "token_type_ids")


def make_image_model(folder: Path) -> Path:
    """A tiny Qwen3-VL with its real processor."""
    make_multimodal(folder, "qwen3_vl")
    qwen3_vl(folder)
    return folder


class Pictures:
    """The images of a test, and the tokens that stand for them."""

    def __init__(self, folder: Path) -> None:
        self.processor = qwen3_vl(folder)

    def chunk(self, seed: int, **other: Any) -> types.ImageChunk:
        """An image with the number of tokens that a renderer of the cookbook finds."""
        image = picture(40 + 9 * (seed % 7), 60 - 5 * (seed % 5), seed)
        patches = self.processor.image_processor.get_number_of_image_patches(
            image.height, image.width, images_kwargs={}
        )
        count = patches // self.processor.image_processor.merge_size**2
        given = {"data": png(image), "format": "png", "expected_tokens": count, **other}
        return types.ImageChunk(**given)

    @cached_property
    def around(self) -> list[int]:
        """The tokens before and behind an image."""
        ids = self.processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "</s>"])
        return [int(each) for each in ids]

    @property
    def image_token(self) -> int:
        return int(self.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>"))

    def prompt(self, seed: int, num_images: int = 1) -> types.ModelInput:
        """Text with images in it."""
        numbers = np.random.default_rng(seed)
        start, end = self.around
        chunks: list[Any] = [types.EncodedTextChunk(tokens=_text(numbers, 4))]
        for index in range(num_images):
            chunks += [
                types.EncodedTextChunk(tokens=[start]),
                self.chunk(10 * seed + index),
                types.EncodedTextChunk(tokens=[end, *_text(numbers, 3 + index)]),
            ]
        return types.ModelInput(chunks=chunks)

    def data(self, count: int, seed: int = 0) -> list[types.Datum]:
        """Sequences with two, no and one image in turn; the last tokens are learned."""
        made = []
        for row in range(count):
            numbers = np.random.default_rng(100 * seed + row)
            prompt = self.prompt(100 * seed + row, (2, 0, 1)[row % 3])
            answer = _text(numbers, 3 + row)
            whole = prompt.append(types.EncodedTextChunk(tokens=answer[:-1]))
            learned = np.arange(whole.length) >= whole.length - len(answer)
            # The cookbook has 0 as the target where an image's token would be.
            targets = np.zeros(whole.length, np.int64)
            targets[learned] = answer
            weights = (numbers.random(whole.length) * learned).astype(np.float32)
            made.append(
                types.Datum(
                    model_input=whole,
                    loss_fn_inputs={"target_tokens": targets, "weights": weights},  # type: ignore[dict-item]
                )
            )
        return made


class PlainWithImages(Plain):
    """The same as `Plain` for a model of images and text."""

    def __init__(self, model: str, adapter: Path) -> None:
        self.pictures = Pictures(Path(model))
        base = AutoModelForImageTextToText.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )
        self.model = PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
        self.parameters = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters)

    def inputs(self, chunks: Sequence[Any]) -> dict[str, Tensor]:
        """The model's arguments: tokens, and what the processor makes of the images."""
        ids = list[int]()
        images = []
        for chunk in chunks:
            if isinstance(chunk, types.ImageChunk):
                images.append(opened(chunk))
                ids += [self.pictures.image_token] * int(chunk.expected_tokens or 0)
            else:
                ids += chunk.tokens
        tokens = torch.tensor([ids])
        kinds = (tokens == self.pictures.image_token).long()
        if not images:
            return {"input_ids": tokens}
        shown = self.pictures.processor.image_processor(images=images, return_tensors="pt")
        return {"input_ids": tokens, "mm_token_type_ids": kinds, **shown}

    def logprobs(self, datum: types.Datum) -> Tensor:
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        logits = self.model(**self.inputs(datum.model_input.chunks)).logits[0]
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def scores(self, prompt: types.ModelInput) -> tuple[Tensor, Tensor]:
        """Log-probabilities of a prompt's tokens behind the first, and of all tokens at each."""
        inputs = self.inputs(prompt.chunks)
        with torch.no_grad():
            likely = self.model(**inputs).logits[0].log_softmax(-1)
        return likely[:-1].gather(1, inputs["input_ids"][0, 1:, None])[:, 0], likely


class Alone:
    """A base that computes each sequence alone, with the arguments of the library's processor.

    An adapter of the service changes nothing at first.
    """

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._shown: dict[bytes, Any] = {}
        self.processor = ImageProcessor(folder, folder.name, self._shown.__getitem__)

    def datum(self, seed: int, num_images: int) -> types.Datum:
        """Text with images, whose next tokens are its targets."""
        numbers = np.random.default_rng(seed)
        chunks: list[Any] = [types.EncodedTextChunk(tokens=_text(numbers, 3 + seed))]
        for index in range(num_images):
            image = picture(40 + 7 * seed, 60 - 3 * index, 10 * seed + index)
            [ids], _ = self.processor.tokens_for([image])
            content = png(image)
            self._shown[content] = image
            chunks += [
                types.ImageChunk(data=content, format="png", expected_tokens=len(ids)),
                types.EncodedTextChunk(tokens=_text(numbers, 4 + index)),
            ]
        targets = [*self._tokens(chunks)[1:], 7]
        return types.Datum(
            model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": targets}
        )

    @torch.no_grad()
    def logprobs(self, datum: types.Datum) -> Tensor:
        chunks = datum.model_input.chunks
        tokens = torch.tensor([self._tokens(chunks)])
        names = [chunk.data for chunk in chunks if isinstance(chunk, types.ImageChunk)]
        taken = inspect.signature(type(self.model).forward).parameters
        kinds = {name: torch.zeros_like(tokens) for name in _KINDS if name in taken}
        if names:
            kinds = self.processor.model_inputs([self.processor.outputs_of(names)], tokens, taken)
        logits = self.model(input_ids=tokens, **kinds).logits[0]
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def _tokens(self, chunks: Sequence[Any]) -> list[int]:
        ids = list[int]()
        for chunk in chunks:
            if isinstance(chunk, types.ImageChunk):
                ids += self.processor.tokens_for([self._shown[chunk.data]])[0][0]
            else:
                ids += chunk.tokens
        return ids


def opened(chunk: types.ImageChunk) -> Any:
    return Image.open(io.BytesIO(chunk.data)).convert("RGB")


def _text(numbers: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = numbers.integers(5, _TEXT, count).tolist()
    return tokens
