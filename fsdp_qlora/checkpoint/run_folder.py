"""The folder of one run: its files, its lock, and its differences from the run that starts."""

import contextlib
import fcntl
import fnmatch
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fsdp_qlora.config.cli import current_options
from fsdp_qlora.utils.errors import ENDINGS, RunStopped, UserError
from fsdp_qlora.utils.files import NotAFile, is_partial, read_named, why_not_writable, write_json
from fsdp_qlora.utils.redact import lost_output
from fsdp_qlora.utils.run_files import CHECKPOINTS, LOCK, RUN, RUN_FILES, STATUS

log = logging.getLogger("fsdp_qlora")

_STATUS_SECONDS = 10.0  # between two writes of status.json: a step may take milliseconds
OR_START_OVER = "or start from zero with --resume off:replace."
# Values of options with which a resumed run keeps its earlier choice.
KEPT = {"context_length": "auto"}
RUN_KEYS = ("run_id", "options", "facts", "world_size", "global_batch_size")  # in every run.json
# Files of a start that was killed before it wrote run.json, besides partial checkpoints. They are
# no results.
_LEFTOVERS = {LOCK, ".saving", STATUS}


def is_run(output_dir: Path) -> bool:
    """Whether a folder holds a run."""
    return (output_dir / RUN).is_file()


def read_run(output_dir: Path) -> dict[str, Any]:
    """The content of run.json; empty if there is none. Raises UserError if it is damaged."""
    return _read(output_dir / RUN, RUN_KEYS, f"Restore the original, {OR_START_OVER}")


def read_status(output_dir: Path) -> dict[str, Any]:
    """The content of status.json; empty if there is none. Raises UserError if it is damaged."""
    advice = (
        "Restore the original, or delete it: the run then resumes and counts its hours from zero."
    )
    return _read(output_dir / STATUS, {"state"}, advice)


def _read(path: Path, required: Collection[str], advice: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(read_named(path))
        missing = [key for key in required if key not in content]
        if missing:
            raise ValueError(f"it has no {missing[0]}")
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, RecursionError, NotAFile) as error:
        raise UserError(f"{path} cannot be used: {error}. {advice}") from error
    return content


def is_finished(output_dir: Path) -> bool:
    """Whether a folder holds a run that has finished."""
    return read_status(output_dir).get("state") == "finished"


@contextlib.contextmanager
def errors_explained(output_dir: Path) -> Iterator[None]:
    """Explain in one sentence why a run's files cannot be used.

    Raises:
        RunStopped: they cannot be read or written at present, such as on a network disk that is
            away: try again.
        UserError: they have been edited: values are missing, or have the wrong type.
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise RunStopped(
            "unreadable",
            f"The run in {output_dir} cannot be read at present: {error}. No checkpoint was "
            "renamed. Try again.",
        ) from error
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise UserError(
            f"{output_dir / RUN}, {STATUS} beside it or a checkpoint has been edited and cannot be "
            f"used: {error!r}. Restore the original, {OR_START_OVER}"
        ) from error


class Status:
    """Writes status.json, the state of a run.

    It has state, step, saved_step, reason, exit_code, seconds, and `output` if log lines were lost.

    Does nothing on ranks other than 0. Errors are ignored: a full or missing disk is no reason to
    stop a run.
    """

    def __init__(self, output_dir: Path, *, is_rank_0: bool, **values: Any) -> None:
        self._path = output_dir / STATUS if is_rank_0 else None
        self.values = values
        self._written_at = 0.0

    def update(self, **values: Any) -> None:
        self.values |= values
        lost = lost_output()
        if lost:
            self.values["output"] = f"lost: {lost.strerror}"
        self._written_at = time.monotonic()
        if self._path is not None:
            with contextlib.suppress(OSError):
                write_json(self._path, self.values)

    def end(self, state: str, reason: str | None) -> None:
        """Record how the run has ended. state: a key of `errors.ENDINGS`."""
        self.update(state=state, reason=reason, exit_code=ENDINGS[state].exit_code)

    def keep(self, **values: Any) -> None:
        """Set values that change in every step.

        They are written every few seconds, and with the next update.
        """
        self.values |= values
        if time.monotonic() - self._written_at > _STATUS_SECONDS:
            self.update()


def check_usable(path: Path, *, overwrite: bool) -> None:
    """Raise UserError if the folder cannot be created, or has files that may not be replaced."""
    reason = why_not_writable(path)
    if reason:
        raise UserError(f"output_dir {path}: {reason}. Give another folder.")
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    results = {
        name
        for name in names - _LEFTOVERS
        if not is_partial(name, RUN) and not is_partial(name, STATUS)
    }
    # A start that died before its first checkpoint leaves the folder for them empty.
    if not list((path / CHECKPOINTS).glob("step_*")):
        results.discard(CHECKPOINTS)
    if results and not overwrite:
        raise UserError(
            f"output_dir {path} is not empty: it may hold the results of another run. Give another "
            "folder, or --resume auto:replace to replace them."
        )


def remove_run(output_dir: Path) -> None:
    """Remove a run's files from its folder. A link is removed without its target."""
    for path in list(output_dir.iterdir()):
        # Other files are the user's: notes, or the program's own log.
        if not any(fnmatch.fnmatch(path.name, pattern) for pattern in RUN_FILES):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Lock a folder, which is created if needed, against other runs. Raises UserError if one has
    it. For rank 0 only.

    The system releases the lock when its holder dies. Folders that hold nothing but the lock are
    removed at the end.
    """
    new_folders = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
    descriptor = _open_locked(output_dir)
    try:
        yield
    finally:
        # Removed while it is still locked: afterwards it could be another run's.
        (output_dir / LOCK).unlink(missing_ok=True)
        os.close(descriptor)
        with contextlib.suppress(OSError):  # it is not empty
            for path in new_folders:
                path.rmdir()


def _open_locked(output_dir: Path) -> int:
    path = output_dir / LOCK
    while True:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            where = f" ({path.name})" if output_dir.is_dir() else ""
            raise UserError(
                f"output_dir {output_dir} cannot be written{where}: {error.strerror}."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise UserError(
                f"output_dir {output_dir} is in use by another run ({holder}). Wait for it, stop "
                "it, or give another folder."
            ) from None
        except OSError as error:  # some network disks do not support locks
            log.warning(
                "%s cannot be locked (%s): make sure that no other run writes there.",
                output_dir,
                error,
            )
            return descriptor
        # The last holder may have removed the file between our open and our lock: then the lock
        # protects nothing.
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                os.ftruncate(descriptor, 0)
                with contextlib.suppress(OSError):  # a full disk
                    os.pwrite(
                        descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0
                    )
                return descriptor
        os.close(descriptor)


# --- comparing a stored run with the one that is about to start ---

# Properties of a run that are compared by content -> their names in messages.
FACTS = {
    "base": "the base model's weights (--model_name)",
    "model": "the model's config.json",
    "rows": "the rows (--dataset, --eval_dataset)",
    "precision": "the precision",
    "adapter": "the adapter to start from (--adapter)",
}


@dataclass(frozen=True)
class StartRequest:
    """The options of a start, and how it may use the run's folder.

    options: all options of the run, as stored in run.json. may_differ: names of options that may
    change on resume; the model and the rows are compared by content, the batch by its global size.
    resume: auto, off, or a checkpoint's or run's folder. overwrite: whether a finished run or
    another run may be replaced. is_unattended: whether torchrun or a script restarts the run: an
    explicit `resume` is followed once, and starts without progress are limited.
    """

    options: Mapping[str, Any]
    may_differ: Collection[str] = ()
    world_size: int = 1
    resume: str = "auto"
    overwrite: bool = False
    is_unattended: bool = False

    @property
    def origin(self) -> Path | None:
        """The folder to start from; None if `resume` is auto or off."""
        return None if self.resume in ("auto", "off") else Path(self.resume).expanduser()


def find_differences(
    stored: Mapping[str, Any], facts: Mapping[str, Any], request: StartRequest
) -> list[str]:
    """A line for each difference between a stored run and this start.

    facts: the facts of this start to compare.
    """
    old = current_options(stored.get("options", {}))
    options = request.options
    differences = [
        f"--{name} was {_shown(old[name])} and is {_shown(value)}"
        for name, value in options.items()
        if name not in request.may_differ
        and name in old
        and old[name] != value
        and KEPT.get(name) != value
    ]
    context_size = options.get("context_parallel_size", 1)
    if (request.world_size, context_size) == (
        stored.get("world_size"),
        old.get("context_parallel_size", 1),
    ):
        data_size = request.world_size // context_size
        rows = _rows_per_step(options, data_size)
        old_rows = stored["global_batch_size"]
        # On another number of ranks a run keeps its rows per step, so the options that make them
        # may differ.
        if rows not in (old_rows, _rows_per_step(old, data_size)):
            product = f"--batch_size x --gradient_accumulation_steps x {data_size} ranks"
            differences.append(f"{product} was {old_rows} rows per step and is {rows}")
    for name, fact in facts.items():
        old_fact = stored.get("facts", {}).get(name)
        if old_fact != fact:
            values = f": {old_fact} then, {fact} now" if name == "precision" else ""
            differences.append(
                f"{FACTS[name]} {'are' if name == 'rows' else 'is'} not the same{values}"
            )
    return differences


def _rows_per_step(options: Mapping[str, Any], data_size: int) -> int:
    return int(options["batch_size"] * options["gradient_accumulation_steps"] * data_size)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def refuse(folder: Path | str, differences: list[str]) -> NoReturn:
    """Raise UserError with the differences from the run in a folder, checkpoint or mirror."""
    advice = (
        "Give the same options to resume it, another folder, or --resume auto:replace to replace "
        "it."
    )
    kind = "a finished" if isinstance(folder, Path) and is_finished(folder) else "an unfinished"
    if isinstance(folder, Path):
        run = folder.parents[1] if folder.parent.name == CHECKPOINTS else folder
        advice += (
            " To train its adapter further, as a new run, give another --output_dir and "
            f"--adapter {run}."
        )
    raise UserError(
        "\n  ".join([f"{folder} belongs to {kind} run with other settings:", *differences])
        + f"\n{advice}"
    )
