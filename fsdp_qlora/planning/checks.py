"""Checks that a run's weights and result fit on this machine, before the first byte is read."""

import resource
from pathlib import Path

import psutil
import torch
from torch import nn

from fsdp_qlora.model.model_parts import each_parameter
from fsdp_qlora.planning.memory import Memory
from fsdp_qlora.utils.errors import OutOfMemory, UserError
from fsdp_qlora.utils.files import free_disk
from fsdp_qlora.utils.text import GIB


def check_resources(memory: Memory, device: torch.device, *, ranks_on_host: int, can_offload: bool) -> None:
    """Refuse a run that cannot fit, with the numbers and what would help.

    Raises:
        UserError: the device or the host has less memory than the weights alone need.
        OutOfMemory: it has less free, since others hold it, so that a later start may succeed.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if (needed := sum(memory.resident.values())) > free:
            advice = "--use_cpu_offload true keeps the frozen weights in host memory; " if can_offload else ""
            raise (UserError if needed > total else OutOfMemory)(
                f"This rank's weights, gradients and optimizer state need {needed / GIB:.1f} GiB of GPU memory, "
                f"and {free / GIB:.1f} of {total / GIB:.1f} GiB are free. {advice}more GPUs, a smaller --lora_rank or "
                "a smaller model need less."
            )
    free, host = host_memory_free(ranks_on_host), psutil.virtual_memory()
    if (needed := sum(memory.host.values())) > free:
        is_held = host.available < needed * ranks_on_host <= host.total
        raise (OutOfMemory if is_held else UserError)(
            f"This rank needs {needed / GIB:.1f} GiB of host memory to load its part of the model, and "
            f"{free / GIB:.1f} GiB are free for it ({ranks_on_host} ranks on this machine). More ranks, "
            "--use_cpu_offload false or a smaller model need less."
        )


def check_disk(output_dir: Path, num_bytes: int) -> None:
    """Refuse a run whose result would not fit on the disk.

    Raises:
        UserError: output_dir has less room than the result takes.
    """
    free = free_disk(output_dir)
    if num_bytes > free:
        raise UserError(
            f"The result needs {num_bytes / GIB:.2f} GiB, and output_dir {output_dir} has {free / GIB:.2f} GiB free. "
            "Free some space, or give an --output_dir on a larger disk; --save_model false saves only the metrics."
        )


def result_bytes(model: nn.Module, *, dtype: torch.dtype, reduces_base: bool) -> int:
    """Size of the saved result: an adapter and modules trained with it in float32, or the whole model in `dtype`.

    Args:
        reduces_base: the adapter is saved in twice its rank, see `first_values.saved_parameters`.
    """
    kinds = each_parameter(model).values()
    if in_adapters := [kind for kind in kinds if kind.in_adapter]:
        trainable = sum(4 * kind.num_weights for kind in kinds if kind.category == "trainable")
        again = sum(4 * kind.num_weights for kind in in_adapters)
        return trainable + again * reduces_base
    # Of block expansion the quantized base is saved with its original weights.
    return sum(kind.num_weights for kind in kinds) * dtype.itemsize


def host_memory_free(ranks_on_host: int) -> int:
    """Bytes of host memory left for each rank by the limits of the machine, the container and the process."""
    limits = [psutil.virtual_memory().available // ranks_on_host]
    if (in_container := _cgroup_free()) is not None:
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
            most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
            counts = dict(line.split() for line in (folder / stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        # The kernel counts cached files as used, and frees them when memory is needed.
        total = "total_" if "total_inactive_file" in counts else ""
        cached = sum(int(counts.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
        # Version 1 writes "no limit" as a huge number.
        return int(most) - now + cached if most.isdigit() and int(most) < 2**60 else None
    return None
