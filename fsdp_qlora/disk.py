"""Room on the disks."""

import shutil
from pathlib import Path


def free_disk(folder: Path) -> int:
    """Bytes that may still be written to a folder, which need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
