"""Static memory for the tensors of a decoder block, which a CUDA graph reads in their place.

A graph has the addresses of its capture. FSDP2 gathers each block's weights elsewhere, so a block's
bytes are copied to static memory before a graph runs, and all blocks of one structure share it.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_qlora.model.adapters.insert import adapted_layers, adapter_modules
from fsdp_qlora.model.quantizers.base import QuantizedWeight

# Bytes at a multiple of which torch's allocator for CUDA gives memory.
_ALIGNMENT = 512


class BlockTensors:
    """The tensors that a block computes with, while they are gathered.

    They are its parameters and buffers, and the 16-bit copies of adapters in the place of their
    weights (weight_copies.py), but not what a reference alone computes with.

    Raises:
        ValueError: one of them is not contiguous.
    """

    def __init__(self, block: nn.Module) -> None:
        left_out: set[nn.Module] = set()
        for layer in adapted_layers(block):
            left_out.update(layer.start.modules() if layer.start is not None else ())
        self._copied: list[Any] = [
            adapter
            for adapter in adapter_modules(block)
            if adapter not in left_out and adapter.copies is not None
        ]
        for adapter in self._copied:
            left_out.update(adapter.children())
        # These dicts stay the modules' own.
        self._places: list[tuple[dict[str, Any], str]] = []
        for module in block.modules():
            if module not in left_out:
                for tensors in (module._parameters, module._buffers):
                    names = [name for name, tensor in tensors.items() if tensor is not None]
                    self._places += [(tensors, name) for name in names]
        self.tensors = self._found()
        if not all(tensor.is_contiguous() for tensor in self.tensors):
            raise ValueError("a weight is not contiguous")
        self.trained = [index for index, tensor in enumerate(self.tensors) if tensor.requires_grad]
        self._quantized = [each for each in block.modules() if isinstance(each, QuantizedWeight)]
        # They share the tensors' storage, which FSDP2 frees and fills again.
        self._aliases = [tensor.detach() for tensor in self.tensors]

    def _found(self) -> list[torch.Tensor]:
        found = [tensors[name] for tensors, name in self._places]
        for adapter in self._copied:
            found += adapter.copies
        return found

    def are_current(self) -> bool:
        """Whether the block still computes with these tensors, and has them in this memory."""
        # Everything here takes the host a few microseconds, for each block and pass.
        for now, tensor in zip(self._found(), self.tensors, strict=True):
            if now is not tensor:
                return False
        for tensor, alias in zip(self.tensors, self._aliases, strict=True):
            if tensor.data_ptr() != alias.data_ptr():
                return False
        return True

    @contextlib.contextmanager
    def replaced_by(self, others: Sequence[torch.Tensor]) -> Iterator[None]:
        """Have the block compute with other tensors for the duration of the block."""
        # Not `self.tensors`: in between others, such as shards, may be in these places.
        before = self._found()
        self._put(others)
        try:
            yield
        finally:
            self._put(before)
            # They would keep the memory of the others.
            for layer in self._quantized:
                layer.forget_views()

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        for (owner, name), tensor in zip(self._places, tensors, strict=False):
            owner[name] = tensor
        rest = iter(tensors[len(self._places) :])
        for adapter in self._copied:
            adapter.copies = (next(rest), next(rest))


class _Span(NamedTuple):
    """Consecutive bytes of a storage."""

    storage: torch.UntypedStorage
    start: int
    stop: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Span":
        """The bytes of a contiguous tensor."""
        start = int(tensor.storage_offset()) * tensor.itemsize
        return cls(tensor.untyped_storage(), start, start + tensor.nbytes)

    def is_before(self, other: "_Span") -> bool:
        """Whether the other one begins in the same storage where this one ends."""
        is_next = self.stop == other.start
        return is_next and self.storage._cdata == other.storage._cdata

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """The bytes as a tensor that shares the storage."""
        size = dtype.itemsize
        count = (self.stop - self.start) // size
        view = torch.empty(0, dtype=dtype, device=self.storage.device)
        return view.set_(self.storage, self.start // size, (count,), (1,))


class StaticTensors:
    """Static twins of some tensors: with the same shapes and dtypes, in one piece of memory.

    What lies side by side does so in static memory, too. Trained ones require gradients.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        places: list[int] = []
        stop = 0
        before: _Span | None = None
        for tensor in like:
            span = _Span.of(tensor)
            if before is None or not before.is_before(span):
                stop = -(-stop // _ALIGNMENT) * _ALIGNMENT
            places.append(stop)
            stop += tensor.nbytes
            before = span
        self.memory = torch.zeros(stop, dtype=torch.uint8, device=like[0].device)
        self.tensors = [
            _view(self.memory, place, tensor) for place, tensor in zip(places, like, strict=True)
        ]


def _view(memory: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype, from a byte of the memory on."""
    view = torch.empty(0, dtype=like.dtype, device=memory.device)
    first = place // like.itemsize
    view.set_(memory.untyped_storage(), first, like.shape, like.stride())
    return view.requires_grad_(like.requires_grad)


class Staging:
    """Copies a block's tensors to their static twins, as bytes.

    A copy of 16-bit floats may change codes that look like NaN (pytorch#159333).
    """

    def __init__(self, tensors: Sequence[torch.Tensor], static: Sequence[torch.Tensor]) -> None:
        pairs: list[tuple[_Span, _Span]] = []
        for tensor, twin in zip(tensors, static, strict=True):
            source = _Span.of(tensor)
            target = _Span.of(twin)
            if pairs and pairs[-1][0].is_before(source) and pairs[-1][1].is_before(target):
                first = pairs.pop()
                source = first[0]._replace(stop=source.stop)
                target = first[1]._replace(stop=target.stop)
            pairs.append((source, target))
        # One call copies all that have one dtype: words where they can be, else bytes.
        by_dtype: dict[torch.dtype, list[tuple[_Span, _Span]]] = {}
        for source, target in pairs:
            is_whole = math.gcd(source.start, source.stop, target.start) % 4 == 0
            by_dtype.setdefault(torch.int32 if is_whole else torch.uint8, []).append(
                (source, target)
            )
        self._copies = [
            (
                [target.view(dtype) for _, target in some],
                [source.view(dtype) for source, _ in some],
            )
            for dtype, some in by_dtype.items()
        ]

    def copy(self) -> None:
        """Copy what the tensors are now."""
        for targets, sources in self._copies:
            torch._foreach_copy_(targets, sources)


class StaticGradients:
    """Static memory for gradients, which are handed out in memory of their own.

    Those of one dtype are copied together.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(like):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        self._shapes = [tensor.shape for tensor in like]
        self._groups: list[tuple[list[int], list[int], torch.Tensor]] = []
        self.tensors: list[torch.Tensor] = [like[0]] * len(like) if like else []
        for dtype, indices in by_dtype.items():
            sizes = [like[index].numel() for index in indices]
            memory = torch.zeros(sum(sizes), dtype=dtype, device=like[0].device)
            self._groups.append((indices, sizes, memory))
            for index, part in zip(indices, memory.split(sizes), strict=True):
                self.tensors[index] = part.view(self._shapes[index])

    @property
    def nbytes(self) -> int:
        """Bytes of the static memory."""
        return sum(memory.nbytes for _, _, memory in self._groups)

    def copies(self) -> list[torch.Tensor]:
        """The gradients as they are now."""
        found: list[torch.Tensor] = [*self.tensors]
        for indices, sizes, memory in self._groups:
            for index, part in zip(indices, memory.clone().split(sizes), strict=True):
                found[index] = part.view(self._shapes[index])
        return found
