"""The memory of blocks that run as CUDA graphs, beside their memory without (sharding/graphed.py).

Without graphs a block's activations have memory that the head uses, too. A graph's memory serves
graphs alone.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from fsdp_qlora.data.batches.graph_lengths import MOST_TOKENS, filled_length, filled_multiple
from fsdp_qlora.model.architecture.decoder import kind_of
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.kernels.in_use import GRAPHS, ways_in_use
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.planning.allocator import Change, reserved_bytes
from fsdp_qlora.planning.blocks import BlockBytes
from fsdp_qlora.planning.memory import Sizes, Step
from fsdp_qlora.sharding.graphed import MOST_GRAPHS, why_not
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
    return _with_tokens(blocks, step, filled_length(step.num_tokens))


def next_shorter(blocks: Sequence[BlockBytes], step: Step) -> tuple[list[BlockBytes], Step]:
    """The bytes of blocks and the step, with the longest micro-batch that is shorter.

    Args:
        blocks, step: filled up.
    """
    return _with_tokens(blocks, step, _shorter(step.num_tokens))


def _shorter(num_tokens: int) -> int:
    return max(num_tokens - filled_multiple(num_tokens), 0)


def _with_tokens(
    blocks: Sequence[BlockBytes], step: Step, tokens: int
) -> tuple[list[BlockBytes], Step]:
    before = step.num_tokens
    scaled = [BlockBytes(*(count * tokens // before for count in block)) for block in blocks]
    return scaled, dataclasses.replace(step, num_tokens=tokens)


def graph_bytes(parts: ModelParts, blocks: Sequence[BlockBytes], step: Step) -> Sizes:
    """Memory that graphs hold throughout.

    Args:
        blocks, step: filled up.
    """
    graphed = blocks_by_graphs(parts, step)
    param_dtype = step.precision.param_dtype or torch.float32
    width = block_shapes(parts.model.config)[0].hidden
    hidden = step.num_tokens * width * param_dtype.itemsize
    # Blocks of one kind share the memory for their weights, all kinds that for activations.
    kinds = {kind_of(parts.blocks[index]): index for index in graphed}
    weights = sum(_static_bytes(parts, parts.blocks[i], param_dtype) for i in kinds.values())
    arguments = sum(blocks[index].arguments for index in kinds.values())
    # Lengths of micro-batches that have graphs at a time.
    tokens = 0
    length = step.num_tokens
    for _ in range(MOST_GRAPHS):
        tokens += length
        length = _shorter(length)
    return {
        "static tensors of graphs": weights + _STATIC_STATES * hidden,
        "arguments of graphs": arguments * tokens // step.num_tokens,
        "graphs' pool": max(blocks[index].pool for index in graphed),
        "workspaces of captures": reserved_bytes(_of_captures(step)),
    }


def _of_captures(step: Step) -> list[Change]:
    """Memory that the stream of captures keeps."""
    # cuBLAS has a workspace for each pass's thread, the generator a number for graphs.
    return [Change(place, size) for place, size in enumerate([step.workspace, step.workspace, 8])]


def _static_bytes(parts: ModelParts, block: nn.Module, param_dtype: torch.dtype) -> int:
    """Bytes of a block's gathered weights and of the gradients of those that train."""
    total = 0
    for kind, count in parts.kinds(block).items():
        if kind.category == "trainable":
            total += 2 * count * kind.numel * param_dtype.itemsize
        else:
            total += count * kind.numel * kind.dtype.itemsize
    return total
