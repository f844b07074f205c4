"""Saves a run's checkpoints on all ranks, large ones in the background, and deletes old ones.

A large state is copied to the host's memory and written by a thread on each rank. In every step the
ranks exchange whether they are still writing; when none is, all publish the checkpoint after the
same step.
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
from fsdp_qlora.checkpoint.progress import Progress, measure_of
from fsdp_qlora.checkpoint.train_state import Tensors, TrainState
from fsdp_qlora.distributed.process_group import all_gather_strings
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.utils.errors import TrainingError, UserError
from fsdp_qlora.utils.files import FileRecord, read_json, write_hashed_json
from fsdp_qlora.utils.run_files import CHECKPOINTS

log = logging.getLogger("fsdp_qlora")

# The disk, the user's quota, and the largest file that the file system or a limit allows.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
MIN_BACKGROUND_BYTES = 2**26  # a smaller state is written in less time than a step takes
_Failure = tuple[bool, str]  # whether the disk is full, and the error's text
_Part = tuple[_Failure | None, dict[str, Any]]  # a rank's failure, and the records of its files


@dataclass
class _Save:
    """A checkpoint being written.

    part: this rank's result. made_progress: whether a tensor was written since the last beat.
    """

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
    """Writes checkpoints of a run. Every rank calls each method; rank 0 decides and publishes.

    root: the folder of the checkpoints. identity: content of run.json, stored in every checkpoint.
    save_total_limit: number of newest checkpoints to keep, in addition to the best by evaluation
    loss. saved_step: step of the newest checkpoint, -1 for none. saved_eval_step: step of the last
    evaluation in it. max_failing_seconds: how long saving may fail before the run ends. seconds:
    duration of the last save, until it was published.
    """

    root: Path
    state: TrainState
    ranks: Ranks
    identity: Mapping[str, Any]
    save_total_limit: int
    saved_step: int = -1
    saved_eval_step: int = -1
    max_failing_seconds: float = math.inf
    seconds: float = 0.0
    _failing_since: float | None = None
    _save: _Save | None = None  # the checkpoint being written
    _thread: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 1, thread_name_prefix="checkpoint")
    )

    def save(self, progress: Progress, *, until_published: bool = True) -> bool:
        """Save a checkpoint of this step, unless it exists. Returns whether it exists now.

        One without the last evaluation is replaced, as it could not be the best one: a stop in an
        evaluation leaves it, and the resumed run evaluates its step.

        A disk error is reported, and training may continue: earlier checkpoints are untouched. A
        save in the background is finished first, so checkpoints appear in order.

        Args:
            until_published: wait for the checkpoint. Otherwise a large state is copied to the
                host's memory, if there is room, and written by a thread; `finish` publishes it.
        Raises:
            TrainingError: the parameters are not finite, or saving has failed for too long.
        """
        self.finish()
        is_evaluated = self.saved_eval_step == progress.last_eval_step
        if self.saved_step == progress.step and is_evaluated:
            # A killed start may have published this checkpoint without deleting an old one.
            self._prune()
            return True
        started = time.monotonic()
        # Before anything is written: with NaN in it, the newest checkpoint could not be resumed.
        self.state.check_finite()
        staging = checkpoint.staging_folder(self.root, progress.step)
        failure = None
        if self.ranks.is_rank_0:
            try:
                # A killed start may have left one.
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
            except OSError as error:
                # Not raised: the other ranks are on their way to the next collective. The failure
                # goes to all with the parts.
                failure = self._describe(error)
        # Called even if until_published: it is a collective, after which rank 0 has created the
        # folder.
        in_background = self._fits_in_memory() and not until_published
        contents, description = self.state.contents()
        if in_background:
            # Training goes on and changes the parameters, so all values are copied now.
            contents = {name: content.copied() for name, content in contents.items()}
        save = _Save(
            progress.to_dict(), staging, contents, description, started, in_background=in_background
        )
        # Raises if a rank is lost meanwhile: then there is nothing to wait for.
        self._start(save, failure)
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
        """Whether `finish` has a save to publish, the same on every rank."""
        return self._save is not None

    def finish(self) -> None:
        """Wait for a background save and publish it. Collective, if there is one.

        On a full disk, an old checkpoint is deleted, and the new one written again.
        """
        save = self._save
        if save is None:
            return
        step = save.progress["step"]
        # All ranks get the same outcome from rank 0, and so make as many attempts. It ends: each
        # attempt has deleted a checkpoint, and the newest one is never deleted.
        while (failure := self._wait_and_publish(save)) and failure["freed"]:
            log.warning(
                "Step %d: %s. %s was deleted to make room.",
                step,
                failure["reason"],
                failure["freed"],
            )
            if not save.in_background:  # the iterators of the first attempt are exhausted
                save.contents, _ = self.state.contents()
            self._start(save)
        self._save = None
        if failure:
            self._note_failure(step, failure["reason"], failure["failing_seconds"])
            return
        self.saved_step = step
        self.saved_eval_step = save.progress["last_eval_step"]
        self._failing_since = None
        self.seconds = time.monotonic() - save.started
        self._prune()
        log.info("Checkpoint of step %d: %s", step, checkpoint.step_folder(self.root, step))

    def _wait_and_publish(self, save: _Save) -> dict[str, Any] | None:
        """Wait until all ranks have written their parts. Returns `_publish`'s result, on all."""
        # The thread that writes must not beat by itself: the heartbeat is the training thread's. A
        # write that hangs makes no progress, and the watchdog ends the run.
        while not wait([save.part], timeout=1).done:
            if save.made_progress:
                save.made_progress = False
                self.state.beat()
        # Every part is on disk when the gather returns, so rank 0 may publish. The second gather
        # keeps all ranks here until it has.
        parts = all_gather_strings(json.dumps(save.part.result()), self.ranks.device)
        outcome = self._publish(save, parts) if self.ranks.is_rank_0 else None
        failure: dict[str, Any] | None = json.loads(
            all_gather_strings(json.dumps(outcome), self.ranks.device)[0]
        )
        return failure

    def close(self) -> None:
        """Publish a save in the background that rank 0 writes alone.

        After a failed run other ranks may be gone, so nothing is collective here.
        """
        save = self._save
        self._save = None
        if save is not None and self.ranks.is_rank_0 and not save.description["is_sharded"]:
            with contextlib.suppress(Exception):  # the failure of the run is reported instead
                self._publish(save, [json.dumps(save.part.result())])
        self._thread.shutdown()

    def _fits_in_memory(self) -> bool:
        """Whether the state is large enough for a thread, and the host has room. Collective."""
        # Decided from all ranks' numbers, since all must take the same way.
        local = json.dumps([self.state.num_bytes, psutil.virtual_memory().available])
        sizes = []
        free = []
        for text in all_gather_strings(local, self.ranks.device):
            rank_bytes, rank_free = json.loads(text)
            sizes.append(rank_bytes)
            free.append(rank_free)
        # As if all ranks were on one machine, whose memory they share.
        return MIN_BACKGROUND_BYTES <= sum(sizes) < min(free) / 2

    def _start(self, save: _Save, failure: _Failure | None = None) -> None:
        """Write this rank's part, in the background in a thread."""
        if save.in_background and not failure:
            save.part = self._thread.submit(self._write, save, failure)
        else:
            part = self._write(save, failure)
            save.part = Future()
            save.part.set_result(part)

    def _write(self, save: _Save, failure: _Failure | None) -> _Part:
        def counted(values: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
            for value in values:
                save.made_progress = True
                yield value

        contents = {
            name: content._replace(values=counted(content.values))
            for name, content in save.contents.items()
        }
        # Also after a failure: taking the values may be collective, and other ranks take theirs.
        try:
            files = self.state.write(save.staging, contents)
            return failure, {name: record._asdict() for name, record in files.items()}
        except OSError as error:
            return failure or self._describe(error), {}

    def _note_failure(self, step: int, reason: str, failing_seconds: float) -> None:
        """Report a failed save. End the run if saving has failed for too long."""
        last = "there is none yet"
        if self.saved_step >= 0:
            last = f"the last checkpoint is step {self.saved_step}"
        if failing_seconds > self.max_failing_seconds:
            raise TrainingError(
                f"Step {step}: no checkpoint could be saved for {failing_seconds / 60:.0f} "
                f"minutes: {reason}. The run ends, since its work would be lost; {last}. Make "
                f"{self.root} writable, and the same command resumes."
            )
        log.warning(
            "Step %d: no checkpoint was saved: %s. Training continues; %s.", step, reason, last
        )

    def _publish(self, save: _Save, parts: Sequence[str]) -> dict[str, Any] | None:
        """Publish the parts of all ranks, or make room for another attempt. For rank 0.

        Returns:
            None if the checkpoint was published. Otherwise reason: the error of the first rank that
            failed; freed: name of the deleted checkpoint, if any; failing_seconds: time since the
            first failed save.
        """
        failures: list[_Failure] = []
        files: dict[str, FileRecord] = {}
        for failure, records in map(json.loads, parts):
            if failure:
                failures.append(failure)
            files |= {name: FileRecord(**record) for name, record in records.items()}
        if not failures:
            try:
                content = {
                    "progress": save.progress,
                    "tensors": save.description,
                    "about": self.identity,
                }
                # Order: the ranks' tensors (written and flushed), state.json, the manifest with the
                # hashes of all, the rename. Until the rename nothing is visible to a reader.
                files[checkpoint.STATE] = write_hashed_json(
                    save.staging / checkpoint.STATE, content
                )
                step = save.progress["step"]
                target = checkpoint.step_folder(self.root, step)
                checkpoint.publish_checkpoint(
                    save.staging, target, files, replaces=step == self.saved_step
                )
                return None
            except OSError as error:
                failures.append(self._describe(error))
        # First, as it is the room that the next attempt needs, too.
        shutil.rmtree(save.staging, ignore_errors=True)
        freed = delete_oldest(self.root) if any(full for full, _ in failures) else None
        if freed:
            with contextlib.suppress(OSError):  # the next attempt fails then, and reports it
                save.staging.mkdir()
        self._failing_since = self._failing_since or time.monotonic()
        failing_seconds = time.monotonic() - self._failing_since
        return {"reason": failures[0][1], "freed": freed, "failing_seconds": failing_seconds}

    def _describe(self, error: OSError) -> _Failure:
        return is_full(error), f"{error.filename or self.root}: {error.strerror or error}"

    # --- deleting old checkpoints ---

    def _prune(self) -> None:
        # Only after a newer one is published: at no time is there none.
        folders = checkpoint.published(self.root) if self.ranks.is_rank_0 else {}
        keep = {*list(folders)[-self.save_total_limit :], best_step(folders)}
        for step, folder in folders.items():
            # One whose state cannot be read may be the best.
            if step not in keep and read_json(folder / checkpoint.STATE):
                try:
                    checkpoint.remove(folder)
                except OSError as error:
                    log.warning("%s could not be deleted: %s", folder, error.strerror)


def delete_oldest(root: Path) -> str | None:
    """Delete a quarantined checkpoint, or else the oldest one; the best one last, the newest never.

    The best one by evaluation loss. Returns the name of what was deleted.
    """
    for folder in checkpoint.quarantined(root):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return folder.name
    folders = checkpoint.published(root)
    best = best_step(folders)
    for step in sorted(list(folders)[:-1], key=lambda step: (step == best, step)):
        with contextlib.suppress(OSError):
            checkpoint.remove(folders[step])
            return folders[step].name
    return None


def is_full(error: Exception) -> bool:
    """Whether the disk or the quota is full."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    # The safetensors library, in Rust, reports the system's error as text.
    return any(f"os error {code}" in str(error) for code in _FULL)


def best_step(folders: Mapping[int, Path]) -> int | None:
    """The step of the checkpoint with the lowest loss or highest score, as the run chooses.

    Among those evaluated at their own step.
    """
    values: dict[int, float] = {}
    for step, folder in folders.items():
        progress = read_json(folder / checkpoint.STATE).get("progress", {})
        value = measure_of(progress, step)
        if value is not None:
            values[step] = value
    return min(values, key=lambda step: values[step], default=None)


def find_checkpoint(source: Path, *, best: bool) -> Path:
    """Find a checkpoint by its own folder, or the newest or best one by the folder of its run.

    Raises:
        UserError: there is none.
    """
    if (source / checkpoint.STATE).is_file() or (source / checkpoint.MANIFEST).is_file():
        return source
    if not source.is_dir():
        raise UserError(
            f"{source}: there is no such folder. Give the folder of a checkpoint or run."
        )
    root = source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source
    folders = checkpoint.published(root)
    if not folders:
        raise UserError(f"{source} has no checkpoint. Give the folder of a checkpoint or run.")
    step = best_step(folders) if best else max(folders)
    if step is None:
        raise UserError(
            f"{source}: no checkpoint was evaluated, so none is known to be the best. "
            "Leave out --best."
        )
    return folders[step]
