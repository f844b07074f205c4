"""One rank among the others, from the start of its process to the end of the process group."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import torch.distributed as dist

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.device import configure_kernels
from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.distributed.process_group import process_group_closed, start_process_group
from fsdp_qlora.distributed.ranks import Ranks, read_ranks, set_up_logging
from fsdp_qlora.distributed.store import connect, kept_until_all_connect
from fsdp_qlora.distributed.supervision import clock, exits
from fsdp_qlora.distributed.supervision.presence import Presence
from fsdp_qlora.distributed.supervision.stops import Signals

_GROUP_MINUTES = 30.0  # that a collective may take, at least: ranks load at different speeds


def enter_rank(config: TrainConfig, stream: TextIO | None = None) -> Ranks:
    """Make this process a rank: torch's kernels, its device and its log. stream: of the log."""
    configure_kernels()
    # A dry run may plan for GPUs that are elsewhere.
    is_elsewhere = config.is_preview and config.device == "cuda"
    ranks = read_ranks("auto" if is_elsewhere else config.device)
    set_up_logging(ranks, verbose=config.verbose, stream=stream)
    return ranks


@dataclass(frozen=True)
class Session:
    """A rank that has met rank 0. It is closed by the block that has opened it.

    Whatever refers to a model or to the process group must be gone by then: it belongs to a
    function that the block calls (see `stop_process_group`).
    """

    ranks: Ranks
    store: dist.Store
    timeout_minutes: float = _GROUP_MINUTES

    def kept_until_all_connect(self) -> contextlib.AbstractContextManager[None]:
        """If rank 0 fails in the block, wait for the others, which fail for the same reason."""
        return kept_until_all_connect(self.store, self.ranks)

    def store_of(self, name: str) -> dist.Store:
        """A part of the store for a second model, whose planning uses the same keys."""
        return dist.PrefixStore(name, self.store)

    def start_group(self, layout: Layout) -> None:
        """Join the other ranks. Afterwards the process group owns the store."""
        start_process_group(
            self.ranks, self.store, layout=layout, timeout_minutes=self.timeout_minutes
        )


@dataclass(frozen=True, kw_only=True)
class SupervisedSession(Session):
    """A session whose ranks watch each other, and which signals can stop."""

    presence: Presence
    signals: Signals
    started: float
    """`clock.elapsed()` when it was opened: what comes before the first step uses up the budget."""


@contextlib.contextmanager
def open_session(ranks: Ranks) -> Iterator[Session]:
    """Connect to rank 0's store. The process group ends with the block."""
    with process_group_closed():
        yield Session(ranks, connect(ranks))


@contextlib.contextmanager
def open_supervised_session(
    ranks: Ranks, signals: Signals, *, hang_minutes: float
) -> Iterator[SupervisedSession]:
    """Connect to rank 0's store, and tell the other ranks how the block ends.

    Raises:
        LostRank: another rank has ended. RunStopped: a signal came before the training began.
    """
    started = clock.elapsed()
    # A collective of a hanging rank must not end before the watchdog has said which rank hangs.
    minutes = max(_GROUP_MINUTES, 2 * hang_minutes)
    with process_group_closed():
        store = connect(ranks, timeout_minutes=minutes, wait_minutes=hang_minutes)
        presence = Presence(store, ranks, hang_minutes=hang_minutes)
        with exits.aborting_others(presence), signals.handled():
            yield SupervisedSession(
                ranks, store, minutes, presence=presence, signals=signals, started=started
            )
