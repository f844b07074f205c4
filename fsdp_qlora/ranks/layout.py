"""How the ranks share a model and its rows: which hold one copy together, and which get rows of their own."""

from dataclasses import dataclass

from fsdp_qlora.errors import UserError

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
    """per_node: ranks of one machine. sharding_strategy: a key of SHARDING_STRATEGIES.

    Raises:
        UserError: a hybrid strategy on nodes with different numbers of ranks.
    """

    world_size: int
    per_node: int
    sharding_strategy: str

    def __post_init__(self) -> None:
        if self.world_size % self.num_shards:
            raise UserError(
                f"sharding_strategy {self.sharding_strategy} needs the same number of ranks on every node; "
                f"{self.world_size} ranks are not a multiple of this node's {self.num_shards}. Use full_shard."
            )

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
