"""The process group: its start and end, and small collectives on numbers and texts."""

import contextlib
import datetime
import gc
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.distributed.shards import all_gather
from fsdp_qlora.distributed.store import connect
from fsdp_qlora.utils.errors import RunStopped, UserError

log = logging.getLogger("fsdp_qlora")


def start_process_group(
    ranks: Ranks,
    store: dist.Store | None = None,
    *,
    layout: Layout | None = None,
    timeout_minutes: float = 30.0,
    backend: str = "",
) -> None:
    """Join the other ranks: NCCL for tensors on a GPU, gloo for tensors on the CPU.

    Args:
        store: returned by `connect`, which is called if None. The group owns it afterwards.
        layout: of the run; None: all ranks share one model. NCCL's variables that the user has set
            stay.
        backend: another backend, for tests: gloo lets several ranks share a GPU, fake is a group of
            one rank.
    """
    # torch's flight recorder is dumped when a collective hangs. It keeps the last collectives,
    # about 1 KiB each, and made a tiny run grow by 2 MiB on the CPU, where the Python stacks of a
    # hang are enough.
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the old name
        os.environ.setdefault(
            "TORCH_FR_BUFFER_SIZE", "2000" if ranks.device.type == "cuda" else "200"
        )
    if ranks.device.type == "cuda":
        layout = layout or ranks.layout("full_shard")
        # NCCL reads its variables when the first communicator is made, so before the group.
        for name, value in {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", **layout.nccl_settings}.items():
            os.environ.setdefault(name, value)
        if not backend and ranks.local_world_size > 1:
            _warn_of_small_shared_memory()
    store = store or connect(ranks, timeout_minutes=timeout_minutes)
    # With a GPU there are two backends, of which a tensor's device chooses one.
    dist.init_process_group(
        backend or ("cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"),
        timeout=datetime.timedelta(minutes=timeout_minutes),
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )


def _warn_of_small_shared_memory(folder: str = "/dev/shm") -> None:
    """Warn of little shared memory, which NCCL uses between GPUs without peer access.

    docker's default is 64 MiB.
    """
    with contextlib.suppress(OSError):
        size = shutil.disk_usage(folder).total
        if size < 2**30 and os.environ.get("NCCL_SHM_DISABLE") != "1":
            log.warning(
                "Shared memory (%s) has %d MiB, which may be too little for NCCL: if it fails, "
                "start the container with --shm-size 1g or more, or with --ipc host.",
                folder,
                size // 2**20,
            )


def gather_numbers(
    values: Sequence[float | torch.Tensor],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """All-gather a list of numbers: float64 [ranks of the group, len(values)], on the CPU.

    Collective: every rank of the group gives as many. Values may be tensors without dims on any
    device. The host waits for the GPU once, when the
    result is copied back.
    """
    # Plain numbers are copied to the device together; tensors are added there, where they are, so
    # that the host need not know them.
    floats = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in values]
    host = torch.tensor(floats, dtype=torch.float64, pin_memory=device.type == "cuda")
    local = host.to(device, non_blocking=True)
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            local[index].add_(value)
    gathered = local.new_empty(dist.get_world_size(group) * local.numel())
    all_gather(gathered, local, group=group)
    return gathered.view(-1, local.numel()).cpu()


@contextlib.contextmanager
def raise_on_all_ranks(
    kind: type[Exception], device: torch.device, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """If the block raises an error of `kind` on one rank, raise it on every rank.

    Otherwise the others would wait for a timeout. Collective. The block must raise it on that rank
    after its last collective: the exchange at its end is the next one on every rank.
    """
    failure = ""
    try:
        yield
    except kind as error:
        failure = str(error)
    # Any other error leaves here at once, and the presence ends the other ranks.
    if dist.is_initialized():  # not in a command of one process
        failures = all_gather_strings(failure, device, group)
        failure = next(filter(None, failures), "")  # of the first rank, the same on all
    if failure:
        raise kind(failure)


def check_agreement(facts: Mapping[str, object], device: torch.device) -> None:
    """Check that every rank works on the same input. Collective.

    Each computes order, loss and learning rate by itself.

    Args:
        facts: name for messages -> value. The values' repr are compared.
    Raises:
        UserError: some ranks have another value than rank 0; the same message on every rank.
    """
    # 52 bits, which float64 holds exactly.
    digests = gather_numbers([derive_seed(value) % 2**52 for value in facts.values()], device)
    for name, column in zip(facts, digests.T, strict=True):
        different = (column != column[0]).nonzero().flatten().tolist()
        if different:
            noun = "rank" if len(different) == 1 else "ranks"
            listed = ", ".join(map(str, different[:16]))
            raise UserError(
                f"The ranks do not agree on {name}: {noun} {listed} differ from rank 0. Give every "
                "node the same command and files."
            )


def release_cached_memory(device: torch.device) -> float:
    """Return cached GPU memory to the device, and begin a new peak.

    Returns the last peak, GiB reserved; 0 on a CPU.
    """
    if device.type != "cuda":
        return 0.0
    peak = torch.cuda.max_memory_reserved(device) / 2**30
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def stop_process_group() -> None:
    """End the process group and its threads. Call it when nothing refers to the model any more.

    A gloo thread releases its tensor after it has woken the waiting thread, and needs the GIL for
    that: if Python is finalizing by then, the process aborts (pytorch#190489). The group's
    destructor joins the threads, so reference cycles that hold the group are collected. torch's
    cache of layouts still holds it: hence the sleep without the GIL.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
        time.sleep(0.1)  # the threads need microseconds, more on a busy machine


@contextlib.contextmanager
def process_group_closed() -> Iterator[None]:
    """End the process group with the block, in which another function holds the model.

    See `stop_process_group`. After a failure the group is aborted, since another rank may be gone,
    or may wait for this one.
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


def all_gather_strings(
    text: str, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[str]:
    """All-gather a text, as UTF-8 bytes and without pickle."""
    content = text.encode()
    # Two gathers, since an all-gather needs the same size from every rank. All ranks see the same
    # lengths, so all leave out the second one if there is nothing to send.
    lengths = gather_numbers([len(content)], device, group).flatten().int().tolist()
    size = max(lengths)
    if not size:
        return [""] * len(lengths)
    # Without lists of Python, which take 8 bytes for each byte.
    padded = torch.frombuffer(bytearray(content.ljust(size)), dtype=torch.uint8)
    padded = padded.to(device)
    gathered = padded.new_empty(len(lengths) * size)
    all_gather(gathered, padded, group=group)
    rows = gathered.view(-1, size).cpu().numpy()
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def broadcast_bytes(content: bytes, device: torch.device) -> np.ndarray:
    """Rank 0's bytes, on every rank: uint8 [bytes], on the CPU. Collective."""
    size = torch.tensor(len(content), device=device)
    dist.broadcast(size, src=0)
    # All ranks see the same size, so all leave out the second broadcast if there is nothing to
    # send.
    if not size.item():
        return np.empty(0, np.uint8)
    if dist.get_rank() == 0:
        received = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    else:
        received = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(received, src=0)
    return received.cpu().numpy()
