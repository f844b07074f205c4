"""Saves a run's checkpoints on all ranks: when to save, which to keep, and what to do if the disk is full."""

import errno
import json
import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_qlora.checkpointing import checkpoint
from fsdp_qlora.checkpointing.progress import Progress
from fsdp_qlora.checkpointing.train_state import TrainState
from fsdp_qlora.errors import TrainingError
from fsdp_qlora.ranks.distributed import Ranks, gather_texts
from fsdp_qlora.storage.files import FileRecord, read_json, write_hashed_json

log = logging.getLogger("fsdp_qlora")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Saver:
    """Writes checkpoints of a run. Every rank calls each method; rank 0 decides and publishes.

    Args:
        root: the folder of the checkpoints.
        identity: of the run, stored in every checkpoint.
        save_total_limit: number of newest checkpoints to keep, in addition to the best by held-out loss.
        saved_step: the newest existing checkpoint, -1 for none.
        max_failing_seconds: how long saving may fail before the run ends.
    """

    def __init__(
        self,
        root: Path,
        state: TrainState,
        ranks: Ranks,
        *,
        identity: Mapping[str, Any],
        save_total_limit: int,
        saved_step: int = -1,
        max_failing_seconds: float = math.inf,
    ) -> None:
        self.root, self.state, self.ranks, self.identity = root, state, ranks, identity
        self.save_total_limit, self.saved_step = save_total_limit, saved_step
        self.max_failing_seconds = max_failing_seconds
        self.seconds = 0.0  # of the last save
        self._failing_since: float | None = None

    def save(self, progress: Progress) -> bool:
        """Publish a checkpoint of this step, unless there is one; returns whether there is one now.

        A disk that is full or fails is reported, and training may continue: earlier checkpoints are untouched.

        Raises:
            TrainingError: the parameters are not finite, or nothing could be saved for too long.
        """
        if self.saved_step == progress.step:
            self._prune()  # the previous start may have been killed before it did
            return True
        started = time.monotonic()
        self.state.check_finite()
        while (failure := self._try(progress)) is not None:
            if failure["freed"] is None:
                self._note_failure(progress.step, failure["reason"], failure["failing_seconds"])
                return False
            log.warning(
                "Step %d: %s. To make room, %s was deleted.", progress.step, failure["reason"], failure["freed"]
            )
        self.saved_step, self._failing_since = progress.step, None
        self.seconds = time.monotonic() - started
        self._prune()
        log.info("Checkpoint of step %d: %s", progress.step, checkpoint.step_folder(self.root, progress.step))
        return True

    def _note_failure(self, step: int, reason: str, failing_seconds: float) -> None:
        """Report that nothing was saved; end the run if that has lasted too long."""
        last = f"the last checkpoint is step {self.saved_step}" if self.saved_step >= 0 else "there is none yet"
        if failing_seconds > self.max_failing_seconds:
            raise TrainingError(
                f"Step {step}: no checkpoint could be saved for {failing_seconds / 60:.0f} minutes: {reason}. The run "
                f"ends, since its work would be lost; {last}. Make {self.root} writable, and the same command resumes."
            )
        log.warning("Step %d: no checkpoint was saved: %s. Training continues; %s.", step, reason, last)

    def _try(self, progress: Progress) -> dict[str, Any] | None:
        """Write and publish once; None, or how it failed on any rank, the same on every rank.

        reason: of the first rank that failed. freed: the checkpoint that has made room for another try, if one has.
        failing_seconds: since a save first failed, by rank 0's clock.
        """
        staging, failure = checkpoint.staging_folder(self.root, progress.step), None
        if self.ranks.is_rank_0:
            try:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
            except OSError as error:
                failure = self._describe(error)
        gather_texts("", self.ranks.device)  # waits for the folder
        part: dict[str, Any] = {}
        description: dict[str, Any] = {}
        try:
            files, description = self.state.write(staging)
            part = {name: record._asdict() for name, record in files.items()}
        except OSError as error:
            failure = failure or self._describe(error)
        parts = gather_texts(json.dumps([failure, part]), self.ranks.device)
        outcome = self._publish(staging, progress, description, parts) if self.ranks.is_rank_0 else None
        found: dict[str, Any] | None = json.loads(gather_texts(json.dumps(outcome), self.ranks.device)[0])
        return found

    def _publish(
        self, staging: Path, progress: Progress, description: Mapping[str, Any], parts: Sequence[str]
    ) -> dict[str, Any] | None:
        """Publish what all ranks have written, on rank 0, or make room for another try; see `_try`."""
        failures: list[tuple[bool, str]] = []
        files: dict[str, FileRecord] = {}
        for failure, records in map(json.loads, parts):
            failures += filter(None, [failure])
            files |= {name: FileRecord(**record) for name, record in records.items()}
        if not failures:
            try:
                content = {"progress": progress.to_dict(), "tensors": description, "about": self.identity}
                files[checkpoint.STATE] = write_hashed_json(staging / checkpoint.STATE, content)
                checkpoint.publish_checkpoint(staging, checkpoint.step_folder(self.root, progress.step), files)
                return None
            except OSError as error:
                failures.append(self._describe(error))
        shutil.rmtree(staging, ignore_errors=True)
        freed = delete_oldest(self.root) if any(is_full for is_full, _ in failures) else None
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
