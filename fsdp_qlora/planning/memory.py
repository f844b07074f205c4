"""The memory of a rank: bytes by what they are, at each point of a run where they may be most."""

from dataclasses import dataclass

from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.planning.activations import ON_DEVICE, OnHost
from fsdp_qlora.planning.fit import Placement
from fsdp_qlora.planning.image_memory import NO_IMAGE_BYTES, ImageBytes
from fsdp_qlora.planning.workspaces import WORKSPACE

Sizes = dict[str, int]  # what it is -> bytes


@dataclass(frozen=True)
class Step:
    """The settings of a run, besides its model, that its memory depends on."""

    precision: Precision
    optimizer: str
    """The empty text for a forward pass alone."""
    layout: Layout
    """How the ranks share the model and its rows."""
    placement: Placement
    num_tokens: int
    """Tokens of a rank in the longest micro-batch."""
    recomputing: int
    """Number of blocks that do not keep their activations on the device, which are the first ones.
    """
    has_micro_batches: bool = False
    """Whether a step accumulates the gradients of several micro-batches."""
    on_host: OnHost = ON_DEVICE
    """Their activations in host memory."""
    buffer_bytes: int = 0
    """Bytes for weights that are being loaded."""
    workspace: int = WORKSPACE
    """Bytes of cuBLAS for a thread and stream (workspaces.py); 0 on a CPU."""
    passes: int = 1
    """1 for the policy, 2 with a reference, whose hidden states follow the policy's behind the last
    block."""
    images: ImageBytes = NO_IMAGE_BYTES
    """For the images of the micro-batch with the most of them."""

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of the model."""
        return self.layout.num_shards

    @property
    def on_gpu(self) -> bool:
        return self.workspace > 0

    @property
    def trains(self) -> bool:
        """Whether there are gradients, and not a forward pass alone."""
        return bool(self.optimizer)

    @property
    def gathers_from_host(self) -> bool:
        return self.placement.offload.blocks > 0 and self.num_shards > 1


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank."""

    weights: Sizes
    """Weights, gradients and optimizer state of the fullest rank, wherever they are."""
    resident: Sizes
    """Memory that is always in use on the device, including memory of separate streams, which
    serves nothing else.
    """
    phases: dict[str, Sizes]
    """Memory that comes and goes on the device in addition, at each point that may be the peak."""
    allocated: int
    """The peak bytes of tensors; on a CPU all that a rank needs."""
    host: Sizes
    """Tensors in host memory."""
    recomputing: int
    """Number of blocks that do not keep their activations on the device."""
    block: int
    """Bytes that one block more keeps if it keeps its activations."""
    block_input: int
    """Bytes of a block's input."""
    moved: int
    """Bytes of activations that go to host memory in a micro-batch, and come back."""
    overhead: int
    """Bytes that the allocator reserves and does not use."""

    @property
    def peak(self) -> str:
        """The phase with the most reserved memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def reserved(self) -> int:
        """Bytes reserved on the device, without the context and NCCL's buffers."""
        return sum(self.resident.values()) + sum(self.phases[self.peak].values()) + self.overhead
