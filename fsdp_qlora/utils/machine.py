"""The free memory and disk of this machine, within the limits of a container."""

import contextlib
import os
import resource
import shutil
from pathlib import Path

import psutil


def host_memory_free(ranks_on_host: int) -> int:
    """Bytes of host memory left for each rank, by machine, container and process limits."""
    # The machine's and the container's memory is for all ranks; a process has its own limit.
    limits = [psutil.virtual_memory().available // ranks_on_host]
    in_container = _cgroup_free()
    if in_container is not None:
        limits.append(in_container // ranks_on_host)
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)  # ulimit -v
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - psutil.Process().memory_info().vms)
    return max(0, min(limits))


def _cgroup_free(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left by a container's memory limit (cgroup v2 or v1); None without one."""
    for limit_file, usage_file, stat_file in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / usage_file).read_text())
            counts = dict(line.split() for line in (folder / stat_file).read_text().splitlines())
        except (OSError, ValueError):
            continue
        # The kernel counts cached files as used, and frees them when memory is needed.
        # In version 1 only the "total_" counts include the groups below this one.
        total = "total_" if "total_inactive_file" in counts else ""
        cached = sum(int(counts.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
        # Version 2 writes "max" where there is no limit, version 1 a huge number.
        if limit.isdigit() and int(limit) < 2**60:
            return int(limit) - used + cached
        return None
    return None


def free_disk(folder: Path) -> int:
    """Bytes that may still be written to a folder, which need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder and below it, each once; 0 if there is none."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            # A program may delete it now. A link's file may be here, too, and is not followed.
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total
