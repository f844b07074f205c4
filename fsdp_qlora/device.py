"""Chooses a rank's device, and explains why a GPU that exists cannot be used."""

import os
import subprocess

import torch

from fsdp_qlora.errors import UserError

_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def choose_device(asked: str, local_rank: int) -> torch.device:
    """The device of a rank.

    Args:
        asked: the option device: auto, cpu or cuda.
    Raises:
        UserError: torch cannot use the machine's GPU, a requested GPU does not exist, or there are fewer than ranks.
    """
    if asked == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} are visible. "
                "Start one process per visible GPU."
            )
        return torch.device("cuda", local_rank)
    if problem := _gpu_problem():
        raise UserError(problem)
    if asked == "cuda":
        raise UserError("--device is cuda, but no GPU is visible on this machine. Leave it at auto.")
    return torch.device("cpu")


def _gpu_problem() -> str | None:
    """Why torch sees no GPU although the driver lists some; None if there is none, or they are hidden on purpose."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    cards = _listed_cards()
    if not cards:
        return None
    name, driver = cards[0]
    found = f"{len(cards)} NVIDIA GPU{'s' * (len(cards) > 1)} ({name}, driver {driver})"
    if torch.version.cuda is None:
        why = f"the installed torch {torch.__version__} is made for the CPU"
        cure = "Install one that is made for CUDA: pip install --force-reinstall torch"
    else:
        why = f"the installed torch {torch.__version__}, made for CUDA {torch.version.cuda}, cannot use them"
        cure = (
            f"Install a driver for CUDA {torch.version.cuda} or newer, or a torch for the CUDA version that nvidia-smi "
            "shows, such as 12.6: pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
        )
    return f"This machine has {found}, but {why}. {cure}. To train on the CPU, give --device cpu."


def _listed_cards() -> list[tuple[str, str]]:
    """(name, driver version) of each card that nvidia-smi lists."""
    try:
        listed = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no driver, or none that answers
        return []
    pairs = [line.rpartition(",") for line in listed.splitlines() if "," in line]
    return [(name.strip(), driver.strip()) for name, _, driver in pairs]
