"""Prevents pointless restarts by torchrun.

torchrun restarts all workers after any failure, up to --max-restarts times. An exit that would only be repeated is
recorded in torchrun's own store, which outlives the workers, and the next attempt exits at once. If torchrun's worker
is a launcher, its own workers record the exit in a file, and the launcher forwards it.
"""

import contextlib
import datetime
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_qlora.errors import Ending

if TYPE_CHECKING:  # torch is imported where it is needed, so that wrong options are reported quickly
    from torch.distributed import TCPStore

NOTE_FILE = "FSDP_QLORA_NOTE_FILE"  # set by a launcher for its workers
AUTO_RESTART = "FSDP_QLORA_AUTO_RESTART"  # set by scripts/run_forever.sh and the systemd unit


def is_restart() -> bool:
    """Whether torchrun has restarted this process."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def is_unattended() -> bool:
    """Whether the run is restarted automatically, so that nobody would notice repeated failures."""
    return is_restart() or os.environ.get(AUTO_RESTART) == "1"


def record_exit(ending: Ending, message: str) -> None:
    """Record a final ending, so that torchrun's next attempt exits at once."""
    if not ending.is_final:
        return
    note = json.dumps([ending.exit_code, message.splitlines()[0]])
    if file := os.environ.get(NOTE_FILE):
        with contextlib.suppress(OSError), Path(file).open("x") as stream:  # another rank may have been first
            stream.write(note)
    _store(note)


def forward_exit(file: Path) -> None:
    """Record the final ending of a launcher's workers, if they have left one, for torchrun's next attempt."""
    with contextlib.suppress(OSError):
        _store(file.read_text())


def _store(note: str) -> None:
    if _has_agent_store() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0:
        with contextlib.suppress(Exception):  # torchrun may have ended; then nothing restarts
            _agent_store().set(_key(), note)


def previous_exit() -> tuple[int, str] | None:
    """(exit status, message) of a previous attempt that ended for good, None if there is none."""
    if not is_restart() or not _has_agent_store():
        return None
    with contextlib.suppress(Exception):
        store = _agent_store()
        if store.check([_key()]):
            code, message = json.loads(store.get(_key()))
            return int(code), str(message)
    return None


def _has_agent_store() -> bool:
    """Whether the store is torchrun's own. With a fixed port it is rank 0's and ends with it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _key() -> str:
    """Begins as those of `ranks.store.connect`."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '0')}/do_not_restart"


def _agent_store() -> "TCPStore":
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, timeout=datetime.timedelta(seconds=10), wait_for_workers=False)
