"""Saving while the disk fails: how long a run continues that saves nothing."""

import errno
import threading
import time
from pathlib import Path

import pytest
import torch

from fsdp_qlora.checkpoint import checkpoint, saving
from fsdp_qlora.checkpoint.progress import Progress
from fsdp_qlora.checkpoint.saving import Saver
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.utils.errors import TrainingError
from fsdp_qlora.utils.files import FileRecord


class Disk:
    """Stands for the state of a model whose disk fails while `fails`."""

    fails = False
    num_bytes = 0

    def check_finite(self) -> None:
        pass

    def contents(self) -> tuple[dict[str, object], dict[str, object]]:
        return {}, {"is_sharded": False}

    def write(self, folder: Path, contents: object) -> dict[str, FileRecord]:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error", str(folder))
        return {}


def test_a_run_that_cannot_save_for_too_long_ends(tmp_path, monkeypatch, lines):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(saving, "all_gather_strings", lambda text, *_: [text])
    ranks = Ranks(0, 0, 1, 1, torch.device("cpu"))
    disk = Disk()
    saver = Saver(
        tmp_path,
        disk,
        ranks,
        identity={},
        save_total_limit=3,
        max_failing_seconds=1800,  # type: ignore[arg-type]
    )
    for step in range(1, 7):
        now += 900
        disk.fails = step not in (1, 4)  # a save that succeeds begins a new count
        assert saver.save(Progress(step=step)) == (not disk.fails)
    assert sum("Training continues; the last checkpoint is step 4." in line for line in lines) == 2
    now += 900.5 + 900
    with pytest.raises(
        TrainingError,
        match=r"no checkpoint could be saved for 45 minutes: .*Input/output error",
    ):
        saver.save(Progress(step=7))


def test_a_run_whose_rank_is_lost_in_a_save_ends(tmp_path, monkeypatch):
    def lost(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(saving, "all_gather_strings", lambda text, *_: [text])
    disk = Disk()
    saver = Saver(
        tmp_path, disk, Ranks(0, 0, 1, 1, torch.device("cpu")), identity={}, save_total_limit=3
    )  # type: ignore[arg-type]
    assert saver.save(Progress(step=1))
    monkeypatch.setattr(disk, "write", lost)  # a collective in it
    with pytest.raises(RuntimeError, match="closed by peer"):
        saver.save(Progress(step=2))
    closing = threading.Thread(target=saver.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_is_saved_again_with_a_later_evaluation(fails, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "all_gather_strings", lambda text, *_: [text])
    disk = Disk()
    ranks = Ranks(0, 0, 1, 1, torch.device("cpu"))
    saver = Saver(tmp_path, disk, ranks, identity={}, save_total_limit=3)  # type: ignore[arg-type]
    progress = Progress(step=4)
    assert saver.save(progress)
    progress.add_evaluation(4, 2.0)
    disk.fails = fails
    assert saver.save(progress)
    assert saving.best_step(checkpoint.published(tmp_path)) == (None if fails else 4)
    checkpoint.verify(checkpoint.step_folder(tmp_path, 4))
    written = checkpoint.step_folder(tmp_path, 4).stat().st_ino
    disk.fails = not fails
    assert saver.save(progress)
    assert (checkpoint.step_folder(tmp_path, 4).stat().st_ino != written) == fails
