"""Mirrors of every kind: what is there after each update, and what a new machine gets from it."""

import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import CommitOperationAdd, HfFileSystem

from fsdp_qlora.checkpoint import checkpoint, mirror
from fsdp_qlora.checkpoint.mirror import Store, fetch, open_store
from fsdp_qlora.checkpoint.run_folder import check_usable
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.run_files import CHECKPOINTS, STATUS
from tests.saving.test_checkpoint import make


class Hub(LocalFileSystem):
    """The hub's calls that are used, on a folder."""

    protocol = "hf"
    cachable = False
    folder = Path()
    is_there = False

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> None:
        assert private and exist_ok
        type(self).is_there = True

    def create_commit(self, repo: str, operations: list, *, commit_message: str) -> None:
        assert self.is_there
        for operation in operations:
            path = self.folder / operation.path_in_repo
            if isinstance(operation, CommitOperationAdd):
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(operation.path_or_fileobj, path)
            else:
                shutil.rmtree(path)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.replace("hf://owner/run", str(cls.folder))


@pytest.fixture(params=["folder", "memory", "hf"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty place for copies: tmp_path/there, or in memory, where any URL is represented."""
    there = tmp_path / "there"
    if request.param == "folder":
        return open_store(str(there))
    if request.param == "memory":
        monkeypatch.setattr(MemoryFileSystem, "store", {})
        return Store(f"memory:/{there}")
    monkeypatch.setattr(Hub, "folder", there)
    monkeypatch.setattr(Hub, "is_there", False)
    monkeypatch.setattr(mirror, "HfApi", Hub)
    register_implementation("hf", Hub, clobber=True)
    request.addfinalizer(lambda: register_implementation("hf", HfFileSystem, clobber=True))
    return open_store("hf:owner/run")


@pytest.fixture
def add_step(tmp_path: Path) -> Callable[[int], None]:
    """Adds a checkpoint to the run in tmp_path/run."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"run_id": "abc"}')
    (run / "status.json").write_text('{"state": "finished"}')

    def add(step: int) -> None:
        make(run / CHECKPOINTS, step)
        (run / "metrics.jsonl").write_text(f"{step}\n")

    return add


def test_a_new_machine_resumes_from_the_mirror(store, add_step, tmp_path):
    run = tmp_path / "run"
    assert store.run() == {} and store.steps() == []
    (run / "samples.jsonl").write_text("of another run\n")
    for step in (1, 2):
        add_step(step)
        store.update(run)
        (run / "samples.jsonl").unlink(missing_ok=True)
    checkpoint.remove(checkpoint.step_folder(run / CHECKPOINTS, 1))
    add_step(3)
    # Cut off before its manifest, the copy of a checkpoint is none, and is completed by the next
    # update.
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / checkpoint.STATE).write_text("{}")
    store.put_all({f"{CHECKPOINTS}/step_000003": tmp_path / "part"}, [], "cut off")
    assert store.steps() == [1, 2]
    store.update(run)
    assert store.run() == {"run_id": "abc"} and store.steps() == [2, 3]
    fetch(store, tmp_path / "box")
    found = checkpoint.published(tmp_path / "box" / CHECKPOINTS)
    assert list(found) == [3] and checkpoint.verify(found[3])  # no more than is needed
    assert (tmp_path / "box" / "metrics.jsonl").read_text() == "3\n"
    assert json.loads((tmp_path / "box" / "status.json").read_text())["state"] == "running"
    assert {path.name for path in (tmp_path / "box").iterdir()} == {
        CHECKPOINTS,
        "metrics.jsonl",
        "run.json",
        STATUS,
    }
    (run / "samples.jsonl").write_text('{"step": 3}\n')
    store.update(run)
    fetch(store, tmp_path / "next_box")
    assert (tmp_path / "next_box" / "samples.jsonl").read_text() == '{"step": 3}\n'
    store.delete_later_than(2)
    assert store.steps() == [2]
    (tmp_path / "part" / "run.json").write_text('{"run_id"')
    store.put_all({"": tmp_path / "part"}, [], "cut off")
    with pytest.raises(OSError, match=r"its run\.json cannot be read"):
        store.run()
    store.delete_later_than(-1)
    assert store.files(CHECKPOINTS) == []


def test_a_killed_fetch_is_completed_by_the_next_one(add_step, tmp_path, monkeypatch):
    for step in (1, 2):
        add_step(step)
    store = open_store(str(tmp_path / "run"))
    box = tmp_path / "box"
    for place in (
        f"{CHECKPOINTS}/.step_000002.fetching/{checkpoint.STATE}",
        "status.json",
        "run.json",
    ):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(
                Path, "replace", functools.partialmethod(_die_before, box / place, Path.replace)
            )
            fetch(store, box)
        assert not (box / "run.json").exists()
        check_usable(box, overwrite=False)
    fetch(store, box)
    assert list(checkpoint.published(box / CHECKPOINTS))[-1] == 2
    assert sorted(path.name for path in box.iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "run.json",
        "status.json",
    ]


def _die_before(self: Path, place: Path, original: Callable[..., Path], target: Path) -> Path:
    if target == place:
        raise KeyboardInterrupt
    return original(self, target)


def test_a_mirror_that_needs_a_missing_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match="Install s3fs"):
        open_store("s3://bucket/run")


def test_errors_of_a_store_become_one_line_os_errors(tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise LookupError("no route\nmore")

    monkeypatch.setattr(MemoryFileSystem, "find", fail)
    with pytest.raises(OSError, match=r"LookupError: no route$"):
        Store("memory://there").steps()


def test_invalid_mirrors_are_refused_and_unreachable_ones_explained(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="hf:OWNER/NAME"):
        open_store("hf:run")
    (tmp_path / "file").write_text("")
    # nobody's; the first copy tells that none can be made
    assert open_store(str(tmp_path / "file")).run() == {}
