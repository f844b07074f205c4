"""Process group, device mesh, seeds, communication between ranks, and rank 0's log."""

import contextlib
import datetime
import gc
import hashlib
import ipaddress
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_qlora.errors import LostRank, RunStopped, UserError
from fsdp_qlora.output.text import LineHandler
from fsdp_qlora.ranks.device import choose_device

log = logging.getLogger("fsdp_qlora")

# Renamed in torch 2.13; 2.11 has only the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_START_SECONDS = 30.0  # by which the ranks of one command may start one after the other
MAX_WAIT_MINUTES = 5.0  # for rank 0, before training begins: who starts ranks one by one may have lost it by then

# strategy -> (shards over which ranks, whether a block's weights are freed between forward and backward).
# "all": one shard group of every rank. "node": shards within a node, replicas across nodes. "none": replicas.
SHARDING_STRATEGIES: dict[str, tuple[str, bool]] = {
    "full_shard": ("all", True),
    "shard_grad_op": ("all", False),
    "hybrid_full_shard": ("node", True),
    "hybrid_shard_grad_op": ("node", False),
    "ddp": ("none", False),
}


@dataclass(frozen=True)
class Ranks:
    """This process's ranks and device."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_rank_0(self) -> bool:
        return self.rank == 0


def read_ranks(device: str = "auto") -> Ranks:
    """Read torchrun's variables; a process started without torchrun is rank 0 of 1.

    Args:
        device: the option of that name.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = choose_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return Ranks(
        rank=int(os.environ.get("RANK", 0)),
        local_rank=local_rank,
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        device=chosen,
    )


def set_up_logging(ranks: Ranks, *, verbose: bool, stream: TextIO | None = None) -> None:
    """Give rank 0's logger its handler. Warnings of the other ranks are not repeated.

    Args:
        stream: stdout if None.
    """
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    log.propagate = False
    log.handlers.clear()
    log.addHandler(LineHandler(stream or sys.stdout) if ranks.is_rank_0 else logging.NullHandler())


def connect(ranks: Ranks, *, timeout_minutes: float = 30.0, wait_minutes: float = MAX_WAIT_MINUTES) -> dist.Store:
    """The store of this start, for communication before there is a process group. Rank 0's process hosts it.

    Ranks wait here for rank 0 only. The store may be used by one thread at a time; another needs a `clone()`.

    Args:
        timeout_minutes: of each later request. wait_minutes: for rank 0, MAX_WAIT_MINUTES at most.
    Raises:
        LostRank: rank 0 did not open the store in time.
    """
    if ranks.world_size == 1:  # a single process needs no server, hence no free port
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not ranks.is_rank_0:
        _wait_for_store(ranks.rank, address, port, min(wait_minutes or MAX_WAIT_MINUTES, MAX_WAIT_MINUTES))
    resolved = _resolve(address)
    if ranks.is_rank_0 and resolved is not None and resolved.is_global:
        log.warning(
            "The store of this run listens at %s:%d, which is a public address, and has no password: close the port to "
            "all but the run's own nodes.", address, port,
        )  # fmt: skip
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = ranks.is_rank_0 and not is_agents
    store = dist.TCPStore(
        address,
        port,
        is_master=is_master,
        timeout=datetime.timedelta(minutes=timeout_minutes),
        wait_for_workers=False,
        master_listen_fd=_listen_on_loopback(resolved, port) if is_master else None,
    )
    # torchrun keeps its store when it restarts the workers. Without a prefix they would read addresses of the previous
    # attempt (measured: 3 of 8 restarts worked, with the prefix 16 of 16). A store of rank 0's own is new, and agents
    # that have joined later count fewer attempts. The name of the run, which our launcher and `torchrun --standalone`
    # draw at random, keeps those out that can reach the port but not read this environment.
    run, attempt = os.environ.get("TORCHELASTIC_RUN_ID", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"{run}/attempt-{attempt if is_agents else 0}", store)


def _wait_for_store(rank: int, address: str, port: int, minutes: float) -> None:
    """Wait for rank 0's store. torch itself would wait for twice the given time and then print pages of frames."""
    last = ""

    def is_there() -> bool:
        nonlocal last
        try:
            with socket.create_connection((address, port), timeout=10) as ours:
                return bool(ours.getsockname() != ours.getpeername())  # a TCP socket may connect to itself
        except OSError as error:
            last = error.strerror or str(error)
            return False

    if not _becomes_true(is_there, seconds=60 * minutes):
        raise LostRank(
            f"Rank {rank} has waited {minutes:.3g} minutes for rank 0, which opens the store at {address}:{port} "
            f"(MASTER_ADDR, MASTER_PORT): it was not started, has ended, or is out of reach ({last})."
        )


def _resolve(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address of a host; None if it has none, which torch says better."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(address))
    except OSError:
        return None


def _listen_on_loopback(address: ipaddress.IPv4Address | ipaddress.IPv6Address | None, port: int) -> int | None:
    """A listening socket if all ranks are on this machine; None if `address` is not a loopback address.

    Without it torch's store listens on every interface, and anyone who reaches the port can read and write it.
    """
    if address is None or not address.is_loopback:
        return None
    try:
        return socket.create_server((str(address), port)).detach()
    except OSError:
        return None  # torch says what is wrong with the port


@contextlib.contextmanager
def kept_until_all_connect(store: dist.Store, ranks: Ranks) -> Iterator[None]:
    """If rank 0 fails in the block, keep its store until every rank has connected.

    The store ends with rank 0. A rank that starts a little later would wait for it for minutes, instead of failing by
    itself for the same reason.
    """
    store.add("connected", 1)
    try:
        yield
    except Exception:
        if ranks.is_rank_0:
            with contextlib.suppress(Exception):
                _becomes_true(lambda: store.add("connected", 0) >= ranks.world_size, seconds=_START_SECONDS)
        raise


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


def once_per_machine(work: Callable[[], str], what: str, ranks: Ranks, store: dist.Store, *, hours: float) -> str:
    """The result of `work`, which local rank 0 calls while the other ranks of its machine wait.

    Args:
        what: words for messages, such as "the download of owner/model"; unique in this start.
        hours: how long the others wait.
    Raises:
        UserError: raised by `work` on local rank 0; the same on every rank of the machine.
        LostRank: local rank 0 failed in another way, has ended, or takes too long.
    """
    first = ranks.rank - ranks.local_rank  # a machine's ranks are numbered one after another
    if ranks.local_rank == 0:
        try:
            result = work()
        except Exception as error:
            outcome = "refused" if isinstance(error, UserError) else "failed"
            _tell_machine([outcome, str(error) or repr(error)], what, ranks, store)
            raise
        _tell_machine(["done", result], what, ranks, store)
        return result
    try:
        is_over = _becomes_true(lambda: store.check([f"{what}/{first}"]), seconds=3600 * hours)
        late = ["failed", f"it takes more than {hours:g} hours, so its process may be stuck."]
        outcome, text = json.loads(store.get(f"{what}/{first}")) if is_over else late
    except RuntimeError as error:
        raise LostRank(f"Rank 0 has ended while rank {ranks.rank} waited for {what}.") from error
    with contextlib.suppress(RuntimeError):
        store.add(f"{what}/{first}/heard", 1)
    if outcome == "refused":
        raise UserError(text)
    if outcome == "failed":
        raise LostRank(f"Rank {first} has failed at {what}: {text}")
    return str(text)


def values_of_ranks(value: str, what: str, ranks: Ranks, store: dist.Store) -> list[str]:
    """Each rank's value, on every rank; before there is a process group.

    Args:
        what: unique in this start.
    Raises:
        LostRank: rank 0 has ended, or another rank does not come to this point.
    """
    store.set(f"{what}/{ranks.rank}", value)
    try:
        return [store.get(f"{what}/{rank}").decode() for rank in range(ranks.world_size)]
    except RuntimeError as error:
        raise LostRank(f"A rank has ended while rank {ranks.rank} waited for {what} of all ranks.") from error


def _tell_machine(answer: list[str], what: str, ranks: Ranks, store: dist.Store) -> None:
    """Set the answer, and wait until it has been read: the store may end with this process."""
    with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the store with it
        store.set(f"{what}/{ranks.rank}", json.dumps(answer))
        heard = f"{what}/{ranks.rank}/heard"
        _becomes_true(lambda: store.add(heard, 0) >= ranks.local_world_size - 1, seconds=60)


def _becomes_true(condition: Callable[[], bool], *, seconds: float) -> bool:
    """Check ten times a second, so that signals are handled meanwhile; False on timeout."""
    end = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return is_true


def ranks_per_node(ranks: Ranks, world_size: int) -> int:
    """As on this node; a run that is only planned, with another number of ranks, is planned for one node."""
    return ranks.local_world_size if ranks.world_size == world_size else world_size


def num_shards(ranks: Ranks, world_size: int, *, sharding_strategy: str) -> int:
    """The number of ranks that share one copy of the model.

    Raises:
        UserError: a hybrid strategy on nodes with different numbers of ranks.
    """
    scope, _ = SHARDING_STRATEGIES[sharding_strategy]
    shards = {"all": world_size, "node": ranks_per_node(ranks, world_size), "none": 1}[scope]
    if world_size % shards:
        raise UserError(
            f"sharding_strategy {sharding_strategy} needs the same number of ranks on every node; "
            f"{world_size} ranks are not a multiple of this node's {shards}. Use full_shard."
        )
    return shards


def build_mesh(ranks: Ranks, *, sharding_strategy: str) -> DeviceMesh:
    """Arrange the ranks as [replicate, shard]; a pure shard mesh has only the axis shard."""
    shard = num_shards(ranks, ranks.world_size, sharding_strategy=sharding_strategy)
    if shard == ranks.world_size:
        return init_device_mesh(ranks.device.type, (shard,), mesh_dim_names=("shard",))
    sizes = (ranks.world_size // shard, shard)
    return init_device_mesh(ranks.device.type, sizes, mesh_dim_names=("replicate", "shard"))


def shard_size(mesh: DeviceMesh) -> int:
    """Number of ranks that share one copy of the model."""
    return mesh["shard"].size()


def shard_rank(mesh: DeviceMesh) -> int:
    return mesh["shard"].get_local_rank()


def shard_bounds(num_rows: int, *, rank: int, size: int) -> tuple[int, int]:
    """The rows [start, stop) of dim 0 that FSDP2 gives to `rank` of `size`: `torch.chunk`'s split."""
    chunk = -(-num_rows // size)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


def own_rows(parameter: torch.Tensor, mesh: DeviceMesh) -> tuple[int, int]:
    """The rows [start, stop) of a parameter that this rank keeps."""
    return shard_bounds(parameter.shape[0], rank=shard_rank(mesh), size=shard_size(mesh))


def padded_rows(parameter: torch.Tensor) -> int:
    """Rows that FSDP2 gathers from every rank: as many as the first rank has."""
    assert isinstance(parameter, DTensor)
    return shard_bounds(parameter.shape[0], rank=0, size=shard_size(parameter.device_mesh))[1]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def store_rows(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Store `values`, this rank's rows of a parameter (all rows if it is not sharded)."""
    local = local_part(parameter)
    local.copy_(values.view(local.shape))


@contextlib.contextmanager
def whole_weights(module: FSDPModule) -> Iterator[None]:
    """In this block of code a sharded module has all of its weights, on the device."""
    module.unshard()
    for part in module.modules():  # type: ignore[attr-defined]
        if bring := getattr(part, "bring_weights", None):  # of sharding/weight_stream.py
            bring()
    yield
    module.reshard()


def gather_rows(local: torch.Tensor, num_rows: int, mesh: DeviceMesh) -> torch.Tensor:
    """All-gather a tensor split along dim 0 by `shard_bounds` into its [num_rows, ...] whole, on every rank."""
    size = shard_size(mesh)
    chunk, dims = -(-num_rows // size), local.shape[1:]
    padded = local.contiguous()
    if len(local) < chunk:
        padded = torch.cat([local, local.new_zeros((chunk - len(local), *dims))])
    whole = local.new_empty((chunk * size, *dims))
    all_gather(whole, padded, group=mesh["shard"].get_group())
    return whole[:num_rows]


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
    everyone = mine.new_empty(dist.get_world_size(group) * mine.numel())
    all_gather(everyone, mine, group=group)
    return everyone.view(-1, mine.numel()).cpu()


@contextlib.contextmanager
def failing_alike(
    kind: type[Exception], device: torch.device, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Where the block fails with `kind` on one rank, after its last collective, raise that error on every rank."""
    failure = ""
    try:
        yield
    except kind as error:
        failure = str(error)
    is_alone = not dist.is_initialized()  # a command of one process
    if failure := next(filter(None, [failure] if is_alone else gather_texts(failure, device, group)), ""):
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


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends only on its parts, equal on every machine."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


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


def gather_texts(text: str, device: torch.device, group: dist.ProcessGroup | None = None) -> list[str]:
    """Every rank's text, on every rank: as UTF-8 bytes, without pickle."""
    mine = text.encode()
    lengths = gather_numbers([len(mine)], device, group).flatten().int().tolist()
    size = max(lengths)
    if not size:
        return [""] * len(lengths)
    padded = torch.tensor(list(mine.ljust(size)), dtype=torch.uint8, device=device)
    everyone = padded.new_empty(len(lengths) * size)
    all_gather(everyone, padded, group=group)
    rows = everyone.view(-1, size).tolist()
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]
