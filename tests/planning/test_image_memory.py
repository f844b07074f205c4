"""What images are planned to keep is what a pass of real values keeps."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForImageTextToText

from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.model.adapters.insert import LoraOptions, add_adapters
from fsdp_qlora.model.architecture.precision import PRECISIONS
from fsdp_qlora.model.architecture.towers import tower_linears
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.planning.image_memory import ImageMemory
from fsdp_qlora.sharding.recompute import wrap_towers
from tests.parity.test_multimodal import make_multimodal

QWEN = {
    "pixel_values": torch.randn(16 * 16, 1176),
    "image_grid_thw": torch.tensor([[1, 16, 16]]),
}
# Padded: places of no patch are -1.
GEMMA4 = {
    "pixel_values": torch.rand(1, 280, 588),
    "image_position_ids": F.pad(
        torch.cartesian_prod(torch.arange(16), torch.arange(16)), (0, 0, 0, 24), value=-1
    )[None],
}


class _Kept:
    """A tensor that is kept for a backward pass."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("family", "image", "recompute"),
    [
        ("qwen3_vl", QWEN, False),
        ("qwen3_vl", QWEN, True),
        ("qwen2_5_vl", QWEN, False),
        ("qwen2_5_vl", QWEN, True),
        ("gemma4", GEMMA4, False),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_images_are_planned_to_keep_what_they_keep(family, image, recompute, tmp_path, caplog):
    folder = make_multimodal(tmp_path, family)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    targets = [path for paths in tower_linears(model).values() for path in paths]
    add_adapters(model, "lora", targets, LoraOptions(rank=4))
    num_values = sum(value.numel() for value in image.values())
    lengths = Lengths([64], image_values=2 * num_values, example_image=image)
    memory = ImageMemory(ModelParts(model.to("meta")), PRECISIONS["fp32"])
    planned = memory.of(lengths, keeps_inputs_only=recompute)
    assert "only estimated" not in caplog.text

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    add_adapters(model, "lora", targets, LoraOptions(rank=4))
    if recompute:
        wrap_towers(model)
    uncounted = {*map(_place, [*model.parameters(), *image.values()])}
    kept: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def keep(tensor: torch.Tensor) -> _Kept:
        kept.add(one := _Kept(tensor))
        return one

    with saved_tensors_hooks(keep, lambda one: one.tensor):
        output = model.model.get_image_features(**image)
    # What else the function returns ends here, as in the model.
    shown = output.pooler_output, getattr(output, "deepstack_features", None)
    del output
    storages = {_place(one.tensor): one.tensor.untyped_storage().nbytes() for one in kept}
    measured = sum(size for place, size in storages.items() if place not in uncounted)
    assert shown[0] is not None
    # Hooks do not see what a checkpoint has besides the states, such as rotary embeddings.
    most = 1.2 if recompute else 1.03
    assert 0.97 < planned.kept / 2 / measured < most


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_reference_is_planned_beside_what_images_keep(family, tmp_path):
    folder = make_multimodal(tmp_path, family)

    def memory_of(*, adapted: bool) -> ImageMemory:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        targets = [path for paths in tower_linears(model).values() for path in paths]
        model.requires_grad_(False)
        if adapted:
            add_adapters(model, "lora", targets, LoraOptions(rank=4))
        return ImageMemory(ModelParts(model.to("meta")), PRECISIONS["fp32"])

    num_values = sum(value.numel() for value in QWEN.values())
    lengths = Lengths([64], image_values=num_values, example_image=QWEN)
    adapted = memory_of(adapted=True)
    for keeps_inputs_only in (False, True):
        alone = adapted.of(lengths, keeps_inputs_only=keeps_inputs_only)
        beside = adapted.of(lengths, keeps_inputs_only=keeps_inputs_only, has_reference=True)
        assert (beside.kept, beside.backward) == (alone.kept, alone.backward)
        # A forward pass without adapters, while the policy's features are there.
        plain = memory_of(adapted=False).of(lengths, keeps_inputs_only=keeps_inputs_only)
        assert plain.at_work < beside.at_work < 1.2 * plain.at_work
