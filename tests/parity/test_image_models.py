"""Models compute concatenated rows with images as padded ones, also those whose processors need
torchvision: these get images that are made by hand.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
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


class _HandMade:
    """Stands for a processor, for rows whose images are named by their numbers."""

    def __init__(self, make: Callable[[Sequence[int]], dict[str, torch.Tensor]]) -> None:
        self._make = make

    def outputs_of(self, names: Sequence[bytes]) -> dict[str, torch.Tensor]:
        return self._make([name[0] for name in names])

    def model_inputs(
        self, outputs: Sequence[Mapping[str, torch.Tensor]], *_: Any
    ) -> dict[str, torch.Tensor]:
        return {name: torch.cat([each[name] for each in outputs]) for name in outputs[0]}


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


def _loss(model: PreTrainedModel, collator: Collator, table: TokenizedRows) -> torch.Tensor:
    [batch] = collator.repeated(table, np.array([2, 0, 1, 3]), 1)
    attention = None if collator.schedule.padding else SDPA
    with attending(model, attention):
        logits = model(**batch.model_inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1)[batch.target_rows], batch.targets)


@pytest.mark.parametrize(("family", "make"), [("mistral3", _whole_images), ("kimi_k25", _patches)])
def test_a_model_computes_concatenated_images_as_padded_ones(family, make, tmp_path):
    folder = make_multimodal(tmp_path / "model", family)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    keep_documents_apart(model)
    keep_documents_from(find_towers(model).values())
    image_token = model.config.image_token_id
    inputs = ImageInputs(
        _HandMade(make), inspect.signature(type(model).forward).parameters, positions_of_rows(model)
    )
    table = _rows(image_token)
    results = []
    for batching in ("padding_free", "padded"):
        schedule = Schedule(4, 4, 4, 1, 1, 1, 0, batching=batching)
        loss = _loss(model, Collator(schedule, pad_token_id=0, image_inputs=inputs), table)
        model.zero_grad()
        loss.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        results.append((loss.item(), [each.clone() for each in gradients]))
    (free, gradients), (padded, expected) = results
    assert free == pytest.approx(padded, rel=1e-5)
    for gradient, of_padded in zip(gradients, expected, strict=True):
        assert (gradient - of_padded).norm() <= 1e-5 * max(of_padded.norm(), 1e-3)
