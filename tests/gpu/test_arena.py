"""The pinned host memory of offloaded weights: one registration, whose parts are copied without
waiting.
"""

import time

import psutil
import pytest
import torch

from fsdp_qlora.sharding.host_memory import split_arena
from tests.gpu.check import IS_STAND_IN, holds

GIB = 2**30
MIB = 2**20


def test_sixteen_gib_are_registered_at_once_and_parts_are_pinned(record_property):
    free = psutil.virtual_memory().available
    size = 64 * MIB if IS_STAND_IN else min(16 * GIB, free // 2)
    began = time.perf_counter()
    parts = split_arena(
        [size - 100 * MIB, 99 * MIB, 7] if size > GIB else [size - MIB, MIB - 64, 7], pinned=True
    )
    record_property("registered_gib", size / GIB)
    record_property("seconds", time.perf_counter() - began)
    assert all(part.is_pinned() for part in parts)
    assert parts[1].data_ptr() % 64 == parts[2].data_ptr() % 64 == 0
    assert not parts[1].any()


def test_copies_from_the_arena_are_asynchronous_and_bring_the_bytes():
    [part] = split_arena([4 * MIB], pinned=True)
    part.copy_(torch.arange(4 * MIB, dtype=torch.int64).to(torch.uint8))
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_gpu = part.to("cuda", non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    holds(torch.equal(on_gpu.cpu(), part))


def test_memory_that_cannot_be_pinned_is_refused_with_its_size():
    with pytest.raises(MemoryError, match="host memory for offloaded weights cannot be"):
        split_arena([2**62], pinned=True)
