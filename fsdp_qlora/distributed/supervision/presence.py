"""Heartbeats between the ranks, from the first contact to the end of training, in their store.

Before training, ranks wait for each other in collectives and in the store, where work such as a
download or reading a model may take long. If a rank has failed or was never started, this ends the
wait: each rank sends heartbeats and watches one other rank, and the first rank that fails sends its
reason to all.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.store import MAX_WAIT_MINUTES
from fsdp_qlora.distributed.supervision.clock import within
from fsdp_qlora.utils.errors import ENDINGS, note_reason, write_line

POLL_SECONDS = 0.5
# More than this between two checks: the whole machine was paused, so all recorded times are too
# old. Much more than a poll, since a busy machine may hold up a thread for seconds.
PAUSE_SECONDS = 10.0
_PULSE_SECONDS = 2.0  # between heartbeats
# Without a heartbeat for so long a rank counts as dead: 15 of them. NCCL and gloo would wait until
# the group's timeout.
_SILENT_SECONDS = 30.0
# Before training most ranks fail for the same reason, and report it themselves.
_OWN_REASON_SECONDS = 3.0
# A key of the store, and kinds of heartbeats. Ranks compare them as bytes, as the store has them.
_ABORT = "abort"
_STARTING = b"starting"
_TRAINING = b"training"
_DONE = b"done"


class BoundedStore:
    """A store whose requests time out. torch's wait forever for a host that is stopped or lost.

    Args:
        seconds: time limit of a request. Time in which this process's parent is stopped does not
            count: it may be the launcher that hosts the store.
    Raises:
        TimeoutError: a request was not answered in `seconds`.
        Exception: raised by the store.
    """

    def __init__(self, store: dist.Store, *, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._parent = os.getppid()

    def __getattr__(self, request: str) -> Callable[..., Any]:
        """The store's request of this name with the time limit: set, get, check, compare_set."""
        send = getattr(self._store, request)
        return lambda *arguments: within(
            self._seconds, partial(send, *arguments), counts=self._is_parent_awake
        )

    def _is_parent_awake(self) -> bool:
        # An unknown state counts: a request must end some time.
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self._parent).status() != psutil.STATUS_STOPPED
        return True


class Presence:
    """This rank's heartbeats, its neighbour's, and the reason of the first rank that fails.

    Args:
        store: shared by all ranks.
        hang_minutes: how long a rank may be missing before training begins: 5 at most, 0 means 5.
    Attributes:
        is_starting: False from the first step on.
        on_end: called with a key of errors.ENDINGS and the reason before this process ends by a
            failure or a stop.
        where: describes the point that this rank has reached, for messages.
        watch: called twice a second by this object's thread.
    """

    def __init__(self, store: dist.Store, ranks: Ranks, *, hang_minutes: float) -> None:
        # A clone, since a request blocks its connection: a poll would wait while another thread
        # waits in `get`.
        clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's annotations
        self._store = (
            BoundedStore(clone, seconds=_SILENT_SECONDS) if ranks.world_size > 1 else clone
        )
        self.ranks = ranks
        self.is_starting = True
        self.on_end: Callable[[str, str], None] = lambda state, reason: None
        self.where: Callable[[], str] = lambda: "before training began"
        self.watch: Callable[[], None] = self.check_peers
        self._missing_seconds = 60 * min(hang_minutes or MAX_WAIT_MINUTES, MAX_WAIT_MINUTES)
        # Each rank watches one other, in a ring: requests grow with the number of ranks, not with
        # its square. Who finds a silent neighbour tells all.
        self._neighbour = (ranks.rank + 1) % ranks.world_size
        self._agent = os.getppid()  # if torchrun has started this process
        self._lock = threading.Lock()  # one request to the store at a time
        self._has_lost_store = False
        self._is_silent = False  # whether the store was lost by a request without an answer
        self._heard = b""  # the neighbour's last heartbeat
        self._pulse_at = self._heard_at = self._looked_at = time.monotonic()
        # Time of receipt, rank, reason and state of an abort. Remembered, since the store may end
        # before this rank does.
        self._abort: tuple[float, int, str, str] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="presence", daemon=True)

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Send heartbeats, and end this process if another rank fails or is missing.

        Until training begins; `begin_training` goes on from there.
        """
        if self.ranks.world_size > 1:
            self._begin()
        try:
            yield
        finally:
            self.stop()
        # Not after an exception: then the silence of this rank must end the others.
        self.mark_done()

    def begin_training(self, where: Callable[[], str], watch: Callable[[], None]) -> None:
        """Call `watch` from now on, which must call `check_peers`.

        A silent rank counts as dead sooner than before.
        """
        self.is_starting = False
        self.where = where
        self.watch = watch
        self._begin()

    def _begin(self) -> None:
        self._heard_at = self._looked_at = time.monotonic()
        self._announce()
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """End the thread that calls `watch`."""
        self._stopped.set()
        # Not for ever: the thread may wait for a store that does not answer.
        if self._thread.is_alive():
            self._thread.join(5)

    def _work(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            self.watch()

    def mark_done(self) -> None:
        """Tell the others that from now on this rank's silence is no failure.

        All ranks have finished together.
        """
        self._set(f"alive/{self.ranks.rank}", _DONE.decode())

    def abort_others(self, reason: str, *, state: str = "failed") -> None:
        """Make all other ranks end with this reason, unless one has aborted already.

        state: a key of errors.ENDINGS.
        """
        # The store decides who is first, so that all ranks end with one reason.
        with self.using_store() as store:
            store.compare_set(_ABORT, "", json.dumps([self.ranks.rank, reason, state]))
        if self.ranks.world_size > 1 and self.ranks.is_rank_0:
            # The store ends with this process: the others must read it first, at their next poll.
            time.sleep(2 * POLL_SECONDS)
        elif self.is_starting:
            # Rank 0 may fail as well. When this process ends, the launcher kills the others: if it
            # killed rank 0 meanwhile, the lock of the run's folder would stay.
            time.sleep(4 * POLL_SECONDS)

    def abort_or_exit(self, reason: str, *, state: str = "failed") -> None:
        """Make all other ranks end quietly, since this one reports why.

        If another one has aborted already, end this one.
        """
        self.abort_others(reason, state=state)
        self._exit_if_aborted_elsewhere()

    def exit_if_aborted(self, seconds: float) -> None:
        """End this process if another rank aborts the run within `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._exit_if_aborted_elsewhere()
            time.sleep(0.1)

    def check_peers(self) -> None:
        """Check once.

        The time is taken at the start, so that the next check notices a pause during this one.
        """
        now = time.monotonic()
        if now - self._looked_at > PAUSE_SECONDS:
            # This process was paused, and could hear nothing.
            self._heard_at = now
        self._looked_at = now
        self._exit_if_aborted_elsewhere(grace=_OWN_REASON_SECONDS if self.is_starting else 0.0)
        if self.ranks.world_size > 1 and self._abort is None:
            self._exchange_heartbeats(now)
            if self._is_silent or now - self._heard_at > self._silence_limit():
                self._exit_for_silence()

    @contextlib.contextmanager
    def using_store(self) -> Iterator[Any]:
        """Use the store in the block.

        If it has ended or does not answer, an empty local one replaces it.
        """
        with self._lock:
            try:
                yield self._store
            except Exception as error:
                # Any kind: what a lost connection raises depends on torch and on the request. From
                # here on nobody is heard, so `check_peers` ends this process.
                self._store = dist.HashStore()
                self._has_lost_store = True
                self._is_silent = isinstance(error, TimeoutError)

    def _set(self, key: str, value: str) -> None:
        with self.using_store() as store:
            store.set(key, value)

    def _announce(self) -> None:
        self._pulse_at = time.monotonic()
        kind = _STARTING if self.is_starting else _TRAINING
        self._set(f"alive/{self.ranks.rank}", f"{kind.decode()} {self._pulse_at}")

    def _exchange_heartbeats(self, now: float) -> None:
        """Every few seconds, send a heartbeat and read the neighbour's."""
        if now - self._pulse_at > _PULSE_SECONDS:
            self._announce()
            with self.using_store() as store:
                # `check` first: a `get` would wait for a rank that has not connected.
                if store.check([f"alive/{self._neighbour}"]):
                    heard = store.get(f"alive/{self._neighbour}")
                    # A heartbeat has its time in it, of the sender's clock, which only makes it
                    # differ from the last one: clocks of two machines are not compared.
                    if heard != self._heard:
                        self._heard = heard
                        self._heard_at = now
        if self._heard == _DONE:
            self._heard_at = now

    def _silence_limit(self) -> float:
        """How many seconds the neighbour may be silent.

        While it reads a model, its threads may not run for a while.
        """
        if self._has_lost_store or self._heard.startswith(_TRAINING):
            return _SILENT_SECONDS
        if not self._heard:
            return self._missing_seconds
        return max(_SILENT_SECONDS, self._missing_seconds)

    def _exit_if_aborted_elsewhere(self, grace: float = 0.0) -> None:
        if self._abort is None:
            with self.using_store() as store:
                if store.check([_ABORT]):
                    self._abort = (time.monotonic(), *json.loads(store.get(_ABORT)))
        if self._abort is None:
            return
        at, rank, reason, state = self._abort
        if rank != self.ranks.rank and time.monotonic() - at >= grace:
            self._end(state, f"Ended because of rank {rank}: {reason}", reason)

    def _exit_for_silence(self) -> None:
        message = self._describe_silence()
        write_line(f"[rank {self.ranks.rank}] error: {message}")
        self.abort_others(message)
        if self._is_silent and "TORCHELASTIC_RUN_ID" in os.environ:
            self._end_agent()
        self._end("failed", message, message, is_said=True)

    def _end_agent(self) -> None:
        """End torchrun's agent: it uses the lost store, too, and might wait 15 minutes for TCP."""
        # While it waits in C++, Python handles no SIGTERM, so SIGKILL follows. The parent's id is
        # asked again each time: when it has ended, another process is the parent.
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if os.getppid() == self._agent:
                os.kill(self._agent, signum)
                time.sleep(4)

    def _end(self, state: str, message: str, reason: str, *, is_said: bool = False) -> NoReturn:
        """End this process.

        Under torchrun, which prints the first rank's reason, other ranks print nothing.
        """
        self.on_end(state, reason)
        if not is_said and "TORCHELASTIC_ERROR_FILE" not in os.environ:
            write_line(f"[rank {self.ranks.rank}] {message}")
        note_reason(message)
        # Not sys.exit, which would end this thread alone. The main thread may wait in a collective
        # for ever.
        os._exit(ENDINGS[state].exit_code)

    def _describe_silence(self) -> str:
        if self._has_lost_store:
            return (
                f"The store of all ranks has not answered for {_SILENT_SECONDS:.0f} s: rank 0, or "
                "the launcher that hosts it, has ended, or its machine cannot be reached."
            )
        if not self._heard:
            with self.using_store() as store:
                absent = [
                    rank
                    for rank in range(self.ranks.world_size)
                    if not store.check([f"alive/{rank}"])
                ]
            # It may have connected between the two looks: then it is the one that was missed.
            absent = absent or [self._neighbour]
            noun = "Rank" if len(absent) == 1 else "Ranks"
            return (
                f"{noun} {', '.join(map(str, absent))} did not connect within "
                f"{self._missing_seconds / 60:.3g} minutes: not started, ended before connecting "
                "(its own output says why), or out of reach."
            )
        return (
            f"Rank {self._neighbour} has sent no heartbeat for {self._silence_limit():.0f} s, "
            f"{self.where()}: its process has ended or is stopped, or its machine cannot be "
            "reached."
        )
