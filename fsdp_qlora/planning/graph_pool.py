"""Memory of a decoder block's graphs, from passes on the meta device (sharding/block_graphs.py)."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.data.batches.graph_lengths import MOST_TOKENS
from fsdp_qlora.planning.allocator import reserved_bytes
from fsdp_qlora.planning.storages import CountedStorages
from fsdp_qlora.sharding.block_graphs import Arguments
from fsdp_qlora.sharding.graphed import why_not, why_not_with


def graph_bytes_of(
    block: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int]:
    """Bytes of the pool to which a block's passes are captured, and of its static arguments.

    Both are 0 for a block that gets no graphs.

    Args:
        block: on the meta device, with its weights as gathered.
        hidden: its input.
        args, kwargs: its other arguments.
    """
    arguments = Arguments.of(args, kwargs)
    is_long = hidden.shape[:-1].numel() > MOST_TOKENS
    if is_long or why_not(block) or why_not_with(arguments):
        return 0, 0
    return _pool_bytes(block, hidden, args, kwargs), arguments.nbytes


def _pool_bytes(
    block: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    x = torch.empty_like(hidden, requires_grad=True)
    # The gradient of the output is static, too, and so is either pass's result.
    grad_y = torch.empty_like(hidden)
    trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
    uncounted = [x, grad_y, *block.parameters(), *block.buffers()]
    uncounted += filter(torch.is_tensor, tree_leaves((args, kwargs)))
    with CountedStorages(uncounted) as counted:
        output = checkpoint(
            block.forward, x, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )
        y = output[0] if isinstance(output, tuple) else output
        torch.autograd.grad(y, [x, *trained], grad_y, allow_unused=True)
    return reserved_bytes(counted.changes)
