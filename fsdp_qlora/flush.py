"""Making sure that what was written is on the disk."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
