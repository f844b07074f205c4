"""The ten lines about a profile: shares that add up, and the largest operations."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from fsdp_qlora.observability.profiling import _write, summarize


def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CUDA, **more: object) -> SimpleNamespace:
    times = SimpleNamespace(start=1000 * start, end=1000 * end)
    return SimpleNamespace(name=name, time_range=times, device_type=device, self_cpu_time_total=0.0, **more)


def test_each_rank_exports_the_memory_timeline_of_its_own_gpu(tmp_path: Path) -> None:
    profiler = mock.Mock(step_num=4, events=list)
    _write(tmp_path / "rank1_steps3-4", "cuda:1", True, profiler)
    file = str(tmp_path / "rank1_steps3-4.memory.json.gz")
    assert profiler.export_memory_timeline.call_args == mock.call(file, device="cuda:1")  # torch takes cuda:0 by itself


def test_time_on_a_gpu_is_split_into_parts_that_add_up_to_the_steps() -> None:
    events = [
        event("ProfilerStep#8", 0, 50, DeviceType.CPU),
        event("ProfilerStep#9", 50, 100, DeviceType.CPU),
        event("FSDP::all_gather", 0, 100, is_user_annotation=True),
        event("aten::mm", 0, 90, DeviceType.CPU),  # the host's part of it
        event("gemm_kernel", 0, 40),
        event("gemm_kernel", 45, 55),
        event("ncclDevKernel_AllGather", 30, 60),  # 15 of them while something computes
        event("Memcpy HtoD (Pinned -> Device)", 58, 70),
        event("gemm_kernel", 95, 120),  # it ends after the window
    ]
    lines = summarize(events, "Profile of rank 0 to step 10").splitlines()
    assert lines == [
        "Profile of rank 0 to step 10: 2 steps of 50.00 ms on the GPU",
        "  compute        55.0%  27.50 ms a step",
        "  communication  10.0%  5.00 ms a step, 10.00 ms more behind the above",
        "  copies         10.0%  5.00 ms a step, 1.00 ms more behind the above",
        "  waiting        25.0%  12.50 ms a step",
        "  1. 37.50 ms a step, 1.5 calls: gemm_kernel",
        "  2. 15.00 ms a step, 0.5 calls: ncclDevKernel_AllGather",
        "  3. 6.00 ms a step, 0.5 calls: Memcpy HtoD (Pinned -> Device)",
    ]


def test_a_profile_of_torch_on_the_cpu_names_its_largest_operation() -> None:
    found: list[str] = []
    cycle = schedule(wait=0, warmup=1, active=2)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=cycle,
        on_trace_ready=lambda one: found.append(summarize(one.events(), "Profile")),
    ) as profiler:
        for _ in range(3):
            a = torch.randn(400, 400)
            (a @ a).sum().item()
            profiler.step()
    (text,) = found
    lines = text.splitlines()
    assert lines[0].startswith("Profile: 2 steps of ") and len(lines) == 10
    shares = [float(line.split()[1].rstrip("%")) for line in lines[1:5]]
    assert sum(shares) == pytest.approx(100, abs=0.3) and shares[0] > 10
    assert any(line.endswith("aten::mm") for line in lines[5:7])
