"""What a planned run needs of each rank, in words and numbers: for the log of a run and for `fsdp-qlora plan`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_qlora.distributed.layout import SHARDING_STRATEGIES
from fsdp_qlora.model.architecture.chunking import count_pieces
from fsdp_qlora.model.architecture.fused import Mlp
from fsdp_qlora.model.model_parts import count_bytes
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.plan import Machine
from fsdp_qlora.planning.speed import exchanged_bytes, size_of
from fsdp_qlora.utils.text import GIB, format_bytes

_LARGEST = 10  # items that --explain names
_BAR = 34  # columns


@dataclass(frozen=True)
class PlanReport:
    """The memory that a placed model needs.

    Attributes:
        gpu_bytes: memory of a GPU, if it is known.
        beside_torch: bytes of it that torch's allocator does not get, by what they are.
    """

    placed: PlacedModel
    gpu_bytes: float | None = None
    beside_torch: Mapping[str, int] = field(default_factory=dict)

    @property
    def needed(self) -> int:
        """Bytes of a GPU."""
        return self.placed.memory.reserved + sum(self.beside_torch.values())

    def lines(self) -> Iterator[str]:
        """For the log: bytes per rank on the GPU and the host, then by what they are."""
        memory, machine = self.placed.memory, self.placed.model.machine
        on_gpu, host = machine.device.type == "cuda", sum(memory.host.values())
        needs = f"about {format_bytes(self.needed if on_gpu else memory.allocated)}"
        if on_gpu and self.gpu_bytes:
            needs = f"{self.needed / GIB:.1f} of {self.gpu_bytes / GIB:.0f} GiB"
        if on_gpu and host:
            needs += f" of the GPU, {format_bytes(host)} of the host"
        yield f"Memory: each rank needs {needs}; {_describe_device(machine)}, {self.placed.placement.describe()}"
        yield f"  {_named(memory.weights)}"
        yield (
            f"  most at the {memory.peak}: {_named(memory.phases[memory.peak])}; each block without recompute keeps "
            f"{format_bytes(memory.block)} more"
        )
        yield from (f"  {line}" for line in self.details())

    def details(self) -> Iterator[str]:
        """Lines about how long rows are computed, where they are divided."""
        parts, memory, num_tokens = self.placed.model.meta.parts, self.placed.memory, self.placed.step.num_tokens
        hidden = parts.model.config.get_text_config().hidden_size
        mlps = [module for module in parts.blocks.modules() if isinstance(module, Mlp)]
        pieces = max((count_pieces(num_tokens, hidden=hidden, inner=mlp.inner) for mlp in mlps), default=1)
        if memory.recomputing and pieces > 1:
            yield f"long rows: MLPs in {pieces} pieces of tokens"
        if (ranks := self.placed.layout.context_size) > 1:
            sent = format_bytes(int(exchanged_bytes(size_of(parts), num_tokens, ranks)))
            yield f"{ranks} ranks share rows: {num_tokens:,} tokens each, {sent} sent per block and pass"

    def chart(self) -> Iterator[str]:
        """A bar for each phase of a step, beside the GPU's memory."""
        stays = sum(self._resident().values())
        for name, sizes in self.placed.memory.phases.items():
            whole = stays + sum(sizes.values())
            columns = [round(_BAR * min(part / (self.gpu_bytes or whole), 1.5)) for part in (stays, whole)]
            drawn = "#" * columns[0] + "+" * (columns[1] - columns[0])
            yield f"  {name:15} {f'{drawn[:_BAR]:{_BAR}}|{drawn[_BAR:]}'} {whole / GIB:.1f} GiB"
        yield "  '#' stays there, '+' comes and goes, '|' is the end of the card"

    def largest(self) -> Iterator[str]:
        """The largest items at the peak."""
        items = {**self._resident(), **self.placed.memory.phases[self.placed.memory.peak]}
        for name, count in sorted(items.items(), key=lambda item: -item[1])[:_LARGEST]:
            yield f"  {count / GIB:6.2f} GiB  {name}"

    def as_json(self) -> dict[str, Any]:
        """Bytes of a rank, for programs."""
        memory = self.placed.memory
        return {
            "gpu_bytes": self.gpu_bytes and int(self.gpu_bytes),
            "needed_bytes": self.needed,
            "reserved_bytes": memory.reserved,
            "resident": memory.resident,
            "phases": memory.phases,
        }

    def _resident(self) -> dict[str, int]:
        """Bytes of a GPU that are in use in each phase."""
        memory = self.placed.memory
        return {**memory.resident, "torch's allocator": memory.overhead, **self.beside_torch}


def describe_link(placed: PlacedModel, *, num_nodes: int) -> str:
    """One line: about how much each of several nodes sends to the others in a step."""
    meta, (sharded_over, frees_blocks) = placed.model.meta, SHARDING_STRATEGIES[placed.placement.sharding_strategy]
    sizes = {name: count.total for name, count in count_bytes(meta.parts.kinds(meta.model), 1).items()}
    all_reduced = 2 * sizes.pop("trainable") * (num_nodes - 1) // num_nodes
    line = f"Between {num_nodes} nodes: each sends about {format_bytes(all_reduced)} per step, gradients of what trains"
    if sharded_over == "all":
        gathered = sum(sizes.values()) * (2 if frees_blocks else 1) * (num_nodes - 1) // num_nodes
        line += f", and {format_bytes(gathered)} per micro-batch, gathered weights"
    return line


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in sizes.items() if count)


def _describe_device(machine: Machine) -> str:
    """The number of ranks and their device."""
    device, name = machine.device, "the CPU"
    if device.type == "cuda":
        is_here, elsewhere = torch.cuda.is_available(), "GPUs that are not here (--device cpu plans for the CPU)"
        name = torch.cuda.get_device_name(device) if is_here else elsewhere
    return f"{machine.world_size} rank{'s' * (machine.world_size > 1)} on {name}"
