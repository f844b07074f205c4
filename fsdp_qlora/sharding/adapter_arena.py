"""Memory for a rank's shards of all adapters in one buffer, so that an optimizer can take them as one tensor."""

import itertools
import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_qlora.adapters.insert import adapter_modules
from fsdp_qlora.distributed import padded_rows
from fsdp_qlora.optimizers.flat import ALIGNMENT, is_second, is_small


def adapter_places(model: nn.Module, device: torch.device) -> dict[int, DTensor]:
    """For each trained adapter parameter, by id, a DTensor whose local tensor lies in a common buffer, zeroed.

    The local tensors have FSDP2's padding. Those that an optimizer treats alike are neighbours.
    """
    adapters = {id(parameter) for adapter in adapter_modules(model) for parameter in adapter.parameters()}
    trained = [
        (path, parameter)
        for path, parameter in model.named_parameters()
        if id(parameter) in adapters and parameter.requires_grad and isinstance(parameter, DTensor)
    ]
    trained.sort(key=lambda named: (str(named[1].dtype), *_order(*named)))
    places: dict[int, DTensor] = {}
    for dtype, group in itertools.groupby((parameter for _, parameter in trained), key=lambda each: each.dtype):
        parameters = list(group)
        shapes = [(padded_rows(parameter), *parameter.shape[1:]) for parameter in parameters]
        starts = [0, *itertools.accumulate(-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes)]
        arena = torch.zeros(starts[-1], dtype=dtype, device=device)
        for parameter, shape, start in zip(parameters, shapes, starts, strict=False):
            place = torch.empty_like(parameter, device=device)
            assert isinstance(place, DTensor)
            place._local_tensor = arena[start : start + math.prod(shape)].view(shape)
            places[id(parameter)] = place
    return places


def _order(path: str, parameter: torch.Tensor) -> tuple[bool, bool]:
    """Large, small; small, large of the second kind: few ranges by whichever of the two an optimizer cuts them."""
    second = is_second(path, parameter)
    return second, is_small(parameter) != second
