"""What a program asked of the GPU, in plain numbers. For programs that run on the stand-in
(README.md).

    with recording() as counts:
        train_step()
    assert [sync.line for sync in counts.syncs] == ["fsdp_qlora/training/trainer.py:120"]

Only the standard library and, where the program has imported it, torch.
"""

import contextlib
import ctypes
import functools
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen", __file__)


class Operation(IntEnum):
    """As in runtime/phantom.h."""

    KERNEL = 0
    GEMM = 1
    MEMSET = 2
    COPY = 3
    SYNC = 4
    COLLECTIVE = 5
    MALLOC = 6
    FREE = 7
    PIN = 8
    EVENT_RECORD = 9
    EVENT_WAIT = 10
    GRAPH = 11


LAUNCHED = (Operation.KERNEL, Operation.GEMM, Operation.MEMSET, Operation.GRAPH)
_DIRECTIONS = ("host_to_device", "device_to_host", "device_to_device", "host_to_host")
# bits of a copy's detail
COPY_DIRECTIONS = 3
COPY_PINNED = 4
COPY_BLOCKING = 8


class Record(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("size", ctypes.c_longlong),
        ("host_ns", ctypes.c_longlong),
        ("stream", ctypes.c_uint64),
        ("operation", ctypes.c_int),
        ("detail", ctypes.c_int),
        ("ranks", ctypes.c_int),
        ("place", ctypes.c_int),
    )


class Sync(NamedTuple):
    """The host waited for the device. The line is the innermost of the program, "" where no Python
    was running.
    """

    call: str
    line: str


class Copy(NamedTuple):
    kind: str  # host_to_device, device_to_host, device_to_device, host_to_host
    bytes: int
    pinned: bool  # the host's side; True where there is none
    # 0: where the device computes; 1: another one, whose number differs from run to run
    stream: int
    line: str


class Collective(NamedTuple):
    kind: str  # all_gather, reduce_scatter, all_reduce, broadcast, ...
    bytes: int  # of the whole: what an all_gather returns, what a reduce_scatter is given
    group: int  # communicators are numbered as they are made
    group_size: int


@dataclass
class Counts:
    """Everything between the start and the end of a recording."""

    # all that was launched: kernels, matrix products and memsets, and graphs as one launch each
    kernels: int = 0
    matrix_products: int = 0
    graphs: int = 0
    captured_kernels: int = 0  # in the launched graphs: kernels, products, memsets and copies
    mallocs: int = 0
    pinned_allocations: int = 0
    syncs: Counter[Sync] = field(default_factory=Counter)
    copies: Counter[Copy] = field(default_factory=Counter)
    collectives: Counter[Collective] = field(default_factory=Counter)
    memory: dict[str, int] = field(default_factory=dict)  # see memory_now

    def add(self, record: Record, line: str) -> None:
        name = record.name.decode()
        size = record.size
        operation = Operation(record.operation)
        self.kernels += operation in LAUNCHED
        self.matrix_products += operation == Operation.GEMM
        self.graphs += operation == Operation.GRAPH
        self.captured_kernels += size if operation == Operation.GRAPH else 0
        self.mallocs += operation == Operation.MALLOC
        self.pinned_allocations += operation == Operation.PIN
        if operation == Operation.COPY:
            kind = _DIRECTIONS[record.detail & COPY_DIRECTIONS]
            self.copies[
                Copy(kind, size, bool(record.detail & COPY_PINNED), min(record.stream, 1), line)
            ] += 1
        elif operation == Operation.SYNC:
            self.syncs[Sync(name, line)] += 1
        elif operation == Operation.COLLECTIVE:
            self.collectives[Collective(name, size, record.detail, record.ranks)] += 1

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            name: [{**entry._asdict(), "count": count} for entry, count in value.items()]
            if isinstance(value, Counter)
            else value
            for name, value in vars(self).items()
        }


# ---- the library


@functools.cache
def _library() -> ctypes.CDLL:
    """The stand-in that is preloaded into this process."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "phantom_start"):
        raise RuntimeError(
            "libphantom.so is not preloaded into this process: see stand_in/README.md"
        )
    library.phantom_count.restype = ctypes.c_longlong
    library.phantom_captured.restype = ctypes.c_long
    library.phantom_read.argtypes = (ctypes.POINTER(Record), ctypes.c_longlong, ctypes.c_longlong)
    return library


_numbers: dict[str, int] = {}


def _find_line() -> int:
    """The number of the innermost line of this thread that is not of a library."""
    frame: FrameType | None = sys._getframe().f_back
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    line = f"{frame.f_code.co_filename.removeprefix(ROOT)}:{frame.f_lineno}" if frame else ""
    return _numbers.setdefault(line, len(_numbers))


_callback = ctypes.CFUNCTYPE(ctypes.c_int)(_find_line)  # kept here: C holds only its address


@functools.cache
def _empty_cache_without_lines() -> None:
    """Have `torch.cuda.empty_cache` wait for the device without asking for the line.

    It holds the allocator's lock, for which a thread of autograd may wait that holds Python's.
    """
    import torch

    empty_cache = torch.cuda.empty_cache

    def empty() -> None:
        _library().phantom_without_places(1)
        try:
            empty_cache()
        finally:
            _library().phantom_without_places(0)

    torch.cuda.empty_cache = torch.cuda.memory.empty_cache = empty


def memory_now(reset_peak: bool = False) -> dict[str, int]:
    """Bytes: what the device gave out (now, peak), and torch's own allocated and reserved (now,
    peak).
    """
    given = (ctypes.c_longlong * 2)()
    _library().phantom_memory(given, int(reset_peak))
    memory = {"device": given[0], "device_peak": given[1]}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        memory |= {
            "allocated": torch.cuda.memory_allocated(),
            "allocated_peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "reserved_peak": torch.cuda.max_memory_reserved(),
        }
        if reset_peak:
            torch.cuda.reset_peak_memory_stats()
    return memory


def captured_now(stream: int) -> tuple[int, int] | None:
    """The number of the capture in which a stream is, and how many kernels and copies it has."""
    number = ctypes.c_ulonglong()
    kernels = _library().phantom_captured(ctypes.c_void_p(stream), ctypes.byref(number))
    return None if kernels < 0 else (number.value, kernels)


# ---- recording


def start(*, lines: bool = True) -> None:
    """Forget what was recorded and record from here on, in all threads; peaks start again."""
    _library().phantom_stop()
    _library().phantom_clear()
    memory_now(reset_peak=True)
    if lines:
        _empty_cache_without_lines()
    _library().phantom_start(_callback if lines else None)


def read_records(first: int = 0) -> list[Record]:
    """The records from number `first` on."""
    number = max(_library().phantom_count() - first, 0)
    records = (Record * number)()
    _library().phantom_read(records, first, number)
    return list(records)


def stop() -> Counts:
    """End the recording and return it."""
    _library().phantom_stop()
    counts = Counts(memory=memory_now())
    lines = list(_numbers)
    for record in read_records():
        counts.add(record, lines[record.place] if record.place >= 0 else "")
    return counts


@contextlib.contextmanager
def recording() -> Iterator[Counts]:
    """Record the block; the counts are filled in at its end."""
    counts = Counts()
    start()
    try:
        yield counts
    finally:
        vars(counts).update(vars(stop()))
