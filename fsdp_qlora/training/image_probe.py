"""Probes whether rows with images can be concatenated, with two rows of the run.

A model may place tokens of images by what it knows of a whole batch, and let them see each other in
both directions. No class of a model is named here.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.data.batches.collator import Collator
from fsdp_qlora.data.batches.micro_batch import MicroBatch
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.model.architecture.attention import attending
from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.sharding.groups import reshard_all
from fsdp_qlora.sharding.towers import gathered, tower_adapters
from fsdp_qlora.sharding.vocabulary import tokens_known
from fsdp_qlora.training.probes import Probed, largest_of_ranks, relative_difference
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import first_line

# Errors that a model's code may raise at rows in another form than it expects.
OF_MODEL = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


def probe_images(
    probed: Probed, collator: Collator, table: TokenizedRows, towers: Sequence[nn.Module]
) -> str | None:
    """Why rows with images must be padded, in words; None if they can be concatenated.

    The two shortest rows with images are computed together, and the second of them alone; of pairs
    their first documents. Called on every rank.

    Args:
        collator: of micro-batches without padding.
        towers: the parts of the model that compute images.
    """
    rows = _two_shortest(table)
    table = table.as_documents
    padded = dataclasses.replace(collator.schedule, batching="padded")
    alone = _batch(dataclasses.replace(collator, schedule=padded), table, rows[1:])
    reason = None
    model = probed.model.eval()
    if model.get_output_embeddings() is None:
        return "it has no head"
    with _noting_masks(model) as masks:
        expected = _hidden_states(probed, alone, towers)
    if largest_of_ranks(torch.tensor(_see_later(masks), device=probed.ranks.device)):
        return "tokens of an image see later ones of it"
    first, length = (int(table.lengths[row]) for row in rows)
    try:
        # The model's own function places the tokens of these rows, the same on every rank.
        together = _batch(collator, table, rows)
        with attending(model, probed.documents):
            states = _hidden_states(probed, together, towers)[:, first : first + length]
    except OF_MODEL as error:
        if not is_of_model(error):
            raise
        reason = first_line(error)
        # As in `probe_packing`: a whole forward pass puts FSDP2's states right again.
        _hidden_states(probed, alone, towers)
    else:
        difference = relative_difference(states[0].double(), expected[0].double())
        most = largest_of_ranks(difference)
        if most > probed.tolerance:
            reason = f"a second row with images differs by {most:.0%} from it alone"
    return reason


def _two_shortest(table: TokenizedRows) -> np.ndarray:
    """The two shortest documents with images of different rows, or the only one twice."""
    with_images = np.flatnonzero(table.images.counts)
    # The first document of each row.
    documents = table.documents(with_images)[:: table.num_documents]
    order = np.argsort(table.as_documents.lengths[documents], kind="stable")
    return np.resize(documents[order[:2]], 2)


def _batch(collator: Collator, table: TokenizedRows, rows: np.ndarray) -> MicroBatch:
    """A micro-batch that all ranks have."""
    [batch] = collator.repeated(table, rows, 1)
    return batch


def is_of_model(error: Exception) -> bool:
    """Whether an error is of the model's code; others are of a lost rank, of memory, or of images
    that cannot be read.
    """
    if isinstance(error, UserError):
        return False
    if isinstance(error, NotImplementedError) or not isinstance(error, RuntimeError):
        return True
    return re.search(r"\b(shape|size|dimension)s?\b", str(error)) is not None


@torch.no_grad()
def _hidden_states(probed: Probed, batch: MicroBatch, towers: Sequence[nn.Module]) -> torch.Tensor:
    """The hidden states that go into the head, [B, T, H], for a micro-batch that all ranks have."""
    model = probed.model
    device = probed.ranks.device
    states: list[torch.Tensor] = []

    def note(head: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        states.append(args[0])
        # Logits of all tokens take memory, and nobody reads them.
        return (args[0][:, -1:], *args[1:])

    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(note, prepend=True)
    try:
        with (
            probed.precision.autocasting(device),
            gathered(towers, tower_adapters(model), is_used=True),
            tokens_known(
                model, batch.tokens_of_ranks, first=batch.input_ids.numel(), has_images=True
            ),
        ):
            model(**batch.to(device, per_document=False).model_inputs, use_cache=False)
    finally:
        handle.remove()
    reshard_all(model)
    return states[0]


@contextlib.contextmanager
def _noting_masks(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Give the masks that the model's blocks get within the block, [.., T, T]."""
    masks: list[torch.Tensor] = []

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() > 2:
            masks.append(mask)

    handles = [
        block.register_forward_pre_hook(note, with_kwargs=True) for block in find_blocks(model)
    ]
    try:
        yield masks
    finally:
        for handle in handles:
            handle.remove()


def _see_later(masks: Sequence[torch.Tensor]) -> bool:
    """Whether masks let a token see a later one."""
    for mask in masks:
        # True, or 0 to be added to a score, where a token is seen.
        is_seen = mask if mask.dtype == torch.bool else mask == 0
        if is_seen.triu(1).any():
            return True
    return False
