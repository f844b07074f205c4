"""Host memory for all offloaded shards of a rank in one allocation, pinned if there is a GPU.

torch rounds pinned memory up to a power of two per tensor, which adds 12% to the shards of a 70B model and 70% to those
of a 13B model. Here ordinary pages are mapped once and registered with CUDA, without rounding. A tensor that is a view
of them counts as pinned, so FSDP2 uses it directly and copies it asynchronously.

torch's own allocator does without rounding only since 2.13 (`pinned_max_round_threshold_mb`), and 2.11 is supported.
Registering has not run on a GPU yet; on a CPU the same arena is used without it.
"""

import logging
import mmap
from collections.abc import Sequence

import torch

log = logging.getLogger("fsdp_qlora")

_MUCH = 18 * 2**30  # bytes
_ALIGNMENT = 64  # bytes, for each part: best for the widest vector instructions


class _Pinned(mmap.mmap):
    """Pages registered with CUDA, unregistered before they are unmapped: the address may be used again."""

    pointer: int = 0

    def __del__(self) -> None:
        if self.pointer:
            torch.cuda.cudart().cudaHostUnregister(self.pointer)


def split_arena(sizes: Sequence[int], *, pinned: bool, what: str = "offloaded weights") -> list[torch.Tensor]:
    """One allocation cut into aligned, zeroed uint8 parts of the given sizes in bytes.

    Args:
        what: lies there, for messages.
    Raises:
        MemoryError: the memory cannot be allocated or pinned.
    """
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    try:
        pages = _Pinned(-1, max(total, 1))
    except OSError as error:
        needed = f"{total / 2**30:.1f} GiB"
        raise MemoryError(f"{needed} of host memory for {what} cannot be allocated: {error}") from error
    arena = torch.frombuffer(pages, dtype=torch.uint8)
    if pinned:
        if total >= _MUCH:
            log.info(
                "Pinning %.1f GiB of host memory for %s on each rank, which takes seconds to minutes. A container's "
                "limit must allow it; WSL2 pins at most half of the memory that Windows gives it.",
                total / 2**30,
                what,
            )
        status = int(torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.numel(), 0))
        if status != 0:
            raise MemoryError(
                f"{total / 2**30:.1f} GiB of host memory for {what} cannot be pinned (CUDA error {status}). "
                "Free host memory, raise the container's limit, or use more ranks."
            )
        pages.pointer = arena.data_ptr()
    return [arena[start : start + size] for start, size in zip(starts, sizes, strict=True)]
