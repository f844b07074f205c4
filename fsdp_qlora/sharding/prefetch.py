"""Says which weights FSDP2 gathers while others are at work, in forward and backward."""

import itertools

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from fsdp_qlora.adapters.insert import adapter_modules, magnitudes
from fsdp_qlora.models import find_blocks


def set_prefetch(model: PreTrainedModel, *, on_compute_stream: bool) -> None:
    """Gather the weights of the next module when a module starts: its adapters, then its base.

    FSDP2 alone gathers a block's adapters when the first of them is called, behind the block's base. In backward it
    begins with the next block when a gradient has reached an adapter, late if only some layers have one.

    Args:
        on_compute_stream: allocate what is gathered there. FSDP2 alone does it on a stream of its own, whose freed
            memory serves gathers only: that of an 8B's head is 1.2 GiB. Copies from the host need their own stream.
    """
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    first, last = ([end] if isinstance(end, FSDPModule) else [] for end in ends)
    blocks: list[nn.Module] = list(find_blocks(model))
    for module, following in itertools.pairwise([model, *first, *blocks, *last]):
        _as_group(module).set_modules_to_forward_prefetch(_groups(following))
    # Adapters stay gathered from forward to backward.
    for module, following in itertools.pairwise([last[0] if last else model, *reversed(blocks)]):
        _as_group(module).set_modules_to_backward_prefetch([_as_group(following)])
    if on_compute_stream:
        _as_group(model)._set_unshard_async_op(True)


def _groups(module: nn.Module) -> list[FSDPModule]:
    """The modules that stand for a module's FSDP2 groups; adapters are one group, and magnitudes another."""
    return [_as_group(part) for part in (*magnitudes(module)[:1], *adapter_modules(module)[:1], module)]


def _as_group(module: object) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
