"""Says which weights FSDP2 gathers while others are at work, in forward and backward."""

import itertools
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from fsdp_qlora.adapters.insert import magnitudes
from fsdp_qlora.models import find_blocks
from fsdp_qlora.sharding.recompute import adapter_owners


def set_prefetch(model: PreTrainedModel) -> None:
    """Gather the weights of the next module when a module starts: its adapters, then its base.

    FSDP2 alone gathers a block's adapters when the first of them is called, behind the block's base. In backward it
    begins with the next block when a gradient has reached an adapter, late if only some layers have one.

    What is gathered is allocated on the compute stream. FSDP2 alone does it on a stream of its own, whose freed memory
    serves gathers only: that of an 8B's head is 1.2 GiB. Weights in host memory need that stream for their copies, and
    without the compute stream these lists reserve 0.2 GiB more for a 70B, so they are not for offloaded models.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    first, last = ([end] if isinstance(end, FSDPModule) else [] for end in ends)
    blocks: list[Any] = list(find_blocks(model))
    forward: list[Any] = [model, *first, *blocks, *last]
    for module, following in itertools.pairwise(forward):
        module.set_modules_to_forward_prefetch(_groups(following))
    # Adapters stay gathered from forward to backward.
    backward: list[Any] = [*(last or [model]), *reversed(blocks)]
    for module, following in itertools.pairwise(backward):
        module.set_modules_to_backward_prefetch([following])
    for block in blocks:
        for owner in adapter_owners(block):
            assert isinstance(owner, FSDPModule)
            # Its backward pass begins before its base's, which is needed first.
            owner.set_modules_to_backward_prefetch([block])
    root: Any = model
    root._set_unshard_async_op(True)


def _groups(module: nn.Module) -> list[Any]:
    """The modules that stand for a module's FSDP2 groups; adapters are one group, and magnitudes another."""
    return [*magnitudes(module)[:1], *adapter_owners(module)[:1], module]
