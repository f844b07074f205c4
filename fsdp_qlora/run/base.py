"""Opens a base model on all ranks.

Its files are fetched while it is only planned, and loaded when the ranks have joined.

Between the two, each program has work of its own: a run compares itself with the one in its folder,
a service with its records, a teacher looks for what it has said before. So these are two calls.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.process_group import release_cached_memory
from fsdp_qlora.distributed.supervision import exits
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.teacher import TEACHER, teacher_config
from fsdp_qlora.run.load_model import fetch_weights, load_model, open_weights
from fsdp_qlora.run.session import Session
from fsdp_qlora.sharding.loading.weight_files import Weights

_MORE_MEMORY = "more or larger GPUs, --use_cpu_offload true"


class LoadedBase(NamedTuple):
    """A base whose verified shards are on the ranks."""

    config: TrainConfig
    placed: PlacedModel
    mesh: DeviceMesh


class FetchedBase(NamedTuple):
    """A base whose files are here, and match its weights."""

    config: TrainConfig
    placed: PlacedModel
    weights: Weights

    def load(self) -> LoadedBase:
        """Turn the planned model into verified shards, in place. Called on every rank.

        Raises:
            UserError, RuntimeError: as of `load_model`.
        """
        ranks = self.placed.model.machine.ranks
        mesh = load_model(self.config, self.placed, self.weights, ranks)
        # What loading took would count as the peak of the first step.
        release_cached_memory(ranks.device)
        return LoadedBase(self.config, self.placed, mesh)


class PlannedBase(NamedTuple):
    """A base that is planned and placed, with the options that it is loaded by."""

    config: TrainConfig
    placed: PlacedModel
    store: dist.Store | None = None
    """The model's own, by which the ranks agree before the process group exists."""

    def fetch(self) -> FetchedBase:
        """Download its files where they are missing. Called on every rank."""
        assert self.store is not None  # a dry run fetches nothing
        ranks = self.placed.model.machine.ranks
        weights = fetch_weights(self.config, self.placed.model, ranks, self.store)
        return FetchedBase(self.config, self.placed, weights)

    def opened(self) -> FetchedBase:
        """The same where `fetch` has been called before."""
        return FetchedBase(self.config, self.placed, open_weights(self.placed.model))


def teacher_base(config: TrainConfig, placed: PlacedModel, session: Session) -> PlannedBase:
    """The teacher of a run with these options, which `make_plan` has placed."""
    return PlannedBase(teacher_config(config), placed, session.store_of(TEACHER))


def open_base(
    plan: Callable[[], PlannedBase], session: Session, *, memory_settings: str = _MORE_MEMORY
) -> LoadedBase:
    """Open a base that nothing has to be done with before it is loaded. Called on every rank.

    Args:
        plan: plans it, and does what may fail before weights are fetched.
        memory_settings: options to advise when memory is exhausted.
    """
    with session.kept_until_all_connect():
        fetched = plan().fetch()
    # After the download, so that no collective waits for it.
    session.start_group(fetched.placed.layout)
    with exits.loading_explained(session.ranks.rank, memory_settings):
        return fetched.load()
