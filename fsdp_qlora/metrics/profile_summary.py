"""Ten lines about a profile: where a step's time goes, and the largest operations."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd import DeviceType

Interval = tuple[float, float]  # start and end, in microseconds

_STEP = "ProfilerStep"
_COMMUNICATION = re.compile(
    r"nccl|c10d::|gloo|record_param_comms|all_?gather|reduce_?scatter|all_?reduce", re.IGNORECASE
)
_COPIES = re.compile(r"^Memcpy|^Memset|^aten::(copy_|_to_copy)$")
_MOST_OPERATIONS = 5
_LONGEST_NAME = 60


def summarize(events: Iterable[Any], title: str) -> str:
    """Ten lines of text.

    The shares add up to the steps' time. Where a GPU computes while it communicates or copies, the time counts as
    computing; on a CPU what is named communication or a copy counts as that. Waiting is when none of them runs: the GPU
    waits for the host, or Python runs between operations.

    Args:
        events: of torch.profiler, with its marks of steps.
        title: what was profiled.
    """
    events = list(events)
    steps = [_interval(event) for event in events if event.name.startswith(_STEP) and _is_on(event, DeviceType.CPU)]
    work = [event for event in events if not _is_mark(event)]
    on_gpu = [event for event in work if not _is_on(event, DeviceType.CPU)]
    window = (min(start for start, _ in steps), max(end for _, end in steps)) if steps else _hull(work)
    parts = _parts(on_gpu or work, window, computing_first=bool(on_gpu))
    wall = max(window[1] - window[0], 1e-9)
    count = max(len(steps), 1)
    lines = [
        f"{title}: {count} step{'s' * (count > 1)} of {_duration(wall / count)} on the {'GPU' if on_gpu else 'CPU'}"
    ]
    for name, (shown, whole) in parts.items():
        hidden = f", {_duration((whole - shown) / count)} more behind the above" if whole - shown > 0.005 * wall else ""
        lines.append(f"  {name:14}{100 * shown / wall:5.1f}%  {_duration(shown / count)} a step{hidden}")
    return "\n".join([*lines, *_largest(on_gpu or work, count, on_gpu=bool(on_gpu))])


def _parts(events: Sequence[Any], window: Interval, *, computing_first: bool) -> dict[str, tuple[float, float]]:
    """Kind of work -> (microseconds that no kind before it covers, all its microseconds)."""
    kinds: dict[str, list[Interval]] = {"compute": [], "communication": [], "copies": []}
    for event in events:
        kinds[_kind(event.name)].append(_interval(event))
    order = ("compute", "communication", "copies") if computing_first else ("communication", "copies", "compute")
    covered: list[Interval] = []
    found: dict[str, tuple[float, float]] = {}
    before = 0.0
    for kind in order:
        covered += kinds[kind]
        after = covered_length(covered, window)
        found[kind] = (after - before, covered_length(kinds[kind], window))
        before = after
    waiting = window[1] - window[0] - before
    return {kind: found[kind] for kind in kinds} | {"waiting": (waiting, waiting)}


def covered_length(intervals: Iterable[Interval], window: Interval) -> float:
    """The length of the union of some intervals within a window."""
    total, reached = 0.0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            total += end - start
            reached = end
    return total


def _largest(events: Sequence[Any], steps: int, *, on_gpu: bool) -> list[str]:
    """The operations with the longest time of their own."""
    times: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for event in events:
        start, end = _interval(event)
        times[event.name] += end - start if on_gpu else event.self_cpu_time_total
        calls[event.name] += 1
    names = sorted(times, key=lambda name: -times[name])[:_MOST_OPERATIONS]
    return [
        f"  {number}. {_duration(times[name] / steps)} a step, {calls[name] / steps:g} calls: {_shorten(name)}"
        for number, name in enumerate(names, 1)
    ]


def _kind(name: str) -> str:
    if _COMMUNICATION.search(name):
        return "communication"
    return "copies" if _COPIES.search(name) else "compute"


def _is_mark(event: Any) -> bool:
    """Whether an event is a heading over others and no work."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith((_STEP, "FSDP::", "Optimizer."))


def _is_on(event: Any, device: DeviceType) -> bool:
    return bool(event.device_type == device)


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _hull(events: Sequence[Any]) -> Interval:
    intervals = [_interval(event) for event in events] or [(0.0, 0.0)]
    return min(start for start, _ in intervals), max(end for _, end in intervals)


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _duration(microseconds: float) -> str:
    return f"{microseconds / 1e6:.2f} s" if microseconds >= 1e6 else f"{microseconds / 1e3:.2f} ms"
