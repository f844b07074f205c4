"""Decides where a run starts: at step 0, or at the newest verified checkpoint of the same run."""

import contextlib
import dataclasses
import json
import logging
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.checkpoint.checkpoint import DamagedCheckpoint
from fsdp_qlora.checkpoint.from_mirror import copied_run, take_from_mirror
from fsdp_qlora.checkpoint.mirror import Store
from fsdp_qlora.checkpoint.result import publish_with_room
from fsdp_qlora.checkpoint.run_folder import (
    OR_START_OVER,
    StartRequest,
    check_usable,
    errors_explained,
    find_differences,
    is_finished,
    is_run,
    locked,
    read_run,
    read_status,
    refuse,
    remove_run,
)
from fsdp_qlora.checkpoint.start import Start
from fsdp_qlora.data.batches import schedule
from fsdp_qlora.distributed.process_group import all_gather_strings, raise_on_all_ranks
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.utils.errors import ENDINGS, RunStopped, TrainingError, UserError, how_it_ends
from fsdp_qlora.utils.files import read_json, write_json
from fsdp_qlora.utils.redact import redact
from fsdp_qlora.utils.result_files import result_error
from fsdp_qlora.utils.run_files import CHECKPOINTS, RUN, STATUS

log = logging.getLogger("fsdp_qlora")

_MAX_FAILED_STARTS = 3  # without progress: the first start and two restarts
_NOT_SEEN = (
    "Rank {rank}'s machine does not see {path}, the output_dir of rank 0. Every rank writes its "
    "part of a checkpoint when whole modules are trained, or with an 8-bit optimizer: give an "
    "--output_dir on a file system that all machines share, or train an adapter without "
    "--modules_to_save and with another --optimizer."
)
# States of starts that ended without a request. A start that was killed leaves "running": nothing
# could write how it ended.
_FAILED = ("running", "failed", "out_of_memory", "hung")


class RunFolder:
    """The folder of the run that is about to start. Only rank 0 writes into it.

    mirror: a store with its copies, used if the folder is empty. identity: as for `choose_start`,
    from then on.
    """

    def __init__(
        self, path: Path, ranks: Ranks, request: StartRequest, mirror: Store | None = None
    ) -> None:
        self.path = path
        self.ranks = ranks
        self.request = request
        self.mirror = mirror
        self.identity: Mapping[str, Any] = {}

    @contextlib.contextmanager
    def claimed(self) -> Iterator["RunFolder"]:
        """Lock the folder against other runs.

        Refuses it if it is in use, or holds something else than this run.
        """
        if self._is_on_this_machine:
            origin = self.request.origin
            if origin is not None and not origin.is_dir():
                raise UserError(
                    f"--resume {origin}: there is no such folder. Give a checkpoint's or a run's "
                    "folder, auto or off."
                )
            with errors_explained(self.path):
                check_usable(
                    self.path,
                    overwrite=self.request.overwrite or _continues(self.path, self.request),
                )
        # Options are compared at once; the contents only when they are known, in `check_contents`.
        self._refuse_another_run({})
        with locked(self.path) if self.ranks.is_rank_0 else contextlib.nullcontext():
            yield self

    @property
    def _is_on_this_machine(self) -> bool:
        """Whether this rank is on rank 0's machine, and so sees the same folder."""
        return self.ranks.rank < self.ranks.local_world_size

    def _refuse_another_run(self, facts: Mapping[str, Any]) -> None:
        """Refuse the folder's run if it has other options or facts.

        The message names each with both values.
        """
        if (
            self._is_on_this_machine
            and self.request.resume == "auto"
            and not self.request.overwrite
        ):
            with errors_explained(self.path):
                if not is_run(self.path):
                    return
                changes = find_differences(read_run(self.path), facts, self.request)
                if changes:
                    refuse(self.path, changes)

    def check_contents(self, facts: Mapping[str, Any], model_folder: Path) -> None:
        """Refuse the model's own folder, and another run's before weights are there.

        facts: those that are known without weights.
        """
        if self.path.resolve() == model_folder.resolve():
            raise UserError(
                f"output_dir {self.path} is the folder of the model itself. Give another folder."
            )
        self._refuse_another_run(facts)

    def choose_start(self, identity: Mapping[str, Any]) -> Start:
        """Decide on rank 0 where the run starts, and send the decision to all ranks. Collective;
        rank 0 has the lock.

        Args:
            identity: this run's options, facts (see FACTS), world_size and global_batch_size.
        Raises:
            UserError, RunStopped: see the function `choose_start`; the same error on all ranks.
        """
        # The other ranks wait in the collective below, so an error is sent there, too: raised on
        # rank 0 alone it would leave them waiting.
        answer: dict[str, Any] = {}
        self.identity = identity
        if self.ranks.is_rank_0:
            try:
                with errors_explained(self.path):
                    answer = {"start": dataclasses.asdict(choose_start(self))}
            except (UserError, RunStopped) as error:
                answer = {"ending": how_it_ends(error).state, "message": str(error)}
        answer = json.loads(all_gather_strings(json.dumps(answer), self.ranks.device)[0])
        if "start" in answer:
            return Start(**answer["start"])
        if answer["ending"] == "bad_input":
            raise UserError(answer["message"])
        raise RunStopped(answer["ending"], answer["message"])

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """How a stored run differs from this one."""
        return find_differences(stored, self.identity["facts"], self.request)

    def prepare(
        self,
        files: Mapping[str, str],
        identity: Mapping[str, Any],
        *,
        keep_run: bool,
        all_write: bool = False,
    ) -> None:
        """Create the folder, remove an earlier run's results, and write `files` (name -> text).

        Called on every rank.

        Called when the model is loaded and verified: a run that cannot load removes nothing.

        Args:
            identity: content of run.json, which is written first and marks the folder as this
                run's.
            keep_run: remove nothing, since the run in the folder continues.
            all_write: each rank will write its part of a checkpoint, so every machine must see the
                folder.
        """
        with raise_on_all_ranks(UserError, self.ranks.device):
            if self.ranks.is_rank_0:
                try:
                    self.path.mkdir(parents=True, exist_ok=True)
                    if not keep_run:
                        remove_run(self.path)
                    # First of all files: if the process dies here, the next start finds its run.
                    write_json(
                        self.path / RUN, dict(identity) | {"started_from": self.request.resume}
                    )
                    publish_with_room(
                        self.path,
                        lambda into: [(into / name).write_text(files[name]) for name in files],
                    )
                except (OSError, TrainingError) as error:
                    raise UserError(f"output_dir {self.path} cannot be written: {error}") from error
        # Rank 0 has written run.json in the block above, which ends with a collective: a rank that
        # does not find it is on another disk.
        with raise_on_all_ranks(UserError, self.ranks.device):
            if all_write and read_json(self.path / RUN).get("run_id") != identity["run_id"]:
                raise UserError(_NOT_SEEN.format(rank=self.ranks.rank, path=self.path))


def _continues(output_dir: Path, request: StartRequest) -> bool:
    """Whether the options ask for resuming the folder's own run."""
    if not is_run(output_dir):
        return False
    if request.resume == "auto" or _has_started(output_dir, request):
        return True
    if request.origin is None:
        return False
    # --resume names the run's own folder, or a checkpoint in it.
    origin = request.origin.resolve()
    return output_dir.resolve() in (origin, *origin.parents)


def choose_start(run: RunFolder) -> Start:
    """Decide where the run starts. Called by rank 0, which holds the folder's lock.

    Raises:
        UserError: the folder holds another run, or none of its checkpoints passes verification.
        RunStopped: an unattended run has been restarted several times without progress.
    """
    request = run.request
    mirror = run.mirror
    copied = copied_run(mirror, run.path)
    has_started = _has_started(run.path, request)
    continues = has_started or request.resume == "auto"
    if mirror and copied and continues:
        take_from_mirror(mirror, copied, run.path, request, run.identity["facts"])
    if has_started:
        log.info(
            "The run in %s continues: a previous start has begun at --resume %s.",
            run.path,
            request.resume,
        )
    if continues:
        # A restart of the attempt that has replaced another run must not replace its own.
        start = _resume_folder(run, overwrite=request.overwrite and not has_started)
    elif request.origin:
        start = _start_from(run, request.origin)
    else:
        start = Start(secrets.token_hex(4))
    if mirror and copied and copied["run_id"] != start.run_id:
        if not request.overwrite:
            raise UserError(
                f"--mirror {mirror.name} holds another run's checkpoints. Give another folder, or "
                "--resume auto:replace to replace them too."
            )
        mirror.delete_later_than(-1)
    elif mirror and copied and not continues:
        mirror.delete_later_than(start.step)  # an abandoned branch of the run
    return start


def _has_started(output_dir: Path, request: StartRequest) -> bool:
    """Whether a previous attempt has already started from an explicit `resume`.

    Then this attempt continues its run.

    The folder decides, not the number of restarts: a previous attempt may have died before it wrote
    run.json.
    """
    if request.resume == "auto" or not request.is_unattended:
        return False  # run.json is not read: it may be another run's, or damaged
    stored = read_run(output_dir)
    return stored.get("started_from") == redact(request.resume) and not find_differences(
        stored, {}, request
    )


def _resume_folder(run: RunFolder, *, overwrite: bool) -> Start:
    """Resume the folder's unfinished run.

    Refuses another run; with `overwrite`, replaces a finished or another one.
    """
    output_dir = run.path
    if not is_run(output_dir):
        return Start(secrets.token_hex(4))
    differences = run.differences(read_run(output_dir))
    was_finished = is_finished(output_dir)
    if differences and not overwrite:
        refuse(output_dir, differences)
    if differences or (was_finished and overwrite):
        content = "another run" if differences else "this run, finished"
        log.warning(
            "output_dir %s holds %s. It is replaced (--resume auto:replace).", output_dir, content
        )
        return Start(secrets.token_hex(4))
    if was_finished:
        return _keep_result(run)
    return _continue(run)


def _keep_result(run: RunFolder) -> Start:
    """Leave a finished run as it is, or write its result again if it was lost."""
    stored = read_run(run.path)
    # Without save_model there is no result that could be lost.
    saves = stored["options"].get("save_model", True)
    difference = result_error(run.path) if saves else None
    if not difference:
        return Start(stored["run_id"], is_new=False, is_finished=True)
    log.warning(
        "The result in %s differs from the one that the finished run saved: %s. It is written "
        "again from the last checkpoint.",
        run.path,
        difference,
    )
    return _continue(run)


def _continue(run: RunFolder) -> Start:
    """Resume the folder's run at its newest valid checkpoint.

    Without one, start again at its origin or at step 0.
    """
    output_dir = run.path
    root = run.path / CHECKPOINTS
    stored = read_run(output_dir)
    status = read_status(output_dir)
    checkpoint.remove_leftovers(root)
    start = _newest_whole(run, root)
    was_finished = status.get("state") == "finished"
    # To begin again would overwrite days of work whose disk is only not mounted.
    if start is None and (status.get("saved_step", -1) >= 0 or was_finished):
        evidence = "the run has finished"
        if not was_finished:
            evidence = f"step {status['saved_step']} was saved"
        raise UserError(
            f"{root} holds no checkpoint, but {STATUS} says that {evidence}. Is its disk mounted? "
            f"Restore the checkpoints, {OR_START_OVER}"
        )
    if start is None and run.request.origin is not None:
        start = dataclasses.replace(_start_from(run, run.request.origin), run_id=stored["run_id"])
    elif start is None:
        start = Start(
            stored["run_id"],
            global_batch_size=stored["global_batch_size"],
            ways=stored.get("ways", {}),
        )
        log.info(
            "Resuming: the run in %s has no checkpoint yet, so it starts from the beginning.",
            output_dir,
        )
    # The number of starts in a row, up to the previous one, that ended before the next checkpoint.
    # A person who starts it again may have removed the cause: only unattended starts are limited.
    made_none = status.get("start_step") == start.step and status.get("state") in _FAILED
    failed_starts = int(status.get("deaths", 0)) + 1 if made_none else 0
    if run.request.is_unattended and failed_starts >= _MAX_FAILED_STARTS:
        _give_up(output_dir, status, start, failed_starts)
    # The number of blocks that recomputed when a start ran out of memory, the previous one or one
    # before it.
    ran_out = status.get("state") == "out_of_memory"
    too_few = status.get("recompute" if ran_out else "too_few", status.get("too_few"))
    return dataclasses.replace(start, failed_starts=failed_starts, too_few=too_few, **_used(status))


def _give_up(
    output_dir: Path, status: Mapping[str, Any], start: Start, failed_starts: int
) -> NoReturn:
    reason = status.get("reason") or "none, it was killed (out of memory? see dmesg)"
    message = (
        f"The run in {output_dir} has been restarted {failed_starts - 1} times without progress: "
        f"each start from step {start.step} has ended before the next checkpoint. The last known "
        f"reason: {reason}. Fix the cause and start it by hand, perhaps with a shorter "
        "--save_every."
    )
    ending = {
        "state": "no_progress",
        "reason": message,
        "exit_code": ENDINGS["no_progress"].exit_code,
    }
    write_json(output_dir / STATUS, dict(status) | ending)
    raise RunStopped("no_progress", message)


def _used(status: Mapping[str, Any]) -> dict[str, Any]:
    """The time used by earlier starts in this folder, for `Budget`."""
    return {
        "used_seconds": float(status.get("seconds", 0.0)),
        "reserve_seconds": float(status.get("reserve_seconds", 0.0)),
    }


# --- a checkpoint ---


def _start_from(run: RunFolder, path: Path) -> Start:
    """Start at a given checkpoint, or at the newest one of a given run."""
    root = run.path / CHECKPOINTS
    if (path / checkpoint.STATE).is_file() or (path / checkpoint.MANIFEST).is_file():
        try:
            start: Start | None = _start_at(run, path, checkpoint.verify(path))
        except DamagedCheckpoint as error:
            raise UserError(
                f"--resume {path}: the checkpoint is damaged ({error}). Give another one."
            ) from error
    else:
        start = _newest_whole(run, path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)
    if start is None:
        raise UserError(
            f"--resume {path}: there is no checkpoint in it. --resume continues a run with the "
            f"same options and rows; to train an adapter further, give --adapter {path}."
        )
    # Another run's checkpoint: what follows is a run of its own, with its own id and folder.
    if Path(str(start.folder)).resolve().parent != root.resolve():
        return dataclasses.replace(start, run_id=secrets.token_hex(4), is_new=True)
    # The checkpoint is in the run's own folder: later ones are an abandoned branch.
    for step, folder in checkpoint.published(root).items():
        if step > start.step:
            log.warning(
                "A checkpoint later than the start was set aside: %s.",
                checkpoint.quarantine(folder),
            )
    return dataclasses.replace(start, **_used(read_status(run.path)))


def _newest_whole(run: RunFolder, root: Path) -> Start | None:
    """The newest checkpoint that passes verification, or None. Damaged ones are set aside."""
    folders = checkpoint.published(root)
    # All bytes of a checkpoint are read for this, so older ones are looked at only if it fails.
    for folder in reversed(folders.values()):
        try:
            state = checkpoint.verify(folder)
        except DamagedCheckpoint as error:
            log.warning(
                "Checkpoint %s is damaged (%s). It is now %s.",
                folder,
                error,
                checkpoint.quarantine(folder).name,
            )
            continue
        return _start_at(run, folder, state)
    unusable = checkpoint.quarantined(root)
    if unusable:
        raise UserError(
            f"No checkpoint in {root} can be used: {', '.join(path.name for path in unusable)} are "
            f"damaged or abandoned. Restore a good copy of one, {OR_START_OVER}"
        )
    return None


def _start_at(run: RunFolder, folder: Path, state: Mapping[str, Any]) -> Start:
    stored = state["about"]
    progress = state["progress"]
    identity = run.identity
    differences = run.differences(stored)
    if differences:
        refuse(folder, differences)
    global_batch_size = stored["global_batch_size"]
    log.info("Resuming at step %d from %s, which passed verification.", progress["step"], folder)
    old_versions = stored.get("versions", {})
    new_versions = identity.get("versions", {})
    changes = [
        f"{name} {old_versions[name]} then, {new_versions[name]} now"
        for name in old_versions.keys() & new_versions
        if old_versions[name] != new_versions[name]
    ]
    if changes:
        log.warning(
            "It was saved by other versions, which may change the numbers: %s.",
            "; ".join(sorted(changes)),
        )
    for name in ("rewards", "eval_rewards"):
        old_rewards = stored.get(name)
        new_rewards = identity.get(name)
        # No fact that would refuse the run: a repaired reward function is a reason to go on.
        if old_rewards and new_rewards and old_rewards != new_rewards:
            log.warning(
                "The reward functions%s were %s, and are now %s.",
                " of --eval_rewards" if name == "eval_rewards" else "",
                ", ".join(old_rewards),
                ", ".join(new_rewards),
            )
    if identity["global_batch_size"] != global_batch_size:
        options = identity["options"]
        data_size = identity["world_size"] // options.get("context_parallel_size", 1)
        log.info(
            "The global batch stays at the %d rows that the run was started with: on %d rank(s) "
            "with --batch_size %d these are %d micro-batches per step instead of "
            "--gradient_accumulation_steps %d.",
            global_batch_size,
            data_size,
            options["batch_size"],
            schedule.num_micro_batches(global_batch_size, options["batch_size"], data_size),
            options["gradient_accumulation_steps"],
        )
    return Start(
        run_id=stored["run_id"],
        step=progress["step"],
        folder=str(folder),
        is_new=False,
        global_batch_size=global_batch_size,
        ways=stored.get("ways", {}),
        state={
            "progress": progress,
            "tensors": state["tensors"],
            "padded": stored.get("padded"),
        },
    )
