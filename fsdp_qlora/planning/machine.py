"""The machine that a run is planned for."""

import os
from dataclasses import dataclass

import torch

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.device import free_gpu_memory
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.planning.workspaces import workspace_bytes


@dataclass(frozen=True)
class Machine:
    """The devices that a run computes on.

    A dry run may plan for other devices than this machine's.
    """

    device: torch.device
    """The device of each planned rank; in a dry run often a GPU that is not here."""
    world_size: int
    """Ranks of the planned run."""
    ranks: Ranks
    """This process and the others that are here."""
    free: int | None = None
    """Bytes of a GPU that is elsewhere, if it is known."""
    capability: int = 0
    """The compute capability of such a GPU, as 90 for 9.0; 0 if it is not known."""

    @classmethod
    def of(cls, config: TrainConfig, ranks: Ranks) -> "Machine":
        """The machine of a run.

        A dry run plans for the machine in its options, even if this machine lacks the GPUs.
        """
        if not config.dry_run:
            return cls(ranks.device, ranks.world_size, ranks)
        # A dry run is one process, which stands for all that torchrun or --nproc_per_node asks for.
        num_ranks = int(os.environ.get("WORLD_SIZE") or 1)
        if num_ranks <= 1:
            num_ranks = config.nproc_per_node
        if num_ranks < 1:
            num_ranks = 1 if config.device == "cpu" else max(1, torch.cuda.device_count())
        is_elsewhere = config.device != "cpu" and ranks.device.type == "cpu"
        return cls(torch.device("cuda") if is_elsewhere else ranks.device, num_ranks, ranks)

    def data_size(self, context_size: int) -> int:
        """The number of groups of `context_size` ranks; each group gets rows of its own.

        Raises:
            UserError: the ranks cannot be divided into such groups.
        """
        return self.ranks.layout("full_shard", self.world_size, context_size).data_size

    @property
    def per_node(self) -> int:
        """Ranks of one machine."""
        return self.ranks.layout("full_shard", self.world_size).per_node

    @property
    def is_elsewhere(self) -> bool:
        return self.device.type != self.ranks.device.type

    @property
    def workspace(self) -> int:
        """Bytes of cuBLAS for a thread and stream; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        if self.is_elsewhere:
            return workspace_bytes(self.capability)
        major, minor = torch.cuda.get_device_capability(self.ranks.device)
        return workspace_bytes(10 * major + minor)

    @property
    def gpu_memory(self) -> tuple[int, int] | None:
        """Free and total bytes of the GPU that is planned for, or is here; None if unknown."""
        if self.free is not None:
            return self.free, self.free
        if self.ranks.device.type != "cuda":
            return None
        return free_gpu_memory(self.ranks.device)
