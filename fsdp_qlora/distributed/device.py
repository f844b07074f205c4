"""Chooses a rank's device, explains why a GPU cannot be used, and copies a batch to it."""

import os
import subprocess
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import plural

# Bytes: where each tensor starts in a shared buffer. A view as another dtype needs a multiple of
# its size, and kernels load faster from an aligned start.
_ALIGNMENT = 64
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def choose_device(requested: str, local_rank: int) -> torch.device:
    """Choose a rank's device.

    Args:
        requested: the option `device`: auto, cpu or cuda.
    Raises:
        UserError: torch cannot use the machine's GPU, no GPU is visible, or there are more ranks
            than GPUs.
    """
    if requested == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} are visible. "
                "Start one process per visible GPU."
            )
        return torch.device("cuda", local_rank)
    problem = gpu_problem()
    if problem:
        raise UserError(problem)
    if requested == "cuda":
        raise UserError(
            "--device is cuda, but no GPU is visible on this machine. Leave it at auto."
        )
    return torch.device("cpu")


def make_deterministic() -> None:
    """Make torch use only deterministic kernels, and raise where none exists.

    Call it before the GPU is used.
    """
    # cuBLAS is deterministic with a fixed workspace only, and reads this when it is initialized.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # transformers passes it on to flash-attn.
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it


def configure_kernels() -> None:
    """Choose among torch's GPU kernels for this process.

    Matrix products accumulate in fp32. By default torch lets cuBLAS add partial sums in 16 bits if
    the summed dim is long and the result small, as in the gradients of A and B (an error of 0.24 to
    0.7% instead of 0.17%).
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # SDPA's cuDNN kernel, torch's first choice on Hopper, builds a new plan for every batch shape.
    torch.backends.cuda.enable_cudnn_sdp(False)


def gpu_problem() -> str | None:
    """Explain why torch cannot use GPUs that the driver lists.

    None if it lists none, or they are hidden on purpose.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    cards = _listed_cards()
    if not cards:
        return None
    name, driver = cards[0]
    gpus = f"{plural(len(cards), 'NVIDIA GPU')} ({name}, driver {driver})"
    if torch.version.cuda is None:
        reason = f"the installed torch {torch.__version__} is built for the CPU"
        advice = "Install one that is built for CUDA: pip install --force-reinstall torch"
    else:
        reason = (
            f"the installed torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot "
            "use them"
        )
        advice = (
            f"Install a driver for CUDA {torch.version.cuda} or newer, or a torch for the CUDA "
            "version that nvidia-smi shows, such as 12.6: pip install --force-reinstall torch "
            "--index-url https://download.pytorch.org/whl/cu126"
        )
    return (
        f"This machine has {gpus}, but {reason}. {advice}. To train on the CPU, give --device cpu."
    )


def _listed_cards() -> list[tuple[str, str]]:
    """(name, driver version) of each card that nvidia-smi lists."""
    try:
        listed = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):  # no driver, or none that answers
        return []
    pairs = [line.rpartition(",") for line in listed.splitlines() if "," in line]
    return [(name.strip(), driver.strip()) for name, _, driver in pairs]


def shares_host_memory(device: torch.device) -> bool:
    """Whether a GPU's memory is the host's, as of a GB10: what one takes the other lacks."""
    return device.type == "cuda" and bool(torch.cuda.get_device_properties(device).is_integrated)


def free_gpu_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a GPU.

    Where its memory is the host's, the page cache counts as free: the driver takes it for used,
    though the host gives it up to whoever asks.
    """
    free, total = torch.cuda.mem_get_info(device)
    if shares_host_memory(device):
        free = min(total, psutil.virtual_memory().available)
    return free, total


def to_device(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy the tensors among some values from the CPU to the device; other values stay.

    All tensors are packed into one pinned buffer, so that the host never waits for the copy: from
    pageable memory the driver copies at most 64 KiB asynchronously. torch's allocator reuses the
    pinned buffer only after the copy is done.
    """
    result = dict(values)
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    if device.type != "cuda":
        for name, tensor in tensors.items():
            result[name] = tensor.to(device)
        return result
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, tensor in zip(pinned.split(sizes), tensors.values(), strict=True):
        _like(tensor, part).copy_(tensor)
    # One buffer on the device as well. The tensors are views of it, which keep it alive.
    parts = pinned.to(device, non_blocking=True).split(sizes)
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        result[name] = _like(tensor, part)
    return result


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The first bytes of a uint8 buffer, viewed with the dtype and shape of `tensor`."""
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
