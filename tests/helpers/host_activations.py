"""Small tensors go to host memory too, and nothing in memory that is used again looks right."""

from typing import Any

import pytest
import torch

from fsdp_qlora.sharding import host_activations
from fsdp_qlora.sharding.host_activations import ActivationStore


def poison(patch: pytest.MonkeyPatch, *, least: int, part: int) -> None:
    """Overwrite host memory that is given back, and the device's before it is copied to.

    Args:
        least: bytes of a storage that goes to host memory.
        part: bytes of a part of it.
    """
    give_back = ActivationStore.give_back
    empty = torch.empty

    def give_poison(self: ActivationStore, memory: torch.Tensor) -> None:
        give_back(self, memory.fill_(255))

    def empty_poison(*args: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*args, **options)
        return tensor.fill_(255) if options.get("dtype") == torch.uint8 else tensor

    patch.setattr(ActivationStore, "give_back", give_poison)
    patch.setattr(torch, "empty", empty_poison)
    patch.setattr(host_activations, "LEAST_BYTES", least)
    patch.setattr(host_activations, "PART_BYTES", part)
