"""What an error in a collective is taken for: the words are those of torch 2.11 and NCCL 2.28."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_qlora.control.exits import loading_explained, reporting_failures
from fsdp_qlora.control.status import Status
from fsdp_qlora.errors import Crashed, LostRank, OutOfMemory

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.28.9\n"
)
CUDA = f"{NCCL}ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
REMOTE = (
    f"{NCCL}ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\nsocketProgress: Connection closed by remote peer host<45678>\n"
)


class _Alone:
    """Stands for the watchdog of a lone rank, and for its presence."""

    class ranks:
        rank = 0

    class heartbeat:
        step, phase = 6, "compute"

    @property
    def presence(self) -> "_Alone":
        return self

    def end_others(self, reason: str) -> None:
        """There are none."""

    def end_if_asked_within(self, seconds: float) -> None:
        """Nobody asks."""


@pytest.mark.parametrize(
    ("error", "failure", "words"),
    [
        (
            dist.DistBackendError(f"{CUDA}Cuda failure 2 'out of memory'"),
            OutOfMemory,
            "GPU memory in step 7 .*NCCL: Cuda",
        ),
        (dist.DistBackendError(f"{CUDA}Failed to CUDA malloc 4096 bytes"), OutOfMemory, "NCCL: Failed to CUDA malloc"),
        (dist.DistBackendError(f"{CUDA}Cuda failure 700 'an illegal memory access'"), Crashed, "illegal memory access"),
        (
            dist.DistBackendError(f"{NCCL}ncclInvalidUsage: This usually reflects invalid usage of NCCL library."),
            Crashed,
            "^DistBackendError: NCCL: ncclInvalidUsage",
        ),
        (dist.DistBackendError(REMOTE), LostRank, "connection to another rank was lost"),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), LostRank, "connection to another rank was lost"),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1"), LostRank, "was lost"),
    ],
)
def test_only_a_closed_connection_is_a_lost_rank(
    error: Exception, failure: type[Exception], words: str, tmp_path: Path
) -> None:
    status = Status(tmp_path, is_rank_0=True, state="running", step=6)
    with pytest.raises(failure, match=words), reporting_failures(status, _Alone(), memory_settings=""):  # type: ignore[arg-type]
        raise error


def test_out_of_memory_while_loading_is_one_sentence_that_helps() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    with (
        pytest.raises(OutOfMemory, match=r"Rank 3 ran out of GPU memory while .* 2.00 GiB. What helps: more GPUs\.$"),
        loading_explained(3, "more GPUs"),
    ):
        raise error
