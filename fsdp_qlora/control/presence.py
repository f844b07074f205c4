"""Signs of life between the ranks, from the first contact to the end of training, through the store they share.

Before training ranks wait for each other in places that may rightly take long (a download, the reading of a model), in
collectives and in the store. What ends such a wait, if a rank has failed or was never started, is this: each rank shows
that it lives and watches one other, and the first one that fails tells all why.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch.distributed as dist

from fsdp_qlora.control.bounded_store import BoundedStore
from fsdp_qlora.distributed import MAX_WAIT_MINUTES, Ranks
from fsdp_qlora.errors import ENDINGS, note_reason, write_line

POLL_SECONDS = 0.5
PAUSE_SECONDS = 10.0  # between two looks: the whole machine was paused, so all times are too old
_PULSE_SECONDS = 2.0  # between signs of life
_SILENT_SECONDS = 30.0  # without a sign of life a rank counts as dead; NCCL alone would wait for many minutes
_OWN_REASON_SECONDS = 3.0  # before training most ranks fail for the same reason, and have words of their own for it
_ABORT = "abort"
_STARTING, _TRAINING, _GOODBYE = b"starting", b"training", b"done"


class Presence:
    """This rank's signs of life, its neighbour's, and the reason of the first rank that fails.

    Args:
        store: shared by all ranks; this object has a connection of its own.
        hang_minutes: how long a rank may be missing before training begins, 5 at most (and for 0).
    Attributes:
        is_starting: False from the first step on.
        on_end: called with a key of errors.ENDINGS and the reason before a thread ends this process.
        where: words for messages: the point that this rank has reached.
    """

    def __init__(self, store: dist.Store, ranks: Ranks, *, hang_minutes: float) -> None:
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # its annotations lack it
        self._store: dist.Store | BoundedStore = own
        if ranks.world_size > 1:
            self._store = BoundedStore(own, seconds=_SILENT_SECONDS)
        self.ranks = ranks
        self.is_starting = True
        self.on_end: Callable[[str, str], None] = lambda state, reason: None
        self.where: Callable[[], str] = lambda: "before training began"
        self._missing_seconds = 60 * min(hang_minutes or MAX_WAIT_MINUTES, MAX_WAIT_MINUTES)
        self._neighbour = (ranks.rank + 1) % ranks.world_size  # each rank watches one other
        self._lock = threading.Lock()  # one request to the store at a time
        self._has_lost_store = False
        self._heard = b""  # the neighbour's last sign of life
        self._pulse_at = self._heard_at = self._looked_at = time.monotonic()
        # Seen when, and which rank ends the run why and how. Kept, since the store may end before this rank does.
        self._asked: tuple[float, int, str, str] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="presence", daemon=True)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show that this rank lives, and end it if another one fails or is missing, until training begins."""
        if self.ranks.world_size > 1:
            self._tell()
            self._heard_at = self._looked_at = time.monotonic()
            self._thread.start()
        try:
            yield
        except Exception:
            self._stop()
            raise
        self._stop()
        self.say_goodbye()
        if isinstance(self._store, BoundedStore):
            self._store.close()

    def begin_training(self, where: Callable[[], str]) -> None:
        """From now on another thread calls `look`, and silence counts sooner."""
        self._stop()
        self.is_starting, self.where = False, where
        self._heard_at = self._looked_at = time.monotonic()
        self._tell()

    def say_goodbye(self) -> None:
        """Silence counts no more: all ranks end what they do together."""
        self._set(f"alive/{self.ranks.rank}", _GOODBYE.decode())

    def tell(self, reason: str, *, state: str = "failed") -> None:
        """Make all other ranks end with this reason, unless another one was first. state: a key of errors.ENDINGS."""
        with self.talking() as store:
            store.compare_set(_ABORT, "", json.dumps([self.ranks.rank, reason, state]))
        if self.ranks.world_size > 1 and self.ranks.is_rank_0:
            time.sleep(2 * POLL_SECONDS)  # the store ends with this process: the others must read it first
        elif self.is_starting:
            # Rank 0 may fail as well, and killed by the launcher it would leave the lock of the run's folder behind.
            time.sleep(4 * POLL_SECONDS)

    def end_others(self, reason: str, *, state: str = "failed") -> None:
        """Make all other ranks end quietly, since this one reports why. If another was first, end this one instead."""
        self.tell(reason, state=state)
        self._end_if_another_asked()

    def end_if_asked_within(self, seconds: float) -> None:
        """End this process if another rank soon reports that it ends the run."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._end_if_another_asked()
            time.sleep(0.1)

    def look(self) -> None:
        """Check once, by the time at the start of the check: a pause during it is noticed by the next one."""
        now = time.monotonic()
        if now - self._looked_at > PAUSE_SECONDS:
            self._heard_at = now
        self._looked_at = now
        self._end_if_another_asked(grace=_OWN_REASON_SECONDS if self.is_starting else 0.0)
        if self.ranks.world_size > 1 and self._asked is None:
            self._exchange_signs(now)
            if now - self._heard_at > self._patience():
                self._end_alone()

    @contextlib.contextmanager
    def talking(self) -> Iterator[dist.Store | BoundedStore]:
        """Use the store; if it has died with its host, or does not answer, replace it by an empty local one."""
        with self._lock:
            try:
                yield self._store
            except Exception:
                self._store, self._has_lost_store = dist.HashStore(), True

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            self.look()

    def _stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _set(self, key: str, value: str) -> None:
        with self.talking() as store:
            store.set(key, value)

    def _tell(self) -> None:
        self._pulse_at = time.monotonic()
        kind = _STARTING if self.is_starting else _TRAINING
        self._set(f"alive/{self.ranks.rank}", f"{kind.decode()} {self._pulse_at}")

    def _exchange_signs(self, now: float) -> None:
        """Give a sign of life every few seconds, and listen for the neighbour's."""
        if now - self._pulse_at > _PULSE_SECONDS:
            self._tell()
            with self.talking() as store:
                if store.check([f"alive/{self._neighbour}"]):
                    heard = store.get(f"alive/{self._neighbour}")
                    if heard != self._heard:
                        self._heard, self._heard_at = heard, now
        if self._heard == _GOODBYE:
            self._heard_at = now

    def _patience(self) -> float:
        """Seconds that the neighbour may be silent. While it reads a model, Python may stand still for a while."""
        if self._has_lost_store or self._heard.startswith(_TRAINING):
            return _SILENT_SECONDS
        if not self._heard:
            return self._missing_seconds
        return max(_SILENT_SECONDS, self._missing_seconds)

    def _end_if_another_asked(self, grace: float = 0.0) -> None:
        if self._asked is None:
            with self.talking() as store:
                if store.check([_ABORT]):
                    self._asked = (time.monotonic(), *json.loads(store.get(_ABORT)))
        if self._asked is None:
            return
        at, rank, reason, state = self._asked
        if rank != self.ranks.rank and time.monotonic() - at >= grace:
            self._end(state, f"Ended because of rank {rank}: {reason}", reason)

    def _end_alone(self) -> None:
        message = self._describe_silence()
        write_line(f"[rank {self.ranks.rank}] error: {message}")
        self.tell(message)
        self._end("failed", message, message, is_said=True)

    def _end(self, state: str, message: str, reason: str, *, is_said: bool = False) -> NoReturn:
        """End this process. torchrun shows the reason of the first rank; ranks without it show their own."""
        self.on_end(state, reason)
        if not is_said and "TORCHELASTIC_ERROR_FILE" not in os.environ:
            write_line(f"[rank {self.ranks.rank}] {message}")
        note_reason(message)
        os._exit(ENDINGS[state].exit_code)

    def _describe_silence(self) -> str:
        if self._has_lost_store:
            return (
                f"The store of all ranks has not answered for {_SILENT_SECONDS:.0f} s: rank 0, or the launcher that "
                "keeps it, has ended, or its machine cannot be reached."
            )
        if not self._heard:
            with self.talking() as store:
                absent = [rank for rank in range(self.ranks.world_size) if not store.check([f"alive/{rank}"])]
            names = f"Rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent or [self._neighbour]))}"
            return (
                f"{names} did not come within {self._missing_seconds / 60:.3g} minutes: not started, ended before it "
                "met the others (its own output says why), or out of reach."
            )
        return (
            f"Rank {self._neighbour} has given no sign of life for {self._patience():.0f} s, {self.where()}: "
            "its process has ended or is stopped, or its machine cannot be reached."
        )
