"""Activation checkpointing of decoder blocks, which can be switched between steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.adapters.insert import adapter_modules
from fsdp_qlora.model.fused import set_save_inputs_only
from fsdp_qlora.model.models import find_blocks
from fsdp_qlora.sharding.host_memory import InputStore


class RecomputedBlock(ActivationWrapper):
    """A decoder block of which only the input is kept for the backward pass, and the rest recomputed.

    is_on: if False, everything is kept and nothing is recomputed. Results are the same to the bit.
    store: where the input is kept on the host; None if it stays on the device.
    follow: called with this block, its output, and its arguments while its weights are there (sharding/reference.py).
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
