"""What lies in a run's folder, by name, and the lock that keeps other runs out of it."""

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fsdp_qlora.errors import UserError

log = logging.getLogger("fsdp_qlora")

CHECKPOINTS = "checkpoints"
LOCK, RUN, STATUS = ".lock", "run.json", "status.json"
FETCHED = ".from_mirror"  # what is on its way here from a mirror
# What a run leaves in its folder; --overwrite_output_dir removes these and touches nothing else.
RUN_FILES = (
    "adapter_config.json", "adapter_model.safetensors", "config.json", "config.yaml", "generation_config.json",
    "metrics.jsonl", "metrics.jsonl.set_aside", "model*.safetensors", "model.safetensors.index.json", "rejected.jsonl",
    "additional_chat_templates", ".saving_weights", ".saving", "run.json", "status.json", "hang_rank_*",
    "checkpoints", FETCHED,
)  # fmt: skip
# What a start that was killed before it had written run.json may leave: nobody's results.
LEFTOVERS = {LOCK, ".saving", FETCHED, f".{RUN}.partial"}


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
