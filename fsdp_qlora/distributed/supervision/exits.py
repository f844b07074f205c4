"""Reports failures of a run: in status.json, to the other ranks, and to the user in a sentence."""

import contextlib
import errno
import itertools
import re
import traceback
from collections.abc import Iterator

import torch
import torch.distributed as dist

from fsdp_qlora.distributed.supervision.presence import Presence
from fsdp_qlora.distributed.supervision.watchdog import Watchdog
from fsdp_qlora.utils.errors import (
    Crashed,
    LostRank,
    OutOfMemory,
    RankError,
    RunStopped,
    TrainingError,
    UserError,
    how_it_ends,
    print_error,
    write_line,
)

# Messages of gloo, NCCL and TCP when the peer has ended.
_LOST = re.compile(
    r"gloo|Connection (was )?(likely )?(closed|reset)|Broken pipe|Socket "
    r"(Timeout|closed)|ncclRemoteError",
    re.IGNORECASE,
)
# Out-of-memory errors that are not torch.OutOfMemoryError: CUDA's when a kernel is loaded at its
# first call, those of libraries whose handles need memory, NCCL's and Triton's; and the host
# allocator's.
_GPU_MEMORY = re.compile(
    r"CUDA (driver )?error: out of memory|cudaErrorMemoryAllocation|Triton Error \[CUDA\]: out of "
    r"memory|"
    r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED|"
    r"CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create|CUDNN_STATUS_NOT_INITIALIZED"
)
_NCCL_MEMORY = re.compile(r"out of memory|Cuda failure 2\b|Failed to CUDA [mc]alloc")
_HOST_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory")


@contextlib.contextmanager
def reporting_failures(watchdog: Watchdog, *, memory_settings: str) -> Iterator[None]:
    """Report a failure in the block at once: to `on_end`, to the other ranks and to the user.

    Put it directly around the training. Closing outer blocks may take minutes; by then the other
    ranks would have reported this one as lost, and torchrun would have killed it without a message.

    Raises:
        OutOfMemory: this rank ran out of memory; the other ranks end without a message.
        LostRank: a collective failed because of another rank.
        Crashed: an unexpected error, which has been printed; the other ranks end without a message.
    """
    try:
        yield
    except (RunStopped, UserError, TrainingError) as error:
        # The other errors here were raised on every rank, which need not be told.
        if isinstance(error, RankError):
            watchdog.presence.abort_or_exit(str(error))
            print_error(error)
        watchdog.presence.on_end(how_it_ends(error).state, str(error))
        raise
    except Exception as error:
        kind = exhausted_memory(error)
        if kind:
            where = f"in step {watchdog.heartbeat.step + 1} ({watchdog.heartbeat.phase})"
            message = _describe_out_of_memory(
                error, kind, watchdog.ranks.rank, where, memory_settings
            )
            failure: Exception = OutOfMemory(message)
            # First the others, who wait for this rank, and the print only if none was before: the
            # order leaves one message of the cause on the screen.
            watchdog.presence.abort_or_exit(str(failure), state=how_it_ends(failure).state)
            print_error(failure)
        elif is_lost(error):
            watchdog.presence.exit_if_aborted(seconds=3)  # the rank with the cause reports it
            step = watchdog.heartbeat.step + 1
            failure = LostRank(
                f"The connection to another rank was lost in step {step}: it has ended. Its own "
                "output says why, by a traceback or by one line of a bitsandbytes kernel, which "
                "begins with `Error` and names a file of csrc."
            )
        else:
            text = _in_one_line(error) if isinstance(error, dist.DistBackendError) else error
            failure = Crashed(f"{type(error).__name__}: {text}")
            watchdog.presence.abort_or_exit(str(failure))
            write_line("".join(traceback.format_exception(error)).rstrip())
            print_error(failure)
        watchdog.presence.on_end(how_it_ends(failure).state, str(failure))
        raise failure from error


@contextlib.contextmanager
def aborting_others(presence: Presence) -> Iterator[None]:
    """Record how the block ends. Before training begins, also tell the other ranks.

    They may wait for this one until a timeout.

    Raises:
        LostRank: a collective or the store failed. If another rank reports the cause, the process
            ends here.
    """
    with presence.announced():
        try:
            yield
        except Exception as error:
            presence.on_end(how_it_ends(error).state, str(error))
            if not presence.is_starting or presence.ranks.world_size == 1:
                raise
            if not isinstance(error, LostRank) and not is_lost(error):
                presence.abort_others(str(error) or repr(error), state=how_it_ends(error).state)
                raise
            presence.exit_if_aborted(seconds=3)  # the rank with the cause reports it
            if isinstance(error, LostRank):
                raise
            message = "The connection to another rank was lost before training began: it has ended."
            raise LostRank(message) from error


@contextlib.contextmanager
def loading_explained(rank: int, settings: str) -> Iterator[None]:
    """Turn errors while the model is loaded into one sentence.

    Raises:
        TrainingError: this rank ran out of memory; a restart would fail again.
        LostRank: a collective failed; another rank reports the cause.
    """
    try:
        yield
    except Exception as error:
        kind = exhausted_memory(error)
        if kind:
            message = _describe_out_of_memory(
                error, kind, rank, "while the model was loaded", settings
            )
            raise TrainingError(message) from error
        if is_lost(error):
            message = (
                "The connection to another rank was lost while the model was loaded: it has ended."
            )
            raise LostRank(message) from error
        raise


def exhausted_memory(error: Exception) -> str | None:
    """The exhausted memory that an error reports, "GPU" or "host"; None for any other error."""
    text = str(error)
    # The host first: torch reports both kinds as a RuntimeError, told apart by their words alone.
    if isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM:
        return "host"
    if isinstance(error, RuntimeError) and _HOST_MEMORY.search(text):
        return "host"
    if isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _GPU_MEMORY.search(text)
    ):
        return "GPU"
    # NCCL's buffers are memory of the GPU, too.
    if isinstance(error, dist.DistBackendError) and _NCCL_MEMORY.search(text):
        return "GPU"
    return None


def is_lost(error: Exception) -> bool:
    """Whether an error says that another rank has ended."""
    if isinstance(error, dist.DistError) and not isinstance(error, dist.DistBackendError):
        return True  # an error of the store, which ends with the rank that hosts it
    in_words = isinstance(error, RuntimeError) and not isinstance(error, (TrainingError, Crashed))
    return in_words and bool(_LOST.search(str(error)))


def _in_one_line(error: Exception) -> str:
    """The first line of an error's text. NCCL's begin with a place in torch: their last message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    for before, line in itertools.pairwise(lines):
        if before == "Last error:":
            return f"NCCL: {line}"
    for line in lines:
        if re.match(r"nccl\w+: ", line):
            return f"NCCL: {line}"
    return lines[0]


def _describe_out_of_memory(
    error: Exception, kind: str, rank: int, where: str, settings: str
) -> str:
    if kind == "host":
        # Offloading would need more of it.
        helpful = [setting for setting in settings.split(", ") if "offload" not in setting]
        settings = ", ".join(["more memory in the machine", *helpful])
    return (
        f"Rank {rank} ran out of {kind} memory {where}: {_in_one_line(error)} What helps: "
        f"{settings}."
    )
