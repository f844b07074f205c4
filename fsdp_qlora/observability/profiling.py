"""torch's profiler for some training steps, and a log of memory."""

import contextlib
import heapq
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from fsdp_qlora.config.conflicts import profiled_steps
from fsdp_qlora.distributed.ranks import Ranks

log = logging.getLogger("fsdp_qlora")


class MemoryLog:
    """Logs rank 0's memory after each phase of the start and each of the first steps, if enabled."""

    def __init__(self, device: torch.device, *, enabled: bool, records: int = 6) -> None:
        self._device, self._left = device, records if enabled else 0

    def record(self, phase: str) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        resident = psutil.Process().memory_info().rss / 2**30
        gpu = ""
        if self._device.type == "cuda":
            allocated, peak = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
            gpu = f"{allocated:.2f} GiB allocated on the GPU (peak {peak:.2f}), "
        log.info("Memory %s: %s%.2f GiB resident on the host", phase, gpu, resident)


@contextlib.contextmanager
def profiling(asked: tuple[str, ...], output: Path, ranks: Ranks) -> Iterator[Callable[[], None]]:
    """Record steps, if any are `asked` for as by --profile; gives what is called after each optimizer step.

    Each rank writes a summary, a trace and, if asked for, a timeline of its memory, to `output`.
    """
    steps = profiled_steps(asked)
    if steps is None:
        yield lambda: None
        return
    first, last = steps
    output.mkdir(parents=True, exist_ok=True)
    has_memory = "memory" in asked
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    warmup = min(first - 1, 1)  # a step that the profiler runs and discards
    profiler = profile(
        activities=activities,
        schedule=schedule(wait=first - 1 - warmup, warmup=warmup, active=last - first + 1, repeat=1),
        on_trace_ready=partial(_write, output / f"rank{ranks.rank}_steps{first}-{last}", str(ranks.device), has_memory),
        with_stack=has_memory or "stack" in asked,
        record_shapes=has_memory or "shapes" in asked,
        profile_memory=has_memory,
    )
    try:
        with profiler:
            yield profiler.step
    finally:
        if profiler.step_num < last:
            log.warning("--profile %s: the run ended after %d steps.", " ".join(asked), profiler.step_num)


def _write(stem: Path, device: str, has_memory: bool, profiler: profile) -> None:
    summary = summarize(profiler.events() or (), f"Profile of {stem.name}")
    Path(f"{stem}.summary.txt").write_text(summary + "\n")
    log.info("%s", summary)
    profiler.export_chrome_trace(f"{stem}.trace.json")
    if has_memory:
        profiler.export_memory_timeline(f"{stem}.memory.json.gz", device=device)  # by default cuda:0
    log.info("Profile written: %s.*", stem)


# --- ten lines about the steps: where a step's time goes, and the largest operations ---

Interval = tuple[float, float]  # start and end, in microseconds
_KINDS = {
    "communication": r"(?i)nccl|c10d::|gloo|record_param_comms|all_?gather|reduce_?scatter|all_?reduce",
    "copies": r"Memcpy|Memset|aten::(copy_|_to_copy)$",
}


def summarize(events: Iterable[Any], title: str) -> str:
    """Ten lines of text: the shares of a step's time, which add up to 100%, and the five largest operations.

    Time in which a GPU computes counts as computing, whatever else it does meanwhile; on a CPU communication and copies
    are counted first. The rest is waiting: the GPU waits for the host, or Python runs between operations.

    Args:
        events: of torch.profiler, with its marks of steps.
        title: what was profiled.
    """
    events = list(events)
    steps = [_interval(event) for event in events if event.name.startswith("ProfilerStep") and not _is_on_gpu(event)]
    work = [event for event in events if not _is_heading(event)]
    on_gpu = [event for event in work if _is_on_gpu(event)]
    work = on_gpu or work
    bounds = steps or [_interval(event) for event in work] or [(0.0, 0.0)]
    window = min(start for start, _ in bounds), max(end for _, end in bounds)
    wall, count = max(window[1] - window[0], 1e-9), max(len(steps), 1)
    lines = [f"{title}: {count} step{'s' * (count > 1)} of {_ms(wall / count)} on the {'GPU' if on_gpu else 'CPU'}"]
    for kind, (share, hidden) in _shares(work, window, computing_first=bool(on_gpu)).items():
        more = f", {_ms(hidden / count)} more behind the above" if hidden > 0.005 * wall else ""
        lines.append(f"  {kind:14}{100 * share / wall:5.1f}%  {_ms(share / count)} a step{more}")
    times: defaultdict[str, float] = defaultdict(float)
    for event in work:
        start, end = _interval(event)
        times[event.name] += end - start if on_gpu else event.self_cpu_time_total
    calls = Counter(event.name for event in work)
    for number, (name, total) in enumerate(heapq.nlargest(5, times.items(), key=lambda item: item[1]), 1):
        shown = name if len(name) <= 60 else f"{name[:57]}..."
        lines.append(f"  {number}. {_ms(total / count)} a step, {calls[name] / count:g} calls: {shown}")
    return "\n".join(lines)


def _shares(events: Iterable[Any], window: Interval, *, computing_first: bool) -> dict[str, Interval]:
    """Kind of work -> microseconds that no kind counted before it covers, and microseconds that one does."""
    kinds: dict[str, list[Interval]] = {"compute": [], "communication": [], "copies": []}
    for event in events:
        kind = next((kind for kind, pattern in _KINDS.items() if re.search(pattern, event.name)), "compute")
        kinds[kind].append(_interval(event))
    found: dict[str, Interval] = {}
    covered: list[Interval] = []
    for kind in ("compute", *_KINDS) if computing_first else (*_KINDS, "compute"):
        before = covered_length(covered, window)
        covered += kinds[kind]
        share = covered_length(covered, window) - before
        found[kind] = (share, covered_length(kinds[kind], window) - share)
    waiting = window[1] - window[0] - covered_length(covered, window)
    return {kind: found[kind] for kind in kinds} | {"waiting": (waiting, 0.0)}


def covered_length(intervals: Iterable[Interval], window: Interval) -> float:
    """The length of the union of some intervals within a window."""
    total, reached = 0.0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            total += end - start
            reached = end
    return total


def _is_heading(event: Any) -> bool:
    """Whether an event is a heading over others and no work."""
    headings = ("ProfilerStep", "FSDP::", "Optimizer.")
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(headings)


def _is_on_gpu(event: Any) -> bool:
    return bool(event.device_type != DeviceType.CPU)


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:,.2f} ms"
