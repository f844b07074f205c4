"""Opens a service's records, socket and key, before a model is loaded."""

import shlex
import socket
import sys
from pathlib import Path
from typing import NamedTuple

from fsdp_qlora.service.access import (
    KEY_FILE,
    NO_KEY,
    check_key,
    is_of_this_machine,
    kept_key,
)
from fsdp_qlora.service.records import Records
from fsdp_qlora.utils.errors import UserError


class ServeOptions(NamedTuple):
    """Where a service listens, and what it keeps."""

    host: str
    port: int
    folder: Path
    """Records and checkpoints."""
    max_models: int
    """The maximum number of adapters in host memory."""
    api_key: str | None
    """The key that clients must send; None for the one that is kept in the folder, "none" for no
    key.
    """
    teacher: str | None = None
    """A second, frozen model."""
    rollout_url: str | None = None
    """The address of a server that answers requests for samples."""


class Opened(NamedTuple):
    """Records, socket and key, which rank 0 opens before the model is loaded.

    key: None if requests need none.
    """

    records: Records
    listening: socket.socket
    key: str | None


def open_folder_and_port(options: ServeOptions) -> Opened:
    """Open the folder's records and the socket to listen at.

    They come first, since either may be refused.
    """
    # Without a key, everybody who reaches the port could use the GPUs.
    has_no_key = options.api_key == NO_KEY
    if has_no_key and not is_of_this_machine(options.host):
        raise UserError(
            f"--host {options.host} accepts other machines, and --api_key none accepts anybody on "
            "them. Leave out --api_key."
        )
    if options.api_key is not None and not has_no_key:
        check_key(options.api_key, "--api_key or TINKER_API_KEY")
    records = Records(options.folder)
    key = None if has_no_key else options.api_key or _key_of(options.folder)
    try:
        return Opened(records, socket.create_server((options.host, options.port)), key)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--host {options.host} --port {options.port}: {error}. Give another address or port."
        ) from error


def _key_of(folder: Path) -> str:
    """The key that is kept in the folder.

    How clients get it is printed past the filter that hides secrets.
    """
    key, is_new = kept_key(folder)
    value = key if is_new else f'"$(cat {shlex.quote(str(folder / KEY_FILE))})"'
    print(
        f"Clients need this service's key:\n    export TINKER_API_KEY={value}",
        file=sys.__stdout__,
        flush=True,
    )
    return key
