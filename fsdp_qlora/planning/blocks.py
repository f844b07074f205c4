"""Measures the memory of a decoder block: one pass of the block on the meta device, its storages counted."""

import copy
import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from fsdp_qlora.data.batches.micro_batch import describe_documents, documents_of_part
from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.distributed.context import ContextGroup
from fsdp_qlora.model.architecture.attention import EAGER, VARLEN, attending
from fsdp_qlora.model.architecture.fused import set_save_inputs_only
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.model_parts import ModelParts, matrix_shapes
from fsdp_qlora.sharding.recompute import RecomputedBlock

_SEGMENT = 512  # bytes: the allocator of torch rounds to these

log = logging.getLogger("fsdp_qlora")


class BlockBytes(NamedTuple):
    """Bytes of a block's activations for a micro-batch, besides its input.

    kept: kept from forward to backward without recompute. backward: the most during a backward pass, with what is kept
    and the adapters' gradients. recomputing: the same with recompute.
    """

    kept: int
    backward: int
    recomputing: int


class CountedStorages(TorchDispatchMode):
    """Counts the bytes of storages that are made in this context and alive.

    now, most: these, and the most of them.

    Args:
        uncounted: tensors whose storages are not counted: weights and inputs.
    """

    def __init__(self, uncounted: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive = {tensor.untyped_storage()._cdata for tensor in uncounted}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default and args[0].is_meta and args[0].dim() == 1:
            return torch.arange(len(args[0]))[:, None]  # int8's columns with outliers: all, which no value tells
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._count(tensor.untyped_storage())
        if func._schema.name == "torch_attn::_varlen_attn_backward":
            # Inside the kernel: queries' gradients in float32, and keys' and values' for each head that shares them.
            query, is_shared = args[1], args[2].shape[1] < args[1].shape[1]
            inside = query.numel() * (4 + 2 * query.element_size() * is_shared)
            self.most = max(self.most, self.now + inside)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        size = -(-storage.nbytes() // _SEGMENT) * _SEGMENT
        self._alive.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


class _Loss(torch.autograd.Function):
    """Ends a graph and keeps nothing, as what follows a block keeps its output only until its gradient is there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.form = x.shape, x.dtype
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        shape, dtype = ctx.form
        return grads[0].new_empty(shape, dtype=dtype)


def measure_blocks(
    parts: ModelParts, precision: Precision, lengths: Lengths, documents: str | None, *, num_parts: int = 1
) -> list[BlockBytes]:
    """Measure the bytes that each decoder block keeps and needs; takes a second for an 8B or a 70B.

    Blocks of equal shapes are measured once.

    Args:
        lengths: of the micro-batch. documents: from `attention.choose`; every kernel but the eager one
            takes memory in proportion to the tokens. num_parts: ranks that share the micro-batch.
    """
    described = describe_documents(lengths.of_documents, lengths.shared, num_parts=num_parts)
    if num_parts > 1:
        described = documents_of_part(described, 0, num_parts)
    measured: dict[Any, BlockBytes] = {}
    try:
        with attending(parts.model, EAGER if documents == EAGER else VARLEN, ContextGroup(num_parts)):
            inputs = _arguments(parts, precision, described)
            for block in parts.blocks:
                if (kind := _kind(block)) not in measured:
                    measured[kind] = _measure(block, precision, inputs)
    except Exception as error:  # a model's own code may fail in any way on tensors without values
        reason = str(error).partition("\n")[0]
        log.info("The memory that a decoder block of this model keeps is only guessed from its shapes (%s).", reason)
        # From the inputs and outputs of each block's matrices.
        row_bytes = precision.compute_dtype.itemsize * described["position_ids"].shape[1]
        kept = [row_bytes * sum(sum(shape[-2:]) for shape in matrix_shapes(block)) for block in parts.blocks]
        return [BlockBytes(count, 2 * count, 2 * count) for count in kept]
    return [measured[_kind(block)] for block in parts.blocks]


def _kind(block: nn.Module) -> Any:
    parameters = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in block.parameters())
    windows = tuple(getattr(module, "sliding_window", None) for module in block.modules())
    return type(block), parameters, windows


def _measure(block: nn.Module, precision: Precision, inputs: "_Inputs") -> BlockBytes:
    wrapped = RecomputedBlock(_as_gathered(block, precision))
    counts = {}
    for recomputes in (False, True):
        wrapped.is_on = recomputes
        set_save_inputs_only(wrapped, not recomputes)
        x = torch.empty(inputs.shape, dtype=inputs.dtype, device="meta", requires_grad=True)
        uncounted = filter(torch.is_tensor, [x, *wrapped.parameters(), *wrapped.buffers(), *tree_leaves(inputs)])
        with CountedStorages(uncounted) as count, precision.autocasting(torch.device("cpu")):
            y = wrapped(x, *inputs.args, **inputs.kwargs)
            loss = _Loss.apply(y if isinstance(y, torch.Tensor) else y[0])
            del y
            kept, count.most = count.now, count.now
            loss.backward()
        counts[recomputes] = kept, count.most
        wrapped.zero_grad()
    return BlockBytes(*counts[False], counts[True][1])


def _as_gathered(block: nn.Module, precision: Precision) -> nn.Module:
    """A copy of a block on the meta device with its weights as FSDP2 gathers them."""
    result = copy.deepcopy(block).to("meta").train()
    if precision.param_dtype:
        for parameter in result.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(precision.param_dtype)
    return result


class _Inputs(NamedTuple):
    """A block's input [1, T, H] and other arguments."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Reached(Exception):
    """Ends a forward pass at the first block."""


def _arguments(parts: ModelParts, precision: Precision, told: Mapping[str, Any]) -> _Inputs:
    """Find the arguments of the first block by the model's own code, with hidden states that take no memory."""
    model: PreTrainedModel = parts.model
    embedded: torch.Tensor = parts.embedding.weight  # type: ignore[assignment]
    dtype = (precision.param_dtype if embedded.requires_grad else None) or embedded.dtype
    tokens, hidden = told["position_ids"].shape[1], block_shapes(model.config)[0].hidden
    inputs: list[_Inputs] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.pop("hidden_states")
        on_meta = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args[1:], kwargs))
        inputs.append(_Inputs(tuple(x.shape), x.dtype, *on_meta))
        raise _Reached

    handle = parts.blocks[0].register_forward_pre_hook(note, with_kwargs=True)
    try:
        model.base_model(inputs_embeds=torch.zeros((), dtype=dtype).expand(1, tokens, hidden), use_cache=False, **told)
    except _Reached:
        pass
    finally:
        handle.remove()
    return inputs[0]
