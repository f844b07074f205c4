"""Names of the files in a run's folder, and the lock that keeps other runs out of it."""

import contextlib
import fcntl
import fnmatch
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from fsdp_qlora.errors import UserError
from fsdp_qlora.storage.files import is_partial, open_own

log = logging.getLogger("fsdp_qlora")

CHECKPOINTS = "checkpoints"
CARD, RECORD = "README.md", "training.json"  # what a result says of itself
BEST = "best"  # the adapter of the lowest held-out loss
LOCK, RUN, STATUS, RESULT = ".lock", "run.json", "status.json", "result.json"
FETCHED = ".from_mirror"  # files being copied from a mirror
BRING_BACK = (
    "Is its disk mounted? Bring the checkpoints back, or start anew with --resume off --overwrite_output_dir true."
)
# Files that a run leaves in its folder; --overwrite_output_dir removes only these.
RUN_FILES = (
    "adapter_config.json", "adapter_model.safetensors", "config.json", "config.yaml", "generation_config.json",
    "metrics.jsonl", "metrics.jsonl.set_aside", "model*.safetensors", "model.safetensors.index.json", "rejected.jsonl",
    "samples.jsonl",
    "additional_chat_templates", ".saving_weights", ".saving", "run.json", "status.json", "result.json", "hang_rank_*",
    "checkpoints", "facts.json", "report.html", "tensorboard", BEST, CARD, RECORD, FETCHED,
)  # fmt: skip
# Files that a start killed before it has written run.json may leave. They are no results.
_LEFTOVERS = {LOCK, ".saving", FETCHED}
# Files and folders opened under a fixed name; all others are written under a random name and renamed.
_OPENED = (LOCK, FETCHED, RUN, STATUS, RESULT, "metrics.jsonl*", ".saving*", "hang_rank_*", "tensorboard")


def is_leftover(path: Path) -> bool:
    """Whether this is a leftover of a killed start of ours: not a link."""
    is_ours = path.name in _LEFTOVERS or is_partial(path.name, RUN)
    return is_ours and not path.is_symlink()


def refuse_links(output_dir: Path) -> None:
    """Refuse a folder with a link, device or pipe in the place of a file that a run would open.

    Raises:
        UserError: names it.
    """
    try:
        paths = sorted(output_dir.iterdir())
    except OSError:  # it is not there, or what it is else is said elsewhere
        return
    for path in paths:
        if not any(fnmatch.fnmatch(path.name, pattern) for pattern in _OPENED):
            continue
        try:
            mode = path.lstat().st_mode
        except OSError:  # another rank's, gone meanwhile
            continue
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            continue
        problem = "is a link, and would be written through" if stat.S_ISLNK(mode) else "is a pipe, socket or device"
        raise UserError(f"output_dir {output_dir}: {path.name} {problem}. Remove it, or give another folder.")


def check_reachable(root: Path) -> None:
    """Refuse to start at step 0 if the folder of the checkpoints exists and cannot be used.

    Raises:
        UserError: it is a link to nothing, as where a disk is not mounted, a file, or not ours to use.
    """
    problem = None
    if root.is_symlink() and not root.exists():
        problem = f"is a link to {root.readlink()}, which does not exist"
    elif root.exists() and not root.is_dir():
        problem = "is not a folder"
    elif root.exists() and not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        problem = "cannot be read and written"
    if problem:
        raise UserError(f"{root} {problem}. {BRING_BACK}")


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which is created if needed. For rank 0 only.

    The system releases the lock whenever its holder dies. Folders created for the lock alone are removed.

    Raises:
        UserError: another process holds the lock, or the folder cannot be created.
    """
    made = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
    descriptor = _take(output_dir)
    try:
        yield
    finally:
        (output_dir / LOCK).unlink(missing_ok=True)
        os.close(descriptor)
        with contextlib.suppress(OSError):  # it is not empty
            for path in made:
                path.rmdir()


def _take(output_dir: Path) -> int:
    path = output_dir / LOCK
    while True:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            descriptor = open_own(path, os.O_RDWR | os.O_CREAT, allow_hard_link=True)
        except OSError as error:
            where = f" ({path.name})" if output_dir.is_dir() else ""
            raise UserError(f"output_dir {output_dir} cannot be written{where}: {error.strerror}.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise UserError(
                f"output_dir {output_dir} is in use by another run ({holder}). Wait for it, stop it, or give another "
                "folder."
            ) from None
        except OSError as error:  # some network disks do not support locks
            log.warning("%s cannot be locked (%s): make sure that no other run writes there.", output_dir, error)
            return descriptor
        # The last holder may have removed the file after we opened it.
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                if os.fstat(descriptor).st_nlink == 1:  # else what its other names mean is not ours to change
                    os.ftruncate(descriptor, 0)
                    with contextlib.suppress(OSError):  # a full disk
                        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return descriptor
        os.close(descriptor)
