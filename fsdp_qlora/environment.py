"""What a run depends on besides its options: the machine, the versions, the variables; secrets are left out."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from fsdp_qlora.redact import HIDDEN, is_secret_name, redact
from fsdp_qlora.units import format_bytes
from fsdp_qlora.version import VERSION

PACKAGES = (
    "torch", "transformers", "peft", "bitsandbytes", "accelerate", "datasets", "huggingface_hub", "numpy",
    "safetensors", "tokenizers", "hqq", "flash-attn", "schedulefree", "wandb", "tensorboard", "trackio", "triton",
    "gguf", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
_VARIABLES = re.compile(
    r"(CUDA|NCCL|GLOO|TORCH|PYTORCH|HF|HUGGINGFACE|TRANSFORMERS|FSDP_QLORA|WANDB|TRACKIO|BNB|OMP|MKL|TOKENIZERS|PYTHON|SLURM"
    r"|PET)_|LD_LIBRARY_PATH$|LD_PRELOAD$|PYTHONPATH$|(HTTPS?|NO|ALL)_PROXY$|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR)$",
    re.IGNORECASE,
)

Facts = dict[str, dict[str, str]]


def describe_environment() -> Facts:
    """Heading -> name -> text. torch is imported; what cannot be found out says why."""
    return {"versions": versions(), "machine": machine(), "GPUs": gpus(), "variables": variables()}


def versions() -> dict[str, str]:
    """The program, Python and the packages that are installed."""
    found = {"fsdp_qlora": VERSION, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    memory = psutil.virtual_memory()
    facts = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "processor": f"{os.cpu_count()} cores" + (f", {name}" if (name := _processor()) else ""),
        "memory": f"{format_bytes(memory.total)}, {format_bytes(memory.available)} free",
        "/dev/shm": _free("/dev/shm"),
        "disk": f"{_free('.')} here",
        "python": redact(_without_home(sys.executable)),
    }
    return {name: text for name, text in facts.items() if text}


def gpus() -> dict[str, str]:
    """What torch sees, and what the driver's own program sees, which may differ."""
    facts = {}
    try:
        import torch

        facts["torch is built for"] = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
        facts["torch sees"] = f"{torch.cuda.device_count()} GPUs"
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            capability = f"compute capability {about.major}.{about.minor}"
            facts[f"GPU {index}"] = f"{about.name}, {format_bytes(about.total_memory)}, {capability}"
    except Exception as error:  # a broken installation is what is asked about
        facts["torch"] = redact(f"cannot be used: {type(error).__name__}: {error}".splitlines()[0])
    facts["driver"] = _driver()
    return facts


def variables() -> dict[str, str]:
    """The environment variables that change a run; of secret ones the name alone."""
    names = sorted(name for name in os.environ if _VARIABLES.match(name))
    return {name: _value(name) for name in names}


def _value(name: str) -> str:
    value = os.environ[name]
    return HIDDEN if value and is_secret_name(name) else redact(_without_home(value))


def _without_home(text: str) -> str:
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text


def _free(folder: str) -> str:
    try:
        return f"{format_bytes(shutil.disk_usage(folder).free)} free"
    except OSError:
        return ""


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return platform.processor()
    return found[1] if found else platform.processor()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        return "nvidia-smi is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer: {error}"
    return "; ".join(answer.stdout.split("\n")).rstrip("; ") or f"nvidia-smi: {answer.stderr.strip() or 'no answer'}"
