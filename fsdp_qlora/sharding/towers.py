"""Towers in training: gathered for images alone, with adapters that are one group.

Collectives of a micro-batch are the same on all ranks, whichever of them have images: towers and
their adapters are gathered before the forward pass, and stay so until the backward pass has passed
them. Their gradients, zeros on ranks without images, are reduced when the backward pass ends.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_qlora.model.adapters.weight_copies import WeightCopies


class TowerAdapters(nn.Module):
    """The adapters of a model's towers, whose weights are gathered together.

    It is never called, so that FSDP2 neither gathers nor reduces by itself, but for the end of the
    backward pass.

    Args:
        adapters: of all towers.
    Attributes:
        adapters: only registered while FSDP2 looks for parameters; they have names in the towers.
        copies: of the weights in 16 bits, on one rank.
    """

    copies: WeightCopies | None = None

    def __init__(self, adapters: Iterable[nn.Module]) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(adapters)

    def hide(self) -> None:
        """Unregister the adapters."""
        adapters = [*self.adapters]
        del self.adapters
        vars(self)["adapters"] = adapters

    def prepare(self) -> None:
        """Gather once, since FSDP2 asks for gradients before the first images, too. Collective."""
        if isinstance(self, FSDPModule):
            self.unshard()
            self.reshard()

    def gather(self) -> None:
        """Make the weights ready for a forward pass, and zeros of their gradients. Collective."""
        if self.copies is not None:
            self.copies.refresh()
        if not isinstance(self, FSDPModule):
            return
        self.unshard()
        if not torch.is_grad_enabled():
            return
        for adapter in self.adapters:
            for parameter in adapter.parameters():
                # Copies of the first values have no gradient.
                if parameter.requires_grad and parameter.grad is None:
                    # FSDP2 reduces what has a gradient, which must be the same on all ranks.
                    parameter.grad = torch.zeros_like(parameter)


def tower_adapters(model: nn.Module) -> TowerAdapters | None:
    """The group that `shard_model` has made; None if towers have no adapters."""
    groups = (child for child in model.children() if isinstance(child, TowerAdapters))
    return next(groups, None)


@contextlib.contextmanager
def gathered(
    towers: Sequence[nn.Module], adapters: TowerAdapters | None, *, is_used: bool
) -> Iterator[None]:
    """Gather the weights of towers for a forward pass in the block. Called on every rank.

    With adapters they stay gathered behind it, where a backward pass needs them, which frees them.

    Args:
        is_used: whether this rank uses them. Otherwise it only takes part in the gather.
    """
    groups = [module for module in towers if isinstance(module, FSDPModule)]
    for module in groups:
        # Also on a rank that does not use them: the others would wait for its shards.
        module.unshard()
        if not is_used:
            module.reshard()
    if adapters is not None:
        adapters.gather()
    yield
    if adapters is not None and torch.is_grad_enabled():
        return
    for module in groups:
        module.reshard()
