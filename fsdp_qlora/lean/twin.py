"""A module with other parts, to try what it computes."""

import copy
from collections.abc import Mapping

from torch import nn


def twin(
    module: nn.Module,
    *,
    parameters: Mapping[str, nn.Parameter] | None = None,
    children: Mapping[str, nn.Module] | None = None,
) -> nn.Module:
    """A shallow copy of the module whose own parameters, or children, are these."""
    copied = copy.copy(module)  # which shares its dicts
    if parameters is not None:
        copied._parameters = dict(parameters)
    if children is not None:
        copied._modules = dict(children)
    return copied
