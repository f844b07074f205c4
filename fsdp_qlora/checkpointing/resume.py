"""Where a run begins: at its start, or at the newest checkpoint that passes verification, if the run is the same."""

import dataclasses
import logging
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fsdp_qlora.checkpointing import checkpoint
from fsdp_qlora.checkpointing.checkpoint import DamagedCheckpoint
from fsdp_qlora.checkpointing.layout import BRING_BACK, CHECKPOINTS, RUN, STATUS, check_reachable
from fsdp_qlora.checkpointing.records import read_run, read_status, run_error, state_error
from fsdp_qlora.checkpointing.result import result_error
from fsdp_qlora.checkpointing.stores import Store, fetch
from fsdp_qlora.checkpointing.train_state import contents_error
from fsdp_qlora.data import schedule
from fsdp_qlora.errors import ENDINGS, RunStopped, UserError
from fsdp_qlora.redact import redact
from fsdp_qlora.storage.files import write_json

log = logging.getLogger("fsdp_qlora")

_MAX_DEATHS = 3  # starts without progress: the first one and two restarts

# What of a run is compared by content -> how it is called.
FACTS = {
    "base": "the base model's weights (--model_name)",
    "model": "the model's config.json",
    "rows": "the rows (--dataset, --eval_dataset)",
    "precision": "the precision",
}


@dataclass(frozen=True)
class Start:
    """Where a run begins, the same on all ranks.

    folder: the checkpoint, None for the beginning. is_new: nothing of an earlier start is kept. progress, tensors: of
    the checkpoint. global_batch_size: rows per optimizer step. used_seconds, reserve_seconds: of
    control.Budget.
    deaths: starts in a row that made no progress.
    """

    run_id: str
    step: int = 0
    folder: str | None = None
    is_new: bool = True
    is_finished: bool = False
    global_batch_size: int | None = None
    used_seconds: float = 0.0
    reserve_seconds: float = 0.0
    deaths: int = 0
    progress: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)

    @property
    def saved_step(self) -> int:
        """The newest checkpoint that is in the run's own folder already, -1 for none."""
        return self.step if self.folder and not self.is_new else -1


@dataclass(frozen=True)
class StartRequest:
    """What a start was asked to do.

    options: all of the run's, as run.json keeps them. may_differ: those that a resumed run may change: the model and
    the rows are compared by content and not by name, the batch by its global size. resume: auto, off, or a checkpoint's
    or run's folder. overwrite: whether a finished or another run may be replaced. is_unattended: nobody is watching: an
    explicit `resume` that has been followed is not repeated, and starts without progress come to an end. mirror: holds
    copies, from which an empty folder is filled.
    """

    options: Mapping[str, Any]
    may_differ: Collection[str] = ()
    world_size: int = 1
    resume: str = "auto"
    overwrite: bool = False
    is_unattended: bool = False
    mirror: Store | None = None

    @property
    def origin(self) -> Path | None:
        """The folder to start from, where one was named."""
        return None if self.resume in ("auto", "off") else Path(self.resume).expanduser()


def is_run(output_dir: Path) -> bool:
    """Whether a folder holds a run that can be told from others."""
    return (output_dir / RUN).is_file()


def continues(output_dir: Path, request: StartRequest) -> bool:
    """Whether the folder's own run is what the start is about, as far as the options tell."""
    if not is_run(output_dir):
        return False
    if request.resume == "auto" or _was_followed(output_dir, request):
        return True
    origin = request.origin
    return origin is not None and output_dir.resolve() in (origin.resolve(), *origin.resolve().parents)


def check_options(output_dir: Path, request: StartRequest) -> None:
    """Refuse to resume with other options, before any work; what is compared by content comes later.

    Raises:
        UserError: names every option that differs, with both values.
    """
    if request.resume != "auto" or request.overwrite or not is_run(output_dir):
        return
    if differences := _different_options(read_run(output_dir), request):
        _refuse(output_dir, differences, is_finished=_is_finished(output_dir))


def choose_start(output_dir: Path, identity: Mapping[str, Any], request: StartRequest) -> Start:
    """Where the run begins. Rank 0 alone decides, holding the folder's lock.

    Args:
        identity: this run's options, facts (see FACTS), world_size and global_batch_size.
    Raises:
        UserError: the run in the folder is another one, or none of its checkpoints passes verification.
        RunStopped: nobody is watching, and starting it again and again has not helped.
    """
    run = _Run(output_dir, identity, request)
    was_followed = _was_followed(output_dir, request)
    if is_run(output_dir) and (was_followed or request.resume == "auto"):
        check_reachable(output_dir / CHECKPOINTS)
    copied = _copied_run(request.mirror, output_dir)
    if request.mirror is not None and copied and (was_followed or request.resume == "auto"):
        if is_run(output_dir):
            _catch_up_with_mirror(run, request.mirror, copied)
        else:
            _fill_from_mirror(run, request.mirror, copied)
    if was_followed:
        log.info("--resume %s was followed before this restart: the run in %s continues.", request.resume, output_dir)
        start = _from_output_dir(run, origin=request.origin, overwrite=False)
    elif request.resume == "auto":
        start = _from_output_dir(run, overwrite=request.overwrite)
    elif request.origin is None:
        start = Start(secrets.token_hex(4))
    else:
        start = _from_path(run, request.origin)
    if request.mirror is not None and copied:
        _tidy_mirror(request.mirror, copied, start, request, was_followed=was_followed)
    return start


class _Run(NamedTuple):
    """The run that is about to start, and its folder."""

    output_dir: Path
    identity: Mapping[str, Any]
    request: StartRequest


def _was_followed(output_dir: Path, request: StartRequest) -> bool:
    """Whether a start from elsewhere, or from zero, was made already, and this one repeats it after its death.

    What was asked for is then done, and it continues as with auto. An earlier attempt may have died before it wrote its
    own run.json, so the folder tells, and not the number of the restart.
    """
    if request.resume == "auto" or not request.is_unattended:
        return False  # run.json, which may be of another run or damaged, is not asked
    stored = read_run(output_dir)
    return stored.get("started_from") == redact(request.resume) and not _different_options(stored, request)


def _tidy_mirror(
    mirror: Store, copied: Mapping[str, Any], start: Start, request: StartRequest, *, was_followed: bool
) -> None:
    """Take away from the mirror what is no part of the run that begins."""
    if copied["run_id"] != start.run_id:
        if not request.overwrite:
            raise UserError(
                f"--mirror {mirror.name} holds another run's checkpoints. Give another folder, or "
                "--overwrite_output_dir true to replace them too."
            )
        mirror.forget()
    elif not was_followed and request.resume != "auto":
        mirror.forget(later_than=start.step)  # of an abandoned branch of the run


def _copied_run(mirror: Store | None, output_dir: Path) -> dict[str, Any]:
    """What the mirror holds; empty for nothing."""
    if mirror is None:
        return {}
    try:
        copied = mirror.run()
        if error := run_error(copied) if copied else None:
            raise UserError(f"--mirror {mirror.name}: its {RUN} cannot be used: {error}. Give another mirror, or none.")
        return copied
    except OSError as error:
        if not is_run(output_dir):
            raise UserError(
                f"--mirror {mirror.name} is out of reach, so nobody knows whether this run has begun elsewhere "
                f"({error}). Try again, or leave it out."
            ) from error
        log.warning("The mirror %s is out of reach: %s. The run continues from its own folder.", mirror.name, error)
        return {}


def _fill_from_mirror(run: _Run, mirror: Store, copied: Mapping[str, Any]) -> None:
    """Copy a run from its mirror into a folder that has none, where it is this run."""
    if differences := _differences(copied, run):
        if not run.request.overwrite:
            _refuse(mirror.name, differences, is_finished=False)
        return
    log.info("output_dir %s is empty: the run is copied from its mirror %s.", run.output_dir, mirror.name)
    if not fetch(mirror, run.output_dir):
        raise UserError(
            f"No checkpoint on the mirror {mirror.name} is whole. Put back a good copy of one, or start from zero with "
            "another --mirror, or with none."
        )


def _catch_up_with_mirror(run: _Run, mirror: Store, copied: Mapping[str, Any]) -> None:
    """Where the folder's run has got further elsewhere, copy the newest checkpoint from its mirror."""
    output_dir = run.output_dir
    stored = read_run(output_dir)
    if stored.get("run_id") != copied["run_id"] or _is_finished(output_dir) or _differences(stored, run):
        return
    newest = max(checkpoint.published(output_dir / CHECKPOINTS), default=-1)
    ahead = max(mirror.steps(), default=-1)
    if ahead > newest:
        log.info(
            "The mirror %s has step %d of this run, and %s %s: the run resumes from the mirror's.",
            mirror.name, ahead, output_dir, f"step {newest}" if newest >= 0 else "no checkpoint",
        )  # fmt: skip
        fetch(mirror, output_dir, later_than=newest)


def _from_output_dir(run: _Run, *, overwrite: bool, origin: Path | None = None) -> Start:
    """Resume the folder's run. origin: where it was begun, for as long as it has no checkpoint of its own."""
    output_dir = run.output_dir
    if not is_run(output_dir):
        return Start(secrets.token_hex(4))
    stored, is_finished = read_run(output_dir), _is_finished(output_dir)
    differences = _differences(stored, run)
    if differences and not overwrite:
        _refuse(output_dir, differences, is_finished=is_finished)
    if differences or (is_finished and overwrite):
        held = "another run" if differences else "this run, finished"
        log.warning("output_dir %s holds %s. It is replaced as asked for.", output_dir, held)
        return Start(secrets.token_hex(4))
    lost = result_error(output_dir) if is_finished and stored["options"].get("save_model", True) else None
    if is_finished and not lost:
        return Start(stored["run_id"], is_new=False, is_finished=True)
    if lost:
        log.warning("The result in %s is not what the finished run has saved: %s.", output_dir, lost)
    checkpoint.remove_leftovers(output_dir / CHECKPOINTS)
    status = read_status(output_dir)
    start = _newest_whole(run, output_dir / CHECKPOINTS)
    if lost and start is None:
        raise UserError(
            f"{output_dir} holds a finished run whose result is not what was saved ({lost}), and no checkpoint to "
            "write it from. Put the file back, or train again with --resume off --overwrite_output_dir true."
        )
    if lost and start is not None:
        log.info("It is written again from the checkpoint of step %d.", start.step)
    if start is None and (saved_step := status.get("saved_step", -1)) >= 0:
        raise UserError(
            f"{output_dir / CHECKPOINTS} holds no checkpoint, but {STATUS} says that step {saved_step} was saved. "
            f"{BRING_BACK}"
        )
    if start is None and origin is not None:
        start = dataclasses.replace(_from_path(run, origin), run_id=stored["run_id"])
    elif start is None:
        start = Start(stored["run_id"], global_batch_size=stored["global_batch_size"])
        log.info("Resuming: the run in %s has no checkpoint yet, so it starts from the beginning.", output_dir)
    deaths = _failed_starts(status, start)
    if run.request.is_unattended and deaths >= _MAX_DEATHS:
        _give_up(output_dir, status, start, deaths)
    return dataclasses.replace(start, deaths=deaths, **_used(status))


def _failed_starts(status: Mapping[str, Any], start: Start) -> int:
    """Starts in a row that ended before the next checkpoint, this one's predecessor included."""
    made_none = status.get("start_step") == start.step and status.get("state") in ("running", "failed", "hung")
    return int(status.get("deaths", 0)) + 1 if made_none else 0


def _give_up(output_dir: Path, status: Mapping[str, Any], start: Start, deaths: int) -> NoReturn:
    message = (
        f"The run in {output_dir} has been restarted {deaths - 1} times without progress: each start from step "
        f"{start.step} has ended before the next checkpoint. The last reason known: "
        f"{status.get('reason') or 'none, it was killed (out of memory? see dmesg)'}. Start it by hand when that "
        "is mended, perhaps with a smaller --save_minutes."
    )
    ending = {"state": "no_progress", "reason": message, "exit_code": ENDINGS["no_progress"].exit_code}
    write_json(output_dir / STATUS, {**status, **ending})
    raise RunStopped("no_progress", message)


def _used(status: Mapping[str, Any]) -> dict[str, Any]:
    """What earlier starts in this folder have used of the budget."""
    return {"used_seconds": status.get("seconds", 0.0), "reserve_seconds": status.get("reserve_seconds", 0.0)}


def _from_path(run: _Run, path: Path) -> Start:
    """Begin at a given checkpoint, or at the newest of a given run."""
    output_dir = run.output_dir
    if not path.is_dir():
        raise UserError(
            f"--resume {path}: there is no such folder. Give a checkpoint's or a run's folder, auto or off."
        )
    if (path / checkpoint.STATE).is_file() or (path / checkpoint.MANIFEST).is_file():
        try:
            start = _start_at(run, path, _verified(path))
        except DamagedCheckpoint as error:
            raise UserError(f"--resume {path}: the checkpoint is damaged ({error}). Give another one.") from error
    else:
        root = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
        newest = _newest_whole(run, root)
        if newest is None:
            raise UserError(f"--resume {path}: there is no checkpoint in it.")
        start = newest
    if Path(str(start.folder)).resolve().parent != (output_dir / CHECKPOINTS).resolve():
        return dataclasses.replace(start, run_id=secrets.token_hex(4), is_new=True)
    # An earlier one of this very folder: what came after it is an abandoned branch.
    for step, folder in checkpoint.published(output_dir / CHECKPOINTS).items():
        if step > start.step:
            log.warning("Checkpoint %s is later than the one to start from: set aside.", checkpoint.set_aside(folder))
    return dataclasses.replace(start, **_used(read_status(output_dir)))


def _newest_whole(run: _Run, root: Path) -> Start | None:
    """The newest checkpoint that passes verification; damaged ones are set aside. None where there are none."""
    folders = checkpoint.published(root)
    for folder in reversed(folders.values()):
        try:
            state = _verified(folder)
        except DamagedCheckpoint as error:
            log.warning(
                "Checkpoint %s is damaged (%s). It is now %s.", folder, error, checkpoint.set_aside(folder).name
            )
            continue
        return _start_at(run, folder, state)
    if unusable := checkpoint.were_set_aside(root):
        raise UserError(
            f"No checkpoint in {root} is whole: {', '.join(path.name for path in unusable)} are damaged or were given "
            "up. Put back a good copy of one, or start from zero with --resume off --overwrite_output_dir true."
        )
    return None


def _verified(folder: Path) -> dict[str, Any]:
    """The state.json of a checkpoint whose bytes are those that were written, and whose parts fit together.

    Raises:
        DamagedCheckpoint: says what is wrong.
    """
    state = checkpoint.verify(folder)
    error = state_error(state, checkpoint.step_of(folder)) or contents_error(folder, state["tensors"])
    if error:
        raise DamagedCheckpoint(f"it contradicts itself: {error}")
    return state


def _start_at(run: _Run, folder: Path, state: Mapping[str, Any]) -> Start:
    stored, progress, about = state["about"], state["progress"], run.identity
    if differences := _differences(stored, run):
        _refuse(folder, differences, is_finished=False)
    global_batch_size = stored["global_batch_size"]
    log.info("Resuming at step %d from %s, which passed verification.", progress["step"], folder)
    if about["global_batch_size"] != global_batch_size:
        log.info(
            "The global batch stays at the %d rows that the run was started with: on %d rank(s) with --batch_size %d "
            "that is %d micro-batches per step instead of --gradient_accumulation_steps %d.",
            global_batch_size, about["world_size"], about["options"]["batch_size"],
            schedule.num_micro_batches(global_batch_size, about["options"]["batch_size"], about["world_size"]),
            about["options"]["gradient_accumulation_steps"],
        )  # fmt: skip
    return Start(
        run_id=stored["run_id"],
        step=progress["step"],
        folder=str(folder),
        is_new=False,
        global_batch_size=global_batch_size,
        progress=progress,
        tensors=state["tensors"],
    )


# --- whether it is the same run ---


def _is_finished(output_dir: Path) -> bool:
    return read_status(output_dir).get("state") == "finished"


def _differences(stored: Mapping[str, Any], run: _Run) -> list[str]:
    differences = _different_options(stored, run.request)
    for name, called in FACTS.items():
        then, now = stored.get("facts", {}).get(name), run.identity["facts"][name]
        if then != now:
            shown = f": {then} then, {now} now" if name == "precision" else ""
            differences.append(
                f"{called} are not the same{shown}" if name == "rows" else f"{called} is not the same{shown}"
            )
    return differences


def _different_options(stored: Mapping[str, Any], request: StartRequest) -> list[str]:
    then, options, world_size = stored.get("options", {}), request.options, request.world_size
    differences = [
        f"--{name} was {_shown(then[name])} and is {_shown(value)}"
        for name, value in options.items()
        if name not in request.may_differ and name in then and then[name] != value
    ]
    if world_size != stored.get("world_size"):
        return differences
    rows = _rows_per_step(options, world_size)
    if rows not in (stored["global_batch_size"], _rows_per_step(then, world_size)):
        differences.append(
            f"--batch_size x --gradient_accumulation_steps x {world_size} ranks was {stored['global_batch_size']} rows "
            f"per step and is {rows}"
        )
    return differences


def _rows_per_step(options: Mapping[str, Any], world_size: int) -> int:
    return schedule.global_batch_size(options["batch_size"], options["gradient_accumulation_steps"], world_size)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _refuse(folder: Path | str, differences: list[str], *, is_finished: bool) -> NoReturn:
    raise UserError(
        f"{folder} is not empty: it holds {'a finished run' if is_finished else 'an unfinished run'} "
        "that is not this one:\n  "
        + "\n  ".join(differences)
        + "\nGive the same options to resume it, another folder, or --overwrite_output_dir true to replace it."
    )
