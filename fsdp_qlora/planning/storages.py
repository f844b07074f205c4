"""Counts the storages that operators make on the meta device."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_qlora.model.architecture.decoder import tensors_of
from fsdp_qlora.planning.allocator import SEGMENT, Change


class CountedStorages(TorchDispatchMode):
    """Counts the bytes of storages that are made in this context and alive.

    Args:
        uncounted: tensors whose storages are not counted: weights and inputs.
        on_operator: called for each operator.
        everywhere: count storages with values, too, which a GPU has beside the others.
    Attributes:
        now: bytes that are allocated.
        most: the maximum that was allocated at once.
        changes: all allocations and their ends, in order.
    """

    def __init__(
        self,
        uncounted: Iterable[torch.Tensor],
        on_operator: Callable[[], object] = lambda: None,
        *,
        everywhere: bool = False,
    ) -> None:
        super().__init__()
        self._everywhere = everywhere
        self._on_operator = on_operator
        self.now = self.most = 0
        self.changes: list[Change] = []
        self._alive = {tensor.untyped_storage()._cdata for tensor in uncounted}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._on_operator()
        # The meta device does not know how many values are not zero. bitsandbytes asks for the
        # columns with outliers in int8: all is the upper bound.
        if func is torch.ops.aten.nonzero.default and args[0].is_meta and args[0].dim() == 1:
            return torch.arange(len(args[0]))[:, None]
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            if tensor.is_meta or self._everywhere:
                self._count(tensor.untyped_storage())
        self._count_inside(_sizes_inside(func, args))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        # Views and in-place operators return the storage of a tensor that is counted already.
        key = storage._cdata
        size = -(-storage.nbytes() // SEGMENT) * SEGMENT
        if key in self._alive or not size:
            return
        self._alive.add(key)
        self.changes.append(Change(key, size))
        self.now += size
        self.most = max(self.most, self.now)
        # Its address may be given to a later storage, so it is forgotten when this one ends.
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.changes.append(Change(key, 0))
        self.now -= size

    def _count_inside(self, sizes: Sequence[int]) -> None:
        """Count buffers of an operator, which end with it."""
        self.most = max(self.most, self.now + sum(sizes))
        # An empty buffer is no allocation.
        named = [(place, size) for place, size in enumerate(sizes) if size]
        self.changes += [Change(("inside", place), size) for place, size in named]
        self.changes += [Change(("inside", place), 0) for place, _ in named]


def _sizes_inside(func: Any, args: tuple[Any, ...]) -> list[int]:
    """Bytes of buffers inside a kernel for CUDA, which no operator shows."""
    name = func._schema.name
    if name == "torch_attn::_varlen_attn_backward":
        # Queries' gradients in float32, and keys' and values' for each head that shares them.
        query, key = args[1:3]
        of_heads = key.nbytes // key.shape[1] * query.shape[1]
        shared = 2 * [of_heads] if key.shape[1] < query.shape[1] else []
        return [4 * query.numel(), *shared]
    if name == "aten::_softmax_backward_data":
        # the gradient times the output
        return [args[1].nbytes]
    return []


class EmptyLoss(torch.autograd.Function):
    """Ends a graph and keeps nothing: what follows a block frees its output in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.form = x.shape, x.dtype
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        shape, dtype = ctx.form
        return grads[0].new_empty(shape, dtype=dtype)
