"""Folders of checkpoints: what is published stays as it is, and which one goes first."""

import shutil
from pathlib import Path

import pytest
import torch

from fsdp_qlora.checkpoint import checkpoint, resume, run_folder
from fsdp_qlora.checkpoint.resume import RunFolder
from fsdp_qlora.checkpoint.run_folder import StartRequest
from fsdp_qlora.checkpoint.saving import best_step, delete_oldest
from fsdp_qlora.distributed.ranks import Ranks, read_ranks
from fsdp_qlora.utils import run_files
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import write_hashed_json


def make(root: Path, step: int, eval_loss: float | None = None, *, replaces: bool = False) -> Path:
    staging = checkpoint.staging_folder(root, step)
    staging.mkdir(parents=True)
    progress = {"eval_loss": eval_loss, "last_eval_step": step if eval_loss else step - 1}
    record = write_hashed_json(staging / checkpoint.STATE, {"progress": progress})
    target = checkpoint.step_folder(root, step)
    checkpoint.publish_checkpoint(staging, target, {checkpoint.STATE: record}, replaces=replaces)
    return target


def test_a_published_step_is_not_replaced_unasked(tmp_path):
    folder = make(tmp_path, 5)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(OSError, match="not empty"):
        make(tmp_path, 5, eval_loss=1.0)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    checkpoint.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_a_kill_in_replacing_a_checkpoint_loses_none(tmp_path, monkeypatch):
    folder = make(tmp_path, 5)
    before = {path: path.read_bytes() for path in folder.iterdir()}

    def dies(error: type[BaseException]) -> None:
        def publish(*_: object) -> None:
            raise error

        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(checkpoint, "publish_folder", publish)
            make(tmp_path, 5, eval_loss=1.0, replaces=True)
        checkpoint.remove_leftovers(tmp_path)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before

    dies(KeyboardInterrupt)
    dies(OSError)
    assert best_step(checkpoint.published(tmp_path)) is None
    make(tmp_path, 5, eval_loss=1.0, replaces=True)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    checkpoint.verify(folder)
    make(tmp_path, 0, eval_loss=0.5)  # the base, which was not trained
    assert best_step(checkpoint.published(tmp_path)) == 5


def test_freeing_space_deletes_the_least_needed_checkpoint_first(tmp_path, monkeypatch):
    for step, loss in ((1, None), (2, 1.5), (3, 2.0), (1_000_000, None)):
        make(tmp_path, step, loss)
    checkpoint.quarantine(make(tmp_path, 1_000_001))
    assert best_step(checkpoint.published(tmp_path)) == 2
    freed = [delete_oldest(tmp_path) for _ in range(2)]
    checkpoint.quarantine(make(tmp_path, 1_000_001))
    with monkeypatch.context() as patch:  # one that cannot be deleted gives no room
        rmtree = shutil.rmtree
        patch.setattr(
            shutil,
            "rmtree",
            lambda path, **how: path.name.endswith(".set_aside") or rmtree(path, **how),
        )
        freed += [delete_oldest(tmp_path) for _ in range(3)]
    assert freed == ["step_1000001.set_aside", "step_000001", "step_000003", "step_000002", None]
    checkpoint.verify(tmp_path / "step_1000000")


def test_the_lock_keeps_a_second_run_out_and_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "a" / "b"
    with run_folder.locked(folder):
        refused = pytest.raises(UserError, match=r"in use by another run \(process \d+ on ")
        with refused, run_folder.locked(folder):
            pass
        assert folder.is_dir()
    assert not (tmp_path / "a").exists()


def test_nodes_that_do_not_share_the_output_folder_are_refused(tmp_path):
    first = RunFolder(tmp_path / "first", Ranks(0, 0, 1, 1, torch.device("cpu")), StartRequest({}))
    second = RunFolder(
        tmp_path / "second", Ranks(1, 0, 1, 1, torch.device("cpu")), StartRequest({})
    )
    first.prepare({}, {"run_id": "abc"}, keep_run=False, all_write=True)
    second.prepare({}, {"run_id": "abc"}, keep_run=False)
    with pytest.raises(UserError, match="Rank 1's machine does not see"):
        second.prepare({}, {"run_id": "abc"}, keep_run=False, all_write=True)
    shutil.copytree(first.path, second.path)
    second.prepare({}, {"run_id": "abc"}, keep_run=False, all_write=True)
    with pytest.raises(UserError, match="does not see"):  # an earlier run's
        second.prepare({}, {"run_id": "abd"}, keep_run=False, all_write=True)


def test_leftovers_of_an_early_kill_are_ignored(tmp_path, monkeypatch):
    out = tmp_path / "out"

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(resume, "publish_with_room", die)
        folder = RunFolder(out, read_ranks(), StartRequest({}))
        folder.prepare({"config.yaml": "x"}, {"run_id": "abc"}, keep_run=False)
    # from here on, the same run is resumed
    assert [path.name for path in out.iterdir()] == [run_files.RUN]
    (out / run_files.RUN).rename(out / ".run.json.0123456789abcdef.partial")
    (out / ".saving").mkdir()
    (out / run_files.STATUS).touch()
    checkpoint.staging_folder(out / run_files.CHECKPOINTS, 1, "fetching").mkdir(parents=True)
    run_folder.check_usable(out, overwrite=False)
    make(out / run_files.CHECKPOINTS, 1)
    with pytest.raises(UserError, match="is not empty"):
        run_folder.check_usable(out, overwrite=False)
