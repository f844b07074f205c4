"""How the ranks share a model and its rows: shards, replicas, and context parallelism."""

from dataclasses import dataclass

from fsdp_qlora.utils.errors import UserError

# strategy -> (ranks that share a copy of the model, whether a block's weights are freed between
# forward and backward). "all": every rank. "node": the ranks of a node, with one replica per node.
# "none": each rank has a whole copy.
SHARDING_STRATEGIES: dict[str, tuple[str, bool]] = {
    "full_shard": ("all", True),
    "shard_grad_op": ("all", False),
    "hybrid_full_shard": ("node", True),
    "hybrid_shard_grad_op": ("node", False),
    "ddp": ("none", False),
}


@dataclass(frozen=True)
class Layout:
    """The groups of ranks.

    per_node: number of ranks of one machine. sharding_strategy: a key of SHARDING_STRATEGIES.
    context_size: number of neighbouring ranks that share each micro-batch (context parallelism).

    Raises:
        UserError: a hybrid strategy on nodes with different numbers of ranks, or ranks not
            divisible by context_size.
    """

    world_size: int
    per_node: int
    sharding_strategy: str
    context_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.num_shards:
            raise UserError(
                f"sharding_strategy {self.sharding_strategy} needs the same number of ranks on "
                f"every node; {self.world_size} ranks are not a multiple of this node's "
                f"{self.num_shards}. Use full_shard."
            )
        if self.per_node % self.context_size or self.world_size % self.context_size:
            raise UserError(
                f"--context_parallel_size {self.context_size} must divide both the {self.per_node} "
                f"ranks of a machine and the {self.world_size} ranks of the run."
            )

    @property
    def data_size(self) -> int:
        """Number of groups of ranks that get different rows (data parallelism)."""
        return self.world_size // self.context_size

    @property
    def num_shards(self) -> int:
        """Number of ranks that share one copy of the model."""
        scope, _ = SHARDING_STRATEGIES[self.sharding_strategy]
        return {"all": self.world_size, "node": self.per_node, "none": 1}[scope]

    @property
    def num_replicas(self) -> int:
        """Number of copies of the model."""
        return self.world_size // self.num_shards

    @property
    def communicators(self) -> list[tuple[int, bool]]:
        """NCCL's communicators of a rank: ranks in its machine, and whether it has all-to-alls."""
        if self.world_size == 1:
            return []
        # The group of all ranks serves as the one of shards or of context where they are all ranks.
        groups = [(self.per_node, self.world_size in (self.num_shards, self.context_size))]
        # Several copies, each shared by several ranks: groups of shards, and of replicas.
        if 1 < self.num_shards < self.world_size:
            groups += [(self.per_node, True), (1, False)]
        if 1 < self.context_size < self.world_size:
            groups.append((self.context_size, True))
        return groups

    @property
    def p2p_channels(self) -> int:
        """The maximum number of NCCL channels of two ranks that exchange tokens.

        Each channel has buffers.

        By itself NCCL takes 32 with NVLink.
        """
        # Lookups of the vocabulary send little, and need few.
        return 16 if self.context_size > 1 else 4

    @property
    def nccl_settings(self) -> dict[str, str]:
        """Environment variables of NCCL."""
        # Collectives of several communicators may deadlock unless they start in one order (NCCL's
        # guide): the host's.
        ordered = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"} if len(self.communicators) > 1 else {}
        return {"NCCL_MAX_P2P_NCHANNELS": str(self.p2p_channels)} | ordered

    @property
    def frees_blocks(self) -> bool:
        """Whether a block's gathered weights are freed between its forward and backward pass."""
        return SHARDING_STRATEGIES[self.sharding_strategy][1]
