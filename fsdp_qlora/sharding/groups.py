"""FSDP2's groups while a model runs: what stays gathered, and when gradients are reduced."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from fsdp_qlora.model.adapters.insert import magnitudes
from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.sharding.recompute import adapter_owners


def fsdp_modules(model: nn.Module) -> Iterable[FSDPModule]:
    """Every module that FSDP2 has been applied to."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard_all(model: nn.Module) -> None:
    """Free all gathered weights: after a forward pass alone, `model.parameters()` are no shards."""
    for module in fsdp_modules(model):
        module.reshard()


@contextlib.contextmanager
def kept_gathered(model: PreTrainedModel) -> Iterator[None]:
    """Keep gathered weights between forward passes, for many passes without gradients.

    For strategies that free a block's weights after its forward pass.
    """
    groups = [
        module
        for module in (*find_blocks(model), model.get_input_embeddings())
        if isinstance(module, FSDPModule)
    ]
    for module in groups:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in groups:
            module.set_reshard_after_forward(True, recurse=False)
        reshard_all(model)


def set_gradient_sync(model: PreTrainedModel, enabled: bool) -> None:
    """Set whether the next backward pass reduces gradients over ranks or accumulates them locally.

    While it accumulates them, adapters stay gathered for the next micro-batch. All of them are
    gathered when a backward pass begins, where memory has its peak.
    """
    root: Any = model
    root.set_requires_gradient_sync(enabled)
    for block in find_blocks(model):
        for module in (*adapter_owners(block), *magnitudes(block)):
            # They are no group on one rank.
            if isinstance(module, FSDPModule):
                module.set_reshard_after_backward(enabled, recurse=False)
