"""Saves a run's checkpoints on all ranks, large ones in the background, and decides which to keep.

A large state is copied to the host's memory and written by a thread on each rank. The ranks tell each other with the
numbers of every step whether they are still writing; then all publish it after the same step.
"""

import contextlib
import errno
import json
import logging
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.checkpoint.progress import Progress
from fsdp_qlora.checkpoint.train_state import Tensors, TrainState
from fsdp_qlora.distributed.process_group import all_gather_strings
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.utils.errors import TrainingError
from fsdp_qlora.utils.files import FileRecord, read_json, write_hashed_json

log = logging.getLogger("fsdp_qlora")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
MIN_BACKGROUND_BYTES = 2**26  # a smaller state is written in less time than a step takes
_Part = tuple[tuple[bool, str] | None, dict[str, Any]]  # a rank's failure, and the records of its files


@dataclass
class _Save:
    """A checkpoint being written. part: of this rank. made_progress: another tensor since the last heartbeat."""

    progress: dict[str, Any]
    staging: Path
    contents: Mapping[str, Tensors]
    description: Mapping[str, Any]
    started: float
    in_background: bool
    part: "Future[_Part]" = field(default_factory=Future)
    made_progress: bool = False


@dataclass(eq=False)
class Saver:
    """Writes checkpoints of a run. Every rank calls each method; rank 0 decides and publishes."""

    root: Path
    """The folder of the checkpoints."""
    state: TrainState
    ranks: Ranks
    identity: Mapping[str, Any]
    """The run's, stored in every checkpoint."""
    save_total_limit: int
    """Newest checkpoints to keep, in addition to the best by held-out loss."""
    saved_step: int = -1
    """The newest existing checkpoint, -1 for none."""
    max_failing_seconds: float = math.inf
    """How long saving may fail before the run ends."""
    seconds: float = 0.0
    """The duration of the last save, until it was published."""
    _failing_since: float | None = None
    _save: _Save | None = None  # the one that is being written
    _thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, thread_name_prefix="checkpoint"))

    def save(self, progress: Progress, *, until_published: bool = True) -> bool:
        """Save a checkpoint of this step, unless there is one; returns whether there is one now.

        A disk that is full or fails is reported, and training may continue: earlier checkpoints are untouched. The save
        before is finished first, so checkpoints appear in order.

        Args:
            until_published: wait for it. Otherwise a large state is copied to the host's memory, if that has room, and
                written by a thread; `finish` publishes it.
        Raises:
            TrainingError: the parameters are not finite, or nothing could be saved for too long.
        """
        self.finish()
        if self.saved_step == progress.step:
            self._prune()  # the previous start may have been killed before it did
            return True
        started = time.monotonic()
        self.state.check_finite()
        staging, failure = checkpoint.staging_folder(self.root, progress.step), None
        if self.ranks.is_rank_0:
            try:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
            except OSError as error:
                failure = self._describe(error)
        in_background = self._fits_in_memory() and not until_published  # waits for the folder
        contents, description = self.state.contents()
        if in_background:
            contents = {name: content.copied() for name, content in contents.items()}
        save = _Save(progress.to_dict(), staging, contents, description, started, in_background=in_background)
        self._start(save, failure)  # raises if a rank is lost meanwhile: then there is nothing to wait for
        self._save = save
        if in_background:
            return False
        self.finish()
        return self.saved_step == progress.step

    @property
    def is_writing(self) -> bool:
        """Whether this rank's part of a save is still being written."""
        return self._save is not None and not self._save.part.done()

    @property
    def is_unfinished(self) -> bool:
        """Whether there is a save to finish, the same on every rank."""
        return self._save is not None

    def finish(self) -> None:
        """Wait for a save that is being written, and publish it; write it again where deleting another makes room."""
        if (save := self._save) is None:
            return
        step = save.progress["step"]
        while (failure := self._wait_and_publish(save)) and failure["freed"]:
            log.warning("Step %d: %s. To make room, %s was deleted.", step, failure["reason"], failure["freed"])
            if not save.in_background:  # its values have been taken
                save.contents, _ = self.state.contents()
            self._start(save)
        self._save = None
        if failure:
            self._note_failure(step, failure["reason"], failure["failing_seconds"])
            return
        self.saved_step, self._failing_since, self.seconds = step, None, time.monotonic() - save.started
        self._prune()
        log.info("Checkpoint of step %d: %s", step, checkpoint.step_folder(self.root, step))

    def _wait_and_publish(self, save: _Save) -> dict[str, Any] | None:
        """Wait until all ranks have written their parts; returns what `_publish` does, on every rank."""
        while not wait([save.part], timeout=1).done:
            if save.made_progress:
                save.made_progress = False
                self.state.beat()
        parts = all_gather_strings(json.dumps(save.part.result()), self.ranks.device)
        outcome = self._publish(save, parts) if self.ranks.is_rank_0 else None
        failure: dict[str, Any] | None = json.loads(all_gather_strings(json.dumps(outcome), self.ranks.device)[0])
        return failure

    def close(self) -> None:
        """Publish what is still being written, if no other rank has a part of it: the run has failed."""
        save, self._save = self._save, None
        if save is not None and self.ranks.is_rank_0 and not save.description["is_sharded"]:
            with contextlib.suppress(Exception):  # what the run has failed of is reported
                self._publish(save, [json.dumps(save.part.result())])
        self._thread.shutdown()

    def _fits_in_memory(self) -> bool:
        """Whether the state is so large that a thread should write it, and the host's memory has room for a copy."""
        own = json.dumps([self.state.num_bytes, psutil.virtual_memory().available])
        sizes, free = zip(*map(json.loads, all_gather_strings(own, self.ranks.device)), strict=True)
        return MIN_BACKGROUND_BYTES <= sum(sizes) < min(free) / 2  # ranks of one machine share its memory

    def _start(self, save: _Save, failure: tuple[bool, str] | None = None) -> None:
        """Write this rank's part, in a thread if it may take its time."""
        if save.in_background and not failure:
            save.part = self._thread.submit(self._write, save, failure)
        else:
            part, save.part = self._write(save, failure), Future()
            save.part.set_result(part)

    def _write(self, save: _Save, failure: tuple[bool, str] | None) -> _Part:
        def counted(values: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
            for value in values:
                save.made_progress = True
                yield value

        contents = {name: content._replace(values=counted(content.values)) for name, content in save.contents.items()}
        try:
            files = self.state.write(save.staging, contents)
            return failure, {name: record._asdict() for name, record in files.items()}
        except OSError as error:
            return failure or self._describe(error), {}

    def _note_failure(self, step: int, reason: str, failing_seconds: float) -> None:
        """Report that nothing was saved; end the run if that has lasted too long."""
        last = f"the last checkpoint is step {self.saved_step}" if self.saved_step >= 0 else "there is none yet"
        if failing_seconds > self.max_failing_seconds:
            raise TrainingError(
                f"Step {step}: no checkpoint could be saved for {failing_seconds / 60:.0f} minutes: {reason}. The run "
                f"ends, since its work would be lost; {last}. Make {self.root} writable, and the same command resumes."
            )
        log.warning("Step %d: no checkpoint was saved: %s. Training continues; %s.", step, reason, last)

    def _publish(self, save: _Save, parts: Sequence[str]) -> dict[str, Any] | None:
        """Publish what all ranks have written, or make room for another try. For rank 0.

        Returns:
            None if it was published, else reason: of the first rank that failed; freed: the checkpoint that was
            deleted, if one could be; failing_seconds: since a save first failed.
        """
        failures: list[tuple[bool, str]] = []
        files: dict[str, FileRecord] = {}
        for failure, records in map(json.loads, parts):
            failures += filter(None, [failure])
            files |= {name: FileRecord(**record) for name, record in records.items()}
        if not failures:
            try:
                content = {"progress": save.progress, "tensors": save.description, "about": self.identity}
                files[checkpoint.STATE] = write_hashed_json(save.staging / checkpoint.STATE, content)
                target = checkpoint.step_folder(self.root, save.progress["step"])
                checkpoint.publish_checkpoint(save.staging, target, files)
                return None
            except OSError as error:
                failures.append(self._describe(error))
        shutil.rmtree(save.staging, ignore_errors=True)
        freed = delete_oldest(self.root) if any(is_full for is_full, _ in failures) else None
        if freed:
            with contextlib.suppress(OSError):  # the next try says so
                save.staging.mkdir()
        self._failing_since = self._failing_since or time.monotonic()
        failing_seconds = time.monotonic() - self._failing_since
        return {"reason": failures[0][1], "freed": freed, "failing_seconds": failing_seconds}

    def _describe(self, error: OSError) -> tuple[bool, str]:
        """Whether an error says that a disk is full, and its words."""
        return is_full(error), f"{error.filename or self.root}: {error.strerror or error}"

    # --- deleting old checkpoints ---

    def _prune(self) -> None:
        folders = checkpoint.published(self.root) if self.ranks.is_rank_0 else {}
        keep = {*list(folders)[-self.save_total_limit :], best_step(folders)}
        for step, folder in folders.items():
            if step not in keep and read_json(folder / checkpoint.STATE):  # what cannot be read now may be the best
                try:
                    checkpoint.remove(folder)
                except OSError as error:
                    log.warning("%s could not be deleted: %s", folder, error.strerror)


def delete_oldest(root: Path) -> str | None:
    """Delete a quarantined checkpoint, else the oldest one, the best by held-out loss last and the newest never."""
    for folder in checkpoint.quarantined(root):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return folder.name
    folders = checkpoint.published(root)
    best = best_step(folders)
    older = sorted(list(folders)[:-1], key=lambda step: (step == best, step))
    for step in older:
        try:
            checkpoint.remove(folders[step])
        except OSError:
            continue
        return folders[step].name
    return None


def is_full(error: Exception) -> bool:
    """Whether there was no space for a file. The safetensors library reports the system's error as text."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(f"os error {number}" in str(error) for number in _FULL)


def best_step(folders: Mapping[int, Path]) -> int | None:
    """The checkpoint with the lowest held-out loss, among those evaluated at their own step."""
    losses = {step: loss for step, folder in folders.items() if (loss := _eval_loss(folder, step)) is not None}
    return min(losses, key=lambda step: losses[step], default=None)


def _eval_loss(folder: Path, step: int) -> float | None:
    progress = read_json(folder / checkpoint.STATE).get("progress", {})
    loss = progress.get("eval_loss") if progress.get("last_eval_step") == step else None
    return loss if loss is not None and math.isfinite(loss) else None
