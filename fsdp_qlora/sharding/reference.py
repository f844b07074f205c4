"""Computes the reference's hidden states in the policy's forward pass, while each block is gathered."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdp_qlora.adapters.insert import adapted_layers, as_at_start
from fsdp_qlora.sharding.recompute import RecomputedBlock, recomputed_blocks, unwrapped


class ReferencePass:
    """Computes the hidden states of the model that training started from, in the policy's own forward pass.

    A block's weights are gathered (or copied from the host) once for both. The reference has no autograd graph, and of
    its hidden states one block's are there at a time. Behind the last block they follow the policy's in the batch
    dimension, so that the model's own code computes the rest, which has no adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._adapted = {block: adapted_layers(block) for block in recomputed_blocks(model)}
        self._hidden: torch.Tensor | None = None

    @contextlib.contextmanager
    def beside_policy(self) -> Iterator[None]:
        """In this block of code a forward pass of the model gives [2 * B, T, H]: policy, then reference."""
        for block in self._adapted:
            block.follow = self._follow
        try:
            yield
        finally:
            self._hidden = None
            for block in self._adapted:
                block.follow = None

    def _follow(self, block: RecomputedBlock, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """After a block's own forward pass."""
        hidden = args[0].detach() if self._hidden is None else self._hidden  # the embedding has no adapters
        # Not the block's __call__: FSDP2 and other hooks have done their work for this pass.
        with torch.no_grad(), as_at_start(self._adapted[block]):
            found = unwrapped(block).forward(hidden, *args[1:], **kwargs)
        found = found if isinstance(found, torch.Tensor) else found[0]
        is_last = block is next(reversed(self._adapted))
        self._hidden = None if is_last else found
        if not is_last:
            return output
        if isinstance(output, torch.Tensor):
            return torch.cat([output, found])
        return torch.cat([output[0], found]), *output[1:]
