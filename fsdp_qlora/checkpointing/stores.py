"""The places for a mirror: a folder, an rclone remote, or a private repository on the Hugging Face hub.

Each holds copies of a run folder's run.json, status.json, metrics.jsonl, samples.jsonl and checkpoints/. A checkpoint
is complete if its manifest is there, which is copied last (on the hub, in one commit with the rest).
"""

import contextlib
import json
import logging
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

from fsdp_qlora.checkpointing import checkpoint
from fsdp_qlora.checkpointing.checkpoint import MANIFEST
from fsdp_qlora.checkpointing.layout import CHECKPOINTS, FETCHED, RUN, STATUS
from fsdp_qlora.errors import UserError
from fsdp_qlora.metrics.sinks import METRICS_FILE, SAMPLES_FILE
from fsdp_qlora.redact import redact
from fsdp_qlora.storage.files import copy_regular, flush, read_json, read_regular, staged_file, write_json
from fsdp_qlora.storage.locations import mirror_error

log = logging.getLogger("fsdp_qlora")

_RECORDS = (METRICS_FILE, SAMPLES_FILE)
_SMALL_FILES = (*_RECORDS, STATUS, RUN)  # run.json last: it makes a folder a run's
# A remote that does not answer must not delay the end of a run.
_RCLONE_OPTIONS = ["--contimeout", "15s", "--timeout", "60s", "--retries", "2", "--low-level-retries", "3"]


class Store(ABC):
    """A place for copies: a few file operations for each kind of store, and a mirror's functions on top of them.

    Paths in the store are relative, with slashes; "" is its root. Every method raises OSError if the store is
    unreachable or full.
    """

    name: str  # as --mirror gives it

    # --- defined by each kind of store ---

    @abstractmethod
    def files(self, folder: str) -> list[str]:
        """The paths of all files below a folder, relative to it; empty if there is no such folder."""

    @abstractmethod
    def read(self, file: str) -> str:
        """The text of a small file. Raises FileNotFoundError if there is none."""

    @abstractmethod
    def put(self, source: Path, folder: str) -> None:
        """Copy the files of `source` into a folder of the store, a manifest last."""

    @abstractmethod
    def get(self, folder: str, root: Path) -> None:
        """Copy a folder to the same path below `root`, where a part of it may exist already."""

    @abstractmethod
    def delete(self, folder: str) -> None:
        """Delete an existing folder with its content."""

    def put_all(self, folders: Mapping[str, Path], outdated: Sequence[str], message: str) -> None:
        """Put folders (path -> source) in order, then delete the outdated ones; in one commit if the store has them."""
        for folder, source in folders.items():
            try:
                self.put(source, folder)
            except OSError:
                if source.exists():
                    raise  # otherwise the run has deleted this old checkpoint meanwhile
        for folder in outdated:
            self.delete(folder)

    # --- the same for every kind ---

    def run(self) -> dict[str, Any]:
        """The content of the store's run.json; empty if there is none."""
        try:
            identity: dict[str, Any] = json.loads(self.read(RUN))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise OSError(f"{RUN} there cannot be read ({error})") from error
        return identity

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        found = [path.split("/") for path in self.files(CHECKPOINTS)]
        names = [parts[0].removeprefix("step_") for parts in found if parts[1:] == [MANIFEST]]
        return sorted(int(name) for name in names if name.isdecimal())

    def update(self, output_dir: Path) -> None:
        """Update the checkpoints to those of a run's folder: copy new ones, delete deleted ones.

        Checkpoints later than any in the folder stay: they belong to a start that got further on another machine.
        """
        wanted, there = checkpoint.published(output_dir / CHECKPOINTS), self.steps()
        outdated = [_path(step) for step in there if step not in wanted and step < max(wanted, default=-1)]
        with tempfile.TemporaryDirectory() as small:
            _write_small_files(output_dir, Path(small))
            # run.json first: checkpoints without it would belong to no run.
            folders = {"": Path(small)}
            folders |= {_path(step): folder for step, folder in reversed(wanted.items()) if step not in there}
            self.put_all(folders, outdated, f"Checkpoints up to step {max(wanted, default='none')}")

    def delete_later_than(self, last_step: int) -> None:
        """Delete the checkpoints later than a step: of another run (-1: all), or of an abandoned branch of this one."""
        outdated = [_path(step) for step in self.steps() if step > last_step]
        message = f"Back to step {last_step}"
        if last_step < 0:  # partial checkpoints too
            names = {path.partition("/")[0] for path in self.files(CHECKPOINTS)}
            outdated, message = [f"{CHECKPOINTS}/{name}" for name in sorted(names)], "Another run"
        if outdated:
            self.put_all({}, outdated, message)


class FolderStore(Store):
    """A folder on another disk or machine."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.name = str(self.folder)

    def files(self, folder: str) -> list[str]:
        root = self.folder / folder
        return [path.relative_to(root).as_posix() for path in root.glob("**/*") if path.is_file()]

    def read(self, file: str) -> str:
        try:
            return read_regular(self.folder / file).decode()
        except NotADirectoryError as error:  # a file stands where the mirror should be: no run has begun there
            raise FileNotFoundError(str(error)) from error

    def put(self, source: Path, folder: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _copy_folder(source, self.folder / folder)

    def get(self, folder: str, root: Path) -> None:
        if not (root / folder).exists():
            _copy_folder(self.folder / folder, root / folder)

    def delete(self, folder: str) -> None:
        checkpoint.remove(self.folder / folder)


class RcloneStore(Store):
    """A remote of rclone, such as s3:bucket/run."""

    def __init__(self, remote: str) -> None:
        if shutil.which("rclone") is None:
            raise UserError(
                f"--mirror rclone:{remote} needs the program rclone, which is not installed (rclone.org/install)."
            )
        self.remote, self.name = remote.rstrip("/"), f"rclone:{remote}"

    def files(self, folder: str) -> list[str]:
        return [path for path in self._lines("lsf", "-R", self._at(folder)) if not path.endswith("/")]

    def read(self, file: str) -> str:
        if file not in self._lines("lsf", self.remote):  # on some remotes `cat` of a missing file succeeds
            raise FileNotFoundError(f"{self._at(file)} is not there")
        return self._rclone("cat", self._at(file))

    def put(self, source: Path, folder: str) -> None:
        self._rclone("copy", "--exclude", MANIFEST, str(source), self._at(folder))
        if (source / MANIFEST).exists():
            self._rclone("copyto", str(source / MANIFEST), self._at(folder, MANIFEST))

    def get(self, folder: str, root: Path) -> None:
        self._rclone("copy", self._at(folder), str(root / folder))

    def delete(self, folder: str) -> None:
        self._rclone("purge", self._at(folder))

    def _at(self, *parts: str) -> str:
        separator = "" if self.remote.endswith(":") else "/"
        return self.remote + separator + "/".join(parts) if any(parts) else self.remote

    def _lines(self, *words: str) -> list[str]:
        try:
            return self._rclone(*words).splitlines()
        except FileNotFoundError:
            return []

    def _rclone(self, *words: str) -> str:
        done = subprocess.run(["rclone", *words, *_RCLONE_OPTIONS], capture_output=True, text=True, errors="replace")
        if done.returncode == 3:  # directory not found
            raise FileNotFoundError(f"rclone {words[0]}: not there")
        if done.returncode:
            raise OSError(redact(f"rclone {words[0]}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}"))
        return done.stdout


class HubStore(Store):
    """A private repository on the Hugging Face hub; each change is one commit."""

    def __init__(self, repo: str) -> None:
        self.repo, self.name = repo, f"hf:{repo}"

    def files(self, folder: str) -> list[str]:
        try:
            with _as_os_error():
                paths = HfApi().list_repo_files(self.repo)
        except FileNotFoundError:
            return []
        return [path.removeprefix(f"{folder}/") for path in paths if path.startswith(f"{folder}/")]

    def read(self, file: str) -> str:
        with _as_os_error():
            return Path(hf_hub_download(self.repo, file)).read_text()

    def put(self, source: Path, folder: str) -> None:
        self.put_all({folder: source}, [], f"Add {folder}")

    def get(self, folder: str, root: Path) -> None:
        with _as_os_error():
            snapshot_download(self.repo, local_dir=root, allow_patterns=[f"{folder}/*"])

    def delete(self, folder: str) -> None:
        self.put_all({}, [folder], f"Delete {folder}")

    def put_all(self, folders: Mapping[str, Path], outdated: Sequence[str], message: str) -> None:
        with _as_os_error():
            HfApi().create_repo(self.repo, private=True, exist_ok=True)
            added = [
                CommitOperationAdd(f"{folder}/{path.name}".lstrip("/"), path)
                for folder, source in folders.items()
                for path in source.iterdir()
            ]
            gone = [CommitOperationDelete(f"{folder}/", is_folder=True) for folder in outdated]
            HfApi().create_commit(self.repo, [*added, *gone], commit_message=message)


# Prefix of --mirror, before the colon -> store; anything else is a folder.
_STORES: dict[str, type[RcloneStore | HubStore]] = {"rclone": RcloneStore, "hf": HubStore}


def open_store(target: str) -> Store:
    """The store that `--mirror` names: rclone:REMOTE:PATH, hf:OWNER/NAME, or a folder.

    Raises:
        UserError: it is none of these, or rclone is not installed.
    """
    if error := mirror_error(target):
        raise UserError(error)
    kind, _, rest = target.partition(":")
    return _STORES[kind](rest) if kind in _STORES else FolderStore(target)


def fetch(store: Store, output_dir: Path, *, later_than: int = -1) -> bool:
    """Copy the newest verified checkpoint later than a step, and the small files, into a run's folder.

    Files that an interrupted fetch has left in FETCHED are used again.

    Returns:
        False if there are checkpoints and none passes verification; the folder is then unchanged.
    """
    partial = output_dir / FETCHED
    steps = [step for step in reversed(store.steps()) if step > later_than]
    if steps and not any(_fetch_step(store, step, partial) for step in steps):
        shutil.rmtree(partial, ignore_errors=True)
        return False
    partial.mkdir(parents=True, exist_ok=True)
    for name in _SMALL_FILES:
        with contextlib.suppress(FileNotFoundError):
            text = _as_here(store.read(name)) if name == STATUS else store.read(name)
            if text:
                with staged_file(partial / name) as whole:
                    whole.write_text(text)
    _move_run(partial, output_dir)
    return True


def _as_here(status: str) -> str:
    """The copy of a status.json without the step that was saved: its copy may have been cut off, or is passed over."""
    try:
        content = json.loads(status)
    except ValueError:
        return status
    if isinstance(content, dict) and "saved_step" in content:
        content["saved_step"] = -1
    return json.dumps(content, indent=2) + "\n"


def _fetch_step(store: Store, step: int, partial: Path) -> bool:
    """Copy a checkpoint, replacing any other; returns whether it passes verification."""
    folder = partial / _path(step)
    for other in folder.parent.glob("*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    store.get(_path(step), partial)
    try:
        checkpoint.verify(folder)
    except checkpoint.DamagedCheckpoint as error:
        log.warning("The copy of step %d on the mirror %s is damaged (%s).", step, store.name, error)
        shutil.rmtree(folder, ignore_errors=True)
        return False
    return True


def _move_run(fetched: Path, output_dir: Path) -> None:
    """Move the fetched files into the run's folder; run.json last: it makes the folder a run's."""
    (output_dir / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    for folder in checkpoint.published(fetched / CHECKPOINTS).values():
        target = output_dir / CHECKPOINTS / folder.name
        shutil.rmtree(target, ignore_errors=True)  # left by a start that was killed while it moved files
        folder.rename(target)
    for name in _SMALL_FILES:
        if (fetched / name).is_file():
            (fetched / name).replace(output_dir / name)
    flush(output_dir)
    shutil.rmtree(fetched, ignore_errors=True)


def _path(step: int) -> str:
    """A checkpoint's path in the store."""
    return checkpoint.step_folder(Path(CHECKPOINTS), step).as_posix()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn any error of the hub's client or its HTTP library into an OSError of one line."""
    try:
        yield
    except Exception as error:
        lines = [*str(error).strip().splitlines(), ""]
        is_absent = isinstance(error, (EntryNotFoundError, RepositoryNotFoundError))
        kind = FileNotFoundError if is_absent and not isinstance(error, LocalEntryNotFoundError) else OSError
        raise kind(redact(f"{type(error).__name__}: {lines[0]}")) from error


def _write_small_files(output_dir: Path, target: Path) -> None:
    """Copy run.json, status.json and the run's records."""
    if run := read_json(output_dir / RUN):  # a damaged one must not replace the good copy
        write_json(target / RUN, run)
    for name in _RECORDS:
        if (output_dir / name).is_file():
            copy_regular(output_dir / name, target / name)
        else:
            (target / name).touch()  # in the place of what another run had there
    # A new machine does not have the results, so the run must not appear finished there.
    write_json(target / STATUS, {**read_json(output_dir / STATUS), "state": "running"})


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a folder's files atomically, the manifest last; a new folder appears at once with all its files."""
    staging = target if target.exists() else target.with_name(f".{target.name}.writing")
    if staging != target:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    try:
        for path in sorted(source.iterdir(), key=lambda path: path.name == MANIFEST):
            with staged_file(staging / path.name) as partial:
                copy_regular(path, partial)
        flush(staging)
        if staging != target:
            staging.rename(target)
            flush(target.parent)
    except OSError:
        if staging != target:
            shutil.rmtree(staging, ignore_errors=True)
        raise
