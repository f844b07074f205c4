"""Tries the reference of rows with images before the first step, with one row of the run."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import nn

from fsdp_qlora.data.batches.micro_batch import MicroBatch
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.distributed.shards import local_part
from fsdp_qlora.model.adapters.insert import adapted_layers, adapter_modules, as_at_start
from fsdp_qlora.sharding.groups import reshard_all
from fsdp_qlora.training.cross_entropy import CrossEntropy
from fsdp_qlora.training.forward import ForwardPass
from fsdp_qlora.training.image_probe import OF_MODEL, is_of_model
from fsdp_qlora.training.probes import LOSS_TOLERANCE, largest_of_ranks
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import first_line


@torch.no_grad()
def check_image_reference(forward: ForwardPass, table: TokenizedRows) -> None:
    """Make sure that the reference of a row with images is what it is alone.

    Called on every rank. Adapters for images change meanwhile, since at the start they may add
    nothing, in which case the policy's features would pass for the reference's.

    Args:
        table: at least one row has images.
    Raises:
        UserError: the model's code takes values from one to the other, or refuses both in one pass.
    """
    model = forward.model.eval()
    loss = CrossEntropy(by_token=True)
    with_images = np.flatnonzero(table.images.counts)
    row = with_images[np.argmin(table.lengths[with_images])]
    batch, batch_alone = _batches(forward, table, row)
    other_way = "Compute it before training: --precompute_reference true."
    name = type(model).__name__.removeprefix("FSDP")
    with forward.attending(), _changed(forward.towers):
        try:
            values, on_device = forward.token_losses(batch, loss)
        except OF_MODEL as error:
            if not is_of_model(error):
                raise
            raise UserError(
                f"{name} cannot run a reference beside the policy for rows with images "
                f"({first_line(error)}). {other_way}"
            ) from error
        together = values[1, on_device.targets >= 0]
        reshard_all(model)
    with forward.attending(), as_at_start(adapted_layers(model)):
        values, on_device = forward.token_losses(batch_alone, loss, alone=True)
        alone = values[0, on_device.targets >= 0]
    reshard_all(model)
    # Where a model is nearly certain of a token, rounding changes its loss by more than a share.
    difference = (together - alone).norm() / alone.norm().clamp(min=1)
    if largest_of_ranks(difference) > LOSS_TOLERANCE[forward.precision.compute_dtype]:
        raise UserError(
            f"{name} takes values of images from the policy to the reference, which cannot run in "
            f"the policy's forward pass. {other_way}"
        )


def _batches(forward: ForwardPass, table: TokenizedRows, row: int) -> tuple[MicroBatch, MicroBatch]:
    """A row's micro-batch, and the same or its teacher's alone. All ranks have them."""
    collator = forward.collator
    [batch] = collator.repeated(table, np.array([row]), 1)
    if not collator.has_teacher:
        return batch, batch
    collator = dataclasses.replace(collator, has_teacher=False)
    [of_teacher] = collator.repeated(table.as_documents, np.array([2 * row + 1]), 1)
    return batch, of_teacher


@contextlib.contextmanager
def _changed(towers: Iterable[nn.Module]) -> Iterator[None]:
    """Change what the adapters of towers add to their layers while the block runs."""
    parts = [
        local_part(parameter)
        for tower in towers
        for adapter in adapter_modules(tower)
        for parameter in adapter.parameters()
        if parameter.requires_grad
    ]
    before = [part.clone() for part in parts]
    for part in parts:
        # No random number is drawn.
        part.add_(torch.linspace(-1, 1, part.numel(), device=part.device).view_as(part))
    try:
        yield
    finally:
        for part, values in zip(parts, before, strict=True):
            part.copy_(values)
