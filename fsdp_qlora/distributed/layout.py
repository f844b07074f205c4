"""How the ranks share a model and its rows: which hold one copy together, and which get rows or tokens of their own."""

from dataclasses import dataclass

from fsdp_qlora.utils.errors import UserError

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
class Layout:
    """per_node: ranks of one machine. sharding_strategy: a key of SHARDING_STRATEGIES. context_size: neighbouring ranks
    that share each micro-batch (context parallelism).

    Raises:
        UserError: a hybrid strategy on nodes with different numbers of ranks, or ranks that cannot be so grouped.
    """

    world_size: int
    per_node: int
    sharding_strategy: str
    context_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.num_shards:
            raise UserError(
                f"sharding_strategy {self.sharding_strategy} needs the same number of ranks on every node; "
                f"{self.world_size} ranks are not a multiple of this node's {self.num_shards}. Use full_shard."
            )
        if self.per_node % self.context_size or self.world_size % self.context_size:
            raise UserError(
                f"--context_parallel_size {self.context_size}: the {self.per_node} ranks of a machine, "
                f"{self.world_size} in all, cannot be divided into groups of so many. Give a divisor of both."
            )

    @property
    def data_size(self) -> int:
        """Groups of ranks that get other rows than each other."""
        return self.world_size // self.context_size

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of the model."""
        scope, _ = SHARDING_STRATEGIES[self.sharding_strategy]
        return {"all": self.world_size, "node": self.per_node, "none": 1}[scope]

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.world_size // self.num_shards

    @property
    def frees_blocks(self) -> bool:
        """Whether a block's gathered weights are freed between its forward and backward pass."""
        return SHARDING_STRATEGIES[self.sharding_strategy][1]

    @property
    def is_hybrid(self) -> bool:
        """Whether there are several copies, each of which several ranks share."""
        return 1 < self.num_shards < self.world_size
