"""Communication between ranks before there is a process group: through the store that rank 0 opens."""

import contextlib
import datetime
import ipaddress
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.utils.errors import LostRank, UserError

log = logging.getLogger("fsdp_qlora")
_START_SECONDS = 30.0  # by which the ranks of one command may start one after the other
_TO_ANSWER = datetime.timedelta(minutes=1)  # for what listens at the port: a stranger may have taken it
_DOWNLOAD_HOURS = 24.0
MAX_WAIT_MINUTES = 5.0  # for rank 0, before training begins: who starts ranks one by one may have lost it by then


def connect(ranks: Ranks, *, timeout_minutes: float = 30.0, wait_minutes: float = MAX_WAIT_MINUTES) -> dist.Store:
    """The store of this start, for communication before there is a process group. Rank 0's process hosts it.

    Ranks wait here for rank 0 only. The store may be used by one thread at a time; another needs a `clone()`.

    Args:
        timeout_minutes: of each later request. wait_minutes: for rank 0, MAX_WAIT_MINUTES at most.
    Raises:
        UserError: rank 0 cannot listen at the port. LostRank: rank 0 did not open the store in time.
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
    timeout = datetime.timedelta(minutes=timeout_minutes)
    try:
        store = dist.TCPStore(
            address,
            port,
            is_master=is_master,
            timeout=min(timeout, _TO_ANSWER),
            wait_for_workers=False,
            master_listen_fd=_listen_on_loopback(resolved, port) if is_master else None,
        )
    except dist.DistError as error:
        where, reason = f"{address}:{port} (MASTER_ADDR, MASTER_PORT)", str(error).partition("\n")[0]
        if is_master:
            raise UserError(f"Rank 0 cannot open its store at {where}: {reason}. Choose a free port.") from error
        raise LostRank(f"Rank {ranks.rank} finds no store at {where}, though something listens: {reason}") from error
    store.set_timeout(timeout)
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


def download_once(ranks: Ranks, store: dist.Store) -> Callable[[Callable[[], str], str], str]:
    """`once_per_machine` for downloads, in which local rank 0 may take a day."""
    return lambda work, what: once_per_machine(work, what, ranks, store, hours=_DOWNLOAD_HOURS)


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


def all_gather_via_store(value: str, what: str, ranks: Ranks, store: dist.Store) -> list[str]:
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
