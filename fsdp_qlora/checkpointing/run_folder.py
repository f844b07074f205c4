"""The folder of one run: who may use it, where the run in it starts, and its description."""

import contextlib
import fnmatch
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_qlora.checkpointing import resume
from fsdp_qlora.checkpointing.layout import (
    CHECKPOINTS,
    FETCHED,
    RUN,
    RUN_FILES,
    STATUS,
    is_leftover,
    locked,
    refuse_links,
)
from fsdp_qlora.checkpointing.publishing import publish_files
from fsdp_qlora.checkpointing.resume import Start
from fsdp_qlora.checkpointing.same_run import StartRequest
from fsdp_qlora.distributed import Ranks, first_failure, gather_texts
from fsdp_qlora.errors import RunStopped, TrainingError, UserError
from fsdp_qlora.metrics.sinks import METRICS_FILE, SAMPLES_FILE
from fsdp_qlora.storage.files import why_not_writable, write_json


class RunFolder:
    """The folder of one run. Rank 0 alone writes into it."""

    def __init__(self, path: Path, ranks: Ranks, request: StartRequest) -> None:
        self.path, self.ranks, self.request = path, ranks, request

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @contextlib.contextmanager
    def claimed(self) -> Iterator["RunFolder"]:
        """Refuse a folder that holds something else, before any work, and keep other runs out of it.

        Raises:
            UserError: the folder is in use, cannot be written, or holds something other than this run.
        """
        if self.ranks.rank < self.ranks.local_world_size:  # the ranks of rank 0's machine see the same folder
            refuse_links(self.path)
            continues = resume.continues(self.path, self.request)
            check_usable(self.path, overwrite=self.request.overwrite or continues)
            resume.check_options(self.path, self.request)
        with locked(self.path) if self.ranks.is_rank_0 else contextlib.nullcontext():
            yield self

    def check_keeps_model(self, model_folder: Path) -> None:
        """Refuse to save the result in the model's folder, which would overwrite the model.

        Raises:
            UserError: the two folders are the same.
        """
        if self.path.resolve() == model_folder.resolve():
            raise UserError(f"output_dir {self.path} is the folder of the model itself. Give another folder.")

    def check_contents(self, facts: Mapping[str, Any]) -> None:
        """Refuse another run's folder before the weights are downloaded. facts: see resume.check_contents.

        Raises:
            UserError: the same on all ranks of rank 0's machine.
        """
        if self.ranks.rank < self.ranks.local_world_size:
            resume.check_contents(self.path, facts, self.request)

    def choose_start(self, identity: Mapping[str, Any]) -> Start:
        """Decide on rank 0 where the run starts, and tell all ranks. Called on every rank, while rank 0 has the lock.

        Args and Raises: as for resume.choose_start.
        """
        answer: dict[str, Any] = {}
        if self.ranks.is_rank_0:
            try:
                answer = {"start": asdict(resume.choose_start(self.path, identity, self.request))}
            except UserError as error:
                answer = {"error": str(error)}
            except OSError as error:
                answer = {"error": f"The run's folder cannot be used: {error}."}
            except RunStopped as stopped:
                answer = {"stopped": [stopped.ending.state, str(stopped)]}
        answer = json.loads(gather_texts(json.dumps(answer), self.ranks.device)[0])
        if "error" in answer:
            raise UserError(answer["error"])
        if "stopped" in answer:
            raise RunStopped(*answer["stopped"])
        return Start(**answer["start"])

    def prepare(self, files: Mapping[str, str], identity: Mapping[str, Any], *, keep_run: bool) -> None:
        """Create the folder, remove an earlier run's results, and write `files` (name -> text). Every rank calls it.

        Called when the model is loaded and verified: a run that cannot load removes nothing.

        Args:
            identity: for run.json, which is written first and makes the folder this run's.
            keep_run: remove nothing, since the run in the folder continues.
        Raises:
            UserError: the folder cannot be written; the same on every rank.
        """
        failure = None
        if self.ranks.is_rank_0:
            try:
                self._prepare(files, identity, keep_run=keep_run)
            except (OSError, TrainingError) as error:
                failure = f"output_dir {self.path} cannot be written: {error}"
        if self.ranks.world_size > 1:
            failure = first_failure(failure, self.ranks.device)
        if failure:
            raise UserError(failure)

    def _prepare(self, files: Mapping[str, str], identity: Mapping[str, Any], *, keep_run: bool) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if not keep_run:
            _remove_run(self.path)
        write_json(self.path / RUN, {**identity, "started_from": self.request.resume})
        publish_files(self.path, lambda folder: [(folder / name).write_text(text) for name, text in files.items()])


def _remove_run(output_dir: Path) -> None:
    """Remove what a run leaves in its folder; of a link the link alone."""
    for path in list(output_dir.iterdir()):
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in RUN_FILES):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def check_usable(path: Path, *, overwrite: bool) -> None:
    """Refuse a folder that is in other use, before any work.

    Raises:
        UserError: the folder is not empty and may not be overwritten, or cannot be created.
    """
    if reason := why_not_writable(path):
        raise UserError(f"output_dir {path}: {reason}. Give another folder.")
    entries = list(path.iterdir()) if path.is_dir() else []
    names, leftovers = {entry.name for entry in entries}, {entry.name for entry in entries if is_leftover(entry)}
    # A start was killed while it moved these here from its mirror; the mirror still has them.
    moving = {CHECKPOINTS, METRICS_FILE, SAMPLES_FILE, STATUS} if FETCHED in names and RUN not in names else set()
    is_used = bool(names - leftovers - moving)
    if is_used and not overwrite:
        raise UserError(
            f"output_dir {path} is not empty: it may hold the results of another run. Give another folder, "
            "or --overwrite_output_dir true to replace them."
        )
