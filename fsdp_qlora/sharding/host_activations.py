"""Keeps what decoder blocks save for their backward pass in host memory.

It goes out while the forward pass computes, and comes back one block ahead in the backward pass, so
that no block is computed again. Storages are copied as they are: one that a block saves several
times, or of which it saves several views, goes once.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from fsdp_qlora.model.adapters.insert import adapter_modules
from fsdp_qlora.sharding.host_memory import SideStream, split_arena

# Less stays on the device: its copy takes the host longer than the link.
LEAST_BYTES = 2**18
# Host memory is used in parts of one size, so that blocks and rows of any length use it again. A
# link takes 0.3 to 2 ms for a part, and the host 10 us.
PART_BYTES = 2**24
_PARTS = 8  # allocated and pinned together
PARTS_AT_ONCE = _PARTS * PART_BYTES


def is_spread(index: int, chosen: int, number: int) -> bool:
    """Whether `index` is one of `chosen` that are spread evenly among `number`, with the last."""
    return (index + 1) * chosen // number > index * chosen // number


class ActivationStore:
    """Moves what the blocks of a model save.

    Activations that are on the host stay on the device, too, until `lag` blocks later, where the
    compute stream waits for the copies: so the device has those of two blocks, and copies have all
    the time until then.

    Attributes:
        lag: blocks from one that moves to the next.
        free: parts of host memory that are not in use.
        total: bytes of all parts.
    """

    def __init__(self) -> None:
        self.side: SideStream | None = None  # there is no device yet when blocks are wrapped
        self.lag = 1
        self.free: list[torch.Tensor] = []
        self.total = 0
        self._number = 0  # blocks that have run
        self._newest: _Moved | None = None
        self._leaving: list[_Moved] = []

    def run(
        self,
        compute: Callable[..., Any],
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        moves: bool,
    ) -> Any:
        """The output of a block: compute(*args, **kwargs).

        Called in a forward pass with gradients for each block, in their order.

        Args:
            args, kwargs: the hidden states come first; blocks share the others.
            moves: whether what this block saves goes to host memory.
        """
        before = self._newest
        self._number += 1
        is_next = before is not None and before.number == self._number - 1
        if moves:
            hidden, *others = args or [kwargs["hidden_states"]]
            self.side = self.side or SideStream(hidden.device)
            shared = {name: each for name, each in kwargs.items() if each is not hidden}
            self._newest = moved = _Moved(self, self._number, block, (others, shared))
            with saved_tensors_hooks(moved.pack, _unpack):
                output = compute(*args, **kwargs)
            moved.end()
            self._leaving.append(moved)
        else:
            output = compute(*args, **kwargs)
        # Before the next block allocates, and after this one has had its time.
        while self._leaving and self._leaving[0].number + self.lag <= self._number:
            self._leaving.pop(0).release()
        # The gradient of a block's output is the first thing in its part of the backward pass.
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if before is not None and (moves or is_next) and hidden.requires_grad:
            hidden.register_hook(before.come)
        return output

    def reserve(self, size: int, device: torch.device) -> None:
        """Allocate host memory of `size` bytes in all, before a step needs it.

        Raises:
            MemoryError: it cannot be allocated or pinned.
        """
        self.side = self.side or SideStream(device)
        while self.total < size:
            self._allocate()

    def take_part(self) -> torch.Tensor:
        """Host memory that is not in use."""
        if not self.free:
            self._allocate()
        return self.free.pop()

    def _allocate(self) -> None:
        pinned = self.side is not None and self.side.stream is not None
        self.free += split_arena([PART_BYTES] * _PARTS, pinned=pinned, what="activations")
        self.total += _PARTS * PART_BYTES

    def give_back(self, part: torch.Tensor) -> None:
        """Take host memory that is not in use any more.

        A later copy into it is behind the last one from it in the order of the side stream.
        """
        self.free.append(part)


class _Lease:
    """A part of host memory, in use as long as this object."""

    def __init__(self, store: ActivationStore) -> None:
        self.store = store
        self.memory = store.take_part()

    def __del__(self) -> None:
        self.store.give_back(self.memory)


class _Moved:
    """Activations that a block saves in one forward pass.

    Autograd alone keeps the storages alive: it frees each, on the device and on the host, after the
    last function that has saved a part of it.

    number: of the block, counted by the store.
    """

    def __init__(self, store: ActivationStore, number: int, block: nn.Module, inputs: Any) -> None:
        assert store.side is not None
        self.store = store
        self.side = store.side
        self.number = number
        # Storages that stay, by their keys. Found when the first tensor is saved, and not before:
        # FSDP2 gathers adapters at the call of the inner block.
        self._staying: set[int] | None = None
        self._find_staying: Callable[[], set[int]] = lambda: _shared(block, inputs)
        self._storages: list[weakref.ref[_Storage]] = []
        self._newest_of: dict[int, weakref.ref[_Storage]] = {}
        self._lease: _Lease | None = None
        self._used = 0  # bytes of the lease

    def pack(self, tensor: torch.Tensor) -> "torch.Tensor | _View":
        """Start to copy a saved tensor to the host, unless it stays on the device."""
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES or tensor.is_conj() or tensor.is_neg():
            return tensor
        self._staying = self._find_staying() if self._staying is None else self._staying
        key = storage._cdata
        if key in self._staying:
            return tensor
        # A key belongs to one storage: until the block has run, those that are copied stay.
        found = self._newest_of.get(key)
        copied = None if found is None else found()
        # One that was written since then has other values.
        if copied is None or copied.version != tensor._version:
            copied = _Storage(self, tensor)
            self._newest_of[key] = weakref.ref(copied)
            self._storages.append(self._newest_of[key])
        return _View(copied, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def host_memory(self, size: int) -> Iterator[tuple[_Lease, torch.Tensor]]:
        """`size` bytes of host memory, in parts, and what keeps each from other uses."""
        while size:
            if self._lease is None or self._used == len(self._lease.memory):
                self._lease = _Lease(self.store)
                self._used = 0
            memory = self._lease.memory[self._used : self._used + size]
            self._used += len(memory)
            size -= len(memory)
            yield self._lease, memory

    def end(self) -> None:
        """Called when the block has run."""
        self._newest_of = {}
        self._find_staying = set
        self._lease = None

    def release(self) -> None:
        """Free the device's memory when the copies to the host are done."""
        for storage in self._alive():
            storage.release()

    def come(self, _: torch.Tensor | None = None) -> None:
        """Start to copy all back to the device, in the order in which it is needed."""
        for storage in reversed([*self._alive()]):
            storage.come()

    def _alive(self) -> "Iterator[_Storage]":
        for reference in self._storages:
            storage = reference()
            if storage is not None:
                yield storage


class _Storage:
    """A storage on the host, on the device, or being copied."""

    def __init__(self, moved: _Moved, tensor: torch.Tensor) -> None:
        self.version = tensor._version
        self.side = moved.side
        self.device = tensor.device
        self.on_device: torch.Tensor | None = _as_bytes(tensor)
        self.size = len(self.on_device)
        # Their leases are held by this object.
        self.parts = [*moved.host_memory(self.size)]
        self.copied = self.side.copy_all(
            (here, there) for there, here in self._pairs(self.on_device)
        )

    def _pairs(self, on_device: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts on the device and on the host."""
        memory = [part for _, part in self.parts]
        return zip(on_device.split([len(part) for part in memory]), memory, strict=True)

    def release(self) -> None:
        """Free the device's memory."""
        if self.on_device is not None:
            # It is the compute stream's: the next tensor there may overwrite it.
            self.side.compute_waits(self.copied)
            self.on_device = None

    def come(self) -> torch.Tensor:
        """The bytes on the device, which the compute stream may use after `copied`."""
        if self.on_device is None:
            self.on_device = torch.empty(self.size, dtype=torch.uint8, device=self.device)
            self.copied = self.side.copy_all(self._pairs(self.on_device))
        return self.on_device

    def __del__(self) -> None:
        # Autograd frees it in its own thread, with whichever stream current: `SideStream` knows the
        # compute stream by itself.
        self.release()


class _View(NamedTuple):
    """A saved tensor, as a view of a storage."""

    storage: _Storage
    dtype: torch.dtype
    offset: Any  # an int
    size: torch.Size
    stride: tuple[int, ...]


def _unpack(saved: "torch.Tensor | _View") -> torch.Tensor:
    """The saved tensor, for the compute stream."""
    if isinstance(saved, torch.Tensor):
        return saved
    storage = saved.storage
    on_device = storage.come()
    # Also for a copy to the host: functions may write their gradients into what they have saved.
    storage.side.compute_waits(storage.copied)
    storage.copied = None
    # By `set_`: several views have one storage, as when they were saved.
    tensor = torch.empty(0, dtype=saved.dtype, device=storage.device)
    return tensor.set_(on_device.untyped_storage(), saved.offset, saved.size, saved.stride)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def _shared(block: nn.Module, inputs: Any) -> set[int]:
    """Keys of the storages of a block's weights, and of inputs that blocks share.

    FSDP2 frees the storages of gathered weights, and refills the same ones.
    """
    opened = [
        [*value.values()] if isinstance(value, Mapping) else value for value in tree_leaves(inputs)
    ]
    copies = [getattr(adapter, "copies", None) for adapter in adapter_modules(block)]
    tensors = [*block.parameters(), *block.buffers(), *tree_leaves((opened, copies))]
    return {
        each.untyped_storage()._cdata
        for each in tensors
        if isinstance(each, torch.Tensor) and each.layout == torch.strided
    }
