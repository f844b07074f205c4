"""What an error in a collective is taken for: the words are those of torch 2.11 and NCCL 2.28."""

import errno
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from fsdp_qlora.distributed.supervision.exits import (
    exhausted_memory,
    loading_explained,
    reporting_failures,
)
from fsdp_qlora.utils.errors import Crashed, LostRank, OutOfMemory, TrainingError
from tests.helpers.run import ROOT

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error, "
    "NCCL version 2.28.9\n"
)
CUDA = f"{NCCL}ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
REMOTE = (
    f"{NCCL}ncclRemoteError: A call failed possibly due to a network error or a remote process "
    "exiting prematurely.\n"
    "Last error:\nsocketProgress: Connection closed by remote peer host<45678>\n"
)


ILLEGAL = "an illegal memory access was encountered"
INVALID_USAGE = f"{NCCL}ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
EXHAUSTED = "GPU memory in step 7 .*NCCL:"
LOST = "connection to another rank was lost"
of_nccl = dist.DistBackendError


class _Alone:
    """Stands for the watchdog of a lone rank, and for its presence."""

    class ranks:
        rank = 0

    class heartbeat:
        step = 6
        phase = "compute"

    @property
    def presence(self) -> "_Alone":
        return self

    def abort_or_exit(self, reason: str, *, state: str = "failed") -> None:
        """There are none."""

    def exit_if_aborted(self, seconds: float) -> None:
        """Nobody asks."""

    def on_end(self, state: str, reason: str) -> None:
        """There is no status.json."""


@pytest.mark.parametrize(
    ("error", "failure", "words"),
    [
        (of_nccl(f"{CUDA}Failed to CUDA malloc 4096 bytes"), OutOfMemory, EXHAUSTED),
        (of_nccl(f"{CUDA}Cuda failure 700 '{ILLEGAL}'"), Crashed, ILLEGAL),
        (of_nccl(INVALID_USAGE), Crashed, "^DistBackendError: NCCL: ncclInvalidUsage"),
        (of_nccl(REMOTE), LostRank, LOST),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), LostRank, LOST),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1"), LostRank, LOST),
    ],
)
def test_only_closed_connections_count_as_a_lost_rank(error, failure, words):
    with pytest.raises(failure, match=words), reporting_failures(_Alone(), memory_settings=""):  # type: ignore[arg-type]
        raise error


_ASYNCHRONOUS = "\nCUDA kernel errors might be asynchronously reported at some other API call."


# Kernels of a library cannot say which error they found.
NOT_INITIALIZED = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling"
# Of RuntimeError -> the memory that is exhausted.
OF_LIBRARIES = {
    "CUDA driver error: out of memory": "GPU",
    "Triton Error [CUDA]: out of memory": "GPU",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "GPU",
    f"{NOT_INITIALIZED} `cublasCreate(handle)`": "GPU",
    f"{NOT_INITIALIZED} `cublasLtCreate(&handle)`": "GPU",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED": "GPU",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`": "GPU",
    "cudaErrorMemoryAllocation: out of memory": "GPU",
    "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you": "host",
    f"{NOT_INITIALIZED} `cublasGemmEx(...)`": None,
}


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        *((RuntimeError(text), memory) for text, memory in OF_LIBRARIES.items()),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "GPU"),
        # A kernel that is loaded when it is first called.
        (torch.AcceleratorError(f"CUDA error: out of memory{_ASYNCHRONOUS}"), "GPU"),
        (torch.AcceleratorError(f"CUDA error: {ILLEGAL}{_ASYNCHRONOUS}"), None),
        (of_nccl(f"{CUDA}Cuda failure 2 'out of memory'"), "GPU"),
        (of_nccl(f"{CUDA}Failed to CUDA calloc async 608 bytes"), "GPU"),
        (of_nccl(f"{CUDA}Cuda failure 200 'device kernel image is invalid'"), None),
        (MemoryError("5.2 GiB of host memory cannot be pinned (CUDA error 2)."), "host"),
        (MemoryError(), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (KeyError("out of memory"), None),
    ],
)
def test_out_of_memory_errors_are_recognized(error, memory):
    assert exhausted_memory(error) == memory


def test_out_of_memory_while_loading_is_explained_in_one_sentence():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    said = r"Rank 3 ran out of GPU memory while .* 2.00 GiB. What helps: more GPUs\.$"
    with pytest.raises(TrainingError, match=said), loading_explained(3, "more GPUs"):
        raise error
    advice = "What helps: more memory in the machine, --recompute all, or more GPUs"
    said = f"Rank 0 ran out of host memory .* {advice}"
    with (
        pytest.raises(TrainingError, match=said),
        loading_explained(0, "--recompute all, --use_cpu_offload true, or more GPUs"),
    ):
        raise MemoryError("5.2 GiB")


# Two ranks. The first one's last collective ends late, while it keeps the GIL until Python ends.
LATE_COLLECTIVE = """
import atexit, gc, mmap, os, sys, time
import torch
import torch.distributed as dist
from fsdp_qlora.distributed.process_group import process_group_closed

is_over, kept, rank = mmap.mmap(-1, 1), [], int(os.fork() == 0)

def keep_the_gil():
    while not is_over[0]:
        pass
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        pass

def use(holder):
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(4))
    if rank:
        time.sleep(0.5)
        dist.all_reduce(torch.ones(4))
        is_over[0] = 1
        time.sleep(3)
        os._exit(0)
    dist.all_reduce(torch.ones(4), async_op=True)
    sys.setswitchinterval(1000)
    if holder == "a cycle":
        model = torch.nn.Module()
        model.__dict__.update(model=model, group=dist.group.WORLD)
    else:
        kept.append(dist.group.WORLD)
        gc.collect = keep_the_gil  # it could not free the group; the collective ends here
    atexit.register(keep_the_gil)

with process_group_closed():
    use(sys.argv[1])
"""


@pytest.mark.parametrize("holder", ["a cycle", "a global"])
def test_a_process_exits_cleanly_while_its_group_is_referenced(holder, tmp_path):
    command = [sys.executable, "-c", LATE_COLLECTIVE, holder, str(tmp_path / "store")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr  # -6: terminate called without an active exception
