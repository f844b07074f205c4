"""Prevents pointless restarts by torchrun.

torchrun restarts all workers after any failure, up to --max-restarts times. A final ending, which a
restart would only repeat, is recorded in torchrun's own store, which outlives the workers, and the
next attempt exits at once. If torchrun's worker is a launcher, its own workers record the ending in
a file, and the launcher forwards it.
"""

import contextlib
import datetime
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_qlora.utils.errors import Ending

# torch is imported where it is needed, so that wrong options are reported quickly.
if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "do_not_restart"
NOTE_FILE = "FSDP_QLORA_NOTE_FILE"  # set by a launcher for its workers
AUTO_RESTART = "FSDP_QLORA_AUTO_RESTART"  # set by scripts/run_forever.sh and the systemd unit


def is_restart() -> bool:
    """Whether torchrun has restarted this process."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def is_unattended() -> bool:
    """Whether the run is restarted automatically: nobody would notice repeated failures."""
    return is_restart() or os.environ.get(AUTO_RESTART) == "1"


def record_exit(ending: Ending, message: str) -> None:
    """Record a final ending, so that torchrun's next attempt exits at once.

    Other endings are not recorded: a restart may help.
    """
    if not ending.is_final:
        return
    note = json.dumps([ending.exit_code, message.splitlines()[0]])
    file = os.environ.get(NOTE_FILE)
    if file:
        # Exclusively: another rank may have been first, and has the cause.
        with contextlib.suppress(OSError), Path(file).open("x") as stream:
            stream.write(note)
    _store(note)


def forward_exit(file: Path) -> None:
    """Record the final ending in a launcher's file, if any, for torchrun's next attempt."""
    with contextlib.suppress(OSError):
        _store(file.read_text())


def _store(note: str) -> None:
    # Without restarts nobody reads it, and connecting to the store would take up to its timeout.
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0:
        with contextlib.suppress(Exception):  # torchrun may have ended; then it restarts nothing
            store = _agent_store()
            if store:
                store.set(_KEY, note)


def previous_exit() -> tuple[int, str] | None:
    """(exit status, message) of a previous attempt's final ending, None if there is none."""
    # Any error means that nothing is known, and the attempt goes on.
    with contextlib.suppress(Exception):
        store = _agent_store() if is_restart() else None
        if store and store.check([_KEY]):
            code, message = json.loads(store.get(_KEY))
            return int(code), str(message)
    return None


def _agent_store() -> "Store | None":
    """torchrun's own store; None if the ranks use one of rank 0, which ends with it.

    The latter is so with a static rendezvous.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import PrefixStore, TCPStore

    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, timeout=datetime.timedelta(seconds=10), wait_for_workers=False)
    return PrefixStore(os.environ.get("TORCHELASTIC_RUN_ID", "0"), store)
