"""Models compute concatenated rows with images as padded ones, also those whose processors need
torchvision: these get images that are made by hand.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText, PreTrainedModel

from fsdp_qlora.data.batches.collator import Collator
from fsdp_qlora.data.batches.image_inputs import ImageInputs
from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import Schedule
from fsdp_qlora.model.architecture.attention import SDPA, attending
from fsdp_qlora.model.architecture.decoder import find_towers
from fsdp_qlora.model.architecture.image_positions import positions_of_rows
from fsdp_qlora.model.architecture.token_mixers import keep_documents_apart
from fsdp_qlora.model.architecture.tower_inputs import keep_documents_from
from fsdp_qlora.training.generation.passes import Batch, Passes
from fsdp_qlora.training.generation.prompt_images import ShownImages
from tests.parity.test_multimodal import make_multimodal

# Patches of each image, as rows and columns, of which four become a token.
GRIDS = [(4, 4), (2, 4), (4, 2), (2, 2)]
IMAGES_OF_ROWS = [[0, 1], [], [2], [3]]


def _whole_images(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Of mistral3: pixels up to the largest size, and sizes."""
    sizes = torch.tensor([GRIDS[number] for number in numbers]) * 14
    generator = torch.Generator().manual_seed(numbers[0])
    return {
        "pixel_values": torch.randn(len(numbers), 3, 56, 56, generator=generator),
        "image_sizes": sizes,
    }


def _patches(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Of kimi_k25: all patches one after the other, and how many there are."""
    grids = torch.tensor([(1, *GRIDS[number]) for number in numbers])
    generator = torch.Generator().manual_seed(numbers[0])
    return {
        "pixel_values": torch.randn(int(grids.prod(1).sum()), 3, 14, 14, generator=generator),
        "image_grid_thw": grids,
    }


def _flat_patches(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Of qwen3_vl: the same, of two frames each, with all numbers of a patch in one dim."""
    made = _patches(numbers)
    pixels = made["pixel_values"].flatten(1).repeat(1, 2)
    return {"pixel_values": pixels, "image_grid_thw": made["image_grid_thw"]}


class _HandMade:
    """Stands for a processor, for rows whose images are named by their numbers.

    image_token: the id that stands for images. made: the images of each call of `outputs_of`.
    """

    def __init__(
        self, make: Callable[[Sequence[int]], dict[str, torch.Tensor]], image_token: int
    ) -> None:
        self._make = make
        self._image_token = image_token
        self.made: list[list[int]] = []

    def outputs_of(self, names: Sequence[bytes]) -> dict[str, torch.Tensor]:
        self.made.append([name[0] for name in names])
        return self._make(self.made[-1])

    def kinds_of(self, input_ids: torch.Tensor) -> torch.Tensor:
        return (input_ids == self._image_token).long()

    def model_inputs(
        self,
        outputs: Sequence[Mapping[str, torch.Tensor]],
        input_ids: torch.Tensor,
        taken: Mapping[str, Any],
        is_prompt: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        inputs = {name: torch.cat([each[name] for each in outputs]) for name in outputs[0]}
        if "mm_token_type_ids" in taken:
            inputs["mm_token_type_ids"] = self.kinds_of(input_ids)
        return inputs


def _rows(image_token: int) -> TokenizedRows:
    numbers = np.random.default_rng(0)
    rows: list[list[int]] = []
    for index, images in enumerate(IMAGES_OF_ROWS):
        row = numbers.integers(5, 300, 3 + index).tolist()
        for image in images:
            height, width = GRIDS[image]
            row += [image_token] * (height * width // 4) + numbers.integers(5, 300, 2).tolist()
        rows.append(row + numbers.integers(5, 300, 4).tolist())
    ids = np.array([token for row in rows for token in row], np.int32)
    names = np.zeros((len(GRIDS), 16), np.uint8)
    names[:, 0] = range(len(GRIDS))
    counts = [len(images) for images in IMAGES_OF_ROWS]
    return TokenizedRows(
        ids,
        ids != image_token,
        np.cumsum([0, *map(len, rows)]),
        np.arange(len(rows)),
        images=RowImages(names, np.stack([counts, counts], axis=1)),
    )


def _answered(table: TokenizedRows, *, in_rows: bool) -> TokenizedRows:
    """Two answers to each of the rows, which are prompts: pairs, or rows of their own."""
    numbers = np.random.default_rng(1)
    documents: list[np.ndarray] = []
    learned: list[bool] = []
    for row in range(len(table)):
        prompt = table[row].input_ids[:]
        for length in (4, 6):
            # Another first token, so that pairs share the prompt alone.
            answer = [length, *numbers.integers(7, 300, length)]
            documents.append(np.concatenate([prompt, answer]).astype(np.int32))
            learned += [False] * len(prompt) + [True] * len(answer)
    lengths = np.array([*map(len, documents)])
    ends = np.cumsum([0, *lengths])
    ids = np.concatenate(documents)
    mask = np.array(learned)
    if in_rows:
        return TokenizedRows(
            ids, mask, ends[::2], table.row_numbers, lengths[::2], images=table.images
        )
    answers = TokenizedRows(
        ids, mask, ends, table.row_numbers.repeat(2), images=table.images.repeated(2)
    )
    return answers.with_columns("row", prompt_tokens=table.lengths.repeat(2) - 1)


def _loss(
    model: PreTrainedModel,
    collator: Collator,
    table: TokenizedRows,
    rows: Sequence[int] = (2, 0, 1, 3),
) -> torch.Tensor:
    [batch] = collator.repeated(table, np.array(rows), 1)
    attention = None if collator.schedule.padding else SDPA
    with attending(model, attention):
        logits = model(**batch.model_inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1)[batch.target_rows], batch.targets)


@pytest.mark.parametrize(("family", "make"), [("mistral3", _whole_images), ("kimi_k25", _patches)])
def test_a_model_computes_concatenated_images_as_padded_ones(family, make, tmp_path):
    model = _load(tmp_path / "model", family)
    inputs = _image_inputs(model, make)
    table = _rows(model.config.image_token_id)
    free = _collator("padding_free", image_inputs=inputs)
    padded = _collator("padded", image_inputs=inputs)
    _check_same(model, _loss(model, free, table), _loss(model, padded, table))


@pytest.mark.parametrize("in_rows", [True, False], ids=["pairs", "answers"])
@pytest.mark.parametrize(
    ("family", "make"), [("qwen3_vl", _flat_patches), ("mistral3", _whole_images)]
)
def test_images_of_a_shared_prompt_are_computed_once(family, make, in_rows, tmp_path):
    model = _load(tmp_path / "model", family)
    inputs = _image_inputs(model, make)
    table = _answered(_rows(model.config.image_token_id), in_rows=in_rows)
    # Of answers the first in the micro-batch computes the prompt, whichever it is.
    rows = [2, 0, 1, 3] if in_rows else [5, 0, 4, 2, 1, 3]
    shared = _collator("padding_free", image_inputs=inputs, shares_prompts=True, fills_up=True)
    found = _loss(model, shared, table, rows)
    # The processor makes them once, too, for documents that are computed by themselves.
    assert sorted(inputs.processor.made) == ([[0, 1], [2], [3]] if in_rows else [[0, 1], [2]])
    for batching in ("padded", "padding_free"):
        apart = _collator(batching, image_inputs=inputs)
        _check_same(model, found, _loss(model, apart, table, rows))
        found = _loss(model, shared, table, rows)
    [once], [twice] = (each.repeated(table, np.array(rows), 1) for each in (shared, apart))
    images = {name for name in once.images if name != "mm_token_type_ids"}
    for name in images:
        assert len(twice.images[name]) == 2 * len(once.images[name])


def _load(folder: Path, family: str) -> PreTrainedModel:
    model = AutoModelForImageTextToText.from_pretrained(
        make_multimodal(folder, family), dtype=torch.float32
    )
    keep_documents_apart(model)
    keep_documents_from(find_towers(model).values())
    return model


def _image_inputs(
    model: PreTrainedModel, make: Callable[[Sequence[int]], dict[str, torch.Tensor]]
) -> ImageInputs:
    processor: Any = _HandMade(make, model.config.image_token_id)
    taken = inspect.signature(type(model).forward).parameters
    return ImageInputs(processor, taken, positions_of_rows(model))


def _collator(batching: str, **options: Any) -> Collator:
    schedule = Schedule(4, 4, 4, 1, 1, 1, 0, batching=batching)
    return Collator(schedule, pad_token_id=0, **options)


def _check_same(model: PreTrainedModel, *losses: torch.Tensor) -> None:
    """Two losses and their gradients are the same but for rounding."""
    results = []
    for loss in losses:
        model.zero_grad()
        loss.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        results.append((loss.item(), [each.clone() for each in gradients]))
    (found, gradients), (expected, others) = results
    assert found == pytest.approx(expected, rel=1e-5)
    for gradient, other in zip(gradients, others, strict=True):
        assert (gradient - other).norm() <= 1e-5 * max(other.norm(), 1e-3)


NEW_TOKENS = 6


@pytest.mark.parametrize(("family", "make"), [("mistral3", _whole_images), ("kimi_k25", _patches)])
@torch.no_grad()
def test_a_model_answers_prompts_with_images_as_in_transformers(family, make, tmp_path):
    folder = make_multimodal(tmp_path / "model", family)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor: Any = _HandMade(make, model.config.image_token_id)
    taken = inspect.signature(type(model).forward).parameters
    inputs = ImageInputs(processor, taken, positions_of_rows(model))
    table = _rows(model.config.image_token_id)
    prompts = [row.tolist() for row in np.split(table.input_ids, table.offsets[1:-1])]
    images = [table.images.of_row(row) for row in range(len(table))]
    batch = Batch.of(prompts, shares_prompts=True, images=images)
    passes = Passes(model, batch, torch.device("cpu"), [], shown=ShownImages(inputs))
    logits = [passes.prompts()]
    while len(logits) < NEW_TOKENS:
        logits.append(passes.next(logits[-1].argmax(dim=-1)))
    # transformers' mistral3 fails at the last one alone, whose image is a single token.
    for index, (prompt, numbers) in enumerate([*zip(prompts, IMAGES_OF_ROWS, strict=True)][:3]):
        made = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            **(make(numbers) if numbers else {}),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected = torch.cat([*made.logits])
        found = torch.stack([each[index] for each in logits])
        assert torch.allclose(found, expected, atol=1e-4)
        assert torch.equal(found.argmax(dim=-1), made.sequences[0, len(prompt) :])
