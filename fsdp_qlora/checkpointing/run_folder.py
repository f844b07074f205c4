"""What a run keeps in its folder about itself: a lock, run.json (what it is) and status.json (how it stands)."""

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdp_qlora.errors import ENDINGS, UserError
from fsdp_qlora.redact import redact_values
from fsdp_qlora.storage.files import flush

log = logging.getLogger("fsdp_qlora")

CHECKPOINTS = "checkpoints"
LOCK, RUN, STATUS = ".lock", "run.json", "status.json"
FETCHED = ".from_mirror"  # what is on its way here from a mirror
_SECONDS_BETWEEN = 10.0


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which is made where it is not there. For rank 0 only.

    The system frees the lock when its holder dies, however that happens. What the lock alone has made is removed.

    Raises:
        UserError: another process holds it, or the folder cannot be made.
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
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"output_dir {output_dir} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise UserError(
                f"output_dir {output_dir} is in use by a run that is going on ({holder}). Wait for it, end it, or give "
                "another folder."
            ) from None
        except OSError as error:  # some network disks know no locks
            log.warning("%s cannot be locked (%s): take care that no other run writes there.", output_dir, error)
            return descriptor
        # The last holder may have removed the file between our opening it and its release.
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                os.ftruncate(descriptor, 0)
                with contextlib.suppress(OSError):  # a full disk
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return descriptor
        os.close(descriptor)


def write_atomically(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file; a reader sees the old one or the new one. Secrets are taken out."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(redact_values(content), indent=2) + "\n")
    flush(partial)
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty where it is not there or cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class Status:
    """Keeps status.json: state, step, saved_step, reason, exit_code, seconds. Only rank 0's does anything.

    A disk that is full or gone is no reason to stop a run, so what cannot be written is left.
    """

    def __init__(self, output_dir: Path, *, is_rank_0: bool, **values: Any) -> None:
        self._path = output_dir / STATUS if is_rank_0 else None
        self.values = values
        self._written_at = 0.0

    def update(self, **values: Any) -> None:
        self.values |= values
        self._written_at = time.monotonic()
        if self._path is not None:
            with contextlib.suppress(OSError):
                write_atomically(self._path, self.values)

    def end(self, state: str, reason: str | None) -> None:
        """Note how the run has ended. state: a key of errors.ENDINGS."""
        self.update(state=state, reason=reason, exit_code=ENDINGS[state].exit_code)

    def keep(self, **values: Any) -> None:
        """Take values that change in every step; they are written every few seconds, and with the next update."""
        self.values |= values
        if time.monotonic() - self._written_at > _SECONDS_BETWEEN:
            self.update()
