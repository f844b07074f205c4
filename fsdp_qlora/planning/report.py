"""The plan of a run in words: its memory, its speed and the command that trains so."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from fsdp_qlora.model.architecture.chunking import count_pieces
from fsdp_qlora.model.architecture.gated_mlp import Mlp
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.planning.long_attention import describe_attention
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.speed import exchanged_bytes, size_of
from fsdp_qlora.utils.text import GIB, format_bytes, plural

_LARGEST = 10  # items that --explain names
_BAR = 34  # columns of a card's memory


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

    @classmethod
    def of(cls, placed: PlacedModel) -> "PlanReport":
        """The report for the machine that the model is placed on."""
        gpu_memory = placed.model.machine.gpu_memory
        return cls(placed, gpu_memory[1] if gpu_memory else None)

    @property
    def needed(self) -> int:
        """Bytes of a GPU."""
        return self.placed.memory.reserved + sum(self.beside_torch.values())

    def lines(self) -> Iterator[str]:
        """For the log: bytes per rank on the GPU and the host, then by what they are."""
        memory = self.placed.memory
        machine = self.placed.model.machine
        placement = self.placed.placement.describe()
        yield f"Memory: each rank needs {self._needs()}; {_describe_device(machine)}, {placement}"
        yield f"  {_named(memory.weights)}"
        peak = f"  peak at the {memory.peak}: {_named(memory.phases[memory.peak])}"
        if self.placed.step.trains:
            peak += f"; each block without recompute keeps {format_bytes(memory.block)} more"
        yield peak
        yield from (f"  {line}" for line in self.details())

    def _needs(self) -> str:
        """The bytes of a rank, compared with the GPU's memory where that is known."""
        memory = self.placed.memory
        # On a CPU tensors are host memory, and no caching allocator reserves more than they take.
        if self.placed.model.machine.device.type != "cuda":
            return f"about {format_bytes(memory.allocated)}"
        needs = f"about {format_bytes(self.needed)}"
        if self.gpu_bytes:
            needs = f"{self.needed / GIB:.1f} of {self.gpu_bytes / GIB:.0f} GiB"
        host = sum(memory.host.values())
        if host:
            needs += f" of the GPU, {format_bytes(host)} of the host"
        return needs

    def details(self) -> Iterator[str]:
        """Lines about how long rows are computed, where they are divided."""
        parts = self.placed.model.meta.parts
        memory = self.placed.memory
        num_tokens = self.placed.step.num_tokens
        hidden = block_shapes(parts.model.config)[0].hidden
        mlps = [module for module in parts.blocks.modules() if isinstance(module, Mlp)]
        counts = [count_pieces(num_tokens, hidden=hidden, inner=mlp.inner) for mlp in mlps]
        pieces = max(counts, default=1)
        # An MLP is only divided inside a block that recomputes: others keep all of its activations.
        on_host = self.placed.step.on_host.blocks
        if memory.recomputing > on_host and pieces > 1:
            yield f"long rows: MLPs in {pieces} pieces of tokens"
        if on_host:
            per_token = memory.moved / on_host / num_tokens
            yield (
                f"activations of {on_host} blocks in host memory: {format_bytes(int(per_token))} "
                "a token and block"
            )
        yield from describe_attention(self.placed)
        ranks = self.placed.layout.context_size
        if ranks > 1:
            per_block = exchanged_bytes(size_of(parts), num_tokens, ranks) / len(parts.blocks)
            yield (
                f"{ranks} ranks share rows: {num_tokens:,} tokens each, "
                f"{format_bytes(int(per_block))} sent per block and pass"
            )

    def chart(self) -> Iterator[str]:
        """A bar for each phase of a step, beside the GPU's memory."""
        stays = sum(self._resident().values())
        for name, sizes in self.placed.memory.phases.items():
            whole = stays + sum(sizes.values())
            most = self.gpu_bytes or whole
            # A bar may end half of the card's width behind the card, so that lines keep to 80
            # columns; the number behind it is exact.
            stays_until, whole_until = (
                round(_BAR * min(size / most, 1.5)) for size in (stays, whole)
            )
            drawn = "#" * stays_until + "+" * (whole_until - stays_until)
            bar = f"{drawn[:_BAR]:{_BAR}}|{drawn[_BAR:]}"
            yield f"  {name:15} {bar} {whole / GIB:.1f} GiB"
        yield "  '#' stays allocated, '+' is temporary, '|' is the memory of the card"

    def largest(self) -> Iterator[str]:
        """The largest items at the peak."""
        items = self._resident() | self.placed.memory.phases[self.placed.memory.peak]
        by_size = sorted(items.items(), key=lambda item: -item[1])
        for name, count in by_size[:_LARGEST]:
            yield f"  {count / GIB:6.2f} GiB  {name}"

    def _resident(self) -> dict[str, int]:
        """Bytes of a GPU that are in use in each phase."""
        memory = self.placed.memory
        return memory.resident | {"torch's allocator": memory.overhead} | dict(self.beside_torch)


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in sizes.items() if count)


def _describe_device(machine: Machine) -> str:
    """The number of ranks and their device."""
    device = machine.device
    if device.type != "cuda":
        name = "the CPU"
    elif torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
    else:
        name = "GPUs that are not here (--device cpu plans for the CPU)"
    return f"{plural(machine.world_size, 'rank')} on {name}"
