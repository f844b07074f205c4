"""A model folder made from another model folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fsdp_qlora.errors import UserError
from fsdp_qlora.storage.files import staged_folder


@contextlib.contextmanager
def new_folder(out: Path, option: str) -> Iterator[Path]:
    """A folder to fill, which becomes `out` (absent or empty) when the block has ended; else nothing of it is left.

    Args:
        option: the flag that gave `out`, for the message.
    Raises:
        UserError: it cannot be written.
    """
    try:
        with staged_folder(out, out.with_name(f"{out.name}.{os.getpid()}.partial")) as partial:
            yield partial
    except OSError as error:
        raise UserError(f"{option} {out} cannot be written ({error.strerror or error}).") from error
