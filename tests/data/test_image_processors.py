"""What a model's processor of images may give."""

from pathlib import Path

import pytest
import torch

from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.utils.errors import UserError
from tests.parity.test_image_rows import make_family

pytestmark = pytest.mark.quick


def test_pixels_in_bfloat16_are_given_to_the_model_in_float32(tmp_path: Path, monkeypatch):
    processor = ImageProcessor(make_family(tmp_path, "qwen2_5_vl"), "qwen2_5_vl")
    example = processor.example
    del processor.example
    of_processor = processor._call

    def in_bfloat16(*args):
        outputs = of_processor(*args)
        return outputs | {"pixel_values": outputs["pixel_values"].bfloat16()}

    # As llama4's processor does.
    monkeypatch.setattr(processor, "_call", in_bfloat16)
    found = processor.example
    assert found.keys() == example.keys()
    assert found["pixel_values"].dtype == torch.float32
    assert found["pixel_values"].equal(example["pixel_values"].bfloat16().float())
    assert found["image_grid_thw"].equal(example["image_grid_thw"])


def test_a_processor_that_describes_tokens_in_a_way_of_its_own_is_refused(
    tmp_path: Path, monkeypatch
):
    processor = ImageProcessor(make_family(tmp_path, "qwen2_5_vl"), "qwen2_5_vl")
    of_processor = processor._call

    def with_more(*args):
        outputs = of_processor(*args)
        return outputs | {"order": outputs["input_ids"].argsort()}

    # As mllama's does.
    monkeypatch.setattr(processor, "_call", with_more)
    with pytest.raises(UserError, match="every token of a row with images by order"):
        _ = processor.example
