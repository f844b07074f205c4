"""The saved values of parameters: the tensors that a result or a checkpoint holds."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_qlora.distributed.shards import gather_rows
from fsdp_qlora.model.adapters.insert import adapter_parameters, full_parameters


class Values(Protocol):
    """The trained values to save, from a model in training or from a checkpoint."""

    @property
    def keeps(self) -> bool:
        """Whether this rank keeps and writes the values.

        Other ranks only take part in gathering.
        """

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole value of a parameter or buffer of the model. Collective."""


class LiveValues:
    """The values of a model in training, gathered from its shards."""

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return tensor
        return gather_rows(tensor.to_local(), tensor.shape[0], tensor.device_mesh)


@torch.no_grad()
def saved_parameters(model: nn.Module, values: Values) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in PEFT's file, whole value) of the adapter. Collective."""
    for name, parameter in (*adapter_parameters(model), *full_parameters(model)):
        yield name, values.whole(parameter)
