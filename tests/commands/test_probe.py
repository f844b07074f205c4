"""`plan --probe`: what is measured, and what a plan makes of it. No test looks at how fast this machine is."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from fsdp_qlora.__main__ import main
from fsdp_qlora.commands import probe
from fsdp_qlora.planning.gpus import GPUS
from fsdp_qlora.planning.speed import Work, seconds

pytestmark = pytest.mark.quick


def test_rates_are_amounts_of_work_by_the_time_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = partial(probe.measure, torch.device("cpu"), shape=(16, 64, 128), copied=2**16)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    found = measure()
    assert all(0 < rate < math.inf for rate in found.values())
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(probe, "_seconds", lambda call: 0.5)
    amounts = {"product_tflops": 2 * 16 * 64 * 128 / 1e12, "decoding_gb_s": 4 * 64 * 128 / 1e9}
    amounts |= dict.fromkeys(["gather_gb_s", "from_host_gb_s", "to_host_gb_s", "host_memory_gb_s"], 2**16 / 1e9)
    assert measure() == pytest.approx({name: 2 * amount for name, amount in amounts.items()})
    assert found.keys() == amounts.keys() - {"gather_gb_s"}


@pytest.mark.parametrize(("gather", "link"), [({"gather_gb_s": 20.0}, 20.0), ({}, 8.0)])
def test_a_plan_takes_as_long_as_was_measured(gather: dict[str, float], link: float) -> None:
    rates = {"product_tflops": 50.0, "decoding_gb_s": 400.0, "from_host_gb_s": 8.0, **gather}
    gpu = probe.with_rates(GPUS["RTX 3090"], rates)
    for work in (Work(50e12, 0, 0, 0), Work(0, 400e9, 0, 0), Work(0, 0, link * 1e9, 0), Work(0, 0, 0, 8e9)):
        assert seconds(work, gpu) == pytest.approx(1.0)


def test_without_a_gpu_one_sentence_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--probe", "--model_name", "qwen3-0.6b"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no GPU is visible here" in line
