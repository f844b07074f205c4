"""torch's profiler for the training steps, with the 2024 program's flags."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fsdp_qlora.errors import UserError
from fsdp_qlora.metrics.profile_summary import summarize
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


class Profiler:
    """torch's profiler, to be told of each training step; does nothing unless enabled."""

    def __init__(self, profiler: profile | None = None, output: Path | None = None) -> None:
        self._profiler, self._output = profiler, output
        if profiler is not None:
            profiler.start()

    def step(self) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            if self._output is not None and not any(self._output.iterdir()):
                log.warning("Nothing was profiled: the run was shorter than one cycle (--profiling_frequency).")


@dataclass(frozen=True)
class ProfilerOptions:
    """When and what to profile, with the 2024 program's names.

    wait_steps: steps skipped at the start of a cycle, if `repeat` is above 0. profiling_frequency: steps of a cycle,
    if `repeat` is 0 and cycles repeat to the end.
    """

    profile: bool
    profiling_output: str
    with_stack: bool
    with_shapes: bool
    export_trace: bool
    export_memory_timeline: bool
    wait_steps: int
    profiling_warmup_steps: int
    active_steps: int
    repeat: int
    profiling_frequency: int


def check_output(options: ProfilerOptions) -> None:
    """Refuse a folder that traces could not be written to, before any work."""
    reason = why_not_writable(Path(options.profiling_output)) if options.profile else None
    if reason:
        raise UserError(f"profiling_output {options.profiling_output}: {reason}. Give another folder.")


def open_profiler(options: ProfilerOptions, *, rank: int) -> Profiler:
    """A profiler that writes summaries, traces and memory timelines per cycle and rank, or nothing unless enabled."""
    if not options.profile:
        return Profiler()
    warmup, active = options.profiling_warmup_steps, options.active_steps
    wait = options.wait_steps if options.repeat else options.profiling_frequency - warmup - active
    output = Path(options.profiling_output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"profiling_output {output} cannot be made: {error}. Give another folder.") from error
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return Profiler(
        profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=options.repeat),
            on_trace_ready=_writer(output, rank, options.export_trace, options.export_memory_timeline),
            with_stack=options.with_stack or options.export_memory_timeline,
            record_shapes=options.with_shapes or options.export_memory_timeline,
            profile_memory=options.export_memory_timeline,
        ),
        output,
    )


def _writer(output: Path, rank: int, trace: bool, memory: bool) -> Callable[[profile], None]:
    def write(profiler: profile) -> None:
        stem = output / f"rank{rank}_step{profiler.step_num}"
        summary = summarize(profiler.events() or (), f"Profile of rank {rank} to step {profiler.step_num}")
        Path(f"{stem}.summary.txt").write_text(summary + "\n")
        log.info("%s", summary)
        if trace:
            profiler.export_chrome_trace(f"{stem}.trace.json")
        if memory:
            profiler.export_memory_timeline(f"{stem}.memory.json.gz")
        log.info("Profile written: %s.*", stem)

    return write
