"""The free memory and disk of this machine, within the limits of a container."""

import resource
import shutil
from pathlib import Path

import psutil


def host_memory_free(ranks_on_host: int) -> int:
    """Bytes of host memory left for each rank by the limits of the machine, the container and the
    process.
    """
    limits = [psutil.virtual_memory().available // ranks_on_host]
    in_container = _cgroup_free()
    if in_container is not None:
        limits.append(in_container // ranks_on_host)
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        limits.append(most - psutil.Process().memory_info().vms)
    return max(0, min(limits))


def _cgroup_free(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left by a container's memory limit (cgroup v2 or v1); None without one."""
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            most = (folder / limit).read_text().strip()
            now = int((folder / used).read_text())
            counts = dict(line.split() for line in (folder / stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        # The kernel counts cached files as used, and frees them when memory is needed.
        total = "total_" if "total_inactive_file" in counts else ""
        cached = sum(int(counts.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
        # Version 1 writes "no limit" as a huge number.
        return int(most) - now + cached if most.isdigit() and int(most) < 2**60 else None
    return None


def free_disk(folder: Path) -> int:
    """Bytes that may still be written to a folder, which need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
