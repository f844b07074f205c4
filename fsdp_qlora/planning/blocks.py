"""Measures the memory of a decoder block: counts the storages of a pass on the meta device."""

import contextlib
import copy
import logging
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_qlora.data.batches.graph_lengths import with_bounds_alone
from fsdp_qlora.data.batches.micro_batch import describe_documents, documents_of_part
from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.distributed.context import ContextGroup
from fsdp_qlora.model.architecture.attention import EAGER, VARLEN, attending, can_share
from fsdp_qlora.model.architecture.decoder import (
    OnMeta,
    buffers_as_before,
    kind_of,
    on_meta,
)
from fsdp_qlora.model.architecture.fused import set_save_inputs_only
from fsdp_qlora.model.architecture.kept_attention import are_long
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.model.model_parts import ModelParts, matrix_shapes
from fsdp_qlora.planning.allocator import Change, reserved_bytes
from fsdp_qlora.planning.graph_pool import graph_bytes_of
from fsdp_qlora.planning.storages import CountedStorages, EmptyLoss
from fsdp_qlora.sharding.recompute import RecomputedBlock, unwrapped
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")


class BlockBytes(NamedTuple):
    """Bytes of a block's activations for a micro-batch, besides its input."""

    kept: int
    """Bytes kept from forward to backward without recompute."""
    backward: int
    """The peak during a backward pass, with what is kept and the adapters' gradients."""
    recomputing: int
    """The peak during a backward pass with recompute."""
    forward: int
    """The peak of a forward pass alone."""
    attention: int = 0
    """Bytes of attention's output that a block with recompute may keep: of long documents alone."""
    gaps: int = 0
    """Reserved beside the peak during a backward pass with recompute."""
    pool: int = 0
    """Reserved by the pool of its graphs; 0 where it has none."""
    arguments: int = 0
    """Static tensors of its graphs, besides its input."""


def measure_blocks(
    parts: ModelParts,
    precision: Precision,
    lengths: Lengths,
    documents: str | None,
    *,
    num_parts: int = 1,
    on_operator: Callable[[], object] = lambda: None,
) -> list[BlockBytes]:
    """Measure the bytes that each decoder block keeps and needs.

    Blocks of equal shapes are measured once, so an 8B or a 70B takes a second.

    Args:
        lengths: of the micro-batch.
        documents: from `attention.choose`.
        num_parts: ranks that share the micro-batch.
        on_operator: called for each operator of the measured blocks; several hundred experts have
            10^5.
    """
    described = describe_documents(lengths.of_documents, lengths.shared, num_parts=num_parts)
    if num_parts > 1:
        described = documents_of_part(described, 0, num_parts)
        described["context_group"] = ContextGroup(num_parts)
    try:
        # Every kernel but the eager one takes memory in proportion to the tokens, so one stands for
        # all of them.
        with attending(parts.model, EAGER if documents == EAGER else VARLEN):
            blocks = _measure_all(parts, precision, described, on_operator)
        # Only our functions have it kept, which know documents: other kernels, and padded rows,
        # have it computed again.
        if not can_share(documents):
            return [block._replace(attention=0) for block in blocks]
        return blocks
    except UserError:
        raise
    except Exception as error:  # a model's own code may fail in any way on tensors without values
        reason = str(error).partition("\n")[0]
        log.info(
            "The memory that a decoder block of this model keeps is only guessed from its shapes "
            "(%s).",
            reason,
        )
        # From the inputs and outputs of each block's matrices.
        row_bytes = precision.compute_dtype.itemsize * described["position_ids"].shape[1]
        block_bytes = [
            row_bytes * sum(sum(shape[-2:]) for shape in matrix_shapes(block))
            for block in parts.blocks
        ]
        return [
            BlockBytes(count, 2 * count, 2 * count, count, pool=2 * count) for count in block_bytes
        ]


class _Counted(NamedTuple):
    """Bytes that a block keeps, the peaks of its two passes, and all its allocations."""

    kept: int
    backward: int
    forward: int
    changes: list[Change]


class _Measured(Exception):
    """Ends a forward pass after the last block."""


def _measure_all(
    parts: ModelParts,
    precision: Precision,
    described: Mapping[str, Any],
    on_operator: Callable[[], object],
) -> list[BlockBytes]:
    """Measure each kind of block where the model's own code calls the first of it.

    Only this code knows the arguments of a block, such as masks and rotary embeddings.
    """
    by_bounds = parts.model.config._attn_implementation == VARLEN
    measured: dict[Any, tuple[BlockBytes, Any]] = {}  # kind -> its bytes and the block's output
    blocks: list[BlockBytes] = []
    embedded: torch.Tensor = parts.embedding.weight  # type: ignore[assignment]
    dtype = (precision.param_dtype if embedded.requires_grad else None) or embedded.dtype

    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del block.forward  # called once
        kind = kind_of(block)
        if kind not in measured:
            hidden = args[0] if args else kwargs.pop("hidden_states")
            other_args, other_kwargs = _as_leaves(on_meta((args[1:], kwargs)))
            measured[kind] = _measure(
                block, precision, hidden, other_args, other_kwargs, on_operator, by_bounds=by_bounds
            )
        block_bytes, output = measured[kind]
        blocks.append(block_bytes)
        # The head is not measured: estimate.py counts it by its shapes.
        if len(blocks) == len(parts.blocks):
            raise _Measured
        return output

    handle = parts.embedding.register_forward_hook(lambda module, args, output: output.to(dtype))
    try:
        for block in parts.blocks:
            block.forward = partial(forward, block)
        with buffers_as_before(parts.model), OnMeta(), contextlib.suppress(_Measured):
            input_ids = torch.zeros_like(described["position_ids"])
            parts.model.base_model(input_ids=input_ids, use_cache=False, **described)
    finally:
        handle.remove()
        for block in parts.blocks:
            vars(block).pop("forward", None)
    if not blocks:
        raise UserError(
            "Text does not pass through what seem to be the decoder blocks of "
            f"{type(parts.model).__name__}. Choose a model of another family."
        )
    if len(blocks) != len(parts.blocks):
        raise RuntimeError(f"text passes through {len(blocks)} of {len(parts.blocks)} blocks")
    return blocks


def _measure(
    block: nn.Module,
    precision: Precision,
    hidden: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_operator: Callable[[], object],
    *,
    by_bounds: bool,
) -> tuple[BlockBytes, Any]:
    """Return a block's bytes and its output.

    Args:
        hidden: the block's input [1, T, H].
        args, kwargs: its other arguments.
        by_bounds: whether attention reads where documents begin from the device.
    """
    wrapped = RecomputedBlock(_as_gathered(block, precision))
    counts: dict[str, _Counted] = {}
    output: Any = None
    ways = ["keeps all", "recomputes"]
    if are_long(kwargs.get("document_lengths", [])):
        ways.append("keeps attention")
    for way in ways:
        wrapped.is_on = way != "keeps all"
        wrapped.keeps_attention = way == "keeps attention"
        set_save_inputs_only(wrapped, not wrapped.is_on)
        counts[way], output = _run(wrapped, precision, hidden, args, kwargs, on_operator)
    keeping = counts["keeps all"]
    again = counts["recomputes"]
    attention = 0
    if "keeps attention" in counts:
        attention = counts["keeps attention"].kept - again.kept
    gaps = reserved_bytes(again.changes) - again.backward
    with precision.autocasting(torch.device("cpu")):
        given = with_bounds_alone(kwargs, hidden.shape[-2]) if by_bounds else kwargs
        pool, arguments = graph_bytes_of(unwrapped(wrapped), hidden, args, given)
    counted = BlockBytes(
        kept=keeping.kept,
        backward=keeping.backward,
        recomputing=again.backward,
        forward=again.forward,
        attention=attention,
        gaps=gaps,
        pool=pool,
        arguments=arguments,
    )
    return counted, output


def _run(
    wrapped: RecomputedBlock,
    precision: Precision,
    hidden: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_operator: Callable[[], object],
) -> tuple[_Counted, Any]:
    """Run a block forward and backward. Returns its bytes and its output.

    Arguments as for `_measure`.
    """
    x = torch.empty(hidden.shape, dtype=hidden.dtype, device="meta", requires_grad=True)
    # tree_leaves does not look into Mappings that are no dicts.
    opened = [dict(arg) if isinstance(arg, Mapping) else arg for arg in kwargs.values()]
    inputs = [x, *wrapped.parameters(), *wrapped.buffers()]
    inputs += tree_leaves((args, kwargs, opened))
    uncounted = filter(torch.is_tensor, inputs)
    output: Any
    with (
        CountedStorages(uncounted, on_operator) as count,
        precision.autocasting(torch.device("cpu")),
    ):
        y = wrapped(x, *args, **kwargs)
        # The input stands for the output, which has its shape: the graph must end here.
        if isinstance(y, torch.Tensor):
            loss = EmptyLoss.apply(y)
            output = x.detach()
        else:
            loss = EmptyLoss.apply(y[0])
            output = (x.detach(), *[None for _ in y[1:]])
        del y
        kept = count.now
        forward = count.most
        count.most = count.now
        loss.backward()
    wrapped.zero_grad()
    for arg in kwargs.values():
        # A block's messages to later blocks, whose backward passes end there.
        if isinstance(arg, MutableMapping):
            arg.update({key: _as_leaves(value) for key, value in arg.items()})
    return _Counted(kept, count.most, forward, count.changes), output


def _as_leaves(values: Any) -> Any:
    """The values with tensors cut off from the graph that made them."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), values
    )


def _as_gathered(block: nn.Module, precision: Precision) -> nn.Module:
    """A copy of a block on the meta device with its weights as FSDP2 gathers them."""
    result = copy.deepcopy(block).to("meta").train()
    if precision.param_dtype:
        for parameter in result.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(precision.param_dtype)
    return result
