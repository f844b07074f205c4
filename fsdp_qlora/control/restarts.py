"""Restarts by torchrun: which are pointless, and how the next attempt learns of it.

torchrun starts all workers again after any failure, up to --max-restarts times. An end that would only repeat itself
is noted in torchrun's own store, which outlives the workers, and the next attempt stops where it begins. Where
torchrun's worker is a launcher with workers of its own, these leave their note in a file, and it passes it on.
"""

import contextlib
import datetime
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_qlora.errors import Ending

if TYPE_CHECKING:  # torch is imported where it is needed: wrong options should not wait for it
    from torch.distributed import TCPStore

_KEY = "fsdp_qlora/do_not_restart"
NOTE_FILE = "FSDP_QLORA_NOTE_FILE"  # set by a launcher for its workers
AUTO_RESTART = "FSDP_QLORA_AUTO_RESTART"  # set by scripts/run_forever.sh and the systemd unit


def is_restart() -> bool:
    """Whether torchrun, and no person, has started this process again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def is_unattended() -> bool:
    """Whether nobody is there to see that a run dies again and again at the same step."""
    return is_restart() or os.environ.get(AUTO_RESTART) == "1"


def note_end(ending: Ending, message: str) -> None:
    """Keep torchrun from restarting for nothing, where the end is final."""
    if not ending.is_final:
        return
    note = json.dumps([ending.exit_code, message.splitlines()[0]])
    if file := os.environ.get(NOTE_FILE):
        with contextlib.suppress(OSError), Path(file).open("x") as stream:  # another rank may have been first
            stream.write(note)
    else:
        _keep(note)


def pass_on(file: Path) -> None:
    """Keep torchrun from restarting this launcher, where one of its workers has noted a final end."""
    with contextlib.suppress(OSError):
        _keep(file.read_text())


def _keep(note: str) -> None:
    if _has_agent_store() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0:
        with contextlib.suppress(Exception):  # torchrun may be gone; then nobody restarts
            _agent_store().set(_KEY, note)


def earlier_end() -> tuple[int, str] | None:
    """(exit status, message) of an attempt after which no other makes sense."""
    if not is_restart() or not _has_agent_store():
        return None
    with contextlib.suppress(Exception):
        store = _agent_store()
        if store.check([_KEY]):
            code, message = json.loads(store.get(_KEY))
            return int(code), str(message)
    return None


def _has_agent_store() -> bool:
    """Whether the store is torchrun's own. With a fixed port it is rank 0's, and ends with it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _agent_store() -> "TCPStore":
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, timeout=datetime.timedelta(seconds=10), wait_for_workers=False)
