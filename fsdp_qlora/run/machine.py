"""Checks of this machine before a run.

Each check returns a sentence about what is fine, or raises UserError with what to do. A check
imports torch itself: that it cannot be imported is one of the things to find.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import cache_folder
from fsdp_qlora.utils.machine import folder_bytes, free_disk
from fsdp_qlora.utils.text import GIB, format_bytes

_PINNED_BYTES = 2**28


def check_machine() -> Iterator[tuple[str, str, bool]]:
    """Yield the name of each check, its sentence, and whether all is fine.

    A check that cannot run is not fine.
    """
    for name, check in CHECKS.items():
        try:
            yield name, check(), True
        except Exception as error:
            reason = str(error)
            # The messages of these two are sentences; any other means little without its type.
            if not isinstance(error, (UserError, MemoryError)):
                reason = f"{type(error).__name__}: {error}"
            yield name, reason.strip().partition("\n")[0], False


def _enough(count: int, least: int, cure: str) -> str:
    if count < least:
        raise UserError(f"{format_bytes(count)}, and {format_bytes(least)} are needed: {cure}.")
    return format_bytes(count)


def _gpus() -> str:
    import torch

    from fsdp_qlora.distributed.device import gpu_problem
    from fsdp_qlora.model.architecture.precision import choose_precision

    problem = gpu_problem()
    if problem:
        raise UserError(problem)
    if not torch.cuda.is_available():
        return "none is visible: training runs on the CPU"
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    torch.ones(64, 64, device="cuda").sum().item()  # fails where torch is built for other GPUs
    names = ", ".join(f"{card.name} ({card.total_memory / GIB:.1f} GiB)" for card in cards)
    precision = choose_precision("auto", torch.device("cuda"))
    return (
        f"{names}; torch {torch.__version__} for CUDA {torch.version.cuda}; trains in {precision}"
    )


def _bitsandbytes() -> str:
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = torch.linspace(-1, 1, 4096, device=device).view(64, 64)
    decoded = dequantize_4bit(*quantize_4bit(weights, quant_type="nf4"))
    error = (decoded - weights).abs().max().item()
    # Two values of nf4 are at most 0.31 apart, so rounding alone is wrong by less than 0.16.
    if error >= 0.2:
        raise UserError(
            f"decoded weights are wrong by {error:.2f}: reinstall bitsandbytes for this CUDA."
        )
    return f"quantizes and decodes on the {weights.device.type}"


def _kernels_of_hybrids() -> str:
    from fsdp_qlora.model.architecture.token_mixers import KERNELS

    missing = " ".join(package for name, package in KERNELS.items() if find_spec(name) is None)
    if missing:
        return (
            "linear attention, Mamba and short convolutions are much slower without: pip "
            f"install {missing}"
        )
    return "kernels for linear attention, Mamba and short convolutions are installed"


def _two_ranks() -> str:
    import torch

    from fsdp_qlora.distributed.trial import problem_of_two_ranks

    on_gpu = torch.cuda.device_count() > 1
    device, how = ("cuda", "NCCL on 2 GPUs") if on_gpu else ("cpu", "gloo on the CPU")
    problem = problem_of_two_ranks(device)
    if problem:
        # Peer-to-peer copies fail in some machines and virtual machines, where nothing else does.
        helps = on_gpu and not problem_of_two_ranks(device, NCCL_P2P_DISABLE="1")
        cure = "NCCL_DEBUG=INFO shows what NCCL does"
        if helps:
            cure = "export NCCL_P2P_DISABLE=1, with which it works"
        raise UserError(f"{how}: {problem}. {cure}.")
    has_peers = on_gpu and torch.cuda.can_device_access_peer(0, 1)
    return f"{how}: sums and all patterns of 16 bits arrive{', peer to peer' if has_peers else ''}"


def _host_memory() -> str:
    from fsdp_qlora.utils.machine import host_memory_free

    remedy = "end other programs, or raise the limit of the container"
    return f"{_enough(host_memory_free(1), 4 * GIB, remedy)} free"


def _shared_memory() -> str:
    import torch

    # NCCL's ranks on one machine exchange data there, and a container has 64 MB by default.
    least = GIB if torch.cuda.device_count() > 1 else 0
    return _enough(
        shutil.disk_usage("/dev/shm").total,
        least,
        "start the container with --shm-size 1g or --ipc host",
    )


def _pinned_memory() -> str:
    import torch

    from fsdp_qlora.sharding.host_memory import split_arena

    if not torch.cuda.is_available():
        return "none is needed without a GPU"
    # A limit of locked memory shows here, not in a run that offloads.
    split_arena([_PINNED_BYTES], pinned=True, what="a trial")
    return f"{format_bytes(_PINNED_BYTES)} can be pinned"


def _disk() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    # They may be on three disks, and the fullest decides.
    free = min(map(free_disk, (Path.cwd(), cache_folder(), Path(HF_HUB_CACHE))))
    remedy = "FSDP_QLORA_CACHE, HF_HOME and --output_dir choose other disks"
    return f"{_enough(free, 10 * GIB, remedy)} free"


def _caches() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    own = cache_folder()
    folders = sorted(path for path in own.glob("*") if path.is_dir())
    sizes = {folder.name: folder_bytes(folder) for folder in folders}
    by_name = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    triton = os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache"
    compiled = Path(triton).expanduser()
    return (
        f"{format_bytes(sum(sizes.values()))} in {own} ({by_name or 'empty'}) and "
        f"{format_bytes(folder_bytes(compiled))} of compiled kernels in {compiled}: while no run "
        "is in progress, these folders may be deleted, and are made again; "
        f"{format_bytes(folder_bytes(Path(HF_HUB_CACHE)))} of the hub in {HF_HUB_CACHE}: hf cache "
        "ls and hf cache rm"
    )


def _hub() -> str:
    import huggingface_hub

    if huggingface_hub.get_token():
        return "logged in"
    # Fine all the same: most models need no login.
    return "not logged in: gated models need `hf auth login`"


def _wandb() -> str:
    from fsdp_qlora.observability.sinks import WandbSink, online_mode

    try:
        return WandbSink.problem() or str(online_mode())
    except UserError as no_key:
        return str(no_key)


CHECKS: dict[str, Callable[[], str]] = {
    "GPUs": _gpus,
    "bitsandbytes": _bitsandbytes,
    "hybrid models": _kernels_of_hybrids,
    "two ranks": _two_ranks,
    "host memory": _host_memory,
    "shared memory": _shared_memory,
    "pinned memory": _pinned_memory,
    "disk": _disk,
    "caches": _caches,
    "hub": _hub,
    "wandb": _wandb,
}
