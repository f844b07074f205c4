"""Inputs of recomputed blocks that wait for the backward pass in host memory, copied beside the computation."""

import weakref

import torch

from fsdp_qlora.sharding.host_arena import split_arena
from fsdp_qlora.sharding.side_stream import SideStream


class InputStore:
    """Where all blocks keep their inputs.

    An input is copied to the host while its block runs, and comes back while the block after it runs backward. The
    newest stays on the device: the backward pass begins with it. Host memory is used again from step to step.
    """

    def __init__(self) -> None:
        self.side: SideStream | None = None  # there is no device yet when blocks are wrapped
        self.free: list[torch.Tensor] = []
        self._newest: weakref.ref[_Kept] | None = None

    def keep(self, tensor: torch.Tensor) -> "torch.Tensor | _Kept":
        """Copy a tensor to the host; what is no input of a block, such as a number or a position, is kept as it is."""
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        self.side = self.side or SideStream(tensor.device)
        before = self._newest
        if before is not None and (last := before()) is not None:
            last.leave_device()
        kept = _Kept(self, tensor.detach(), before)
        self._newest = weakref.ref(kept)
        return kept

    def give_back(self, kept: "torch.Tensor | _Kept") -> torch.Tensor:
        """The tensor, once the compute stream gets there; the one before it begins to come."""
        if isinstance(kept, torch.Tensor):
            return kept
        tensor = kept.come_back()
        kept.side.compute_waits(kept.copied)
        if kept.before is not None and (before := kept.before()) is not None:
            before.come_back()
        kept.on_device = None  # autograd has it now
        return tensor

    def host_memory(self, size: int) -> torch.Tensor:
        """Pinned uint8 memory of at least `size` bytes that is not in use."""
        for index, memory in enumerate(self.free):
            if memory.numel() >= size:
                return self.free.pop(index)
        assert self.side is not None
        if self.free:  # too short for now, and so for later
            self.side.finish()
            self.free.pop()
        return split_arena([size], pinned=self.side.stream is not None, what="activations")[0]


class _Kept:
    """A tensor on the host, on the device, or on its way. copied: when the last copy is done."""

    def __init__(self, store: InputStore, tensor: torch.Tensor, before: "weakref.ref[_Kept] | None") -> None:
        assert store.side is not None
        self.store, self.side, self.before = store, store.side, before
        self.memory = store.host_memory(tensor.numel() * tensor.element_size())
        self.like = torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format)
        self.device = tensor.device
        self.on_device: torch.Tensor | None = tensor
        with self.side.after_compute():
            self._on_host().copy_(tensor, non_blocking=True)
        self.copied = self.side.event()

    def _on_host(self) -> torch.Tensor:
        used = self.memory[: self.like.numel() * self.like.element_size()]
        return used.view(self.like.dtype).view(self.like.shape)

    def leave_device(self) -> None:
        if self.on_device is not None:
            self.side.compute_waits(self.copied)
            self.on_device = None

    def come_back(self) -> torch.Tensor:
        """The tensor on the device, which the compute stream may use after `copied`."""
        if self.on_device is None:
            self.on_device = torch.empty_like(self.like, device=self.device)
            with self.side.after_compute():
                self.on_device.copy_(self._on_host(), non_blocking=True)
            self.copied = self.side.event()
        return self.on_device

    def __del__(self) -> None:
        self.leave_device()
        self.store.free.append(self.memory)
