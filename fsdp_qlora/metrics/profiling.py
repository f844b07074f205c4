"""torch's profiler for the training steps, with the 2024 program's flags."""

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

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.errors import UserError
from fsdp_qlora.ranks.distributed import Ranks
from fsdp_qlora.storage.files import why_not_writable

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


def check_output(folder: str) -> None:
    """Refuse a folder that traces could not be written to, before any work."""
    if reason := why_not_writable(Path(folder)):
        raise UserError(f"profiling_output {folder}: {reason}. Give another folder.")


@contextlib.contextmanager
def profiling(config: TrainConfig, ranks: Ranks) -> Iterator[Callable[[], None]]:
    """Profile the block if --profile says so; gives what is called after each optimizer step.

    Summaries, traces and memory timelines are written per cycle and rank.
    """
    if not config.profile:
        yield lambda: None
        return
    warmup, active = config.profiling_warmup_steps, config.active_steps
    wait = config.wait_steps if config.repeat else config.profiling_frequency - warmup - active
    output = Path(config.profiling_output)
    output.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(
        activities=activities,
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=config.repeat),
        on_trace_ready=partial(_write, output, ranks, config),
        with_stack=config.with_stack or config.export_memory_timeline,
        record_shapes=config.with_shapes or config.export_memory_timeline,
        profile_memory=config.export_memory_timeline,
    )
    try:
        with profiler:
            yield profiler.step
    finally:
        if not any(output.iterdir()):
            log.warning("Nothing was profiled: the run was shorter than one cycle (--profiling_frequency).")


def _write(output: Path, ranks: Ranks, config: TrainConfig, profiler: profile) -> None:
    stem = output / f"rank{ranks.rank}_step{profiler.step_num}"
    summary = summarize(profiler.events() or (), f"Profile of rank {ranks.rank} to step {profiler.step_num}")
    Path(f"{stem}.summary.txt").write_text(summary + "\n")
    log.info("%s", summary)
    if config.export_trace:
        profiler.export_chrome_trace(f"{stem}.trace.json")
    if config.export_memory_timeline:
        profiler.export_memory_timeline(f"{stem}.memory.json.gz", device=str(ranks.device))  # by default cuda:0
    log.info("Profile written: %s.*", stem)


# --- ten lines about a cycle: where a step's time goes, and the largest operations ---

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
