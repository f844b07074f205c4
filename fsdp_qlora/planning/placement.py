"""Decides where the model lies: replicated or sharded, on the GPUs or in host memory; as asked for, or as it fits."""

from collections.abc import Sequence
from typing import NamedTuple

from fsdp_qlora.units import GIB

# Beside the estimate: what the allocator cannot use, and NCCL's buffers (docs/gpu.md: 1.2 times, 0.8 GiB).
_MARGIN_SHARE, _MARGIN = 0.15, GIB


class Placement(NamedTuple):
    """sharding_strategy: of SHARDING_STRATEGIES. cpu_offload: the base is in host memory (all weights, with full), or
    so many decoder blocks of it.
    """

    sharding_strategy: str
    cpu_offload: bool | int

    @property
    def options(self) -> dict[str, object]:
        """The options that ask for it."""
        return {"sharding_strategy": self.sharding_strategy, "use_cpu_offload": self.cpu_offload}


class Sized(NamedTuple):
    """A placement and the bytes that a rank needs for it on its device, with a margin."""

    placement: Placement
    needs: int


def with_margin(estimate: int) -> int:
    """What must be free on a GPU for a step that is estimated to need so many bytes."""
    return int(estimate * (1 + _MARGIN_SHARE)) + _MARGIN


def candidates(
    sharding_strategy: str, cpu_offload: bool | int | str, *, world_size: int, on_gpu: bool, can_offload: bool = True
) -> list[Placement]:
    """The placements that the options leave open, the fastest first; on a CPU there is one.

    Args:
        sharding_strategy, cpu_offload: the options; auto leaves the choice open.
        can_offload: whether auto may choose the host.
    """
    is_auto = sharding_strategy == "auto"
    asked = False if isinstance(cpu_offload, str) else cpu_offload
    if not on_gpu or asked:
        return [Placement("full_shard" if is_auto else sharding_strategy, asked)]
    strategies = [sharding_strategy] if not is_auto else ["ddp", "full_shard"] if world_size > 1 else ["full_shard"]
    found = [Placement(strategy, False) for strategy in strategies]
    if cpu_offload == "auto" and can_offload:
        found.append(Placement(strategies[-1], True))
    return found


def choose(sized: Sequence[Sized], free: int) -> Placement:
    """The first placement that fits in `free` bytes; the last if none does."""
    return next((placement for placement, needs in sized if needs <= free), sized[-1].placement)


def describe_choice(sized: Sequence[Sized], free: int | None) -> str:
    """One line: what is chosen, with the sizes; or, if no GPU is known, from which size on which.

    Args:
        sized: two or more placements. free: on the GPU that has least; None if none is known.
    """
    if free is None:
        sizes = ", ".join(f"{_name(placement)} if {_gib(needs)} are free" for placement, needs in sized[:-1])
        return f"Placement, on each GPU: {sizes}, else {_name(sized[-1].placement)} ({_gib(sized[-1].needs)})."
    chosen = choose(sized, free)
    sizes = ", ".join(f"{_name(placement)} needs {_gib(needs)}" for placement, needs in sized)
    line = f"Placement: {_name(chosen)}. With a margin {sizes} on each GPU, and {_gib(free)} are free."
    if chosen.sharding_strategy == "ddp" and not chosen.cpu_offload:
        line += " The base is not sharded, since it fits: --sharding_strategy full_shard shards it."
    return line


def _name(placement: Placement) -> str:
    where = " with the base in host memory" if placement.cpu_offload else ""
    return f"{placement.sharding_strategy}{where}"


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
