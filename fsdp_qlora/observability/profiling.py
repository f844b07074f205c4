"""torch's profiler for some training steps."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fsdp_qlora.config.conflicts import profiled_steps
from fsdp_qlora.distributed.ranks import Ranks

log = logging.getLogger("fsdp_qlora")


@contextlib.contextmanager
def profiling(settings: tuple[str, ...], output: Path, ranks: Ranks) -> Iterator[Callable[[], None]]:
    """Record steps, if `settings` has any, as --profile does; gives what is called after each optimizer step.

    Each rank writes a summary, a trace and, if asked for, a timeline of its memory, to `output`.
    """
    steps = profiled_steps(settings)
    if steps is None:
        yield lambda: None
        return
    first, last = steps
    output.mkdir(parents=True, exist_ok=True)
    has_memory = "memory" in settings
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    warmup = min(first - 1, 1)  # a step that the profiler runs and discards
    profiler = profile(
        activities=activities,
        schedule=schedule(wait=first - 1 - warmup, warmup=warmup, active=last - first + 1, repeat=1),
        on_trace_ready=partial(_write, output / f"rank{ranks.rank}_steps{first}-{last}", str(ranks.device), has_memory),
        with_stack=has_memory or "stack" in settings,
        record_shapes=has_memory or "shapes" in settings,
        profile_memory=has_memory,
    )
    try:
        with profiler:
            yield profiler.step
    finally:
        if profiler.step_num < last:
            log.warning("--profile %s: the run ended after %d steps.", " ".join(settings), profiler.step_num)


def _write(stem: Path, device: str, has_memory: bool, profiler: profile) -> None:
    sort_by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    summary = profiler.key_averages().table(sort_by=sort_by, row_limit=10, max_name_column_width=40)
    Path(f"{stem}.summary.txt").write_text(summary)
    log.info("Profile of %s, the ten largest operations:\n%s", stem.name, summary)
    profiler.export_chrome_trace(f"{stem}.trace.json")
    if has_memory:
        profiler.export_memory_timeline(f"{stem}.memory.json.gz", device=device)  # by default cuda:0
    log.info("Profile written: %s.*", stem)
