"""Memory of the parts of a model that compute images: counted on the meta device, or estimated."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.model.adapters.insert import adapter_modules
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.model.architecture.towers import encoder_blocks
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.planning.image_passes import PassBytes, count_passes
from fsdp_qlora.utils.text import first_line

log = logging.getLogger("fsdp_qlora")

_LAYERS = (nn.Conv2d, nn.Conv3d, nn.Linear)  # of which the first of a vision tower takes patches


class ImageBytes(NamedTuple):
    """Bytes for the images of a micro-batch, besides weights."""

    pixels: int
    at_work: int
    """The peak of the forward pass, besides what is kept behind it."""
    kept: int
    """Kept for the backward pass; 0 without adapters."""
    backward: int
    """The peak of the backward pass, besides what is kept."""


NO_IMAGE_BYTES = ImageBytes(0, 0, 0, 0)


class ImageMemory:
    """Counts what an image takes, once for each way; several take memory in proportion.

    Args:
        parts: of a model on the meta device.
    """

    def __init__(self, parts: ModelParts, precision: Precision) -> None:
        self._parts = parts
        self._precision = precision
        self._counted: dict[tuple[bool, bool], PassBytes | None] = {}

    def of(
        self, lengths: Lengths, *, keeps_inputs_only: bool, has_reference: bool = False
    ) -> ImageBytes:
        """The bytes for the images of a micro-batch.

        Args:
            keeps_inputs_only: whether blocks with adapters keep nothing besides their inputs.
            has_reference: whether towers with adapters compute features for a reference, too.
        """
        num_values = lengths.image_values
        if not num_values:
            return NO_IMAGE_BYTES
        of_image = sum(value.numel() for value in lengths.example_image.values())
        if of_image:
            way = (keeps_inputs_only, has_reference)
            if way not in self._counted:
                self._counted[way] = self._count(lengths.example_image, *way)
            found = self._counted[way]
            if found is not None:
                share = num_values / of_image
                return ImageBytes(
                    4 * num_values,
                    int(share * (found.forward - found.kept)),
                    int(share * found.kept),
                    int(share * (found.backward - found.kept)),
                )
        towers = self._parts.towers.values()
        return image_bytes(towers, num_values, keeps_inputs_only=keeps_inputs_only)

    def _count(
        self, image: Mapping[str, torch.Tensor], keeps_inputs_only: bool, has_reference: bool
    ) -> PassBytes | None:
        try:
            return count_passes(
                self._parts,
                self._precision,
                image,
                keeps_inputs_only=keeps_inputs_only,
                has_reference=has_reference,
            )
        except Exception as error:  # a model's own code may fail in any way without values
            log.info(
                "The memory that images take in this model is only estimated from the shapes of "
                "its layers (%s).",
                first_line(error),
            )
            return None


def image_bytes(
    towers: Iterable[nn.Module], num_values: int, *, keeps_inputs_only: bool
) -> ImageBytes:
    """Estimate the memory that the images of a micro-batch take from the shapes of layers.

    A block needs the maximum at its MLP: 4 hidden and 2 to 3 inner states. This is within 16%
    of what Siglip, Qwen2.5-VL's and Qwen3-VL's were measured to hold.

    Args:
        num_values: of which the images are made.
        keeps_inputs_only: whether blocks with adapters keep nothing besides their inputs.
    """
    towers = [*towers]
    layers = list(_matrices(towers))
    first = layers[0]
    of_patch = first[0].numel()
    hidden = len(first)
    size = num_values / of_patch * first.dtype.itemsize
    inner = max((len(each) for each in layers if each.shape[1] == hidden), default=hidden)
    at_work = size * (4 * hidden + 2.5 * inner)
    kept = 0.0
    backward = 0.0
    for tower in towers:
        blocks = encoder_blocks(tower)
        of_blocks = [*blocks] if blocks is not None and adapter_modules(blocks) else []
        for block in of_blocks:
            states = sum(sum(each.shape) for each in _matrices([block]))
            kept += size * (hidden if keeps_inputs_only else states)
            backward = max(backward, size * (2 * hidden + inner + states * keeps_inputs_only))
        in_blocks = {module for block in of_blocks for module in block.modules()}
        for adapter in adapter_modules(tower):
            if adapter not in in_blocks:
                # Behind the blocks, several patches are joined where the input is wider.
                wide, out = _features(adapter)
                kept += size * (wide + out) * min(1.0, hidden / wide)
    return ImageBytes(4 * num_values, int(at_work), int(kept), int(backward))


def _matrices(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the weights of layers without those of adapters."""
    for module in modules:
        inside = {each for adapter in adapter_modules(module) for each in adapter.modules()}
        for layer in module.modules():
            if isinstance(layer, _LAYERS) and layer not in inside:
                yield layer.weight


def _features(adapter: Any) -> tuple[int, int]:
    return adapter.lora_A.in_features, adapter.lora_B.out_features
