"""Where a mirror may be: a folder, a remote of rclone, or a private repository on the Hugging Face hub.

Each holds what a run folder holds of its checkpoints: run.json, status.json, metrics.jsonl and checkpoints/. A
checkpoint is there when its manifest is, which comes last (on the hub, with the rest in one commit).
"""

import json
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

from fsdp_qlora.checkpointing import checkpoint
from fsdp_qlora.checkpointing.layout import CHECKPOINTS, FETCHED, RUN, STATUS
from fsdp_qlora.errors import UserError
from fsdp_qlora.metrics.sinks import METRICS_FILE
from fsdp_qlora.redact import redact
from fsdp_qlora.storage.files import flush, read_json, write_json

log = logging.getLogger("fsdp_qlora")

# A remote that does not answer must not hold up the end of a run.
_RCLONE_OPTIONS = ["--contimeout", "15s", "--timeout", "60s", "--retries", "2", "--low-level-retries", "3"]


class Store(Protocol):
    """A place for the copies. Every method raises OSError where the place is out of reach or full."""

    name: str

    def run(self) -> dict[str, Any]:
        """What run.json there says; empty where there is none."""

    def steps(self) -> list[int]:
        """Of the checkpoints that are there whole, in any order."""

    def update(self, output_dir: Path) -> None:
        """Bring the checkpoints there up to those in a run's folder: new ones are copied, deleted ones deleted.

        Those later than any in the folder stay, since they are of a start that has got further elsewhere.
        """

    def copy_step(self, step: int, target: Path) -> None:
        """Copy a checkpoint from there into a run's folder, in which a part of it may be already."""

    def copy_small_files(self, target: Path) -> None:
        """Copy run.json, status.json and metrics.jsonl from there into a folder."""

    def forget(self, *, later_than: int = -1) -> None:
        """Delete the checkpoints there that are later than a step: another run's, or of a course that is given up."""


def open_store(target: str) -> Store:
    """The place that `--mirror` means: rclone:REMOTE, hf:OWNER/NAME, or a folder.

    Raises:
        UserError: rclone is not installed, or the name is none of the hub.
    """
    kind, _, rest = target.partition(":")
    if kind == "rclone":
        if shutil.which("rclone") is None:
            raise UserError(f"--mirror {target} needs the program rclone, which is not installed (rclone.org/install).")
        return RcloneStore(rest)
    if kind == "hf":
        if rest.count("/") != 1:
            raise UserError(f"--mirror {target}: give the repository as hf:OWNER/NAME.")
        return HubStore(rest)
    return FolderStore(Path(target).expanduser())


class FolderStore:
    """A folder on another disk, or of another machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder)

    def run(self) -> dict[str, Any]:
        return read_json(self.folder / RUN)

    def update(self, output_dir: Path) -> None:
        copy_run(output_dir, self.folder)

    def steps(self) -> list[int]:
        return list(checkpoint.published(self.folder / CHECKPOINTS))

    def copy_step(self, step: int, target: Path) -> None:
        if step not in checkpoint.published(target / CHECKPOINTS):
            (target / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            _copy_checkpoint(checkpoint.step_folder(self.folder / CHECKPOINTS, step), target / CHECKPOINTS, step)

    def copy_small_files(self, target: Path) -> None:
        _write_small_files(self.folder, target)

    def forget(self, *, later_than: int = -1) -> None:
        checkpoint.remove_leftovers(self.folder / CHECKPOINTS)
        for step, folder in checkpoint.published(self.folder / CHECKPOINTS).items():
            if step > later_than:
                checkpoint.remove(folder)


class RcloneStore:
    """A remote of the program rclone, such as s3:bucket/run."""

    def __init__(self, remote: str) -> None:
        self.remote, self.name = remote.rstrip("/"), f"rclone:{remote}"

    def run(self) -> dict[str, Any]:
        if RUN not in self._list(""):
            return {}
        try:
            about: dict[str, Any] = json.loads(self._rclone("cat", self._at(RUN)))
        except ValueError as error:
            raise OSError(f"{RUN} there cannot be read ({error})") from error
        return about

    def update(self, output_dir: Path) -> None:
        wanted = checkpoint.published(output_dir / CHECKPOINTS)
        # run.json first: checkpoints without it would be nobody's
        with tempfile.TemporaryDirectory() as small:
            _write_small_files(output_dir, Path(small))
            self._rclone("copy", small, self.remote)
        there = self.steps()
        for step, folder in reversed(wanted.items()):
            if step in there:
                continue
            name = folder.name
            try:
                self._rclone("copy", "--exclude", checkpoint.MANIFEST, str(folder), self._at(CHECKPOINTS, name))
                manifest = self._at(CHECKPOINTS, name, checkpoint.MANIFEST)
                self._rclone("copyto", str(folder / checkpoint.MANIFEST), manifest)
            except OSError:
                if folder.exists():
                    raise  # else the run has deleted it meanwhile, as too old; a newer one is copied
        for step in _outdated(there, wanted):
            self._purge(step)

    def steps(self) -> list[int]:
        found = [path.split("/") for path in self._list(CHECKPOINTS, "-R", "--include", f"*/{checkpoint.MANIFEST}")]
        return _numbers(parts[0] for parts in found if parts[-1] == checkpoint.MANIFEST)

    def copy_step(self, step: int, target: Path) -> None:
        folder = checkpoint.step_folder(target / CHECKPOINTS, step)
        self._rclone("copy", self._at(CHECKPOINTS, folder.name), str(folder))

    def copy_small_files(self, target: Path) -> None:
        self._rclone("copy", "--exclude", f"/{CHECKPOINTS}/**", self.remote, str(target))

    def forget(self, *, later_than: int = -1) -> None:
        if later_than < 0 and self._list(CHECKPOINTS):  # parts of checkpoints too
            self._rclone("purge", self._at(CHECKPOINTS))
        for step in self.steps():
            if step > later_than:
                self._purge(step)

    def _purge(self, step: int) -> None:
        self._rclone("purge", self._at(CHECKPOINTS, checkpoint.step_folder(Path(), step).name))

    def _list(self, folder: str, *options: str) -> list[str]:
        try:
            return self._rclone("lsf", *options, self._at(folder)).splitlines()
        except FileNotFoundError:
            return []

    def _at(self, *parts: str) -> str:
        separator = "" if self.remote.endswith(":") else "/"
        return self.remote + separator + "/".join(parts) if any(parts) else self.remote

    def _rclone(self, *words: str) -> str:
        done = subprocess.run(["rclone", *words, *_RCLONE_OPTIONS], capture_output=True, text=True, errors="replace")
        if done.returncode == 3:  # directory not found
            raise FileNotFoundError(f"rclone {words[0]}: not there")
        if done.returncode:
            raise OSError(redact(f"rclone {words[0]}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}"))
        return done.stdout


class HubStore:
    """A private repository on the Hugging Face hub; each update is one commit."""

    def __init__(self, repo: str) -> None:
        self.repo, self.name = repo, f"hf:{repo}"

    def run(self) -> dict[str, Any]:
        try:
            about: dict[str, Any] = json.loads(Path(hf_hub_download(self.repo, RUN)).read_text())
        except (EntryNotFoundError, RepositoryNotFoundError):
            return {}
        except Exception as error:  # of the HTTP library
            raise _as_os_error(error) from error
        return about

    def update(self, output_dir: Path) -> None:
        wanted = checkpoint.published(output_dir / CHECKPOINTS)
        with tempfile.TemporaryDirectory() as small:
            _write_small_files(output_dir, Path(small))
            files = {path.name: path for path in Path(small).iterdir()}
            try:
                HfApi().create_repo(self.repo, private=True, exist_ok=True)
                there = self.steps()
                for step, folder in wanted.items():
                    if step not in there:
                        files |= {f"{CHECKPOINTS}/{folder.name}/{path.name}": path for path in folder.iterdir()}
                self._commit(files, _outdated(there, wanted), f"Checkpoints up to step {max(wanted, default='none')}")
            except Exception as error:
                raise _as_os_error(error) from error

    def steps(self) -> list[int]:
        try:
            paths = [path.split("/") for path in HfApi().list_repo_files(self.repo)]
        except Exception as error:
            raise _as_os_error(error) from error
        return _numbers(parts[1] for parts in paths if len(parts) == 3 and parts[0] == CHECKPOINTS)

    def copy_step(self, step: int, target: Path) -> None:
        self._download(target, f"{checkpoint.step_folder(Path(CHECKPOINTS), step)}/*")

    def copy_small_files(self, target: Path) -> None:
        self._download(target, RUN, STATUS, METRICS_FILE)

    def forget(self, *, later_than: int = -1) -> None:
        steps = [step for step in self.steps() if step > later_than]
        try:
            self._commit({}, steps, "Another run" if later_than < 0 else f"Back to step {later_than}")
        except Exception as error:
            raise _as_os_error(error) from error

    def _download(self, target: Path, *names: str) -> None:
        try:
            snapshot_download(self.repo, local_dir=target, allow_patterns=list(names))
        except Exception as error:
            raise _as_os_error(error) from error

    def _commit(self, files: dict[str, Path], removed: Iterable[int], message: str) -> None:
        operations = [CommitOperationAdd(name, path) for name, path in files.items()]
        folders = [checkpoint.step_folder(Path(CHECKPOINTS), step) for step in sorted(removed)]
        gone = [CommitOperationDelete(f"{folder}/", is_folder=True) for folder in folders]
        if operations or gone:
            HfApi().create_commit(self.repo, [*operations, *gone], commit_message=message)


def fetch(store: Store, output_dir: Path, *, later_than: int = -1) -> bool:
    """Copy the newest whole checkpoint there that is later than a step, and what goes with it, into a run's folder.

    What a fetch that was cut off has left in FETCHED is used again.

    Returns:
        False where none of them is whole; the folder is then as it was.
    """
    partial = output_dir / FETCHED
    steps = sorted((step for step in store.steps() if step > later_than), reverse=True)
    for step in steps:
        folder = checkpoint.step_folder(partial / CHECKPOINTS, step)
        for other in (partial / CHECKPOINTS).glob("*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        store.copy_step(step, partial)
        try:
            checkpoint.verify(folder)
            break
        except checkpoint.DamagedCheckpoint as error:
            log.warning("The copy of step %d on the mirror %s is damaged (%s).", step, store.name, error)
            shutil.rmtree(folder, ignore_errors=True)
    else:
        if steps:
            shutil.rmtree(partial, ignore_errors=True)
            return False
    partial.mkdir(parents=True, exist_ok=True)
    store.copy_small_files(partial)
    _move_run(partial, output_dir)
    return True


def _numbers(names: Iterable[str]) -> list[int]:
    """The steps that folders of checkpoints are called after."""
    return sorted({int(name.removeprefix("step_")) for name in names if name.removeprefix("step_").isdecimal()})


def _outdated(there: Iterable[int], wanted: Collection[int]) -> list[int]:
    """The steps that are no longer wanted; not those that come later than all that are."""
    return [step for step in there if step not in set(wanted) and step < max(wanted, default=-1)]


def _as_os_error(error: Exception) -> OSError:
    text = str(error).strip().splitlines()
    return OSError(redact(f"{type(error).__name__}: {text[0] if text else ''}"))


def _write_small_files(output_dir: Path, target: Path) -> None:
    """What goes with the checkpoints: run.json, metrics.jsonl and status.json."""
    if (output_dir / RUN).is_file():
        write_json(target / RUN, read_json(output_dir / RUN))
    if (output_dir / METRICS_FILE).is_file():
        partial = target / f".{METRICS_FILE}.partial"
        shutil.copyfile(output_dir / METRICS_FILE, partial)
        partial.replace(target / METRICS_FILE)
    # A new box has none of the results, so there the run is never finished.
    write_json(target / STATUS, {**read_json(output_dir / STATUS), "state": "running"})


def _move_run(fetched: Path, output_dir: Path) -> None:
    """Put what has been fetched whole in its place; run.json, which makes the folder a run's, last."""
    (output_dir / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    for folder in checkpoint.published(fetched / CHECKPOINTS).values():
        target = output_dir / CHECKPOINTS / folder.name
        shutil.rmtree(target, ignore_errors=True)  # moved before, by a start that was killed meanwhile
        folder.rename(target)
    for name in (METRICS_FILE, STATUS, RUN):
        if (fetched / name).is_file():
            (fetched / name).replace(output_dir / name)
    flush(output_dir)
    shutil.rmtree(fetched, ignore_errors=True)


def copy_run(source: Path, target: Path) -> None:
    """Bring the checkpoints in `target`, and what goes with them, up to those in `source`.

    Raises:
        OSError: a copy could not be made; those that are there stay.
    """
    root = target / CHECKPOINTS
    root.mkdir(parents=True, exist_ok=True)
    wanted = checkpoint.published(source / CHECKPOINTS)
    _write_small_files(source, target)  # run.json first: checkpoints without it would be nobody's
    for step, folder in reversed(wanted.items()):
        if step not in checkpoint.published(root):
            _copy_checkpoint(folder, root, step)
    there = checkpoint.published(root)
    for step in _outdated(there, wanted):
        checkpoint.remove(there[step])


def _copy_checkpoint(folder: Path, root: Path, step: int) -> None:
    """A checkpoint is copied under another name, flushed and renamed, as it was made."""
    staging = checkpoint.staging_folder(root, step)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        for path in sorted(folder.iterdir()):
            shutil.copyfile(path, staging / path.name)
            flush(staging / path.name)
        flush(staging)
        staging.rename(checkpoint.step_folder(root, step))
        flush(root)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        if folder.exists():
            raise
        # The run has deleted it meanwhile, as too old; a newer one is copied.
