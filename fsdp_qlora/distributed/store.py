"""Communication between ranks before the process group exists, through rank 0's store."""

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
_START_SECONDS = 30.0  # most time between the starts of two ranks of one command
# Another program may listen at the port, and never answer.
_ANSWER_TIMEOUT = datetime.timedelta(minutes=1)
_DOWNLOAD_HOURS = 24.0  # a download of hundreds of GB over a slow line takes many of them
MAX_WAIT_MINUTES = 5.0  # for rank 0 before training begins; later, it was most likely never started


def connect(
    ranks: Ranks, *, timeout_minutes: float = 30.0, wait_minutes: float = MAX_WAIT_MINUTES
) -> dist.Store:
    """Connect to this start's store, which rank 0's process hosts. Waits for rank 0 only.

    Only one thread at a time may use the store, since a request blocks its connection until the
    answer comes: another thread, such as the one that polls for heartbeats, needs a connection of
    its own, from `clone()`.

    Args:
        timeout_minutes: how long each later request may take.
        wait_minutes: how long to wait for rank 0, at most MAX_WAIT_MINUTES.
    Raises:
        UserError: rank 0 cannot listen at the port.
        LostRank: rank 0 did not open the store in time.
    """
    if ranks.world_size == 1:  # a single process needs no server, hence no free port
        return dist.HashStore()
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    # Rank 0 waits for nobody here, and the others for rank 0 alone: the presence finds any other
    # rank that was never started, and can name it.
    if not ranks.is_rank_0:
        _wait_for_store(
            ranks.rank, address, port, min(wait_minutes or MAX_WAIT_MINUTES, MAX_WAIT_MINUTES)
        )
    resolved = _resolve(address)
    if ranks.is_rank_0 and resolved is not None and resolved.is_global:
        log.warning(
            "The store of this run listens at %s:%d, which is a public address, and has no "
            "password: close the port to all but the run's own nodes.",
            address,
            port,
        )
    # torchrun's agent hosts the store in its own process, and rank 0 is one more client.
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = ranks.is_rank_0 and not is_agents
    timeout = datetime.timedelta(minutes=timeout_minutes)
    listener = _listen_on_loopback(resolved, port) if is_master else None
    try:
        store = dist.TCPStore(
            address,
            port,
            is_master=is_master,
            timeout=min(timeout, _ANSWER_TIMEOUT),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except dist.DistError as error:
        where = f"{address}:{port} (MASTER_ADDR, MASTER_PORT)"
        raise _why_no_store(error, ranks, where, is_master=is_master) from error
    store.set_timeout(timeout)
    # torchrun keeps its store when it restarts the workers. Without a prefix they would read
    # addresses of the previous attempt (measured: 3 of 8 restarts worked, with the prefix 16 of
    # 16). A store hosted by rank 0 is new at each start, and agents that joined later count fewer
    # attempts, so it needs no attempt. The run's id, which our launcher and `torchrun --standalone`
    # draw at random, hides the keys from programs that reach the port only.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "0")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"{run}/attempt-{attempt if is_agents else 0}", store)


def _why_no_store(
    error: dist.DistError, ranks: Ranks, where: str, *, is_master: bool
) -> UserError | LostRank:
    """The error to raise where torch could not open the store, or connect to it."""
    reason = str(error).partition("\n")[0]  # pages of C++ frames follow
    if is_master:
        return UserError(f"Rank 0 cannot open its store at {where}: {reason}. Choose a free port.")
    return LostRank(
        f"Rank {ranks.rank} finds no store at {where}, though something listens: {reason}"
    )


def _wait_for_store(rank: int, address: str, port: int, minutes: float) -> None:
    """Wait for rank 0's store.

    torch itself would wait for twice the timeout and then print pages of C++ frames.
    """
    reason = ""

    def is_listening() -> bool:
        nonlocal reason
        try:
            with socket.create_connection((address, port), timeout=10) as connection:
                # A socket may connect to itself: where nobody listens, the system may give it the
                # very port that it asks for.
                return bool(connection.getsockname() != connection.getpeername())
        except OSError as error:
            reason = error.strerror or str(error)
            return False

    if not _becomes_true(is_listening, seconds=60 * minutes):
        raise LostRank(
            f"Rank {rank} has waited {minutes:.3g} minutes for rank 0, which opens the store at "
            f"{address}:{port} (MASTER_ADDR, MASTER_PORT): it was not started, has ended, or is "
            f"out of reach ({reason})."
        )


def _resolve(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address of a host; None if the name cannot be resolved, which torch reports."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(address))
    except OSError:
        return None


def _listen_on_loopback(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None, port: int
) -> int | None:
    """Open a listening socket if `address` is a loopback address; otherwise None.

    Then all ranks are on this machine. By itself torch's store listens on every interface, and
    anyone who reaches the port can read and write it.
    """
    if address is None or not address.is_loopback:
        return None
    try:
        return socket.create_server((str(address), port)).detach()
    except OSError:
        return None  # torch reports the problem with the port


@contextlib.contextmanager
def kept_until_all_connect(store: dist.Store, ranks: Ranks) -> Iterator[None]:
    """If rank 0 fails in the block, keep its store open until every rank has connected.

    The store ends with rank 0's process. A rank that starts a little later would wait minutes for
    it, instead of failing by itself for the same reason.
    """
    store.add("connected", 1)
    try:
        yield
    except Exception:
        if ranks.is_rank_0:
            with contextlib.suppress(Exception):
                _becomes_true(
                    lambda: store.add("connected", 0) >= ranks.world_size, seconds=_START_SECONDS
                )
        raise


def once_per_machine(ranks: Ranks, store: dist.Store, work: Callable[[], str], what: str) -> str:
    """Call `work`, a download, on local rank 0 and return its result on every rank of the machine.

    Through the store and not a collective: it may take hours, and a group would time out.

    Args:
        what: name of the work for messages, such as "the download of owner/model"; unique in this
            start.
    Raises:
        UserError: raised by `work` on local rank 0; the same on every rank of the machine.
        LostRank: local rank 0 failed in another way, has ended, or takes more than a day.
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
        # Polled: a `get` would block the store's connection, and Python's signals with it.
        is_over = _becomes_true(
            lambda: store.check([f"{what}/{first}"]), seconds=3600 * _DOWNLOAD_HOURS
        )
        outcome = "failed"
        text = f"it takes more than {_DOWNLOAD_HOURS:g} hours, so its process may be stuck."
        if is_over:
            outcome, text = json.loads(store.get(f"{what}/{first}"))
    except RuntimeError as error:
        raise LostRank(f"Rank 0 has ended while rank {ranks.rank} waited for {what}.") from error
    # The first rank waits for this before it ends, and the store may end with it.
    with contextlib.suppress(RuntimeError):
        store.add(f"{what}/{first}/heard", 1)
    if outcome == "refused":
        raise UserError(text)
    if outcome == "failed":
        raise LostRank(f"Rank {first} has failed at {what}: {text}")
    return str(text)


def all_gather_via_store(value: str, what: str, ranks: Ranks, store: dist.Store) -> list[str]:
    """All-gather a text before the process group exists.

    Args:
        what: name of the value for messages, unique in this start.
    Raises:
        LostRank: rank 0 has ended, or another rank does not get to this point.
    """
    # All set first and then get, so the order of arrival does not matter; `get` waits for a key.
    store.set(f"{what}/{ranks.rank}", value)
    try:
        return [store.get(f"{what}/{rank}").decode() for rank in range(ranks.world_size)]
    except RuntimeError as error:
        raise LostRank(
            f"A rank has ended while rank {ranks.rank} waited for {what} of all ranks."
        ) from error


def _tell_machine(answer: list[str], what: str, ranks: Ranks, store: dist.Store) -> None:
    """Send the answer to the other ranks of the machine, and wait until they have read it.

    The store may end with this process.
    """
    with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the store with it
        store.set(f"{what}/{ranks.rank}", json.dumps(answer))
        heard = f"{what}/{ranks.rank}/heard"
        _becomes_true(lambda: store.add(heard, 0) >= ranks.local_world_size - 1, seconds=60)


def _becomes_true(condition: Callable[[], bool], *, seconds: float) -> bool:
    """Poll a condition ten times a second; False on timeout.

    Python handles signals between the polls.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)
    return True
