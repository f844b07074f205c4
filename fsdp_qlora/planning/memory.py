"""The memory of a rank: bytes by what they are, at each point of a run where they may be most.

From the model on the meta device and what its blocks were measured to keep and need (blocks.py).
Nothing is allocated.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.model_parts import Kind, ModelParts, count_bytes
from fsdp_qlora.model.quantizers.routed import GROUP_BYTES
from fsdp_qlora.planning.blocks import BlockBytes
from fsdp_qlora.planning.fit import Placement
from fsdp_qlora.sharding.optimizer import OPTIMIZERS
from fsdp_qlora.sharding.vocabulary import is_shared
from fsdp_qlora.training.head_loss import logits_bytes, tokens_at_a_time

# Bytes that torch's allocator reserves and does not use, from the rows of
# benchmarks/standin_memory.py: so often the largest matrix of a block in the compute dtype, by
# where blocks come from, and for each weight of a block that trains whole so many float32 numbers;
# from the host it is gathered in memory of a stream of its own, and copied out. Where ranks share
# rows, so many times a rank's hidden states, as what is exchanged for attention has sizes of its
# own.
ALLOCATOR = {
    "gathered": 0.8,
    "device": 0.8,
    "host": 1.2,
    "trained": 0.4,
    "trained from host": 1.3,
    "exchanged": 0.5,
}
# Host memory of a rank's process without tensors, resident in a tiny model's run: Python, torch,
# transformers; 438 MiB on a CPU, 457 on the stand-in for CUDA, of which 114 and 139 are pages of
# files that the ranks share.
PROCESS = 450 * 2**20
# of cuBLAS, for the threads of forward and backward passes, as torch allocates them
_WORKSPACES = 2 * 8_519_680
_CATEGORIES = {
    "codes": "quantized weights",
    "statistics": "their statistics",
    "frozen": "other frozen weights",
    "trainable": "trainable weights (fp32)",
}
_LAYERS = (nn.Conv2d, nn.Conv3d, nn.Linear)  # of which the first of a vision tower takes patches
_GRADIENTS = "their gradients"
_STATE = "optimizer state"
_BUFFER = "loading buffer"

Sizes = dict[str, int]  # what it is -> bytes


@dataclass(frozen=True)
class Step:
    """The settings of a run, besides its model, that its memory depends on.

    Attributes:
        optimizer: "" for a forward pass alone. layout: how the ranks share the model and its rows.
        num_tokens: tokens of a rank in the longest micro-batch. recomputing: number of blocks that
        recompute, the first ones. has_micro_batches: whether a step accumulates the gradients of
        several micro-batches. offloads_activations: whether block inputs are kept in host memory.
        buffer_bytes: for weights that are being loaded. passes: 1 for the policy, 2 with a
        reference, whose hidden states follow the policy's behind the last block. image_values:
        numbers that images are made of, in the micro-batch with the most.
    """

    precision: Precision
    optimizer: str
    layout: Layout
    placement: Placement
    num_tokens: int
    recomputing: int
    has_micro_batches: bool = False
    offloads_activations: bool = False
    buffer_bytes: int = 0
    on_gpu: bool = True
    passes: int = 1
    image_values: int = 0

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of the model."""
        return self.layout.num_shards

    @property
    def trains(self) -> bool:
        """Whether there are gradients, and not a forward pass alone."""
        return bool(self.optimizer)

    @property
    def gathers_from_host(self) -> bool:
        return self.placement.offload.blocks > 0 and self.num_shards > 1


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank.

    Attributes:
        weights: weights, gradients and optimizer state of the fullest rank, wherever they are.
        resident: what is always on the device, and memory of streams of their own, which serves
        nothing else. phases: what comes and goes on the device in addition, at each point that may
        be the peak. allocated: most bytes of tensors at once; on a CPU all that a rank needs. host:
        what is in host memory. recomputing: number of blocks that recompute. block: what one block
        more without recompute keeps. overhead: what the allocator reserves and does not use.
    """

    weights: Sizes
    resident: Sizes
    phases: dict[str, Sizes]
    allocated: int
    host: Sizes
    recomputing: int
    block: int
    overhead: int

    @property
    def peak(self) -> str:
        """The phase for which most is reserved."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def reserved(self) -> int:
        """On the device, without the context and NCCL's buffers."""
        return sum(self.resident.values()) + sum(self.phases[self.peak].values()) + self.overhead


def estimate_memory(parts: ModelParts, blocks: Sequence[BlockBytes], step: Step) -> Memory:
    """The memory of a rank. blocks: as measured for its longest micro-batch."""
    return _Estimate(parts, blocks, step).memory()


def _positive(sizes: Mapping[str, int], besides: Mapping[str, int] = {}) -> Sizes:
    return {name: count for name, count in sizes.items() if count > 0 and name not in besides}


class _Estimate:
    """Counts the bytes of one model in one step.

    Attributes:
        hidden: bytes of the hidden states of all tokens between two blocks.
        gathered_sizes: bytes of each block's unsharded weights beside the shards.
        gathered: bytes of all unsharded weights while each block is at work.
        trained: number of weights that train, in each block.
        reduces_each: whether gradients of several micro-batches are reduced one by one.
    """

    def __init__(self, parts: ModelParts, blocks: Sequence[BlockBytes], step: Step) -> None:
        self.parts = parts
        self.blocks = blocks
        self.step = step
        self.reduces_each = step.has_micro_batches and not step.placement.accumulates
        embedded: Any = parts.embedding.weight
        self.vocabulary = len(embedded)
        self.width = block_shapes(parts.model.config)[0].hidden
        dtype = (step.precision.param_dtype if embedded.requires_grad else None) or embedded.dtype
        self.hidden = step.num_tokens * self.width * dtype.itemsize
        self.trained = [self._trained_weights(block) for block in parts.blocks]
        self.frees_blocks = step.layout.frees_blocks or step.num_shards == 1
        from_host = step.placement.offload.blocks > 0
        self.gathered_sizes = [self._gathered(block, from_host=from_host) for block in parts.blocks]
        self.gathered = self._gathered_at_work()

    def memory(self) -> Memory:
        step = self.step
        weights, on_host = self._weights()
        resident = {name: count - on_host.get(name, 0) for name, count in weights.items()}
        host = on_host | {_BUFFER: step.buffer_bytes}
        if step.offloads_activations:
            host["block inputs"] = step.recomputing * self.hidden
        if step.on_gpu:
            resident["workspaces"] = _WORKSPACES
        if step.gathers_from_host:
            resident["gathered blocks"] = max(self.gathered)
        here = resident if step.on_gpu else weights
        candidates = self._phases({name: here[name] for name in (_GRADIENTS, _STATE)})
        stays = sum(
            _positive(
                here, besides=candidates["backward" if step.trains else "forward"][0]
            ).values()
        )
        most = max(sum(sizes.values()) for phase in candidates.values() for sizes in phase)
        phases = {
            name: [_positive(sizes, besides=resident) for sizes in phase]
            for name, phase in candidates.items()
        }
        return Memory(
            weights=weights,
            resident=_positive(resident),
            phases={
                name: max(phase, key=lambda sizes: sum(sizes.values()))
                for name, phase in phases.items()
            },
            allocated=stays + (most if step.on_gpu else max(most, step.buffer_bytes)),
            host=_positive(host),
            recomputing=step.recomputing,
            block=max(block.kept for block in self.blocks),
            overhead=self._overhead(),
        )

    def _weights(self) -> tuple[Sizes, Sizes]:
        """The fullest rank's weights, their gradients and optimizer state; and of these what is in
        host memory.

        Gradients and state are where their weights are. Adapters are not offloaded.
        """
        everywhere = self._shards(self.parts.kinds(self.parts.model))
        if not self.step.on_gpu:
            return everywhere, everywhere
        there = sum(
            map(self.parts.kinds, self.parts.on_host(self.step.placement.offload)), Counter[Kind]()
        )
        return everywhere, self._shards(
            {kind: count for kind, count in there.items() if not kind.in_adapter}
        )

    def _shards(self, kinds: Mapping[Kind, int]) -> Sizes:
        counts = {
            name: count.largest_shard
            for name, count in count_bytes(kinds, self.step.num_shards).items()
        }
        weights = {
            name: counts[category] for category, name in _CATEGORIES.items() if category in counts
        }
        trainable = counts.get("trainable", 0) * self.step.trains
        state = sum(OPTIMIZERS[self.step.optimizer].state) if self.step.trains else 0
        return weights | {_GRADIENTS: trainable, _STATE: int(trainable * state)}

    def _phases(self, of_optimizer: Sizes) -> dict[str, list[Sizes]]:
        """Transient memory at each possible peak, by category; in the backward pass that of each
        block.

        Args:
            of_optimizer: the rank's reduced gradients and optimizer state, which are there only
            from some point on.
        """
        step = self.step
        parts = self.parts
        before = of_optimizer | {_GRADIENTS: of_optimizer[_GRADIENTS] * self.reduces_each}
        in_adapters = sum(
            n * kind.num_weights for kind, n in parts.kinds(parts.model).items() if kind.in_adapter
        )
        adapters = {"adapters as gathered": self._as_gathered(in_adapters)}
        # The head is gathered to be compared with.
        trial = adapters | {"whole head": self._gathered(parts.head or parts.embedding)}
        if not step.trains:
            gathered = {} if self.frees_blocks else {"gathered blocks": self.gathered[0]}
            at_head = adapters | gathered | self._at_head()
            return {"trial": [trial], "forward": self._in_forward(adapters), "head": [at_head]}
        if step.has_micro_batches and not self.reduces_each:
            adapters["accumulated gradients"] = 4 * self._trained_weights(parts.model)
        of_head = (
            self._trained_weights(parts.head) if parts.head is not None and not parts.is_tied else 0
        )
        in_blocks = self._in_backward(adapters, of_optimizer)
        kept = {name: in_blocks[0][name] for name in ("block inputs", "kept activations")}
        # All stay, or the last block comes for its backward pass: by FSDP2 with the head's
        # gradient, by our stream earlier.
        waiting = {
            "gathered blocks": self.gathered_sizes[-1]
            if self.frees_blocks
            else in_blocks[0]["gathered blocks"]
        }
        phases = {
            "trial": trial,
            "loss": (
                before
                | (waiting if step.num_shards == 1 or not step.layout.frees_blocks else {})
                | adapters
                | kept
                | self._at_head()
                | {"head's gradient": self._as_gathered(of_head)}
            ),
            "head's backward": (
                before
                | waiting
                | adapters
                | kept
                | {
                    "hidden states at the head": 2 * step.passes * self.hidden,
                    "head's gradient": self._as_gathered(of_head) + 4 * of_head,
                }
            ),
            "backward": {},
            "optimizer": of_optimizer,
        }
        if step.image_values:
            phases["images"] = (
                before | adapters | {"gathered blocks": self.gathered_sizes[0]} | self._at_images()
            )
        return {name: [sizes] for name, sizes in phases.items()} | {"backward": in_blocks}

    def _in_forward(self, adapters: Sizes) -> list[Sizes]:
        """Transient memory in each block's pass, if no backward pass follows."""
        return [
            (
                adapters
                | {
                    "gathered blocks": gathered,
                    "block inputs": self.hidden,
                    "block at work": block.forward,
                }
            )
            for gathered, block in zip(self.gathered, self.blocks, strict=True)
        ]

    def _in_backward(self, of_trained: Sizes, of_optimizer: Sizes) -> list[Sizes]:
        """Transient memory in each block's backward pass, the last block's first. of_trained: of
        all that trains.

        Blocks before the first that trains have no backward pass, and keep nothing for one. FSDP2
        keeps what it reduces until it reduces the next block's gradients.
        """
        step = self.step
        hidden = self.hidden
        num_blocks = len(self.blocks)
        first = next((i for i, count in enumerate(self.trained) if count), 0)
        first = 0 if self._trained_weights(self.parts.embedding) else first
        keeping = max(first, step.recomputing)  # the first block that keeps its activations
        left = sum(self.trained)
        of_all = max(self._trained_weights(self.parts.model), 1)
        reducing = 0
        phases = []
        for index in reversed(range(first, num_blocks)):
            block = self.blocks[index]
            recomputes = index < step.recomputing
            phases.append(
                {
                    "gathered blocks": self.gathered[index],
                    "block at work": block.recomputing
                    if recomputes
                    else block.backward - block.kept,
                    "block inputs": hidden
                    * min(index - first + 1, 2 if step.offloads_activations else num_blocks),
                    "kept activations": sum(
                        earlier.kept for earlier in self.blocks[keeping : index + 1]
                    ),
                    "hidden states at the head": hidden
                    * (step.passes if index == num_blocks - 1 else 1),
                    "gradients being reduced": 4 * reducing,
                }
                | {name: int(count * left / of_all) for name, count in of_trained.items()}
                | of_optimizer
                | {
                    _GRADIENTS: int(
                        of_optimizer[_GRADIENTS] * (1 if self.reduces_each else 1 - left / of_all)
                    )
                }
            )
            reducing = self.trained[index] or reducing
            left = left - self.trained[index]
        return phases

    def _at_head(self) -> Sizes:
        """Transient memory at the head: hidden states before and after the norm, of learned tokens,
        their gradients.

        The reference's, and those of a forward pass alone, have no gradients.
        """
        step = self.step
        dtype = self.step.precision.compute_dtype
        shared = is_shared(self.parts, step.num_shards, step.precision.param_dtype)
        tokens = min(step.num_tokens, tokens_at_a_time(self.vocabulary, dtype))
        # A CPU's kernels compute the gradients in float32 before they round them.
        unrounded = (
            0
            if step.on_gpu or not step.trains or dtype == torch.float32
            else 4 * tokens * self.vocabulary
        )
        # Bytes beside the shards while embeddings or head are used, whichever are more.
        embedding, head = map(
            self._gathered, (self.parts.embedding, self.parts.head or self.parts.embedding)
        )
        own_rows = (
            -(-head // step.num_shards) if shared[1] and step.placement.offload.embeddings else 0
        )
        ends = max(0 if shared[0] else embedding, own_rows if shared[1] else head)
        return {
            "hidden states at the head": (3 * step.passes + step.trains) * self.hidden,
            "head's weights": ends,
            "hidden states exchanged for it": 2
            * step.num_shards
            * tokens
            * self.width
            * dtype.itemsize
            * shared[1],
            # Gathered weights lie in a buffer and then, beside it, in the weights.
            "logits and their gradients": max(
                logits_bytes(step.num_tokens, self.vocabulary, dtype) + unrounded,
                ends if step.num_shards > 1 else 0,
            ),
        }

    def _at_images(self) -> Sizes:
        """Transient memory of the parts for images: 4 hidden and 2 to 3 inner states, at the MLP of
        a block.

        Within 16% of what Siglip, Qwen2.5-VL's and Qwen3-VL's were measured to hold; no backward
        pass needs any.
        """
        towers = self.parts.towers.values()
        values = self.step.image_values
        layers: list[Any] = [
            module for tower in towers for module in tower.modules() if isinstance(module, _LAYERS)
        ]
        of_patch = layers[0].weight[0].numel()
        hidden = len(layers[0].weight)
        dtype = layers[0].weight.dtype
        inner = max(
            (len(layer.weight) for layer in layers if layer.weight.shape[1] == hidden),
            default=hidden,
        )
        return {
            "gathered parts for images": sum(map(self._gathered, towers)),
            "pixels": 4 * values,
            "images at work": int(values / of_patch * (4 * hidden + 2.5 * inner) * dtype.itemsize),
        }

    def _gathered_at_work(self) -> list[int]:
        """Bytes of blocks' unsharded weights while each is at work: its own and the next, or all.

        From the host a rank's own part of the next block is copied before it is gathered.
        """
        sizes = self.gathered_sizes
        if not self.frees_blocks:
            return [sum(sizes)] * len(sizes)
        copied = 1 / self.step.num_shards if self.step.gathers_from_host else 0
        return [
            size + int((1 + copied) * following)
            for size, following in zip(sizes, [0, *sizes[:-1]], strict=True)
        ]

    def _overhead(self) -> int:
        """Bytes that the allocator reserves beside what is allocated."""
        step = self.step
        if not step.on_gpu:
            return 0
        whole = max(self._trained_weights(block, adapters=False) for block in self.parts.blocks)
        kind = "host" if step.gathers_from_host else "gathered" if step.num_shards > 1 else "device"
        # of experts, decoded together
        group = GROUP_BYTES["cuda"] // step.precision.compute_dtype.itemsize
        largest = max(
            max(math.prod(shape[-2:]), min(math.prod(shape), group))
            for shape in self.parts.matrices
        )
        trained = ALLOCATOR["trained from host" if kind == "host" else "trained"] * 4 * whole
        exchanged = ALLOCATOR["exchanged"] * self.hidden * (step.layout.context_size > 1)
        return int(
            ALLOCATOR[kind] * largest * step.precision.compute_dtype.itemsize + trained + exchanged
        )

    def _gathered(self, module: nn.Module, *, from_host: bool | None = None) -> int:
        """Bytes of a module's unsharded weights that are no adapter's; 0 for weights that FSDP2
        leaves as they are.

        Args:
            from_host: whether some come from there; by default if all weights are there.
        """
        step = self.step
        dtype = self.step.precision.param_dtype
        is_whole = step.num_shards == 1 and not (
            step.placement.offload.embeddings if from_host is None else from_host
        )
        return sum(
            count
            * kind.numel
            * (dtype if dtype and kind.category == "trainable" else kind.dtype).itemsize
            for kind, count in self.parts.kinds(module).items()
            if not kind.in_adapter and not (is_whole and kind.category != "trainable")
        )

    def _as_gathered(self, weights: int) -> int:
        """Bytes of so many trainable weights as FSDP2 gathers them."""
        return weights * (self.step.precision.param_dtype or torch.float32).itemsize

    def _trained_weights(self, module: nn.Module, *, adapters: bool = True) -> int:
        trained = [
            item for item in self.parts.kinds(module).items() if item[0].category == "trainable"
        ]
        return sum(
            count * kind.num_weights for kind, count in trained if adapters or not kind.in_adapter
        )
