"""Host memory for a GPU: one pinned allocation for shards, a copy stream, offloaded activations.

torch's allocator rounds each pinned tensor up to a power of two, so that freed blocks fit later
requests: this adds 12% to the shards of a 70B model and 70% to those of a 13B model. Here ordinary
pages are mapped once and registered with CUDA, without rounding. A view of them counts as pinned,
so FSDP2 uses it directly and copies it asynchronously.

torch's own allocator can avoid the rounding only since 2.13 (`pinned_max_round_threshold_mb`), and
2.11 is supported. An H200's host took 0.7 s to register a GiB; on a CPU the same arena is used
without it.
"""

import itertools
import logging
import mmap
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

log = logging.getLogger("fsdp_qlora")

_SLOW_BYTES = 18 * 2**30  # pinning so much takes long enough to announce it
_ALIGNMENT = 64  # bytes, for each part: the width of AVX-512 loads


class _Pinned(mmap.mmap):
    """Pages registered with CUDA.

    They are unregistered before they are unmapped, since the system may give the same addresses to
    another mapping, which CUDA would take for pinned.
    """

    pointer: int = 0  # 0 until the pages are registered

    def __del__(self) -> None:
        if self.pointer:
            torch.cuda.cudart().cudaHostUnregister(self.pointer)


def split_arena(
    sizes: Sequence[int], *, pinned: bool, what: str = "offloaded weights"
) -> list[torch.Tensor]:
    """Make one allocation and split it into aligned, zeroed uint8 parts.

    Args:
        sizes: bytes of each part.
        what: the content, for messages.
    Raises:
        MemoryError: the memory cannot be allocated or pinned.
    """
    aligned = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    *starts, total = itertools.accumulate(aligned, initial=0)
    memory = f"{total / 2**30:.1f} GiB of host memory for {what}"
    # Anonymous pages are zero, and cost no memory until they are written or pinned.
    try:
        pages = _Pinned(-1, max(total, 1))
    except OSError as error:
        raise MemoryError(f"{memory} cannot be allocated: {error}") from error
    # The tensor keeps the mapping alive: the pages live as long as any view of them.
    arena = torch.frombuffer(pages, dtype=torch.uint8)
    if pinned:
        if total >= _SLOW_BYTES:
            log.info(
                "Pinning %s on each rank, which takes seconds to minutes. A container's limit must "
                "allow it; WSL2 pins at most half of the memory that Windows gives it.",
                memory,
            )
        cuda = torch.cuda.cudart()
        status = int(cuda.cudaHostRegister(arena.data_ptr(), arena.numel(), 0))
        if status != 0:
            raise MemoryError(
                f"{memory} cannot be pinned (CUDA error {status}). Free host memory, raise the "
                "container's limit, or use more ranks."
            )
        pages.pointer = arena.data_ptr()
    return [arena[start : start + size] for start, size in zip(starts, sizes, strict=True)]


class SideStream:
    """Copies that overlap with the work of the compute stream. On a CPU they are synchronous.

    Memory is allocated on the compute stream, which may reuse it as soon as it is freed. So before
    memory is freed, the compute stream must wait for its copy. The compute stream is the one that
    is current in `__init__`, since memory may be freed while another one is current, such as by
    `__del__` in autograd's or FSDP2's code.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.compute = torch.cuda.current_stream(device) if on_gpu else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        """Copy after all work that is queued on the compute stream.

        Returns an event at the end of the copy; None on a CPU, where the copy is done.
        """
        return self.copy_all([(target, source)])

    def copy_all(
        self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.cuda.Event | None:
        """Copy to each target its source, as `copy` does, with one event for all."""
        if self.stream is None or self.compute is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        # That work may still write the sources, or use the memory that the targets have now.
        self.stream.wait_stream(self.compute)
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def finish(self) -> None:
        """Make the host wait for all copies."""
        if self.stream is not None:
            self.stream.synchronize()

    def compute_waits(self, event: torch.cuda.Event | None) -> None:
        """Make the compute stream wait for an event of this stream. The host does not wait."""
        if event is not None and self.compute is not None:
            self.compute.wait_event(event)


class InputStore:
    """Keeps the inputs of all blocks on the host (hooks for `saved_tensors_hooks`).

    An input is copied to the host while its block runs forward, and copied back while the next
    block runs backward. The newest input stays on the device, since the backward pass begins with
    it. Host memory is reused in later steps.

    What a block keeps beside its input goes and comes with it.

    Attributes:
        free: host memory that is not in use: of inputs, and of each tensor that is kept beside one.
            Each has sizes of its own.
    """

    def __init__(self) -> None:
        self.side: SideStream | None = None  # there is no device yet when blocks are wrapped
        self.free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._newest: weakref.ref[_Kept] | None = None

    def pack(self, tensor: torch.Tensor) -> "torch.Tensor | _Kept":
        """Copy a block's input to the host. Others, such as positions, stay on the device."""
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        self.side = self.side or SideStream(tensor.device)
        before = self._newest
        newest = before() if before is not None else None
        # The block before has run by now, or at least its work is queued: its input may go.
        if newest is not None:
            newest.leave()
        saved = _Kept(self, tensor.detach(), before)
        # Weak: autograd alone keeps inputs alive, and frees each after its block's backward pass.
        self._newest = weakref.ref(saved)
        return saved

    def pack_beside(self, tensor: torch.Tensor) -> "torch.Tensor | _Kept":
        """Copy another tensor of the block whose input is the newest to the host."""
        newest = self._newest() if self._newest is not None else None
        if newest is None or not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        saved = _Kept(self, tensor, None, place=len(newest.beside) + 1)
        newest.beside.append(weakref.ref(saved))
        return saved

    def unpack(self, saved: "torch.Tensor | _Kept") -> torch.Tensor:
        """The tensor, for the compute stream. Also prefetches the previous block's input."""
        if isinstance(saved, torch.Tensor):
            return saved
        tensor = saved.prefetch()
        saved.side.compute_waits(saved.copied)
        # The previous block's input, which is needed when this block's backward pass is done.
        before = saved.before() if saved.before is not None else None
        if before is not None:
            before.prefetch()
        saved.on_device = None  # autograd holds it now
        return tensor

    def host_memory(self, size: int, place: int) -> torch.Tensor:
        """Pinned uint8 memory of at least `size` bytes that is not in use.

        place: 0 for inputs, then the number of a tensor that is kept beside one.
        """
        # The shortest that is long enough: blocks may differ, and each finds its own again.
        free = self.free[place]
        fitting = [index for index, memory in enumerate(free) if memory.numel() >= size]
        if fitting:
            return free.pop(min(fitting, key=lambda index: free[index].numel()))
        assert self.side is not None
        if free:
            # All are too short: replace one. Pages are unregistered and unmapped when it is freed,
            # which no copy may see.
            self.side.finish()
            free.pop()
        return split_arena([size], pinned=self.side.stream is not None, what="activations")[0]


class _Kept:
    """A tensor on the host, on the device, or being copied.

    copied: event at the end of the last copy. before: the input of the block before. beside: what
    the block keeps beside this input. place: see `InputStore.host_memory`.
    """

    def __init__(
        self,
        store: InputStore,
        tensor: torch.Tensor,
        before: "weakref.ref[_Kept] | None",
        place: int = 0,
    ) -> None:
        assert store.side is not None
        self.store = store
        self.side = store.side
        self.before = before
        self.beside: list[weakref.ref[_Kept]] = []
        self.place = place
        self.memory = store.host_memory(tensor.numel() * tensor.element_size(), place)
        # The same strides, unless the tensor has gaps.
        self.like = torch.empty_like(tensor, device="meta")
        self.device = tensor.device
        self.on_device: torch.Tensor | None = tensor
        self.copied = self.side.copy(self._on_host(), tensor)

    def _on_host(self) -> torch.Tensor:
        used = self.memory[: self.like.numel() * self.like.element_size()]
        return used.view(self.like.dtype).as_strided(self.like.shape, self.like.stride())

    def _alive_beside(self) -> "Iterator[_Kept]":
        for reference in self.beside:
            kept = reference()
            if kept is not None:
                yield kept

    def leave(self) -> None:
        """Free the device's memory of this tensor and of those beside it."""
        for kept in [self, *self._alive_beside()]:
            kept.release_device_copy()

    def release_device_copy(self) -> None:
        if self.on_device is not None:
            # Its memory is the compute stream's: the next tensor there may overwrite it.
            self.side.compute_waits(self.copied)
            self.on_device = None

    def prefetch(self) -> torch.Tensor:
        """The tensor on the device, which the compute stream may use after `copied`."""
        if self.on_device is None:
            self.on_device = torch.empty_like(self.like, device=self.device)
            self.copied = self.side.copy(self.on_device, self._on_host())
        for kept in self._alive_beside():
            kept.prefetch()
        return self.on_device

    def __del__(self) -> None:
        # Autograd frees it in its own thread, with whichever stream current: `SideStream` knows the
        # compute stream by itself. A later copy into the host memory is behind the last one from it
        # in the order of the side stream, so the memory may be used again at once.
        self.release_device_copy()
        self.store.free[self.place].append(self.memory)
