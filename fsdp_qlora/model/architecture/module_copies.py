"""Copies of a model's modules with other parts, on which its code is tried."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn


def clone_with(module: nn.Module, **attributes: Mapping[str, Any]) -> nn.Module:
    """A shallow copy of the module with other `_parameters` or `_modules`."""
    # The copy shares all other dicts with the module, whose own stay as they are.
    copied = copy.copy(module)
    vars(copied).update(attributes)
    return copied
