"""What people and lost disks do to a run's folder: each is one sentence, and nothing starts over by
itself.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.checkpoint.mirror import open_store
from fsdp_qlora.checkpoint.resume import RunFolder
from fsdp_qlora.checkpoint.run_folder import StartRequest
from fsdp_qlora.checkpoint.start import Start
from fsdp_qlora.distributed.ranks import read_ranks
from fsdp_qlora.sharding.loading.quant_cache import CHECKSUMS, open_entry
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils import files, run_files
from fsdp_qlora.utils.errors import ENDINGS, RunStopped, UserError
from fsdp_qlora.utils.files import write_json
from fsdp_qlora.utils.result_files import publish_files, record_result
from fsdp_qlora.utils.verified_files import Damaged
from tests.resuming.test_resume import ABOUT, DESCRIPTION, OPTIONS, TENSORS, add_step, alone, begin  # noqa: F401


def finds(out: Path, **how: Any) -> Start | str:
    """Where a start begins, or how it is refused; another exception is none of ours."""
    try:
        return begin(out, **how)
    except UserError as error:
        assert "\n" not in str(error) or "with other settings" in str(error)
        return str(error)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 3 and 5."""
    out = tmp_path / "out"
    run_id = begin(out).run_id
    for step in (3, 5):
        add_step(out, step, run_id)
    status = {
        "state": "running",
        "step": 6,
        "start_step": 0,
        "saved_step": 5,
        "deaths": 0,
        "seconds": 60.5,
    }
    write_json(
        out / run_files.STATUS,
        {**status, "reserve_seconds": 1.0, "reason": None, "exit_code": None},
    )
    return out


@pytest.mark.parametrize("name", [run_files.RUN, run_files.STATUS])
def test_edited_run_files_are_refused_in_one_sentence(name, run):
    for text in ("", "[]", "[" * 10_000, '{"state": "finished"', "{}"):
        (run / name).write_text(text)
        assert str(run / name) in str(finds(run))


def test_overwriting_a_run_does_not_read_its_damaged_files(run):
    for name in (run_files.RUN, run_files.STATUS):
        (run / name).write_text("{")
    start = finds(run, resume_from="off", overwrite=True)
    assert isinstance(start, Start) and start.step == 0
    assert not (run / run_files.CHECKPOINTS).exists()


def move_away(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


def link_to_nothing(root: Path) -> None:
    move_away(root)
    root.symlink_to("/not_mounted/checkpoints")


def file_instead(root: Path) -> None:
    move_away(root)
    root.write_text("")


def empty(root: Path) -> None:
    move_away(root)
    root.mkdir()


@pytest.mark.parametrize("lose", [move_away, link_to_nothing, file_instead, empty])
def test_a_run_with_missing_checkpoints_does_not_start_at_step_0(lose, run):
    root = run / run_files.CHECKPOINTS
    lose(root)
    for unattended in (False, True):
        said = str(finds(run, unattended=unattended))
        assert str(root) in said and "Is its disk mounted?" in said and "--resume off" in said
    shutil.rmtree(root, ignore_errors=True)
    root.unlink(missing_ok=True)
    (run / "elsewhere").rename(root)
    assert begin(run).step == 5
    lose(root)
    start = finds(run, resume_from="off", overwrite=True)
    assert isinstance(start, Start) and start.step == 0 and not root.is_symlink()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize(
    "name", [TENSORS, checkpoint.STATE, checkpoint.MANIFEST, run_files.RUN, run_files.STATUS]
)
def test_unreadable_checkpoints_are_retried_and_not_quarantined(name, number, run, monkeypatch):
    original = Path.open
    before = sorted(run.rglob("*"))

    def fails(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *args, **options)

    with (
        monkeypatch.context() as patch,
        pytest.raises(RunStopped, match=f"{os.strerror(number)}.*{name}") as stopped,
    ):
        patch.setattr(Path, "open", fails)
        patch.setattr(files, "open_named", lambda path, **_: fails(path, "rb"))
        begin(run)
    assert stopped.value.ending == ENDINGS["unreadable"] and stopped.value.ending.exit_code == 75
    assert sorted(run.rglob("*")) == before and begin(run).step == 5


def test_damaged_checkpoints_alone_do_not_restart_at_step_0(run):
    for folder in checkpoint.published(run / run_files.CHECKPOINTS).values():
        (folder / checkpoint.MANIFEST).unlink()
    for _ in range(2):  # the second sees only what the first has set aside
        said = str(finds(run))
        assert "No checkpoint in" in said and "step_000005.set_aside" in said


def test_a_run_without_checkpoints_starts_at_step_0(tmp_path):
    begin(tmp_path / "out")
    assert begin(tmp_path / "out").step == 0


def test_a_mirror_whose_run_json_was_edited_is_refused(run, tmp_path):
    mirror = open_store(str(tmp_path / "mirror"))
    mirror.update(run)
    (tmp_path / "mirror" / run_files.RUN).write_text('{"run_id": "x"}')
    assert "its run.json cannot be used" in str(finds(tmp_path / "box", mirror=mirror))
    assert not (tmp_path / "box").exists()


def test_a_mirror_with_a_partial_first_copy_is_not_a_lost_disk(run, tmp_path):
    mirror = open_store(str(tmp_path / "mirror"))
    mirror.update(run)
    shutil.rmtree(tmp_path / "mirror" / run_files.CHECKPOINTS)
    assert begin(tmp_path / "box", mirror=mirror).step == 0


def test_deeply_nested_json_is_refused_and_renames_nothing(run, tmp_path):
    mirror = open_store(str(tmp_path / "mirror"))
    cache = tmp_path / "cache" / "entry"
    mirror.update(run)
    cache.mkdir(parents=True)
    files = [
        tmp_path / "mirror" / run_files.RUN,
        cache / CHECKSUMS,
        cache / "model.safetensors.index.json",
    ]
    for path in files:
        path.write_text("[" * 100_000)
    before = sorted(tmp_path.rglob("*"))
    assert "its run.json cannot be read" in str(finds(tmp_path / "box", mirror=mirror))
    with pytest.raises(Damaged, match=r"recursion|Stack overflow"):
        open_entry(cache)
    with pytest.raises(UserError, match=r"index\.json is not a safetensors index"):
        WeightFiles(cache)
    assert sorted(tmp_path.rglob("*")) == before


# --- the result of a finished run ---


@pytest.fixture
def finished(run: Path) -> Path:
    def write(folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        (folder / "adapter_config.json").write_text("{}")
        record_result(folder)

    publish_files(run, write)
    write_json(
        run / run_files.STATUS,
        {**json.loads((run / run_files.STATUS).read_text()), "state": "finished"},
    )
    return run


def decide(out: Path) -> Start:
    return RunFolder(out, read_ranks(), StartRequest(OPTIONS)).choose_start(ABOUT)


LOSSES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "changed": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_result_is_rewritten_from_the_last_checkpoint(loss, finished, lines):
    assert decide(finished).is_finished
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        path = finished / name
        content = path.read_bytes()
        LOSSES[loss](path)
        lines.clear()
        start = decide(finished)
        assert not start.is_finished and not start.is_new and start.step == 5
        assert (
            sum(
                "differs from the one that the finished run saved: " + name in line
                for line in lines
            )
            == 1
        )
        shutil.rmtree(path, ignore_errors=True)
        path.write_bytes(content)
    assert decide(finished).is_finished
    LOSSES[loss](finished / "adapter_model.safetensors")
    shutil.rmtree(finished / run_files.CHECKPOINTS)
    with pytest.raises(
        UserError,
        match=r"no checkpoint, but status\.json says that the run has finished",
    ):
        decide(finished)


def test_an_edited_result_json_rewrites_the_result(finished):
    path = finished / run_files.RESULT
    record = json.loads(path.read_text())["files"]["adapter_config.json"]
    outside = {"files": {"../../etc/passwd": record}}
    for content in (
        "",
        "[]",
        "{}",
        '{"files": {}}',
        '{"files": {"adapter_config.json": 1}}',
        json.dumps(outside),
    ):
        path.write_text(content)
        assert decide(finished).step == 5
    path.unlink()
    assert decide(finished).step == 5
