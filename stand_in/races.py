"""Finds races between streams, the host and the allocator in a program that runs on the stand-in
(README.md).

    with checking() as races:
        train_step()
    assert not races.findings

Every operator is seen by a dispatch mode, which says what memory it reads and writes. The
stand-in's recorder says on which stream it was launched, and who recorded, waited and synchronized
before it. From the two every stream and the host get a vector clock: `clock[other]` is how much of
`other`'s work is known to be done. Two accesses of the same bytes, one of them a write, are a race
if the later one's clock does not hold the earlier one.

A captured operator accesses its memory at each launch of its graph, on the stream of the launch.

It does not see: memory that a kernel gets by address only, reads of pinned memory that go by
neither an operator nor `numpy` and `tolist`, and more than one thread of the host, which counts as
one.
"""

import contextlib
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stand_in.counts import (
    COPY_BLOCKING,
    COPY_DIRECTIONS,
    Operation,
    Record,
    captured_now,
    read_records,
    start,
    stop,
)

HOST = -1  # beside the numbers of streams
EVERYTHING = 2**64 - 1  # a wait for all streams
LAUNCHES = (
    Operation.KERNEL,
    Operation.GEMM,
    Operation.MEMSET,
    Operation.COPY,
    Operation.COLLECTIVE,
)
COPY_ON_DEVICE = 2
# Operators that ask for the form of a tensor and not for its values.
ONLY_FORM = re.compile(
    r"::(new_|empty|.*_like$|is_pinned|_pin_memory|set_|resize_|_unsafe_view|_has_|is_same)"
)

Clock = dict[int, int]


class Access(NamedTuple):
    """Bytes from start to end, by a stream or the host, at this time of its own clock."""

    start: int
    end: int
    by: int
    time: int
    is_write: bool
    operator: str
    line: str

    def __str__(self) -> str:
        by = "the host" if self.by == HOST else f"stream {self.by:x}"
        return f"{self.operator} ({'write' if self.is_write else 'read'} by {by}) at {self.line}"


class Captured(NamedTuple):
    """Bytes that a graph accesses, in a storage of this number."""

    storage: int
    start: int
    end: int
    is_write: bool
    operator: str
    line: str


class Block:
    """Memory of one storage. `stream`: on which it was allocated, whose next work gets it when it
    is freed.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # which keeps its number from being given to another storage
        self.reference = StorageWeakRef(storage)
        self.is_cuda = storage.device.type == "cuda"
        self.stream = torch.cuda.current_stream().cuda_stream if self.is_cuda else HOST
        self.accesses: list[Access] = []
        self.recorded: set[int] = set()  # streams of Tensor.record_stream

    def of_others(self) -> list[Access]:
        """Accesses for which the allocator does not wait."""
        return [
            access for access in self.accesses if access.by not in (self.stream, *self.recorded)
        ]


class Races:
    """What has been found so far, and what has been looked at."""

    def __init__(self) -> None:
        self.findings: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._clocks: defaultdict[int, Clock] = defaultdict(dict)
        self._events: dict[int, Clock] = {}
        self._blocks: dict[int, Block] = {}  # by the number of the storage
        self._crossed: dict[int, Block] = {}  # those on a device that another stream may be using
        # by the stream that gets it
        self._freed: defaultdict[int, list[tuple[Access, str]]] = defaultdict(list)
        self._most_blocks = 1000
        self._read = 0  # records
        # by the operator that runs now: streams and their clocks
        self._launched: dict[int, Clock] = {}
        self._copies_host = False  # the operator that runs now
        self._captured: defaultdict[int, list[Captured]] = defaultdict(list)  # by the capture
        self._lock = threading.RLock()

    # ---- order

    def follow(self) -> None:
        """Bring the clocks up to the newest record."""
        with self._lock:
            for record in read_records(self._read):
                self._read += 1
                self._follow(record)

    def _follow(self, record: Record) -> None:
        stream = int(record.stream)
        operation = Operation(record.operation)
        match operation:
            case Operation.EVENT_RECORD:
                self._events[record.size] = dict(self._now(stream))
            case Operation.EVENT_WAIT:
                _join(self._clocks[stream], self._events.get(record.size, {}))
            case Operation.SYNC if record.name == b"cudaEventSynchronize":
                self._host_waits(self._events.get(stream, {}))
            case Operation.SYNC if stream != EVERYTHING:
                self._host_waits(self._clocks[stream])
            case Operation.SYNC | Operation.FREE:  # cudaFree waits for the device
                self._host_waits(*self._clocks.values())
            case Operation.GRAPH:
                self._launch_graph(record, stream)
            case _ if operation in LAUNCHES:
                self._launch(record, stream)

    def _launch_graph(self, record: Record, stream: int) -> None:
        self._launched.pop(stream, None)
        self._launch(record, stream)
        clock = self._launched.pop(stream)
        for each in self._captured[record.detail]:
            block = self._blocks.get(each.storage)
            if block is None:
                continue
            access = Access(
                each.start, each.end, stream, clock[stream], each.is_write, each.operator, each.line
            )
            self._add(access, block, clock)
            if not block.reference.expired():  # else the graph alone has its memory
                self._cross(block, each.storage, stream)

    def _launch(self, record: Record, stream: int) -> None:
        self.counts["launches"] += 1
        if stream not in self._launched:
            clock = self._now(stream)
            clock[stream] = clock.get(stream, 0) + 1
            self._launched[stream] = dict(clock)
            for access, line in self._freed.pop(stream, ()):
                if clock.get(access.by, 0) < access.time:
                    self.findings[f"memory freed at {line} is still in use: {access}"] += 1
        if record.operation == Operation.COPY:
            self._copies_host |= record.detail & COPY_DIRECTIONS != COPY_ON_DEVICE
            if record.detail & COPY_BLOCKING:
                self._host_waits(self._clocks[stream])

    def _now(self, stream: int) -> Clock:
        """A stream's clock; what is given to it comes after all that the host has done."""
        return _join(self._clocks[stream], self._clocks[HOST])

    def _host_waits(self, *clocks: Clock) -> None:
        for clock in clocks:
            _join(self._clocks[HOST], clock)

    # ---- memory

    def block(self, storage: torch.UntypedStorage) -> Block:
        if storage._cdata not in self._blocks:
            if len(self._blocks) > self._most_blocks:
                self._blocks = {
                    key: block
                    for key, block in self._blocks.items()
                    if not block.reference.expired()
                }
                self._most_blocks = 2 * len(self._blocks) + 1000
            self._blocks[storage._cdata] = Block(storage)
        return self._blocks[storage._cdata]

    def find_freed(self) -> None:
        """Look for memory that was freed since the last operator."""
        for key, block in list(self._crossed.items()):
            clock = self._clocks[block.stream]
            if block.reference.expired():
                self.freed(block)
            if block.reference.expired() or all(
                clock.get(old.by, 0) >= old.time for old in block.of_others()
            ):
                del self._crossed[key]

    def freed(self, block: Block) -> None:
        """What its stream is told next must come after all accesses."""
        self._freed[block.stream] += [(access, _line()) for access in block.of_others()]
        block.accesses = []

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """FSDP2 frees and allocates by this."""
        block = self.block(storage)
        if size == 0:
            self.freed(block)
        elif storage.nbytes() == 0:
            self._blocks[storage._cdata] = Block(storage)

    def recorded(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        parts = {
            name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")
        }
        self.block(tensor.untyped_storage()).recorded.add(torch.cuda.Stream(**parts).cuda_stream)

    # ---- accesses

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator and check what it has accessed."""
        before = self.counts["launches"]
        self.follow()
        self.counts["launches outside operators"] += self.counts["launches"] - before
        self.find_freed()
        self._launched = {}
        self._copies_host = False
        capture = captured_now(torch.cuda.current_stream().cuda_stream)
        outputs = func(*args, **kwargs)
        if capture:
            self._capture(*capture, func, args, kwargs, outputs)
            return outputs
        self.follow()
        launched = self._launched
        self._launched = {}
        for tensor in _tensors(outputs):
            self.block(tensor.untyped_storage())  # allocated here
        if not launched and ONLY_FORM.search(func._schema.name):
            return outputs
        accessed = list(_accessed(func, args, kwargs, outputs if launched else None))
        # memory of the host that is shared with it
        by_device = self._copies_host or func.namespace == "bitsandbytes"
        self.counts["operators with launches"] += bool(launched)
        for tensor, is_write in accessed:
            if tensor.is_cuda or (by_device and _is_shared(tensor)):
                for stream, clock in launched.items():
                    self._access(tensor, is_write, func._schema.name, stream, clock)
            elif _is_shared(tensor):
                self.host_accesses(tensor, func._schema.name, is_write)
        return outputs

    def _capture(
        self, number: int, kernels: int, func: Any, args: Any, kwargs: Any, outputs: Any
    ) -> None:
        """Keep what an operator will access, if it has been captured: the capture has more than
        `kernels` now.
        """
        now = captured_now(torch.cuda.current_stream().cuda_stream)
        if now is None or now[1] == kernels:
            return
        for tensor, is_write in _accessed(func, args, kwargs, outputs):
            if tensor.numel() and (tensor.is_cuda or _is_shared(tensor)):
                storage = tensor.untyped_storage()
                self.block(storage)
                start = tensor.data_ptr()
                operator = f"{func._schema.name} in a graph"
                self._captured[number].append(
                    Captured(
                        storage._cdata, start, start + _extent(tensor), is_write, operator, _line()
                    )
                )

    def host_accesses(self, tensor: torch.Tensor, operator: str, is_write: bool = False) -> None:
        """The host reads or writes memory to which streams copy."""
        self.follow()
        clock = self._clocks[HOST]
        clock[HOST] = clock.get(HOST, 0) + 1
        self._access(tensor, is_write, operator, HOST, clock)

    def _access(
        self, tensor: torch.Tensor, is_write: bool, operator: str, by: int, clock: Clock
    ) -> None:
        if not tensor.numel():
            return
        start = tensor.data_ptr()
        new = Access(start, start + _extent(tensor), by, clock[by], is_write, operator, _line())
        storage = tensor.untyped_storage()
        block = self.block(storage)
        self._add(new, block, clock)
        self._cross(block, storage._cdata, by)

    def _add(self, new: Access, block: Block, clock: Clock) -> None:
        """Check an access by something of this clock against the earlier ones of the block."""
        by = new.by
        self.counts["accesses"] += 1
        self.counts[
            "of the host" if by == HOST else "of side streams" if by else "of the compute stream"
        ] += 1
        kept = []
        for old in block.accesses:
            overlaps = old.start < new.end and new.start < old.end
            is_before = old.by == by or clock.get(old.by, 0) >= old.time
            if overlaps and not is_before and (new.is_write or old.is_write):
                self.findings[f"{new} does not wait for {old}"] += 1
            covers = new.start <= old.start and old.end <= new.end
            if not (covers and is_before and (new.is_write or not old.is_write)):
                kept.append(old)
        block.accesses = [*kept, new]

    def _cross(self, block: Block, storage: int, by: int) -> None:
        if block.is_cuda and by not in (block.stream, *block.recorded):
            self._crossed[storage] = block


def _join(clock: Clock, other: Clock) -> Clock:
    for by, time in other.items():
        if clock.get(by, 0) < time:
            clock[by] = time
    return clock


def _accessed(
    func: Any, args: Any, kwargs: dict[str, Any], outputs: Any
) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensors that an operator accesses, each once, and whether it writes them."""
    schema = func._schema
    given = {
        argument.name: value for argument, value in zip(schema.arguments, args, strict=False)
    } | kwargs
    written: dict[int, torch.Tensor] = {}
    read: dict[int, torch.Tensor] = {}
    # whose schemas do not say that they write their first argument
    is_collective = func.namespace == "c10d"
    for number, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        is_written = alias is not None and alias.is_write
        is_written |= is_collective and number == 0 and "send" not in schema.name
        if is_written or (alias is None and not ONLY_FORM.search(schema.name)):
            found = written if is_written else read
            found |= {id(tensor): tensor for tensor in _tensors(given.get(argument.name))}
    if not is_collective and outputs is not None:
        results = outputs if len(schema.returns) > 1 else (outputs,)
        for result, value in zip(schema.returns, results, strict=False):
            if result.alias_info is None:
                written |= {id(tensor): tensor for tensor in _tensors(value)}
    yield from ((tensor, True) for tensor in written.values())
    yield from ((tensor, False) for number, tensor in read.items() if number not in written)


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = [value] if isinstance(value, torch.Tensor) else _pytree.tree_leaves(value)
    real = [
        leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
    ]
    return [tensor for tensor in real if tensor.device.type in ("cpu", "cuda")]


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory of the host to which the device has access."""
    return tensor.device.type == "cpu" and (
        tensor.is_pinned() or getattr(tensor, "is_paged", False)
    )


def _extent(tensor: torch.Tensor) -> int:
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()


def _line() -> str:
    """The innermost line of the program or of FSDP2."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/fsdp_qlora/" in path or "_fully_shard" in path or "/programs/" in path:
            return f"{'/'.join(path.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


class _Mode(TorchDispatchMode):
    def __init__(self, races: Races) -> None:
        super().__init__()
        self.races = races

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        if any(
            kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types
        ):
            return NotImplemented  # a subclass such as DTensor: its own operators come here too
        if func._schema.name == "aten::record_stream":
            self.races.recorded(*args)
        return self.races.operator(func, args, kwargs or {})


@contextlib.contextmanager
def checking() -> Iterator[Races]:
    """Check the block; its threads too, but for those that it starts itself."""
    races = Races()

    def host_reads(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        if _is_shared(tensor):
            races.host_accesses(tensor, "numpy or tolist")

    # These are no operators.
    look_before = {
        (torch.Tensor, "numpy"): host_reads,
        (torch.Tensor, "tolist"): host_reads,
        (torch.UntypedStorage, "resize_"): races.resized,
    }
    with contextlib.ExitStack() as stack:
        for (owner, name), look in look_before.items():
            stack.enter_context(
                mock.patch.object(owner, name, _looked_at(getattr(owner, name), look))
            )
        start(lines=False)
        with _Mode(races):
            yield races
        races.follow()
        stop()


def _looked_at(original: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return original(*args, **kwargs)

    return looked_at
