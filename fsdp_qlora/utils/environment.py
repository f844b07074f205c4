"""The machine, versions and environment variables that a run depends on, without secrets."""

import contextlib
import importlib.metadata
import os
import platform
import re

import psutil

from fsdp_qlora import __version__
from fsdp_qlora.utils.redact import HIDDEN, is_secret_name, redact
from fsdp_qlora.utils.text import format_bytes

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "datasets",
    "huggingface_hub",
    "numpy",
    "safetensors",
    "tokenizers",
    "hqq",
    "flash-attn",
    "flash-attn-4",
    "wandb",
    "tensorboard",
    "triton",
    "flash-linear-attention",
    "causal-conv1d",
    "mamba-ssm",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
# Variables that change what is computed, how ranks connect, or where files come from.
_VARIABLES = re.compile(
    r"(CUDA|NCCL|GLOO|TORCH|PYTORCH|HF|HUGGINGFACE|TRANSFORMERS|FSDP_QLORA|WANDB|BNB|OMP|MKL|TOKENIZERS|PYTHON|SLURM"
    r"|PET)_|LD_LIBRARY_PATH$|LD_PRELOAD$|PYTHONPATH$|(HTTPS?|NO|ALL)_PROXY$|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR)$",
    re.IGNORECASE,
)


def describe_environment() -> dict[str, dict[str, str]]:
    """Heading -> name -> text, for a run's facts."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    machine = {
        "system": platform.platform(),
        "processor": f"{os.cpu_count()} cores",
        "memory": format_bytes(psutil.virtual_memory().total),
        "GPUs": ", ".join(gpus) or "none",
    }
    return {"versions": versions(), "machine": machine, "variables": variables()}


def versions() -> dict[str, str]:
    """The versions of this program, Python and the installed packages."""
    installed = {"fsdp_qlora": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def describe_machine() -> str:
    """The report of torch.utils.collect_env: torch's build, machine, GPUs and driver.

    If torch cannot be used, the reason.
    """
    try:
        from torch.utils.collect_env import get_pretty_env_info

        return redact(_without_home(get_pretty_env_info()))
    except Exception as error:  # the report must also describe a broken installation
        return redact(f"torch cannot be used: {type(error).__name__}: {error}")


def variables() -> dict[str, str]:
    """The environment variables that change a run, with the values of secret ones hidden."""
    shown = {}
    for name, value in sorted(os.environ.items()):
        if not _VARIABLES.match(name):
            continue
        if value and is_secret_name(name):
            shown[name] = HIDDEN
        else:
            shown[name] = redact(_without_home(value))
    return shown


def _without_home(text: str) -> str:
    # Reports are published, and the home folder has the user's name.
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text
