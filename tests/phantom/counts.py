"""What a program asked of the GPU, in plain numbers. For programs that run on the stand-in (README.md).

    from tests.phantom.counts import recording

    with recording() as counts:
        train_step()
    assert [sync.line for sync in counts.syncs] == ["fsdp_qlora/training/trainer.py:120"]
    assert counts.bytes_gathered("all_gather") == ...

Only the standard library and, where the program has imported it, torch.
"""

import contextlib
import ctypes
import os
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen", __file__)


class _Operation(IntEnum):
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


_DIRECTIONS = ("host_to_device", "device_to_host", "device_to_device", "host_to_host")
_DIRECTION_BITS, _PINNED, _BLOCKING = 3, 4, 8


class _Record(ctypes.Structure):
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


class Place(NamedTuple):
    """Python lines that were running, as path:number; "" where there was none (a thread of C++)."""

    line: str  # the innermost that is not of a library: of this repository or of the test's own script
    caller: str  # the innermost of all


_NOWHERE = Place("", "")


class Sync(NamedTuple):
    """The host waited for the device."""

    call: str
    line: str
    caller: str


class Copy(NamedTuple):
    kind: str  # host_to_device, device_to_host, device_to_device, host_to_host
    bytes: int
    pinned: bool  # the host's side; True where there is none
    blocking: bool
    stream: int
    line: str


class Collective(NamedTuple):
    kind: str  # all_gather, reduce_scatter, all_reduce, broadcast, ...
    bytes: int  # of the whole: what an all_gather returns, what a reduce_scatter is given
    group: int  # communicators are numbered as they are made
    group_size: int
    stream: int


@dataclass
class Counts:
    """Everything between the start and the end of a recording. Bytes, seconds, plain counts."""

    syncs: list[Sync] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    kernel_names: Counter[str] = field(default_factory=Counter)  # mangled; without matrix products and memsets
    matrix_products: int = 0
    multiply_adds: int = 0  # of the matrix products
    memsets: int = 0
    mallocs: list[int] = field(default_factory=list)  # bytes of each piece of device memory asked for
    frees: list[int] = field(default_factory=list)
    pinned_allocations: list[int] = field(default_factory=list)
    event_records: int = 0
    event_waits: int = 0  # one stream waits for another
    host_cpu_seconds: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)  # see memory_now

    @property
    def kernels(self) -> int:
        """All that was launched: kernels, matrix products and memsets."""
        return sum(self.kernel_names.values()) + self.matrix_products + self.memsets

    def collective_bytes(self, kind: str) -> int:
        return sum(collective.bytes for collective in self.collectives if collective.kind == kind)

    def copied_bytes(self, kind: str) -> int:
        return sum(copy.bytes for copy in self.copies if copy.kind == kind)

    def summary(self) -> dict[str, object]:
        """For JSON: equal entries are one entry with its count, so that two runs can be subtracted."""
        return {
            "kernels": self.kernels,
            "kernel_names": dict(self.kernel_names),
            "matrix_products": self.matrix_products,
            "multiply_adds": self.multiply_adds,
            "mallocs": len(self.mallocs),
            "frees": len(self.frees),
            "pinned_allocations": len(self.pinned_allocations),
            "event_records": self.event_records,
            "event_waits": self.event_waits,
            "host_cpu_seconds": self.host_cpu_seconds,
            "memory": self.memory,
            "syncs": _counted(self.syncs),
            # Numbers of streams differ from run to run, but for the default stream's.
            "copies": _counted([copy._replace(stream=min(copy.stream, 1)) for copy in self.copies]),
            "collectives": _counted(self.collectives, leave_out="stream"),
        }


def _counted(entries: list, leave_out: str = "") -> list[dict[str, object]]:
    counter: Counter[tuple] = Counter()
    for entry in entries:
        counter[tuple((name, value) for name, value in entry._asdict().items() if name != leave_out)] += 1
    return [{**dict(entry), "count": count} for entry, count in counter.items()]


# ---- the library


def _library() -> ctypes.CDLL:
    """The stand-in that is preloaded into this process."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "phantom_start"):
        raise RuntimeError("libphantom.so is not preloaded into this process: see tests/phantom/README.md")
    library.phantom_count.restype = ctypes.c_longlong
    library.phantom_read.argtypes = (ctypes.POINTER(_Record), ctypes.c_longlong, ctypes.c_longlong)
    return library


_PlaceCallback = ctypes.CFUNCTYPE(ctypes.c_int)
_place_numbers: dict[Place, int] = {}


def _name(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    return f"{path.split('site-packages' + os.sep)[-1].removeprefix(ROOT)}:{frame.f_lineno}"


def _find_place() -> int:
    """The number of the place where this thread's Python stands."""
    frame: FrameType | None = sys._getframe().f_back
    caller, line = frame, None
    while frame is not None and line is None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            line = frame
        frame = frame.f_back
    place = Place(_name(line) if line else "", _name(caller) if caller else "")
    return _place_numbers.setdefault(place, len(_place_numbers))


_callback = _PlaceCallback(_find_place)  # kept here: C holds only its address


def memory_now(reset_peak: bool = False) -> dict[str, int]:
    """Bytes: what the device gave out (now, peak), and torch's own allocated and reserved (now, peak)."""
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


# ---- recording


_began = 0.0


def start() -> None:
    """Forget what was recorded and record from here on, in all threads; peaks start again."""
    global _began
    library = _library()
    library.phantom_stop()
    library.phantom_clear()
    memory_now(reset_peak=True)
    _began = time.process_time()
    library.phantom_start(_callback)


def snapshot() -> Counts:
    """What was recorded since start(); the recording goes on."""
    seconds = time.process_time() - _began
    library = _library()
    number = library.phantom_count()
    records = (_Record * number)()
    library.phantom_read(records, 0, number)
    counts = Counts(host_cpu_seconds=seconds, memory=memory_now())
    places = list(_place_numbers)
    for record in records:
        _add(counts, record, places[record.place] if record.place >= 0 else _NOWHERE)
    return counts


def stop() -> Counts:
    """End the recording and return it."""
    _library().phantom_stop()
    return snapshot()


@contextlib.contextmanager
def recording() -> Iterator[Counts]:
    """Record the block; the counts are filled in at its end."""
    counts = Counts()
    start()
    try:
        yield counts
    finally:
        vars(counts).update(vars(stop()))


def _add(counts: Counts, record: _Record, place: Place) -> None:
    name, size = record.name.decode(), record.size
    match _Operation(record.operation):
        case _Operation.KERNEL:
            counts.kernel_names[name] += 1
        case _Operation.GEMM:
            counts.matrix_products += 1
            counts.multiply_adds += size
        case _Operation.MEMSET:
            counts.memsets += 1
        case _Operation.COPY:
            kind = _DIRECTIONS[record.detail & _DIRECTION_BITS]
            pinned, blocking = bool(record.detail & _PINNED), bool(record.detail & _BLOCKING)
            counts.copies.append(Copy(kind, size, pinned, blocking, record.stream, place.line))
        case _Operation.SYNC:
            counts.syncs.append(Sync(name, *place))
        case _Operation.COLLECTIVE:
            counts.collectives.append(Collective(name, size, record.detail, record.ranks, record.stream))
        case _Operation.MALLOC:
            counts.mallocs.append(size)
        case _Operation.FREE:
            counts.frees.append(size)
        case _Operation.PIN:
            counts.pinned_allocations.append(size)
        case _Operation.EVENT_RECORD:
            counts.event_records += 1
        case _Operation.EVENT_WAIT:
            counts.event_waits += 1
