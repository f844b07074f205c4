"""Clocks that jump: a suspended machine, a virtual one that stands still, a time of day that is
set.
"""

import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision import watchdog
from fsdp_qlora.distributed.supervision.clock import Heartbeat
from fsdp_qlora.distributed.supervision.presence import BoundedStore, Presence
from fsdp_qlora.distributed.supervision.stops import Budget, Control

HOUR = 3600.0


class Clocks:
    """The system's clocks: the time of day, since boot,
    and since boot without what was suspended.
    """

    def __init__(self) -> None:
        self.day = 1e9
        self.boot = 1000.0
        self.awake = 1000.0

    def work(self, seconds: float) -> None:
        self.day = self.day + seconds
        self.boot = self.boot + seconds
        self.awake = self.awake + seconds

    def suspend(self, seconds: float) -> None:
        self.day = self.day + seconds
        self.boot = self.boot + seconds

    stand_still = work  # a virtual machine, whose host continues

    def since_boot(self, clock: int) -> float:
        assert clock == time.CLOCK_BOOTTIME
        return self.boot


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(time, "time", lambda: clocks.day)
    monkeypatch.setattr(time, "monotonic", lambda: clocks.awake)
    monkeypatch.setattr(time, "clock_gettime", clocks.since_boot)
    return clocks


def steps(control: Control, clocks: Clocks, count: int) -> str | None:
    """Steps of 10 s until all stop; returns why."""
    for step in range(count):
        clocks.work(10)
        control.agree(torch.tensor([control.flags(step)], dtype=torch.float64))
        if control.stop:
            return control.stop.reason
        if control.save:
            clocks.work(5)
            control.saved(5)
    return None


def test_a_run_survives_a_clock_jump_and_stops_at_its_deadline(clocks):
    control = Control(budget=Budget(max_hours=10), save_seconds=900)
    assert steps(control, clocks, 60) is None
    clocks.day -= 1e6  # NTP, or a person
    for jump in (clocks.suspend, clocks.stand_still):
        clocks.work(3)
        jump(2 * HOUR)  # in the middle of a step
        used = control.used_seconds()
        assert steps(control, clocks, 1) is None and control.save  # what lies unsaved is saved
        assert control.used_seconds() - used == 15  # all else counts: the machine was paid for
        assert control.reserve_seconds() < 60  # no step takes hours
        assert steps(control, clocks, 60) is None
    assert steps(control, clocks, 10_000) == "--max_hours is used up"
    assert 10 * HOUR - 60 < control.used_seconds() < 10 * HOUR


class SilentStore:
    """A store whose host does not answer."""

    def get(self, key: str) -> bytes:
        return threading.Event().wait() or b""  # type: ignore[return-value]


def test_ranks_wait_for_a_stopped_launcher_and_not_for_an_ended_one(monkeypatch):
    launcher = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr("os.getppid", lambda: launcher.pid)
    store = BoundedStore(SilentStore(), seconds=1)  # type: ignore[arg-type]
    launcher.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(store.get, "key")
        assert not wait([asked], 3).done
        launcher.kill()
        with pytest.raises(TimeoutError):
            asked.result(60)
    launcher.wait()


def test_suspending_the_machine_is_not_reported_as_a_hang(clocks, tmp_path, monkeypatch):
    hanging: list[float] = []
    monkeypatch.setattr(
        watchdog.Watchdog, "_end_hanging", lambda self: hanging.append(clocks.awake)
    )
    alone = Ranks(0, 0, 1, 1, torch.device("cpu"))
    presence = Presence(torch.distributed.HashStore(), alone, hang_minutes=15)
    guard = watchdog.Watchdog(Heartbeat(), presence, hang_minutes=15, output_dir=tmp_path)
    for jump in (clocks.suspend, clocks.stand_still):
        for during in ("between two looks", "within a look"):
            guard.heartbeat.beat(1, "compute")
            with monkeypatch.context() as patch:
                if during == "within a look":
                    patch.setattr(presence, "check_peers", lambda jump=jump: jump(2 * HOUR))
                else:
                    jump(2 * HOUR)
                guard._check()
            for _ in range(1799):  # of half a second each
                clocks.work(0.5)
                guard._check()
            assert not hanging
    begin = clocks.awake
    while not hanging:
        clocks.work(0.5)
        guard._check()
    assert clocks.awake - begin < 2
