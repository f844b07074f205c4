"""The memory of blocks that run as CUDA graphs, beside their memory without (sharding/graphed.py).

Without graphs a block's activations have memory that the head uses, too. A graph's memory serves
graphs alone.
"""

from collections.abc import Sequence

import torch
from torch import nn

from fsdp_qlora.data.batches.graph_lengths import MOST_TOKENS, filled_length
from fsdp_qlora.model.architecture.decoder import kind_of
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.kernels.in_use import GRAPHS, ways_in_use
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.planning.blocks import BlockBytes
from fsdp_qlora.planning.memory import Sizes, Step

# A block's input, and its gradient, and the result of either pass.
_STATIC_STATES = 3


def graph_bytes(
    parts: ModelParts, blocks: Sequence[BlockBytes], step: Step, *, workspaces: int
) -> Sizes:
    """Memory that graphs hold throughout; empty where none are in use.

    Args:
        blocks: as measured for the longest micro-batch.
        workspaces: bytes of cuBLAS for the two passes.
    """
    is_short = step.num_tokens <= MOST_TOKENS and step.layout.context_size == 1
    trains_on_gpu = step.trains and step.on_gpu
    recomputing = parts.blocks[: step.recomputing]
    if ways_in_use().blocks != GRAPHS or not (trains_on_gpu and is_short and len(recomputing)):
        return {}
    param_dtype = step.precision.param_dtype or torch.float32
    width = block_shapes(parts.model.config)[0].hidden
    hidden = filled_length(step.num_tokens) * width * param_dtype.itemsize
    # Blocks of one kind share the memory for their weights, all kinds that for activations.
    kinds = {kind_of(block): block for block in recomputing}
    weights = sum(_static_bytes(parts, block, param_dtype) for block in kinds.values())
    # The gradient of a block's output is in static memory.
    at_work = max(block.recomputing for block in blocks[: step.recomputing]) - hidden
    return {
        "static tensors of graphs": weights + _STATIC_STATES * hidden,
        "graphs' pool": at_work + workspaces,
    }


def _static_bytes(parts: ModelParts, block: nn.Module, param_dtype: torch.dtype) -> int:
    """Bytes of a block's gathered weights and of the gradients of those that train."""
    total = 0
    for kind, count in parts.kinds(block).items():
        if kind.category == "trainable":
            total += 2 * count * kind.numel * param_dtype.itemsize
        else:
            total += count * kind.numel * kind.dtype.itemsize
    return total
