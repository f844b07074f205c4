"""Rotary embeddings that depend on a row's length, computed for each row."""

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


def changing_rope(config: PretrainedConfig) -> tuple[str, int] | None:
    """The rope type whose frequencies depend on a row's length, and the length where that begins.

    None if the model's frequencies are constant.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    # The parameters are those of all layers, or a dict of them for each kind of layers (gemma3).
    for rope in (ropes, *ropes.values()):
        if not isinstance(rope, Mapping):
            continue
        kind = rope.get("rope_type")
        if kind in ("dynamic", "longrope"):
            length = rope.get("original_max_position_embeddings")
            return kind, length or text.max_position_embeddings
    return None


def compute_rope_by_row(model: PreTrainedModel) -> None:
    """Compute such frequencies from each row's own length.

    transformers computes them from the longest row in the batch, and for `dynamic` from earlier
    batches, too. Then a row's loss would depend on its batch.
    """
    rope = changing_rope(model.config)
    if rope is None:
        return
    _, length = rope
    for module in model.modules():
        if hasattr(module, "rope_type"):
            # A copy as at the start, since the module changes its frequencies in a forward pass.
            hook = partial(_rope_of_rows, copy.deepcopy(module), length)
            module.register_forward_hook(hook, with_kwargs=True)


def _rope_of_rows(
    module: nn.Module, length: int, _: nn.Module, args: Any, kwargs: Any, tables: Any
) -> Any:
    """The tables of cosines and sines of rows, [B, T, D].

    module: a copy as at the start, of which a fresh copy is called for each row.
    """
    arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    positions = arguments.pop("position_ids")
    # Models for images have three positions of a token [3, B, T]; tensors on the meta device have
    # no values.
    if positions.dim() != 2 or positions.is_meta:
        return tables
    rows = [positions]
    dim = 1
    # Up to `length` the frequencies of all rows are the same, and one call computes them.
    if positions.max() >= length and len(positions) > 1:
        rows = positions.split(1)
        dim = 0
    elif positions.max() >= length:
        # Documents in one row: a new one begins where the position is 0.
        starts = (positions[0] == 0).nonzero().flatten()[1:].cpu()
        rows = positions.tensor_split(starts, dim=1)
    # deepcopy finds the configuration in this memo, and does not copy it.
    memo = {id(module.config): module.config}
    parts = [copy.deepcopy(module, memo.copy())(**arguments, position_ids=row) for row in rows]
    return tuple(torch.cat(table, dim) for table in zip(*parts, strict=True))
