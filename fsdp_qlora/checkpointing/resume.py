"""Where a run begins: at its start, or at the newest checkpoint that is whole, and only if the run is the same."""

import dataclasses
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp_qlora.checkpointing import checkpoint
from fsdp_qlora.checkpointing.checkpoint import DamagedCheckpoint
from fsdp_qlora.checkpointing.run_folder import CHECKPOINTS, RUN, STATUS, read_json, write_atomically
from fsdp_qlora.checkpointing.stores import Store, fetch
from fsdp_qlora.config.marks import MAY_DIFFER
from fsdp_qlora.config.options import names_marked
from fsdp_qlora.distributed import Ranks, gather_texts
from fsdp_qlora.errors import ENDINGS, RunStopped, UserError
from fsdp_qlora.redact import redact

log = logging.getLogger("fsdp_qlora")

_MAX_DEATHS = 3  # starts without progress: the first one and two restarts

# What of a run is compared by content -> how it is called.
_FACTS = {
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


def is_run(output_dir: Path) -> bool:
    """Whether a folder holds a run that can be told from others."""
    return (output_dir / RUN).is_file()


def is_of(output_dir: Path, path: Path) -> bool:
    """Whether a path to start from lies in this very run's folder."""
    return is_run(output_dir) and output_dir.resolve() in (path.resolve(), *path.resolve().parents)


def goes_on_by_itself(
    output_dir: Path, options: Mapping[str, Any], *, resume: str, world_size: int, is_unattended: bool
) -> bool:
    """Whether a start from elsewhere, or from zero, has been made already, and this one repeats it after its death.

    What was asked for then is done; it now goes on as with auto. An earlier attempt may have died before it wrote its
    own run.json, so the folder tells, and not the number of the restart.
    """
    stored = read_json(output_dir / RUN)
    return (
        resume != "auto"
        and is_unattended
        and stored.get("started_from") == redact(resume)
        and not _different_options(stored, options, world_size)
    )


def check_options(
    output_dir: Path, options: Mapping[str, Any], *, resume: str, overwrite: bool, world_size: int
) -> None:
    """Refuse to go on with other options, before any work; what is compared by content comes later.

    Raises:
        UserError: names every option that differs, with both values.
    """
    if resume != "auto" or overwrite or not is_run(output_dir):
        return
    about = read_json(output_dir / RUN)
    if differences := _different_options(about, options, world_size):
        _refuse(output_dir, differences, is_finished=_is_finished(output_dir))


def choose_start(
    output_dir: Path,
    about: Mapping[str, Any],
    ranks: Ranks,
    *,
    resume: str,
    overwrite: bool,
    is_unattended: bool,
    mirror: Store | None = None,
) -> Start:
    """Decide on rank 0 where the run begins, and tell all. Rank 0 holds the folder's lock.

    Args:
        about: this run's options, facts (see _FACTS), world_size and global_batch_size.
        resume: auto, off, or a checkpoint's or run's folder.
        overwrite: whether a run that is finished or another one may be replaced.
        is_unattended: refuse another start after several without progress, and repeat no `resume` that was followed.
        mirror: holds copies, from which an empty output_dir is filled.
    Raises:
        UserError: the run in the folder is another one, or none of its checkpoints is whole.
        RunStopped: nobody is there, and starting it again and again has not helped.
    """

    def decide() -> Start:
        goes_on = goes_on_by_itself(
            output_dir, about["options"], resume=resume, world_size=about["world_size"], is_unattended=is_unattended
        )
        copied = _copied_run(mirror, output_dir)
        if mirror is not None and copied and (goes_on or resume == "auto"):
            if not is_run(output_dir):
                _fill_from_mirror(output_dir, mirror, copied, about, overwrite=overwrite)
            else:
                _catch_up_with_mirror(output_dir, mirror, copied, about)
        if goes_on:
            log.info("--resume %s has been followed before this restart: the run in %s goes on.", resume, output_dir)
            origin = None if resume == "off" else Path(resume).expanduser()
            start = _from_output_dir(output_dir, about, overwrite=False, is_unattended=True, origin=origin)
        elif resume == "auto":
            start = _from_output_dir(output_dir, about, overwrite=overwrite, is_unattended=is_unattended)
        elif resume == "off":
            start = Start(secrets.token_hex(4))
        else:
            start = _from_path(Path(resume).expanduser(), output_dir, about)
        if mirror is not None and copied and copied["run_id"] != start.run_id:
            if not overwrite:
                raise UserError(
                    f"--mirror {mirror.name} holds another run's checkpoints. Give another folder, or "
                    "--overwrite_output_dir true to replace them too."
                )
            mirror.forget()
        elif mirror is not None and copied and not goes_on and resume != "auto":
            mirror.forget(later_than=start.step)  # what came after it belongs to a course that is given up
        return start

    return _from_rank_0(decide, ranks)


def _from_rank_0(decide: Callable[[], Start], ranks: Ranks) -> Start:
    answer: dict[str, Any] = {}
    if ranks.is_rank_0:
        try:
            answer = {"start": asdict(decide())}
        except UserError as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"error": f"The run's folder cannot be used: {error}."}
        except RunStopped as stopped:
            answer = {"stopped": [stopped.ending.state, str(stopped)]}
    answer = json.loads(gather_texts(json.dumps(answer), ranks.device)[0])
    if "error" in answer:
        raise UserError(answer["error"])
    if "stopped" in answer:
        raise RunStopped(*answer["stopped"])
    return Start(**answer["start"])


def _copied_run(mirror: Store | None, output_dir: Path) -> dict[str, Any]:
    """What the mirror holds; empty for nothing."""
    if mirror is None:
        return {}
    try:
        return mirror.run()
    except OSError as error:
        if not is_run(output_dir):
            raise UserError(
                f"--mirror {mirror.name} is out of reach, so nobody knows whether this run has begun elsewhere "
                f"({error}). Try again, or leave it out."
            ) from error
        log.warning("The mirror %s is out of reach: %s. The run goes on from its own folder.", mirror.name, error)
        return {}


def _fill_from_mirror(
    output_dir: Path, mirror: Store, copied: Mapping[str, Any], about: Mapping[str, Any], *, overwrite: bool
) -> None:
    """Copy a run from its mirror into a folder that has none, where it is this run."""
    if differences := _differences(copied, about):
        if not overwrite:
            _refuse(mirror.name, differences, is_finished=False)
        return
    log.info("output_dir %s is empty: the run is copied from its mirror %s.", output_dir, mirror.name)
    if not fetch(mirror, output_dir):
        raise UserError(
            f"No checkpoint on the mirror {mirror.name} is whole. Put back a good copy of one, or start from zero with "
            "another --mirror, or with none."
        )


def _catch_up_with_mirror(output_dir: Path, mirror: Store, copied: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Where the folder's run has got further elsewhere, copy the newest checkpoint from its mirror."""
    stored = read_json(output_dir / RUN)
    if stored.get("run_id") != copied["run_id"] or _is_finished(output_dir) or _differences(stored, about):
        return
    newest = max(checkpoint.published(output_dir / CHECKPOINTS), default=-1)
    ahead = max(mirror.steps(), default=-1)
    if ahead > newest:
        log.info(
            "The mirror %s has step %d of this run, and %s %s: the run is gone on with from the mirror's.",
            mirror.name, ahead, output_dir, f"step {newest}" if newest >= 0 else "no checkpoint",
        )  # fmt: skip
        fetch(mirror, output_dir, later_than=newest)


def _from_output_dir(
    output_dir: Path, about: Mapping[str, Any], *, overwrite: bool, is_unattended: bool, origin: Path | None = None
) -> Start:
    """Go on with the folder's run. origin: where it was begun, for as long as it has no checkpoint of its own."""
    if not is_run(output_dir):
        return Start(secrets.token_hex(4))
    stored = read_json(output_dir / RUN)
    is_finished = _is_finished(output_dir)
    if differences := _differences(stored, about):
        if not overwrite:
            _refuse(output_dir, differences, is_finished=is_finished)
        log.warning("output_dir %s holds another run, which is replaced as asked for.", output_dir)
        return Start(secrets.token_hex(4))
    if is_finished:
        if overwrite:
            log.info("output_dir %s holds this run, finished. It is replaced as asked for.", output_dir)
            return Start(secrets.token_hex(4))
        return Start(stored["run_id"], is_new=False, is_finished=True)
    root = output_dir / CHECKPOINTS
    checkpoint.remove_leftovers(root)
    start = _newest_whole(root, about)
    status = read_json(output_dir / STATUS)
    if start is None and origin is not None:
        start = dataclasses.replace(_from_path(origin, output_dir, about), run_id=stored["run_id"])
    elif start is None:
        start = Start(stored["run_id"], global_batch_size=stored["global_batch_size"])
        log.info("Resuming: the run in %s has no checkpoint yet, so it starts at its beginning.", output_dir)
    deaths = 0
    if status.get("start_step") == start.step and status.get("state") in ("running", "failed", "hung"):
        deaths = int(status.get("deaths", 0)) + 1
    if is_unattended and deaths >= _MAX_DEATHS:
        message = (
            f"The run in {output_dir} has been restarted {deaths - 1} times without progress: each start from step "
            f"{start.step} has ended before the next checkpoint. The last reason known: "
            f"{status.get('reason') or 'none, it was killed (out of memory? see dmesg)'}. Start it by hand when that "
            "is mended, perhaps with a smaller --save_minutes."
        )
        ending = {"state": "no_progress", "reason": message, "exit_code": ENDINGS["no_progress"].exit_code}
        write_atomically(output_dir / STATUS, {**status, **ending})
        raise RunStopped("no_progress", message)
    return dataclasses.replace(start, deaths=deaths, **_used(status))


def _used(status: Mapping[str, Any]) -> dict[str, Any]:
    """What earlier starts in this folder have used of the budget."""
    return {"used_seconds": status.get("seconds", 0.0), "reserve_seconds": status.get("reserve_seconds", 0.0)}


def _from_path(path: Path, output_dir: Path, about: Mapping[str, Any]) -> Start:
    """Begin at a given checkpoint, or at the newest of a given run."""
    if not path.is_dir():
        raise UserError(
            f"--resume {path}: there is no such folder. Give a checkpoint's or a run's folder, auto or off."
        )
    if (path / checkpoint.STATE).is_file() or (path / checkpoint.MANIFEST).is_file():
        try:
            start = _start_at(path, checkpoint.verify(path), about)
        except DamagedCheckpoint as error:
            raise UserError(f"--resume {path}: the checkpoint is damaged ({error}). Give another one.") from error
    else:
        root = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
        newest = _newest_whole(root, about)
        if newest is None:
            raise UserError(f"--resume {path}: there is no checkpoint in it.")
        start = newest
    if Path(str(start.folder)).resolve().parent != (output_dir / CHECKPOINTS).resolve():
        return dataclasses.replace(start, run_id=secrets.token_hex(4), is_new=True)
    # An earlier one of this very folder: what came after it belongs to a course that is given up.
    for step, folder in checkpoint.published(output_dir / CHECKPOINTS).items():
        if step > start.step:
            log.warning("Checkpoint %s is later than the one to start from: set aside.", checkpoint.set_aside(folder))
    return dataclasses.replace(start, **_used(read_json(output_dir / STATUS)))


def _newest_whole(root: Path, about: Mapping[str, Any]) -> Start | None:
    """The newest checkpoint whose every byte is as written; damaged ones are set aside. None where there are none."""
    folders = checkpoint.published(root)
    for folder in reversed(folders.values()):
        try:
            state = checkpoint.verify(folder)
        except DamagedCheckpoint as error:
            log.warning(
                "Checkpoint %s is damaged (%s). It is now %s.", folder, error, checkpoint.set_aside(folder).name
            )
            continue
        return _start_at(folder, state, about)
    if unusable := checkpoint.were_set_aside(root):
        raise UserError(
            f"No checkpoint in {root} is whole: {', '.join(path.name for path in unusable)} are damaged or were given "
            "up. Put back a good copy of one, or start from zero with --resume off --overwrite_output_dir true."
        )
    return None


def _start_at(folder: Path, state: Mapping[str, Any], about: Mapping[str, Any]) -> Start:
    stored, progress = state["about"], state["progress"]
    if differences := _differences(stored, about):
        _refuse(folder, differences, is_finished=False)
    global_batch_size = stored["global_batch_size"]
    log.info("Resuming at step %d from %s, every file of which is as it was written.", progress["step"], folder)
    if about["global_batch_size"] != global_batch_size:
        log.info(
            "The global batch stays at the %d rows that the run was started with: on %d rank(s) with --batch_size %d "
            "that is %d micro-batches per step instead of --gradient_accumulation_steps %d.",
            global_batch_size, about["world_size"], about["options"]["batch_size"],
            -(-global_batch_size // (about["world_size"] * about["options"]["batch_size"])),
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
    return read_json(output_dir / STATUS).get("state") == "finished"


def _differences(stored: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    differences = _different_options(stored, about["options"], about["world_size"])
    for name, called in _FACTS.items():
        then, now = stored.get("facts", {}).get(name), about["facts"][name]
        if then != now:
            shown = f": {then} then, {now} now" if name == "precision" else ""
            differences.append(
                f"{called} are not the same{shown}" if name == "rows" else f"{called} is not the same{shown}"
            )
    return differences


def _different_options(stored: Mapping[str, Any], options: Mapping[str, Any], world_size: int) -> list[str]:
    then, may_differ = stored.get("options", {}), names_marked(MAY_DIFFER)
    differences = [
        f"--{name} was {_shown(then[name])} and is {_shown(value)}"
        for name, value in options.items()
        if name not in may_differ and name in then and then[name] != value
    ]
    rows = _rows_per_step(options, world_size)
    if world_size == stored.get("world_size") and rows not in (
        stored["global_batch_size"],
        _rows_per_step(then, world_size),
    ):
        differences.append(
            f"--batch_size x --gradient_accumulation_steps x {world_size} ranks was {stored['global_batch_size']} rows "
            f"per step and is {rows}"
        )
    return differences


def _rows_per_step(options: Mapping[str, Any], world_size: int) -> int:
    return int(options["batch_size"] * options["gradient_accumulation_steps"] * world_size)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _refuse(folder: Path | str, differences: list[str], *, is_finished: bool) -> None:
    raise UserError(
        f"{folder} is not empty: it holds {'a finished run' if is_finished else 'an unfinished run'} "
        "that is not this one:\n  "
        + "\n  ".join(differences)
        + "\nGive the same options to go on with it, another folder, or --overwrite_output_dir true to replace it."
    )
