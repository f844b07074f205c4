"""Images of the prompts of a batch, which the pass over the prompts computes."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.data.batches.image_inputs import ImageInputs, Outputs
from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.distributed.device import to_device
from fsdp_qlora.sharding.towers import gathered, tower_adapters


class ShownImages(NamedTuple):
    """How a model computes the images of prompts."""

    inputs: ImageInputs | None = None
    """Makes the model's arguments; None if no prompt has images."""
    towers: Sequence[nn.Module] = ()
    """The parts of the model that compute images; none if no rank has images in this batch."""

    def gathered(
        self, model: PreTrainedModel, *, is_used: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Gather the weights of the towers for a pass over prompts. Called on every rank.

        is_used: whether this rank has images.
        """
        if not self.towers:
            return contextlib.nullcontext()
        return gathered(self.towers, tower_adapters(model), is_used=is_used)

    def arguments(
        self,
        prompts: Sequence[torch.Tensor],
        images: Sequence[RowImages],
        input_ids: torch.Tensor,
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The model's arguments for images, and positions of tokens, on the device of the ids.

        Args:
            prompts: the tokens of each prompt, int64 [L].
            images: of each prompt; empty if none has any.
            input_ids: the prompts padded on the left, int64 [P, T].
        Returns:
            No arguments without images. Positions are int64 [axes, P, T], or None where the model
            counts tokens.
        Raises:
            RankError: an image has changed since it was read.
        """
        if not any(map(len, images)):
            return {}, None
        assert self.inputs is not None, "prompts have images, and the generator makes none"
        processor = self.inputs.processor
        outputs: list[Outputs | None] = []
        for shown in images:
            names = [*map(bytes, shown.names)]
            outputs.append(processor.outputs_of(names) if names else None)
        with_images = [*filter(None, outputs)]
        on_host = input_ids.cpu()
        inputs = processor.model_inputs(with_images, on_host, self.inputs.taken)
        device = input_ids.device
        positions = self._positions(prompts, outputs, on_host)
        if positions is not None:
            positions = positions.to(device)
        return to_device(inputs, device), positions

    def _positions(
        self,
        prompts: Sequence[torch.Tensor],
        outputs: Sequence[Outputs | None],
        input_ids: torch.Tensor,
    ) -> torch.Tensor | None:
        """Positions of padded prompts, int64 [axes, P, T]; None where they count tokens.

        outputs: of the processor for each prompt, None without images.
        """
        assert self.inputs is not None
        if self.inputs.positions_of is None:
            return None
        rows: list[torch.Tensor] = []
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = prompt.cpu()[None]
            if output is None:
                # Text has the same position on all axes.
                rows.append(torch.arange(len(prompt))[None, None])
            else:
                inputs = self.inputs.processor.model_inputs([output], tokens, self.inputs.taken)
                rows.append(self.inputs.positions_of(tokens, inputs))
        num_axes = max(map(len, rows))
        positions = input_ids.new_zeros(num_axes, *input_ids.shape)
        for index, row in enumerate(rows):
            positions[:, index, -row.shape[-1] :] = row[:, 0]
        return positions


NONE_SHOWN = ShownImages()
