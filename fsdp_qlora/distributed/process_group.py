"""The process group: its start and end, and what ranks tell each other through it."""

import contextlib
import datetime
import gc
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.distributed.shards import all_gather
from fsdp_qlora.distributed.store import connect
from fsdp_qlora.utils.errors import RunStopped, UserError

log = logging.getLogger("fsdp_qlora")


def start_process_group(
    ranks: Ranks, store: dist.Store | None = None, *, timeout_minutes: float = 30.0, backend: str = ""
) -> None:
    """Join the other ranks: NCCL for tensors on a GPU, gloo for tensors on the CPU.

    Args:
        store: from `connect`, which is called if None. From now on it belongs to the group.
        backend: instead of these, for tests: gloo lets several ranks share a GPU, fake is a group of one rank.
    """
    # torch's flight recorder is written out when a collective does not end. It keeps this many of the last collectives,
    # about 1 KiB each, and so made a tiny run grow by 2 MiB on the CPU, where the stacks of a hang say enough.
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the old name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000" if ranks.device.type == "cuda" else "200")
    if ranks.device.type == "cuda":
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        if not backend and ranks.local_world_size > 1:
            _warn_of_small_shared_memory()
    store = store or connect(ranks, timeout_minutes=timeout_minutes)
    dist.init_process_group(
        backend or ("cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"),
        timeout=datetime.timedelta(minutes=timeout_minutes),
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )


def _warn_of_small_shared_memory(folder: str = "/dev/shm") -> None:
    """Say what to do if NCCL, which joins GPUs without peer access through shared memory, may run out of it."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return
    size = found.f_blocks * found.f_frsize
    if size < 2**30 and os.environ.get("NCCL_SHM_DISABLE") != "1":
        log.warning(
            "Shared memory (%s) has %d MiB, which may be too little for NCCL: if it fails, start the container with "
            "--shm-size 1g or more, or with --ipc host.",
            folder,
            size // 2**20,
        )


def gather_numbers(
    values: Sequence[float | torch.Tensor], device: torch.device, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Every rank's list of numbers as float64 [ranks of the group, len(values)], on the CPU of every rank.

    Numbers may be tensors without dims on any device: the host waits for them only with the result, once.
    """
    numbers = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in values]
    host = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    mine = host.to(device, non_blocking=True)
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            mine[index].add_(value)
    gathered = mine.new_empty(dist.get_world_size(group) * mine.numel())
    all_gather(gathered, mine, group=group)
    return gathered.view(-1, mine.numel()).cpu()


@contextlib.contextmanager
def raise_on_all_ranks(
    kind: type[Exception], device: torch.device, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Raise on every rank the error of `kind` with which the block fails on one, after its last collective."""
    failure = ""
    try:
        yield
    except kind as error:
        failure = str(error)
    is_alone = not dist.is_initialized()  # a command of one process
    if failure := next(filter(None, [failure] if is_alone else all_gather_strings(failure, device, group)), ""):
        raise kind(failure)


def check_agreement(facts: Mapping[str, object], device: torch.device) -> None:
    """Check that every rank works on the same input, since each computes order, loss and learning rate itself.

    Args:
        facts: name for messages -> value, whose repr is compared.
    Raises:
        UserError: some ranks have another value than rank 0; the same message on every rank.
    """
    digests = gather_numbers([derive_seed(value) % 2**52 for value in facts.values()], device)
    for name, column in zip(facts, digests.T, strict=True):
        different = (column != column[0]).nonzero().flatten().tolist()
        if different:
            raise UserError(
                f"The ranks do not agree on {name}: rank{'s' * (len(different) > 1)} "
                f"{', '.join(map(str, different[:16]))} differ from rank 0. Give every node the same command and files."
            )


def release_loading_memory(device: torch.device) -> None:
    """Free the GPU memory that only loading needed, and reset the peaks."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def stop_process_group() -> None:
    """End the process group and its threads, best where nothing refers to the model any more.

    A thread of gloo lets go of a tensor after it has woken who waits for it, and needs the GIL for that: if Python is
    ending by then, it aborts the process (pytorch#190489). The group's destructor waits for its threads, so cycles that
    refer to the group are collected. torch's cache of layouts still does: hence the moment without the GIL.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
        time.sleep(0.1)  # they need microseconds, on a busy machine some more


@contextlib.contextmanager
def process_group_closed() -> Iterator[None]:
    """End the process group with the block, which calls a function that has the model: `stop_process_group`.

    After a failure it is aborted, since another rank may be gone or wait for this one.
    """
    try:
        yield
    except RunStopped:
        raise
    except BaseException:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.group.WORLD.abort()  # type: ignore[union-attr]
        raise
    finally:
        stop_process_group()


def all_gather_strings(text: str, device: torch.device, group: dist.ProcessGroup | None = None) -> list[str]:
    """Every rank's text, on every rank: as UTF-8 bytes, without pickle."""
    mine = text.encode()
    lengths = gather_numbers([len(mine)], device, group).flatten().int().tolist()
    size = max(lengths)
    if not size:
        return [""] * len(lengths)
    padded = torch.tensor(list(mine.ljust(size)), dtype=torch.uint8, device=device)
    gathered = padded.new_empty(len(lengths) * size)
    all_gather(gathered, padded, group=group)
    rows = gathered.view(-1, size).tolist()
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]
