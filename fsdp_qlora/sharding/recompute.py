"""Decoder blocks that recompute, switched between steps, and that compute a reference beside the policy."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.model.adapters.insert import adapted_layers, adapter_modules, as_at_start
from fsdp_qlora.model.architecture.fused import set_save_inputs_only
from fsdp_qlora.model.architecture.models import find_blocks
from fsdp_qlora.sharding.host_memory import InputStore


class RecomputedBlock(ActivationWrapper):
    """A decoder block of which only the input is kept for the backward pass, and the rest recomputed.

    is_on: if False, everything is kept and nothing is recomputed. Results are the same to the bit.
    store: where the input is kept on the host; None if it stays on the device.
    follow: called with this block, its output, and its arguments while its weights are there (`ReferencePass`).
    """

    is_on = True

    def __init__(self, block: nn.Module, store: InputStore | None = None) -> None:
        super().__init__(block)
        self.store = store
        self.follow: Callable[[RecomputedBlock, Any, tuple[Any, ...], dict[str, Any]], Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        return self.follow(self, output, args, kwargs) if self.follow else output

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        block = self._checkpoint_wrapped_module
        if not self.is_on or not torch.is_grad_enabled():
            return block(*args, **kwargs)
        if self.store is None:
            return checkpoint(block, *args, use_reentrant=False, **kwargs)
        # Inside, the checkpoint's own hooks apply: the store gets the block's inputs alone.
        with saved_tensors_hooks(self.store.pack, self.store.unpack):
            return checkpoint(block, *args, use_reentrant=False, **kwargs)


def wrap_blocks(model: nn.Module, *, number: int | None = None, offload: bool) -> None:
    """Let the first `number` blocks (None for all) recompute; with `offload` their inputs are kept on the CPU."""
    blocks, store = find_blocks(model), InputStore()
    for index, block in enumerate(blocks):
        is_offloaded = offload and (number is None or index < number)
        blocks[index] = RecomputedBlock(block, store if is_offloaded else None)
    set_recompute(model, len(blocks) if number is None else number)


def set_recompute(model: nn.Module, number: int) -> None:
    """Let the first `number` blocks recompute, and the others keep their activations.

    The last blocks are the ones to keep them: the backward pass frees theirs first, before another block needs room
    for its recomputation. Any other choice of as many has the same or a higher peak.
    """
    for index, block in enumerate(recomputed_blocks(model)):
        block.is_on = index < number
        set_save_inputs_only(block, not block.is_on)


def recomputed_blocks(model: nn.Module) -> list[RecomputedBlock]:
    """The blocks that can recompute, in the order of the model."""
    return [module for module in model.modules() if isinstance(module, RecomputedBlock)]


def unwrapped(block: nn.Module) -> nn.Module:
    """The model's own block, without what `wrap_blocks` put around it."""
    return block._checkpoint_wrapped_module if isinstance(block, RecomputedBlock) else block


def adapter_owners(block: nn.Module) -> list[nn.Module]:
    """The modules by whose calls FSDP2 gathers a block's adapters: the model's own block, else the adapters.

    Hooks of FSDP2 take the host 50 us, and on the adapters they would run again when the block is recomputed. The
    wrapped block has those of the base.
    """
    adapters, own = adapter_modules(block), unwrapped(block)
    return [own] if adapters and own is not block else adapters


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
