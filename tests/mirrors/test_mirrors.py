"""Mirrors on rclone and on the hub: what is there after each update, and what a new box gets from it."""

import fnmatch
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import RepositoryNotFoundError

from fsdp_qlora.checkpointing import checkpoint, stores
from fsdp_qlora.checkpointing.layout import CHECKPOINTS, FETCHED
from fsdp_qlora.checkpointing.run_folder import check_usable
from fsdp_qlora.checkpointing.stores import Store, fetch, open_store
from fsdp_qlora.errors import UserError
from fsdp_qlora.storage.files import write_hashed_json

# The commands of rclone that are used, on folders, for machines that do not have it.
RCLONE = f"""#!{sys.executable}
import fnmatch, pathlib, shutil, sys
words = sys.argv[1:-8]  # the limits on time come last
command, options, paths = words[0], [], []
while words := words[1:]:
    if words[0] in ("--exclude", "--include"):
        options.append(words[1])
        words = words[1:]
    elif words[0] != "-R":
        paths.append(pathlib.Path(words[0].removeprefix(":local:")))
if "offline" in str(paths[-1]):
    sys.exit("2026/11/21 ERROR : connection refused")
if command in ("lsf", "cat", "purge") and not paths[0].exists():
    sys.exit(3)
if command == "lsf":
    found = [str(path.relative_to(paths[0])) for path in paths[0].rglob("*") if path.is_file()]
    print("\\n".join(name for name in found if not options or fnmatch.fnmatch(name, options[0])))
elif command == "cat":
    print(paths[0].read_text(), end="")
elif command == "purge":
    shutil.rmtree(paths[0])
else:
    files = [paths[0]] if paths[0].is_file() else [path for path in paths[0].rglob("*") if path.is_file()]
    for path in files:
        name = path.relative_to(paths[0])
        if not any(fnmatch.fnmatch("/" + str(name), "*/" + option.strip("/").replace("**", "*")) for option in options):
            target = paths[1] if command == "copyto" else paths[1] / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
"""


class Hub:
    """The hub's calls that are used, on a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.commits = folder, 0

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> None:
        assert private and exist_ok
        self.folder.mkdir(exist_ok=True)

    def list_repo_files(self, repo: str) -> list[str]:
        return [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()]

    def create_commit(self, repo: str, operations: list, *, commit_message: str) -> None:
        self.commits += 1
        for operation in operations:
            path = self.folder / operation.path_in_repo
            if isinstance(operation, CommitOperationAdd):
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(operation.path_or_fileobj, path)
            else:
                shutil.rmtree(path)

    def download(self, repo: str, name: str) -> str:
        if not self.folder.is_dir():
            raise RepositoryNotFoundError("no such repository", response=_Response())
        return str(self.folder / name)

    def snapshot(self, repo: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        for name in self.list_repo_files(repo):
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder / name, local_dir / name)


class _Response:
    headers: dict[str, str] = {}  # noqa: RUF012
    request = None


@pytest.fixture(params=["rclone", "rclone's stand-in", "hf"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty place for copies, tmp_path/there."""
    there = tmp_path / "there"
    if request.param == "hf":
        hub = Hub(there)
        monkeypatch.setattr(stores, "HfApi", lambda: hub)
        monkeypatch.setattr(stores, "hf_hub_download", hub.download)
        monkeypatch.setattr(stores, "snapshot_download", hub.snapshot)
        return open_store("hf:owner/run")
    if request.param == "rclone":
        if shutil.which("rclone") is None:
            pytest.skip("rclone is not installed")
    else:
        (program := tmp_path / "bin" / "rclone").parent.mkdir()
        program.write_text(RCLONE)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return open_store(f"rclone::local:{there}")


@pytest.fixture
def add_step(tmp_path: Path) -> Callable[[int], None]:
    """Adds a checkpoint to the run in tmp_path/run."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"run_id": "abc"}')
    (run / "status.json").write_text('{"state": "finished"}')

    def add(step: int) -> None:
        staging = checkpoint.staging_folder(run / CHECKPOINTS, step)
        staging.mkdir(parents=True)
        record = write_hashed_json(staging / checkpoint.STATE, {"step": step})
        checkpoint.publish_checkpoint(
            staging, checkpoint.step_folder(run / CHECKPOINTS, step), {checkpoint.STATE: record}
        )
        (run / "metrics.jsonl").write_text(f"{step}\n")

    return add


def test_a_new_box_gets_what_the_old_one_had(store: Store, add_step: Callable[[int], None], tmp_path: Path) -> None:
    run, there = tmp_path / "run", tmp_path / "there"
    assert store.run() == {}
    (run / "samples.jsonl").write_text("of another run\n")
    for step in (1, 2):
        add_step(step)
        store.update(run)
        (run / "samples.jsonl").unlink(missing_ok=True)
    checkpoint.remove(checkpoint.step_folder(run / CHECKPOINTS, 1))
    add_step(3)
    # Cut off before its manifest, the copy of a checkpoint is none, and is made whole by the next update.
    if not isinstance(store, stores.HubStore):
        (there / CHECKPOINTS / "step_000003").mkdir()
        (there / CHECKPOINTS / "step_000003" / checkpoint.STATE).write_text("{}")
        fetch(store, tmp_path / "early")
        assert list(checkpoint.published(tmp_path / "early" / CHECKPOINTS)) == [2]
    store.update(run)
    assert store.run() == {"run_id": "abc"}
    fetch(store, tmp_path / "box")
    found = checkpoint.published(tmp_path / "box" / CHECKPOINTS)
    assert [checkpoint.verify(folder)["step"] for folder in found.values()] == [3]  # no more than is needed
    assert (tmp_path / "box" / "metrics.jsonl").read_text() == "3\n"
    assert json.loads((tmp_path / "box" / "status.json").read_text()) == {"state": "running"}
    assert sorted(path.name for path in (tmp_path / "box").iterdir()) == [
        *("checkpoints", "metrics.jsonl", "run.json", "status.json"),
    ]
    (run / "samples.jsonl").write_text('{"step": 3}\n')
    store.update(run)
    fetch(store, tmp_path / "next_box")
    assert (tmp_path / "next_box" / "samples.jsonl").read_text() == '{"step": 3}\n'
    if isinstance(store, stores.RcloneStore):
        (there / "run.json").write_text('{"run_id"')
        with pytest.raises(OSError, match=r"run\.json there cannot be read"):
            store.run()
    store.delete_later_than(-1)
    assert not list((there / CHECKPOINTS).glob("*"))


def test_a_fetch_that_was_killed_is_made_whole_by_the_next(
    add_step: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        add_step(step)
    store, box = open_store(str(tmp_path / "run")), tmp_path / "box"
    for place in (FETCHED + "/run.json", "metrics.jsonl"):  # while it is copied, and while it is moved
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "replace", functools.partialmethod(_die_before, box / place, Path.replace))
            fetch(store, box)
        assert not (box / "run.json").exists()
        check_usable(box, overwrite=False)
    fetch(store, box)
    assert list(checkpoint.published(box / CHECKPOINTS))[-1] == 2
    assert sorted(path.name for path in box.iterdir()) == ["checkpoints", "metrics.jsonl", "run.json", "status.json"]


def _die_before(self: Path, place: Path, original: Callable[..., Path], target: Path) -> Path:
    if target == place:
        raise KeyboardInterrupt
    return original(self, target)


def test_a_mirror_that_cannot_be_is_refused_and_one_out_of_reach_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="hf:OWNER/NAME"):
        open_store("hf:run")
    (tmp_path / "file").write_text("")
    assert open_store(str(tmp_path / "file")).run() == {}  # nobody's; the first copy tells that none can be made
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs the program rclone"):
        open_store("rclone:s3:bucket")
    (tmp_path / "rclone").write_text(RCLONE)
    (tmp_path / "rclone").chmod(0o755)
    with pytest.raises(OSError, match=r"rclone lsf: .*connection refused"):
        open_store("rclone:offline:bucket").run()
