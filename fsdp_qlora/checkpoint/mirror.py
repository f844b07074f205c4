"""Mirrors: copies of a run in another place, made in the background, in case a machine is lost.

A mirror is a folder, a URL that fsspec opens, or a private repository on the Hugging Face hub. It
holds a run folder's run.json, status.json, metrics.jsonl, samples.jsonl, rollouts.jsonl and
checkpoints/. A copied checkpoint is complete once it has its manifest, which is copied last (on the
hub, in one commit with the rest).
"""

import contextlib
import functools
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.checkpoint.checkpoint import MANIFEST, staging_folder
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import (
    PUBLIC,
    check_is_file,
    flush,
    flush_files,
    mirror_error,
    publish_folder,
    read_json,
    staged_file,
    write_json,
)
from fsdp_qlora.utils.redact import redact
from fsdp_qlora.utils.run_files import (
    CHECKPOINTS,
    METRICS_FILE,
    ROLLOUTS_FILE,
    RUN,
    SAMPLES_FILE,
    STATUS,
)
from fsdp_qlora.utils.text import first_line

log = logging.getLogger("fsdp_qlora")

_RECORDS = (METRICS_FILE, SAMPLES_FILE, ROLLOUTS_FILE)


class Mirror:
    """Copies each published checkpoint in a background thread; without a store it does nothing.

    A full or unreachable store is reported once, and tried again at the next checkpoint.
    """

    def __init__(self, output_dir: Path, store: "Store | None") -> None:
        self.output_dir = output_dir
        self.store = store
        # One thread: copies are made one after another, in the order of the checkpoints.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._is_failing = False

    def copy_later(self) -> None:
        """Copy new checkpoints in the background."""
        if self.store is not None:
            self._thread.submit(self._copy, self.store)

    def close(self) -> None:
        """Wait until all checkpoints are copied."""
        self._thread.shutdown()

    def _copy(self, store: "Store") -> None:
        try:
            store.update(self.output_dir)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning(
                    "The mirror %s has no copy of the last checkpoint: %s. Training continues, and "
                    "the mirror is tried again at the next checkpoint.",
                    store.name,
                    error,
                )
            self._is_failing = True


class Store:
    """A mirror in a folder of a file system that fsspec opens.

    Such as this machine's, s3://, gcs://, az:// and sftp://. Paths in the store are relative, with
    slashes; "" is its root. Every method raises OSError if the store is unreachable or full.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = redact(url)

    # --- file operations ---

    def files(self, folder: str) -> list[str]:
        """The paths of all files below a folder, relative to it; empty if there is none."""
        with _as_os_error():
            # fsspec keeps listings, which another machine may have made old.
            self._system.invalidate_cache()
            prefix = f"{folder}/"
            try:
                paths: list[str] = self._system.find(folder)
            except FileNotFoundError:
                return []
        # Without the markers that object stores have in place of folders.
        return [path.removeprefix(prefix) for path in paths if len(path) > len(prefix)]

    def read(self, file: str) -> str:
        """The text of a small file; empty if it does not exist."""
        with _as_os_error():
            try:
                self._refuse_pipe(file)
                content: bytes = self._system.cat_file(file)
            # The latter: a file stands where the mirror should be.
            except (FileNotFoundError, NotADirectoryError):
                return ""
        return content.decode()

    def _refuse_pipe(self, file: str) -> None:
        """Raise OSError for a file of this machine that the system would wait for or never end."""
        if isinstance(self._system.fs, LocalFileSystem):
            check_is_file(Path(self._system.path, file))

    def put(self, source: Path, folder: str) -> None:
        """Copy the files of `source` into a folder of the store. The manifest comes last."""
        with _as_os_error():
            self._system.makedirs(folder, exist_ok=True)
            # A copy that a kill has cut off has no manifest, and so is no checkpoint.
            for path in sorted(source.iterdir(), key=lambda path: path.name == MANIFEST):
                target = f"{folder}/{path.name}".lstrip("/")
                # The run's own files are replaced: a reader sees the old one or the new one. Those
                # of a checkpoint are written once.
                written = target if folder else f"{target}.partial"
                self._system.put_file(str(path), written)
                # Flushed before the rename, and before the manifest is written. Other systems have
                # stored what they acknowledge.
                if isinstance(self._system.fs, LocalFileSystem):
                    flush(Path(self._system.path, written))
                if written != target:
                    self._system.mv(written, target)

    def get(self, folder: str, target: Path) -> None:
        """Copy a folder to a local one. Files that the local folder has already are kept."""
        target.mkdir(parents=True, exist_ok=True)
        for name in self.files(folder):
            if not (target / name).exists():
                with staged_file(target / name) as partial, _as_os_error():
                    self._refuse_pipe(f"{folder}/{name}")
                    self._system.get_file(f"{folder}/{name}", str(partial))

    def delete(self, folder: str) -> None:
        """Delete an existing folder with its content."""
        with _as_os_error():
            with contextlib.suppress(FileNotFoundError):
                # First: what a kill then leaves is no checkpoint.
                self._system.rm_file(f"{folder}/{MANIFEST}")
            self._system.rm(folder, recursive=True)

    def put_all(self, folders: Mapping[str, Path], outdated: Sequence[str], message: str) -> None:
        """Put folders (path -> source) in order, then delete outdated ones.

        In one commit, if the store has commits.
        """
        for folder, source in folders.items():
            try:
                self.put(source, folder)
            except OSError:
                # Otherwise the run has deleted this old checkpoint meanwhile.
                if source.exists():
                    raise
        for folder in outdated:
            self.delete(folder)

    @functools.cached_property
    def _system(self) -> DirFileSystem:
        """The file system of the store's folder, opened at the first use.

        Opening may connect to a server, which a store that is only named need not.
        """
        system, root = fsspec.core.url_to_fs(self.url)
        return DirFileSystem(root.rstrip("/") or root, system)

    # --- a run ---

    def run(self) -> dict[str, Any]:
        """The content of the store's run.json; empty if there is none."""
        try:
            identity: dict[str, Any] = json.loads(self.read(RUN) or "{}")
        except (ValueError, RecursionError) as error:
            raise OSError(f"its {RUN} cannot be read ({error})") from error
        return identity

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        return [step for step, is_complete in self._checkpoints().items() if is_complete]

    def update(self, output_dir: Path) -> None:
        """Copy a run folder's new checkpoints to the store, and delete what the run has deleted.

        Checkpoints later than any in the folder stay: they belong to a start that got further on
        another machine.
        """
        local = checkpoint.published(output_dir / CHECKPOINTS)
        copied = self._checkpoints()
        outdated = [
            _path(step) for step in copied if step not in local and step < max(local, default=-1)
        ]
        with tempfile.TemporaryDirectory() as small:
            _write_small_files(output_dir, Path(small))
            # run.json first: checkpoints without it would belong to no run.
            folders = {"": Path(small)}
            # The newest one next: it is what a lost machine would cost most.
            for step, folder in reversed(local.items()):
                if not copied.get(step):
                    folders[_path(step)] = folder
            self.put_all(folders, outdated, f"Checkpoints up to step {max(local, default='none')}")

    def delete_later_than(self, last_step: int) -> None:
        """Delete checkpoints later than a step.

        They are another run's (-1: all), or an abandoned branch of this run.
        """
        outdated = [_path(step) for step in self._checkpoints() if step > last_step]
        if outdated:
            message = f"Back to step {last_step}" if last_step >= 0 else "Another run"
            self.put_all({}, outdated, message)

    def _checkpoints(self) -> dict[int, bool]:
        """Step -> whether the checkpoint is complete, oldest first."""
        is_complete: dict[int, bool] = {}
        for path in self.files(CHECKPOINTS):
            folder, _, name = path.partition("/")
            step = checkpoint.step_of(Path(folder))
            if step is not None:
                is_complete[step] = is_complete.get(step, False) or name == MANIFEST
        return dict(sorted(is_complete.items()))


class HubStore(Store):
    """A private repository on the Hugging Face hub. Each change is one commit, as it advises."""

    def __init__(self, repo: str) -> None:
        super().__init__(f"hf://{repo}")
        self.repo = repo

    def put_all(self, folders: Mapping[str, Path], outdated: Sequence[str], message: str) -> None:
        added = []
        for folder, source in folders.items():
            for path in source.iterdir():
                added.append(CommitOperationAdd(f"{folder}/{path.name}".lstrip("/"), path))
        gone = [CommitOperationDelete(f"{folder}/", is_folder=True) for folder in outdated]
        with _as_os_error():
            HfApi().create_repo(self.repo, private=True, exist_ok=True)
            HfApi().create_commit(self.repo, [*added, *gone], commit_message=message)


def open_store(target: str) -> Store:
    """Open the store named by `--mirror`: a folder, a URL or hf:OWNER/NAME. Raises UserError."""
    error = mirror_error(target)
    if error:
        raise UserError(error)
    kind, _, rest = target.partition(":")
    if kind == "hf":
        return HubStore(rest.removeprefix("//").removesuffix(PUBLIC))
    if not rest.startswith("//"):
        return Store(str(Path(target).expanduser().absolute()))
    try:
        fsspec.get_filesystem_class(kind)
    except (ImportError, ValueError) as failure:
        raise UserError(f"--mirror {kind}://... cannot be opened: {failure}.") from failure
    return Store(target)


def fetch(store: Store, output_dir: Path, *, later_than: int = -1) -> bool:
    """Copy the newest verified checkpoint later than a step, and small files, to a run's folder.

    A killed fetch is completed by the next one, which keeps the files that it finds. status.json
    names the checkpoint before run.json makes the folder a run's, so a run without its checkpoint
    is noticed.

    Returns:
        False if the store has checkpoints later than the step and none passes verification.
    """
    root = output_dir / CHECKPOINTS
    steps = [step for step in reversed(store.steps()) if step > later_than]
    newest = -1
    # From the newest on, until one passes verification.
    for step in steps:
        if _fetch_step(store, step, staging_folder(root, step, "fetching")):
            newest = step
            break
    if steps and newest < 0:
        return False
    # status.json, run.json, checkpoint: a kill between any two leaves a folder that the next start
    # fetches again or recognizes as a run without its checkpoint.
    output_dir.mkdir(parents=True, exist_ok=True)
    status = json.loads(store.read(STATUS) or "{}")
    write_json(output_dir / STATUS, status | {"saved_step": newest})
    for name in (RUN, *_RECORDS):
        text = store.read(name)
        if text:
            with staged_file(output_dir / name) as partial:
                partial.write_text(text)
    if newest >= 0:
        # fsspec has not flushed them, and the rename must not reach the disk before their content.
        fetched = staging_folder(root, newest, "fetching")
        flush_files(fetched)
        publish_folder(fetched, checkpoint.step_folder(root, newest))
    return True


def _fetch_step(store: Store, step: int, target: Path) -> bool:
    """Copy a checkpoint. Returns whether it passes verification."""
    store.get(_path(step), target)
    try:
        checkpoint.verify(target)
    except checkpoint.DamagedCheckpoint as error:
        log.warning(
            "The copy of step %d on the mirror %s is damaged (%s).", step, store.name, error
        )
        shutil.rmtree(target, ignore_errors=True)
        return False
    return True


def _path(step: int) -> str:
    """A checkpoint's path in the store."""
    return checkpoint.step_folder(Path(CHECKPOINTS), step).as_posix()


def _write_small_files(output_dir: Path, target: Path) -> None:
    """Copy run.json, status.json and the run's records."""
    run = read_json(output_dir / RUN)
    if run:  # a damaged file must not replace the good copy
        write_json(target / RUN, run)
    for name in _RECORDS:
        if (output_dir / name).is_file():
            shutil.copyfile(output_dir / name, target / name)
        else:
            (target / name).touch()  # replaces another run's file
    # A new machine does not have the results, so the mirrored run must not appear finished. Nor may
    # its status name a checkpoint whose copy has been cut off.
    write_json(
        target / STATUS, read_json(output_dir / STATUS) | {"state": "running", "saved_step": -1}
    )


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn any error of a store's own library into an OSError of one line."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(redact(first_line(error))) from error
