"""Decides where a model lies and its gradients add up: on all ranks or sharded, on GPUs or the host; as it fits."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fsdp_qlora.output.text import GIB
from fsdp_qlora.sharding.model_parts import Offload

# Beside the estimate: its error (benchmarks/standin_memory.py) and NCCL's buffers. The context is there already.
_MARGIN_SHARE, _MARGIN = 0.05, GIB // 2


class Placement(NamedTuple):
    """sharding_strategy: of SHARDING_STRATEGIES. offload: what is in host memory. accumulates: gradients of a step's
    micro-batches add up unsharded on each rank and are reduced with the last one's; else they are reduced in each,
    which is slower.
    """

    sharding_strategy: str
    offload: Offload = Offload()
    accumulates: bool = True

    @property
    def options(self) -> dict[str, object]:
        """The options that ask for it."""
        use_cpu_offload = self.offload.embeddings or self.offload.blocks or False
        return {"sharding_strategy": self.sharding_strategy, "use_cpu_offload": use_cpu_offload}

    def describe(self) -> str:
        """In words."""
        return f"{self.sharding_strategy}{' with the base in host memory' if self.offload.blocks else ''}"


def with_margin(estimate: int) -> int:
    """What must be free on a GPU for a step that is estimated to need so many bytes."""
    return int(estimate * (1 + _MARGIN_SHARE)) + _MARGIN


def possible_offloads(use_cpu_offload: bool | int | str, num_blocks: int, *, can_offload: bool = True) -> list[Offload]:
    """What the option leaves open, the faster first. can_offload: whether auto may choose the host."""
    nothing, everything = Offload(), Offload(num_blocks, embeddings=True)
    if use_cpu_offload == "auto":
        return [nothing, everything] if can_offload else [nothing]
    return [everything if use_cpu_offload is True else Offload(int(use_cpu_offload))]


def candidates(
    sharding_strategy: str,
    offloads: Sequence[Offload],
    *,
    world_size: int,
    per_node: int,
    on_gpu: bool,
    accumulates: Sequence[bool] = (True,),
) -> list[Placement]:
    """The placements that the options leave open, the fastest first; on a CPU there is one.

    A rank with a whole model has whole gradients in the end, so there is nothing to gain by reducing them earlier.
    Several nodes each hold the model if it fits, if need be in host memory: their link is slower than that.

    Args:
        sharding_strategy: the option; auto leaves the choice open. per_node: ranks of each node. offloads,
            accumulates: what is possible, the faster first.
    """
    is_auto = sharding_strategy == "auto"
    if not on_gpu:
        return [Placement("full_shard" if is_auto else sharding_strategy, offloads[0], accumulates[0])]
    strategies = [sharding_strategy]
    if is_auto:
        possible = {"ddp": world_size > 1, "hybrid_full_shard": 1 < per_node < world_size}
        strategies = [*(strategy for strategy, is_possible in possible.items() if is_possible), "full_shard"]
    return [
        Placement(strategy, offload, adds_up)
        for strategy in strategies
        for offload in offloads
        if not (is_auto and strategy == "ddp" and offload.blocks)
        for adds_up in (accumulates if world_size > 1 and strategy != "ddp" else accumulates[:1])
    ]


def choose(needs: Mapping[Placement, int], free: int | None) -> Placement:
    """The first placement that fits in `free` bytes; the last if none does.

    If nothing is known of a GPU, that of a model which is shared, on the GPU if that is left open.

    Args:
        needs: bytes that each placement takes of a rank's device, with a margin; the fastest first.
    """
    placements = [*needs]
    if free is None:
        return [each for each in _fastest(needs) if each.offload == placements[0].offload][-1]
    return next((each for each in placements if needs[each] <= free), placements[-1])


def describe_choice(needs: Mapping[Placement, int], free: int | None) -> str | None:
    """One line: what is chosen, with the sizes; or, if no GPU is known, from which size on which; None if one is given.

    Args:
        free: on the GPU that has least; None if none is known.
    """
    *faster, slowest = [(placement.describe(), _gib(needs[placement])) for placement in _fastest(needs)]
    if not faster:
        return None
    if free is None:
        sizes = ", ".join(f"{name} if {size} are free" for name, size in faster)
        return f"Placement, on each GPU: {sizes}, else {slowest[0]} ({slowest[1]})."
    chosen = choose(needs, free)
    sizes = ", ".join(f"{name} needs {size}" for name, size in (*faster, slowest))
    line = f"Placement: {chosen.describe()}. With a margin {sizes} on each GPU, and {_gib(free)} are free."
    if chosen.sharding_strategy == "ddp" and not chosen.offload.blocks:
        line += " The base is not sharded, since it fits: --sharding_strategy full_shard shards it."
    return line


def describe_reduction(needs: Mapping[Placement, int], free: int | None) -> str | None:
    """One line if gradients are reduced in each micro-batch for want of memory."""
    chosen = choose(needs, free)
    more = needs.get(chosen._replace(accumulates=True))
    if free is None or chosen.accumulates or more is None:
        return None
    return (
        "Gradients are reduced in each micro-batch: with a margin, to add them up on each GPU until the last one needs "
        f"{_gib(more)}, and {_gib(free)} are free."
    )


def _fastest(needs: Mapping[Placement, int]) -> list[Placement]:
    """Of those that differ in `accumulates` alone, the first."""
    return [each for each in needs if each.accumulates == next(iter(needs)).accumulates]


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
