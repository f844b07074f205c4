"""The machine, versions and environment variables that a run depends on besides its options, without secrets."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys

import psutil

from fsdp_qlora import __version__
from fsdp_qlora.utils.redact import HIDDEN, is_secret_name, redact
from fsdp_qlora.utils.text import format_bytes

PACKAGES = (
    "torch", "transformers", "peft", "bitsandbytes", "accelerate", "datasets", "huggingface_hub", "numpy",
    "safetensors", "tokenizers", "hqq", "flash-attn", "wandb", "tensorboard", "triton", "gguf",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
_VARIABLES = re.compile(
    r"(CUDA|NCCL|GLOO|TORCH|PYTORCH|HF|HUGGINGFACE|TRANSFORMERS|FSDP_QLORA|WANDB|BNB|OMP|MKL|TOKENIZERS|PYTHON|SLURM"
    r"|PET)_|LD_LIBRARY_PATH$|LD_PRELOAD$|PYTHONPATH$|(HTTPS?|NO|ALL)_PROXY$|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR)$",
    re.IGNORECASE,
)

Facts = dict[str, dict[str, str]]


def describe_environment() -> Facts:
    """Heading -> name -> text. Imports torch; a value that cannot be determined is replaced by the reason."""
    return {"versions": versions(), "machine": machine(), "GPUs": gpus(), "variables": variables()}


def versions() -> dict[str, str]:
    """The versions of this program, Python and the installed packages."""
    installed = {"fsdp_qlora": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def machine() -> dict[str, str]:
    memory = psutil.virtual_memory()
    facts = {
        "system": platform.platform(),
        "processor": f"{os.cpu_count()} cores",
        "memory": f"{format_bytes(memory.total)}, {format_bytes(memory.available)} free",
        "python": redact(_without_home(sys.executable)),
    }
    folders = [folder for folder in ("/dev/shm", ".") if os.path.isdir(folder)]
    return facts | {f"free in {folder}": format_bytes(shutil.disk_usage(folder).free) for folder in folders}


def gpus() -> dict[str, str]:
    """The GPUs that torch sees, and those that nvidia-smi sees, which may differ."""
    try:
        import torch
        from torch.utils import collect_env

        cuda = torch.version.cuda
        facts = {
            "torch is built for": f"CUDA {cuda}" if cuda else "the CPU",
            "torch sees": f"{torch.cuda.device_count()} GPUs",
            "nvidia-smi sees": collect_env.get_gpu_info(collect_env.run),
            "driver": collect_env.get_nvidia_driver_version(collect_env.run),
        }
    except Exception as error:  # the report must also describe a broken installation
        return {"torch": redact(f"cannot be used: {type(error).__name__}: {error}".splitlines()[0])}
    return {name: text or "nothing" for name, text in facts.items()}


def variables() -> dict[str, str]:
    """The environment variables that change a run, with the values of secret ones hidden."""
    names = sorted(name for name in os.environ if _VARIABLES.match(name))
    return {name: _value(name) for name in names}


def _value(name: str) -> str:
    value = os.environ[name]
    return HIDDEN if value and is_secret_name(name) else redact(_without_home(value))


def _without_home(text: str) -> str:
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text
