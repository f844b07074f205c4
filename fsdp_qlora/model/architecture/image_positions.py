"""Positions of tokens in rows with images, as the model itself computes them.

Rotary embeddings of several axes give a token of an image its place in time, height and width. The
models that have them compute these positions in a method of one name, from the tokens of a batch
and the sizes of its images.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial

import torch
from transformers import PreTrainedModel

PositionsOfRow = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
"""Takes a row's tokens, int64 [1, T], and the model's other arguments for it; returns their
positions, int64 [axes, 1, T].
"""

_METHOD = "get_rope_index"


def positions_of_rows(model: PreTrainedModel) -> PositionsOfRow | None:
    """Find the model's own function for positions of a row with images.

    None where positions count tokens, whatever these stand for.
    """
    for module in (model.base_model, model):
        method = getattr(module, _METHOD, None)
        if method is not None:
            return partial(_positions, method)
    return None


def _positions(
    method: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    input_ids: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    # Which arguments describe images differs from family to family, and with it the method's.
    taken = inspect.signature(method).parameters
    known = {name: value for name, value in inputs.items() if name in taken}
    positions, _ = method(input_ids=input_ids, **known)
    if positions.dim() != 3 or positions.shape[1:] != input_ids.shape:
        raise NotImplementedError("its positions of images have another form")
    return positions
