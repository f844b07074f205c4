"""The command `doctor`: what to fix on this machine before a run.

Each check says in a sentence what is fine, or raises UserError with what to do. A check imports torch itself: that it
cannot be imported is one of the things to find.
"""

import argparse
import contextlib
import importlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import cache_folder, free_disk
from fsdp_qlora.utils.text import GIB, format_bytes

if TYPE_CHECKING:
    import torch

_MAX_SECONDS = 60  # for two ranks to start and exchange; then they hang
_TRIAL_BYTES = 2**28  # written to the disk, or pinned


def run(args: argparse.Namespace) -> int:
    """Check this machine before a run, in a line each: fine, or what to do. GPUs and their kernels, what two ranks send
    each other (with NCCL on GPUs, else with gloo), links, memory, disk, logins and limits. A check takes two
    minutes at most; all run without a GPU too. The exit status is 1 if something must be fixed. `env` prints facts.
    """
    is_all_fine = True
    for name, sentence, is_fine in diagnose():
        print(f"{'fine' if is_fine else 'FIX':4}  {name:14}  {sentence}", flush=True)
        is_all_fine &= is_fine
    return 0 if is_all_fine else 1


def diagnose() -> Iterator[tuple[str, str, bool]]:
    """The name of each check, its sentence, and whether all is fine. A check that cannot run is not fine."""
    for name, check in CHECKS.items():
        try:
            yield name, check(), True
        except Exception as error:
            reason = str(error) if isinstance(error, (UserError, MemoryError)) else f"{type(error).__name__}: {error}"
            yield name, reason.strip().partition("\n")[0], False


def _need(is_met: bool, otherwise: str) -> None:
    if not is_met:
        raise UserError(otherwise)


def _enough(count: int, least: int, cure: str) -> str:
    _need(count >= least, f"{format_bytes(count)}, and {format_bytes(least)} are needed: {cure}.")
    return format_bytes(count)


def _gpus() -> str:
    import torch

    from fsdp_qlora.distributed.device import gpu_problem
    from fsdp_qlora.model.architecture.precision import choose_precision

    if problem := gpu_problem():
        raise UserError(problem)
    if not torch.cuda.is_available():
        return "none is visible: training runs on the CPU"
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    torch.ones(64, 64, device="cuda").sum().item()  # fails where torch is built for other GPUs
    names = ", ".join(f"{card.name} ({card.total_memory / GIB:.1f} GiB)" for card in cards)
    precision = choose_precision("auto", torch.device("cuda"))
    return f"{names}; torch {torch.__version__} for CUDA {torch.version.cuda}; trains in {precision}"


def _bitsandbytes() -> str:
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    given = torch.linspace(-1, 1, 4096, device="cuda" if torch.cuda.is_available() else "cpu").view(64, 64)
    error = (dequantize_4bit(*quantize_4bit(given, quant_type="nf4")) - given).abs().max().item()
    _need(error < 0.2, f"decoded weights are wrong by {error:.2f}: reinstall bitsandbytes for this CUDA.")
    return f"quantizes and decodes on the {given.device.type}"


def _two_ranks() -> str:
    import torch

    on_gpu = torch.cuda.device_count() > 1
    device, how = ("cuda", "NCCL on 2 GPUs") if on_gpu else ("cpu", "gloo on the CPU")
    if problem := run_ranks(__name__, device)[1]:
        helps = on_gpu and not run_ranks(__name__, device, NCCL_P2P_DISABLE="1")[1]
        cure = "export NCCL_P2P_DISABLE=1, with which it works" if helps else "NCCL_DEBUG=INFO shows what NCCL does"
        raise UserError(f"{how}: {problem}. {cure}.")
    has_peers = on_gpu and torch.cuda.can_device_access_peer(0, 1)
    return f"{how}: sums and all patterns of 16 bits arrive{', peer to peer' if has_peers else ''}"


def run_ranks(module: str, device: str, num_ranks: int = 2, **variables: str) -> tuple[list[str], str]:
    """Run a module in some ranks of this machine; returns what each prints, and what went wrong, "" for nothing.

    Each runs `module`, which does its work in `joined_ranks`, with these environment variables.
    """
    end, outputs, problems = time.monotonic() + _MAX_SECONDS, [], []
    variables = {**os.environ, **variables, "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", module, device, f"{folder}/store"]
        own = [variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
        ranks = [subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True) for env in own]
        for rank in ranks:
            try:
                output, said = rank.communicate(timeout=max(0.1, end - time.monotonic()))
                outputs.append(output)
                lines = [line for line in said.splitlines() if "Error: " in line] or [f"status {rank.returncode}"]
                problems += lines[-1:] if rank.returncode else []
            except subprocess.TimeoutExpired:
                problems.append(f"no answer within {_MAX_SECONDS} s")
        for rank in ranks:
            rank.kill()
            rank.wait()
    return outputs, problems[0] if problems else ""


@contextlib.contextmanager
def joined_ranks(device: str, store: str) -> Iterator["torch.device"]:
    """Be one of the ranks that `run_ranks` has started, on this device, in the block."""
    import torch.distributed as dist

    from fsdp_qlora.distributed.process_group import process_group_closed, start_process_group
    from fsdp_qlora.distributed.ranks import read_ranks

    ranks, minutes = read_ranks(device), _MAX_SECONDS / 60
    with process_group_closed():
        start_process_group(ranks, dist.FileStore(store, ranks.world_size), timeout_minutes=minutes)
        yield ranks.device


def exchange(device: "torch.device") -> None:
    """One of two ranks: a sum and a gather whose results are known. Raises UserError if they arrive otherwise."""
    import torch
    import torch.distributed as dist

    numbers = torch.arange(2**14, dtype=torch.float32)
    dist.all_reduce(total := (numbers + dist.get_rank()).to(device))
    _need(torch.equal(total.cpu(), 2 * numbers + 1), "an all-reduce gives wrong sums")
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)  # quantized weights have all of them, NaNs included
    gathered = torch.empty(2 * len(bits), dtype=torch.bfloat16, device=device)
    dist.all_gather_into_tensor(gathered, bits.view(torch.bfloat16).to(device))
    _need(torch.equal(gathered.cpu().view(torch.int16), bits.repeat(2)), "an all-gather changes bits")


def _pcie() -> str:
    import torch

    if not torch.cuda.is_available() or not shutil.which("nvidia-smi"):
        return "not known without a GPU and nvidia-smi"
    asked = "--query-gpu=pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    done = subprocess.run(["nvidia-smi", asked, "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    return f"generation, lanes in use and lanes at most: {'; '.join(done.stdout.splitlines())}"


def _pinned_memory() -> str:
    import torch

    from fsdp_qlora.sharding.host_memory import split_arena

    if not torch.cuda.is_available():
        return "none is needed without a GPU"
    split_arena([_TRIAL_BYTES], pinned=True, what="a trial")
    return f"{format_bytes(_TRIAL_BYTES)} can be pinned"


def _disk() -> str:
    import huggingface_hub

    folders = (Path.cwd(), cache_folder(), Path(huggingface_hub.constants.HF_HUB_CACHE))
    free = min(map(free_disk, folders))
    shown = _enough(free, 10 * GIB, "FSDP_QLORA_CACHE, HF_HOME and --output_dir choose other disks")
    with tempfile.TemporaryFile(dir=Path.cwd()) as file:
        started = time.perf_counter()
        file.write(bytes(_TRIAL_BYTES))
        os.fsync(file.fileno())
        speed = _TRIAL_BYTES / (time.perf_counter() - started)
    return f"{shown} free, {format_bytes(speed)}/s written"


def _wandb() -> str:
    from fsdp_qlora.observability.wandb_sink import WandbSink, online_mode

    try:
        return WandbSink.problem() or str(online_mode())
    except UserError as no_key:
        return str(no_key)


def _shared_memory() -> str:
    import torch

    least = GIB if torch.cuda.device_count() > 1 else 0
    return _enough(shutil.disk_usage("/dev/shm").total, least, "start the container with --shm-size 1g or --ipc host")


def _open_files() -> str:
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    _need(allowed >= 1024, f"{allowed} are allowed: ulimit -n {most}.")
    return f"{allowed} are allowed"


def _host_memory() -> str:
    from fsdp_qlora.planning.checks import host_memory_free

    return _enough(host_memory_free(1), 4 * GIB, "end other programs, or raise the container's limit")


def _hub() -> str:
    import huggingface_hub

    return "logged in" if huggingface_hub.get_token() else "not logged in: gated models need `hf auth login`"


CHECKS: dict[str, Callable[[], str]] = {
    "GPUs": _gpus,
    "bitsandbytes": _bitsandbytes,
    "flash-attn": lambda: (
        importlib.import_module("flash_attn").__version__ if find_spec("flash_attn") else "not needed"
    ),
    "two ranks": _two_ranks,
    "PCIe": _pcie,
    "host memory": _host_memory,
    "shared memory": _shared_memory,
    "pinned memory": _pinned_memory,
    "disk": _disk,
    "hub": _hub,
    "wandb": _wandb,
    "open files": _open_files,
}

if __name__ == "__main__":
    with joined_ranks(*sys.argv[1:]) as rank_device:
        exchange(rank_device)
