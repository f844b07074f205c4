"""Folders of checkpoints: what is published stays as it is, and which one goes first."""

import json
import os
import shutil
from pathlib import Path

import pytest

from fsdp_qlora.checkpointing import checkpoint, layout, run_folder
from fsdp_qlora.checkpointing.run_folder import RunFolder
from fsdp_qlora.checkpointing.same_run import StartRequest
from fsdp_qlora.checkpointing.saving import best_step, delete_oldest
from fsdp_qlora.distributed import read_ranks
from fsdp_qlora.errors import UserError
from fsdp_qlora.metrics.metric_log import JsonlSink, cut_metrics
from fsdp_qlora.metrics.sinks import SinkOptions
from fsdp_qlora.storage.files import open_new, write_hashed_json


def make(root: Path, step: int, eval_loss: float | None = None) -> Path:
    staging = checkpoint.staging_folder(root, step)
    staging.mkdir(parents=True)
    progress = {"eval_loss": eval_loss, "last_eval_step": step if eval_loss else step - 1}
    record = write_hashed_json(staging / checkpoint.STATE, {"progress": progress})
    target = checkpoint.step_folder(root, step)
    checkpoint.publish_checkpoint(staging, target, {checkpoint.STATE: record})
    return target


def test_a_published_step_is_never_replaced(tmp_path: Path) -> None:
    folder = make(tmp_path, 5)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FileExistsError):
        make(tmp_path, 5, eval_loss=1.0)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    checkpoint.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_room_is_made_by_what_is_needed_least_and_the_newest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, loss in ((1, None), (2, 1.5), (3, 2.0), (1_000_000, None)):
        make(tmp_path, step, loss)
    checkpoint.quarantine(make(tmp_path, 1_000_001))
    assert best_step(checkpoint.published(tmp_path)) == 2
    freed = [delete_oldest(tmp_path) for _ in range(2)]
    checkpoint.quarantine(make(tmp_path, 1_000_001))
    with monkeypatch.context() as patch:  # one that cannot be deleted gives no room
        rmtree = shutil.rmtree
        patch.setattr(shutil, "rmtree", lambda path, **how: path.name.endswith(".set_aside") or rmtree(path, **how))
        freed += [delete_oldest(tmp_path) for _ in range(3)]
    assert freed == ["step_1000001.set_aside", "step_000001", "step_000003", "step_000002", None]
    checkpoint.verify(tmp_path / "step_1000000")


@pytest.mark.parametrize(
    "progress", ['{"eval_loss": "x", "last_eval_step": 2}', "[]", "null", '{"eval_loss": {}}', "3"]
)
def test_what_was_edited_is_never_the_best_and_stops_no_save(progress: str, tmp_path: Path) -> None:
    make(tmp_path, 1, 1.5)
    (make(tmp_path, 2) / checkpoint.STATE).write_text(f'{{"progress": {progress}}}')
    assert best_step(checkpoint.published(tmp_path)) == 1


def test_the_lock_keeps_a_second_run_out_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with layout.locked(folder):
        refused = pytest.raises(UserError, match=r"in use by another run \(process \d+ on ")
        with refused, layout.locked(folder):
            pass
        assert folder.is_dir()
    assert not (tmp_path / "a").exists()


def test_what_a_start_killed_before_its_first_file_leaves_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_folder, "publish_files", die)
        folder = RunFolder(out, read_ranks(), StartRequest({}))
        folder.prepare({"config.yaml": "x"}, {"run_id": "abc"}, keep_run=False)
    assert [path.name for path in out.iterdir()] == [layout.RUN]  # from here on, the same run is resumed
    (out / layout.RUN).rename(out / ".run.json.partial")
    for name in (".saving", layout.FETCHED):
        (out / name).mkdir()
    make(out / layout.CHECKPOINTS, 1)  # moved from the mirror's
    run_folder.check_usable(out, overwrite=False)
    (out / layout.FETCHED).rmdir()
    with pytest.raises(UserError, match="is not empty"):
        run_folder.check_usable(out, overwrite=False)


PLANTED = (".lock", "run.json", "status.json", "metrics.jsonl", "metrics.jsonl.set_aside", ".saving", ".saving_weights",
           layout.FETCHED, "hang_rank_0.txt", "hang_rank_0.json")  # fmt: skip


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", PLANTED)
def test_a_link_in_a_shared_folder_is_never_written_through(name: str, overwrite: bool, tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.write_text("precious")
    folder = RunFolder(out, read_ranks(), StartRequest({}, overwrite=overwrite))
    for target in (outside, tmp_path / "absent"):
        (out / name).symlink_to(target)
        refused = pytest.raises(UserError, match=rf"{name} is a link, and would be written through")
        with refused, folder.claimed():
            pass
        with pytest.raises(UserError, match="is not empty"):  # somebody's link is somebody's
            run_folder.check_usable(out, overwrite=False)
        if name == ".lock":
            with pytest.raises(UserError, match=r"\(.lock\): it is a link"), layout.locked(out):
                pass
        (out / name).unlink()
    assert outside.read_text() == "precious" and not (tmp_path / "absent").exists()
    os.mkfifo(out / name)
    with pytest.raises(UserError, match=f"{name} is a pipe"), folder.claimed():
        pass


def test_a_hard_link_in_a_shared_folder_is_never_written_through(tmp_path: Path) -> None:
    torn = json.dumps({"step": 1, "loss": 1.0}) + '\nno record\n{"step": 2, "lo'
    for name in (".lock", "metrics.jsonl", "metrics.jsonl.set_aside", "hang_rank_0.txt"):
        (tmp_path / f"outside {name}").write_text(torn)
        (tmp_path / name).hardlink_to(tmp_path / f"outside {name}")
    options = SinkOptions(tmp_path, total_steps=2, config={}, project_name=None, name=None, group=None, entity=None)
    with layout.locked(tmp_path):
        cut_metrics(tmp_path, step=1, last_eval_step=-1)
        sink = JsonlSink(options)
        sink.step({"step": 2}, None)
        sink.close(0)
        os.close(open_new(tmp_path / "hang_rank_0.txt"))
    assert (tmp_path / "metrics.jsonl").read_text() == torn.splitlines()[0] + '\n{"step": 2}\n'
    assert (tmp_path / "metrics.jsonl.set_aside").read_text() == torn + "no record\n"
    assert {path.read_text() for path in tmp_path.glob("outside *")} == {torn}
    (tmp_path / "more").hardlink_to(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="it is a hard link"):
        JsonlSink(options)


def test_leftovers_of_killed_starts_are_in_nobodys_way_unless_they_are_links(tmp_path: Path) -> None:
    for name in (".run.json.partial", ".run.json.0123456789abcdef.partial"):
        (tmp_path / name).write_text("{")
        run_folder.check_usable(tmp_path, overwrite=False)
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to(tmp_path / "absent")
        with pytest.raises(UserError, match="is not empty"):
            run_folder.check_usable(tmp_path, overwrite=False)
        (tmp_path / name).unlink()
