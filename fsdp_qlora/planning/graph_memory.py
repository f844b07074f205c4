"""The memory of blocks that run as CUDA graphs, beside their memory without (sharding/graphed.py).

Without graphs a block's activations have memory that the head uses, too. A graph's memory serves
graphs alone.
"""

import dataclasses
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
from fsdp_qlora.sharding.graphed import why_not
from fsdp_qlora.sharding.host_activations import is_spread

# A block's input, and its gradient, and the result of either pass.
_STATIC_STATES = 3


def blocks_by_graphs(parts: ModelParts, step: Step) -> list[int]:
    """The places of the blocks that graphs may compute; empty where those are less than half.

    All micro-batches are filled up for graphs, which has to be worth it.
    """
    is_short = step.num_tokens <= MOST_TOKENS and step.layout.context_size == 1
    if not (step.trains and step.on_gpu and is_short):
        return []
    found = [
        index
        for index, block in enumerate(parts.blocks[: step.recomputing])
        if not is_spread(index, step.on_host.blocks, step.recomputing) and not why_not(block)
    ]
    return found if 2 * len(found) >= len(parts.blocks) else []


def have_graphs(parts: ModelParts, step: Step) -> bool:
    """Whether the blocks of a step run as graphs by the ways in use."""
    return ways_in_use().blocks == GRAPHS and bool(blocks_by_graphs(parts, step))


def filled_up(blocks: Sequence[BlockBytes], step: Step) -> tuple[list[BlockBytes], Step]:
    """The bytes of blocks and the step, with the longest micro-batch filled up for graphs.

    Args:
        blocks: as measured for the longest micro-batch as it is.
    """
    before = step.num_tokens
    tokens = filled_length(before)
    filled = [BlockBytes(*(count * tokens // before for count in block)) for block in blocks]
    return filled, dataclasses.replace(step, num_tokens=tokens)


def graph_bytes(
    parts: ModelParts, blocks: Sequence[BlockBytes], step: Step, *, workspaces: int
) -> Sizes:
    """Memory that graphs hold throughout; empty where none are in use.

    Args:
        blocks, step: filled up.
        workspaces: bytes of cuBLAS for the two passes.
    """
    if not have_graphs(parts, step):
        return {}
    graphed = blocks_by_graphs(parts, step)
    param_dtype = step.precision.param_dtype or torch.float32
    width = block_shapes(parts.model.config)[0].hidden
    hidden = step.num_tokens * width * param_dtype.itemsize
    # Blocks of one kind share the memory for their weights, all kinds that for activations.
    kinds = {kind_of(parts.blocks[index]): parts.blocks[index] for index in graphed}
    weights = sum(_static_bytes(parts, block, param_dtype) for block in kinds.values())
    # The gradient of a block's output is in static memory.
    at_work = max(blocks[index].recomputing for index in graphed) - hidden
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
