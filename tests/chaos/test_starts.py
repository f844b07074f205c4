"""A rank that fails alone before the first step does not leave the others waiting in a collective."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.harness import Job, ended, inputs
from tests.chaos.test_faults import be_impatient, on

Models = Callable[..., Path]


def fail_while_loading(how: str, rank: int) -> None:
    """Let a rank fail once its model is loaded; the others wait then, in what would not notice, as NCCL does not."""
    from fsdp_qlora.errors import UserError
    from fsdp_qlora.run import run as module

    be_impatient()

    def build_trainer(*args: object) -> None:
        if not on(rank):
            time.sleep(100)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise (UserError if how == "refused" else OSError)("its disk is gone")

    module.build_trainer = build_trainer  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("how", "rank", "status", "says"),
    [
        ("failed", 1, 1, "Ended because of rank 1: its disk is gone"),
        ("refused", 0, 2, "Ended because of rank 0: its disk is gone"),
        ("killed", 1, 1, "error: Rank 1 has given no sign of life for 3 s, before training began: its process has"),
        ("killed", 0, 1, "error: The store of all ranks has not answered for 3 s: rank 0, or"),
    ],
)
def test_the_others_end_soon_with_the_reason(
    how: str, rank: int, status: int, says: str, models: Models, tmp_path: Path
) -> None:
    options = {**inputs(models, tmp_path), "output_dir": tmp_path / "out", "hang_minutes": 0.05}
    with ended(Job(options, tmp_path / "logs", fault=fail_while_loading, arguments=(how, rank))) as job:
        statuses = job.wait()
        assert statuses[1 - rank] == status and 0 not in statuses, job.output()
        assert f"[rank {1 - rank}] {says}" in job.logs[1 - rank].read_text(), job.output()


def never_come(rank: int) -> None:
    if on(rank):
        os._exit(3)


def test_a_rank_that_never_comes_is_named(models: Models, tmp_path: Path) -> None:
    options = {**inputs(models, tmp_path), "output_dir": tmp_path / "out", "hang_minutes": 0.2}
    with ended(Job(options, tmp_path / "logs", ranks=3, fault=never_come, arguments=(1,))) as job:
        assert job.wait() == [1, 3, 1], job.output()
    assert "[rank 0] error: Rank 1 did not come within 0.2 minutes: not started, ended" in job.logs[0].read_text()
    assert "[rank 2] Ended because of rank 0: Rank 1 did not come" in job.logs[2].read_text()
