"""Rotary embeddings that depend on a row's length, computed for each row."""

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
)


def changing_rope(config: PretrainedConfig) -> tuple[str, int] | None:
    """A rope type whose frequencies depend on a row's length, and the length up to which they do
    not.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # one, or one of each kind of layers
        if isinstance(rope, Mapping) and (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
            return kind, rope.get(
                "original_max_position_embeddings"
            ) or text.max_position_embeddings
    return None


def compute_rope_by_row(model: PreTrainedModel) -> None:
    """Let such frequencies follow from each row's own length: transformers takes that of the
    longest row in the batch, and for `dynamic` also that of batches before.
    """
    rope = changing_rope(model.config)
    if rope:
        for module in model.modules():
            if hasattr(module, "rope_type"):
                module.register_forward_hook(
                    partial(_rope_of_rows, copy.deepcopy(module), rope[1]), with_kwargs=True
                )


def _rope_of_rows(
    module: nn.Module, length: int, _: nn.Module, args: Any, kwargs: Any, tables: Any
) -> Any:
    """The tables of cosines and sines, [B, T, D], of rows. module: as at the start, which is not
    called itself.
    """
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    positions = given.pop("position_ids")
    if positions.dim() != 2 or positions.is_meta:
        return tables
    rows = [positions]
    dim = 1
    if positions.max() >= length and len(positions) > 1:
        rows = positions.split(1)
        dim = 0
    elif positions.max() >= length:
        rows = positions.tensor_split((positions[0] == 0).nonzero().flatten()[1:].cpu(), dim=1)
    shared = {id(module.config): module.config}  # and not copied
    parts = [copy.deepcopy(module, shared.copy())(**given, position_ids=row) for row in rows]
    return tuple(torch.cat(table, dim) for table in zip(*parts, strict=True))
