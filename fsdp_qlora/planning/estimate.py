"""Estimates the memory of a rank before anything is allocated.

It counts the model on the meta device, and adds what its blocks keep and need (blocks.py).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_qlora.model.adapters.insert import adapter_modules
from fsdp_qlora.model.architecture.decoder import kind_of
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.model_parts import Kind, ModelParts, count_bytes
from fsdp_qlora.model.quantizers.routed import GROUP_BYTES
from fsdp_qlora.planning.activations import Activations, Here
from fsdp_qlora.planning.allocator import FACTORS, MOST_OF_GAPS
from fsdp_qlora.planning.blocks import BlockBytes
from fsdp_qlora.planning.graph_memory import (
    blocks_by_graphs,
    filled_up,
    graph_bytes,
    have_graphs,
    next_shorter,
)
from fsdp_qlora.planning.memory import Memory, Sizes, Step
from fsdp_qlora.sharding.optimizer import OPTIMIZERS
from fsdp_qlora.sharding.vocabulary import is_shared
from fsdp_qlora.training.head_loss import logits_bytes, tokens_at_a_time

_CATEGORIES = {
    "codes": "quantized weights",
    "statistics": "their statistics",
    "frozen": "other frozen weights",
    "trainable": "trainable weights (fp32)",
}
_GRADIENTS = "their gradients"
_STATE = "optimizer state"
_BUFFER = "loading buffer"
_GATHERED = "adapters as gathered"


def estimate_memory(parts: ModelParts, blocks: Sequence[BlockBytes], step: Step) -> Memory:
    """Estimate the memory of a rank.

    Args:
        blocks: as measured for its longest micro-batch.
    """
    if not have_graphs(parts, step):
        return _Estimate(parts, blocks, step).memory()
    filled, step = filled_up(blocks, step)
    without = _Estimate(parts, *next_shorter(filled, step))
    return _Estimate(parts, filled, step, without).memory()


def _positive(sizes: Mapping[str, int], besides: Mapping[str, int] = {}) -> Sizes:
    return {name: count for name, count in sizes.items() if count > 0 and name not in besides}


def _as_sizes(here: Here) -> Sizes:
    return {
        "block inputs": here.inputs,
        "kept activations": here.kept,
        "attention's outputs": here.attention,
    }


class _Estimate:
    """Counts the bytes of one model in one step.

    Args:
        without: for the longest micro-batch that may have no graphs yet, where others have some.
    Attributes:
        hidden: bytes of the hidden states of all tokens between two blocks.
        gathered_sizes: bytes of each block's unsharded weights beside the shards.
        gathered: bytes of all unsharded weights while each block is at work.
        trained: number of weights that train, in each block.
        adapter_bytes: of a weight of an adapter as it is gathered.
        copies_adapters: whether adapters have 16-bit copies, which stay (weight_copies.py).
        reduces_each: whether gradients of several micro-batches are reduced one by one.
        graphed: the places of blocks that run as CUDA graphs.
        graphs: memory of graphs; empty without any.
        first: the first block that has a backward pass.
    """

    def __init__(
        self,
        parts: ModelParts,
        blocks: Sequence[BlockBytes],
        step: Step,
        without: "_Estimate | None" = None,
    ) -> None:
        self.parts = parts
        self.blocks = blocks
        self.step = step
        self.reduces_each = step.has_micro_batches and not step.placement.accumulates
        embedded: Any = parts.embedding.weight
        self.vocabulary = len(embedded)
        self.width = block_shapes(parts.model.config)[0].hidden
        # FSDP2 casts what trains to param_dtype when it is gathered; frozen weights stay as stored.
        dtype = (step.precision.param_dtype if embedded.requires_grad else None) or embedded.dtype
        self.hidden = step.num_tokens * self.width * dtype.itemsize
        self.trained = [self._trained_weights(block) for block in parts.blocks]
        param_dtype = step.precision.param_dtype or torch.float32
        if any(adapter.in_fp32 for adapter in adapter_modules(parts.model)):
            param_dtype = torch.float32
        self.adapter_bytes = param_dtype.itemsize
        self.copies_adapters = step.num_shards == 1 and param_dtype.itemsize == 2
        self.frees_blocks = step.layout.frees_blocks or step.num_shards == 1
        from_host = step.placement.offload.blocks > 0
        self.gathered_sizes = [self._gathered(block, from_host=from_host) for block in parts.blocks]
        self.gathered = self._gathered_at_work()
        self.without = without
        self.graphed = blocks_by_graphs(parts, step) if without else []
        self.graphs = graph_bytes(parts, blocks, step) if without else {}
        # Blocks before the first that trains have no backward pass, and keep nothing for one.
        self.first = next((i for i, count in enumerate(self.trained) if count), 0)
        if self._trained_weights(parts.embedding) or parts.tower_adapters:
            self.first = 0
        self.activations = Activations(
            [block.kept for block in blocks],
            self.hidden,
            self.first,
            step.recomputing,
            step.on_host,
            [block.attention for block in blocks] if step.on_host.attention else (),
        )

    def memory(self) -> Memory:
        step = self.step
        weights, on_host = self._weights()
        resident = {name: count - on_host.get(name, 0) for name, count in weights.items()}
        host = on_host | {_BUFFER: step.buffer_bytes}
        if step.on_host.inputs or step.on_host.blocks:
            name = "block inputs" if step.on_host.inputs else "activations"
            host[name] = self.activations.host_bytes
            host["attention's outputs"] = self.activations.host_attention_bytes
        if step.on_gpu:
            # For the threads of forward and backward passes.
            resident["workspaces"] = 2 * step.workspace
            resident |= self.graphs
        if step.gathers_from_host:
            resident["gathered blocks"] = max(self.gathered)
        here = resident if step.on_gpu else weights
        candidates = self._phases({name: here[name] for name in (_GRADIENTS, _STATE)})
        # Gradients and optimizer state are counted in the phases, where only a part may be there,
        # and so is a stream's memory for gathered blocks.
        in_phases = candidates["backward" if step.trains else "forward"][0]
        stays = sum(_positive(here, besides=in_phases).values())
        most = max(sum(sizes.values()) for phase in candidates.values() for sizes in phase)
        if not step.on_gpu:  # the loading buffer is host memory, too
            most = max(most, step.buffer_bytes)
        # Of a phase's points, such as the backward passes of all blocks, the fullest counts. What
        # is resident is reserved all the time, whether it is in use at that point or not.
        phases = {}
        for name, points in candidates.items():
            beside_resident = [_positive(sizes, besides=resident) for sizes in points]
            phases[name] = max(beside_resident, key=lambda sizes: sum(sizes.values()))
        return Memory(
            weights=weights,
            resident=_positive(resident),
            phases=phases,
            allocated=stays + most,
            host=_positive(host),
            recomputing=step.recomputing,
            block=max(block.kept for block in self.blocks),
            block_input=self.hidden,
            moved=self.activations.moved_bytes,
            overhead=self._overhead(),
        )

    def _weights(self) -> tuple[Sizes, Sizes]:
        """The fullest rank's weights, gradients and optimizer state: all, and those on the host.

        Gradients and state are where their weights are. Adapters are not offloaded.
        """
        everywhere = self._shards(self.parts.kinds(self.parts.model))
        if not self.step.on_gpu:
            return everywhere, everywhere
        on_host: Counter[Kind] = Counter()
        for module in self.parts.on_host(self.step.placement.offload):
            on_host += self.parts.kinds(module)
        in_base = {kind: count for kind, count in on_host.items() if not kind.in_adapter}
        return everywhere, self._shards(in_base)

    def _shards(self, kinds: Mapping[Kind, int]) -> Sizes:
        """Bytes of the largest shard of these parameters, with their gradients and state."""
        in_shards = count_bytes(kinds, self.step.num_shards)
        counts = {name: count.largest_shard for name, count in in_shards.items()}
        weights = {
            name: counts[category] for category, name in _CATEGORIES.items() if category in counts
        }
        trainable = counts.get("trainable", 0) * self.step.trains
        state = sum(OPTIMIZERS[self.step.optimizer].state) if self.step.trains else 0
        return weights | {_GRADIENTS: trainable, _STATE: int(trainable * state)}

    def _phases(self, of_optimizer: Sizes) -> dict[str, list[Sizes]]:
        """Transient memory at each possible peak, by what it is.

        A phase has several points: the backward pass one for each block.

        Args:
            of_optimizer: the rank's reduced gradients and optimizer state, which are there only
                from some point on.
        """
        step = self.step
        parts = self.parts
        in_adapters = sum(
            count * kind.num_weights
            for kind, count in parts.kinds(parts.model).items()
            if kind.in_adapter
        )
        adapters = {_GATHERED: self.adapter_bytes * in_adapters}
        images = self._kept_for_images()
        copies = adapters.copy() if self.copies_adapters else {}
        # The head is gathered to be compared with.
        trial = adapters | {"whole head": self._gathered(parts.head or parts.embedding)}
        if not step.trains:
            gathered = {} if self.frees_blocks else {"gathered blocks": self.gathered[0]}
            at_head = adapters | gathered | self._at_head()
            return {"trial": [trial], "forward": self._in_forward(adapters), "head": [at_head]}
        if step.has_micro_batches and not self.reduces_each:
            # unsharded, in float32
            adapters["accumulated gradients"] = 4 * self._trained_weights(parts.model)
        in_blocks = self._in_backward(adapters, of_optimizer)
        # Before a block's backward pass there are only gradients of earlier micro-batches.
        earlier = of_optimizer[_GRADIENTS] if self.reduces_each else 0
        before = of_optimizer | {_GRADIENTS: earlier}
        at_loss, at_heads_backward = self._after_forward(before, adapters, in_blocks[0])
        phases = {
            "trial": [trial],
            "loss": [at_loss | images],
            "head's backward": [at_heads_backward | images],
            "backward": [sizes | images for sizes in in_blocks],
            "optimizer": [of_optimizer | copies],
        }
        if self.without is not None:
            phases["without graphs"] = self.without._in_backward(adapters, of_optimizer)
            captures = self.without._in_captures(self.graphed)
            phases["capture"] = [before | adapters | sizes for sizes in captures]
        if step.images.pixels:
            first_block = {"gathered blocks": self.gathered_sizes[0]}
            at_work = self._kept_for_images() | self._at_images()
            phases["images"] = [before | adapters | first_block | at_work]
            # Adapters come later, or are there from an earlier micro-batch.
            there = adapters if step.has_micro_batches else {}
            phases["gathering for images"] = [before | there | self._gathering_towers()]
        return phases

    def _after_forward(
        self, before: Sizes, adapters: Sizes, last_block: Sizes
    ) -> tuple[Sizes, Sizes]:
        """Transient memory at the loss, and in the head's backward pass.

        Args:
            before: gradients and state that are there.
            last_block: memory in the backward pass of the last block.
        """
        step = self.step
        parts = self.parts
        # A tied head has no weights of its own.
        of_head = 0
        if parts.head is not None and not parts.is_tied:
            of_head = self._trained_weights(parts.head)
        gradient = self._as_gathered(of_head)
        here = self.activations.at_loss()
        kept = _as_sizes(here)
        # All stay, or the last block comes for its backward pass: by FSDP2 with the head's
        # gradient, by our stream earlier.
        waiting = last_block["gathered blocks"]
        if self.frees_blocks:
            waiting = self.gathered_sizes[-1]
        loss = dict(before)
        if step.num_shards == 1 or not step.layout.frees_blocks:
            loss["gathered blocks"] = waiting
        loss |= adapters | kept | self._at_head()
        loss["head's gradient"] = gradient
        backward = before | {"gathered blocks": waiting} | adapters | kept
        backward["hidden states at the head"] = 2 * step.passes * self.hidden
        # as computed, and in float32 as it is reduced
        backward["head's gradient"] = gradient + 4 * of_head
        return loss, backward

    def _in_forward(self, adapters: Sizes) -> list[Sizes]:
        """Transient memory in each block's pass, if no backward pass follows."""
        points = []
        for gathered, block in zip(self.gathered, self.blocks, strict=True):
            at_work = {
                "gathered blocks": gathered,
                "block inputs": self.hidden,
                "block at work": block.forward,
            }
            points.append(adapters | at_work)
        return points

    def _in_captures(self, graphed: Sequence[int]) -> list[Sizes]:
        """Transient memory where the passes of a block run on the stream of captures, before them.

        Args:
            graphed: the places of blocks that have graphs.
        """
        first_of_kind = {kind_of(self.parts.blocks[index]): index for index in reversed(graphed)}
        return [
            {
                "gathered blocks": self.gathered[index],
                "block at work": self.blocks[index].pool,
                "block inputs": self.hidden * (index + 1),
            }
            for index in first_of_kind.values()
        ]

    def _in_backward(self, of_trained: Sizes, of_optimizer: Sizes) -> list[Sizes]:
        """Transient memory in each block's backward pass, the last block's first.

        Args:
            of_trained: memory in proportion to all weights that train.
        """
        step = self.step
        num_blocks = len(self.blocks)
        activations = self.activations
        # Those of towers come last.
        left = sum(self.trained) + sum(map(self._trained_weights, self.parts.towers.values()))
        of_all = max(self._trained_weights(self.parts.model), 1)
        # FSDP2 keeps what it reduces until it reduces the next block's gradients.
        reducing = 0
        phases = []
        for index in reversed(range(self.first, num_blocks)):
            block = self.blocks[index]
            at_work = block.backward - block.kept
            if activations.is_computed_again(index):
                at_work = block.recomputing
            if index in self.graphed:
                # the gradients of its output and of its input
                at_work = 2 * self.hidden
            here = activations.in_backward(index)
            is_last = index == num_blocks - 1
            sizes = {
                "gathered blocks": self.gathered[index],
                "block at work": at_work,
                "hidden states at the head": self.hidden * (step.passes if is_last else 1),
                "gradients being reduced": 4 * reducing,
            }
            sizes |= _as_sizes(here)
            for name, count in of_trained.items():
                sizes[name] = int(count * left / of_all)
            if self.copies_adapters:
                # All copies stay, and have their gradients until the pass ends.
                sizes[_GATHERED] = int(of_trained[_GATHERED] * (2 - left / of_all))
            # Reduced gradients are those of the blocks behind, or all from an earlier micro-batch.
            reduced = 1 if self.reduces_each else 1 - left / of_all
            sizes |= of_optimizer
            sizes[_GRADIENTS] = int(of_optimizer[_GRADIENTS] * reduced)
            phases.append(sizes)
            reducing = self.trained[index] or reducing
            left = left - self.trained[index]
        return phases

    def _at_head(self) -> Sizes:
        """Transient memory at the head and the loss."""
        step = self.step
        dtype = self.step.precision.compute_dtype
        shares_embedding, shares_head = is_shared(
            self.parts, step.num_shards, step.precision.param_dtype
        )
        tokens = min(step.num_tokens, tokens_at_a_time(self.vocabulary, dtype))
        # A CPU's kernels compute the gradients in float32 before they round them.
        unrounded = 0
        if step.trains and not step.on_gpu and dtype != torch.float32:
            unrounded = 4 * tokens * self.vocabulary
        # Bytes beside the shards while embeddings or head are used, whichever are more. Where ranks
        # share the vocabulary, a rank's own rows are no more than its shard, unless they come from
        # the host.
        embedding = 0 if shares_embedding else self._gathered(self.parts.embedding)
        head = self._gathered(self.parts.head or self.parts.embedding)
        if shares_head:
            head = -(-head // step.num_shards) if step.placement.offload.embeddings else 0
        ends = max(embedding, head)
        # Hidden states of a chunk of tokens from all ranks.
        exchanged = 0
        if shares_head:
            exchanged = 2 * step.num_shards * tokens * self.width * dtype.itemsize
        # Gathered weights lie in a buffer and then, beside it, in the weights.
        gathering = ends if step.num_shards > 1 else 0
        logits = logits_bytes(step.num_tokens, self.vocabulary, dtype) + unrounded
        return {
            # Before and after the norm, of learned tokens, and their gradients. The reference's,
            # and those of a forward pass alone, have no gradients.
            "hidden states at the head": (3 * step.passes + step.trains) * self.hidden,
            "head's weights": ends,
            "hidden states exchanged for it": exchanged,
            "logits and their gradients": max(logits, gathering),
        }

    def _kept_for_images(self) -> Sizes:
        """Memory from the forward pass of towers with adapters until their backward pass."""
        images = self.step.images
        if not (images.pixels and self.parts.tower_adapters):
            return {}
        return self._with_pixels("activations of images", images.kept)

    def _gathering_towers(self) -> Sizes:
        """Transient memory while the parts for images are gathered, one after the other."""
        sizes = [self._gathered(tower) for tower in self.parts.towers.values()]
        # Beside the weights of a part is the buffer that they come in.
        most = max(sum(sizes[: index + 1]) + size for index, size in enumerate(sizes))
        return {"gathered parts for images": most}

    def _at_images(self) -> Sizes:
        """Transient memory of the parts for images, in their forward or backward pass."""
        images = self.step.images
        return self._with_pixels("images at work", max(images.at_work, images.backward))

    def _with_pixels(self, name: str, size: int) -> Sizes:
        towers = sum(map(self._gathered, self.parts.towers.values()))
        pixels = self.step.images.pixels
        return {"gathered parts for images": towers, "pixels": pixels, name: size}

    def _gathered_at_work(self) -> list[int]:
        """Bytes of unsharded weights while each block is at work: its own and the next, or all."""
        sizes = self.gathered_sizes
        if not self.frees_blocks:
            return [sum(sizes)] * len(sizes)
        # From the host a rank's own part of the next block is copied before it is gathered.
        copied = 1 / self.step.num_shards if self.step.gathers_from_host else 0
        # The next block of a backward pass is the one before; behind the first there is none.
        next_sizes = [0, *sizes[:-1]]
        return [
            size + int((1 + copied) * next_size)
            for size, next_size in zip(sizes, next_sizes, strict=True)
        ]

    def _overhead(self) -> int:
        """Bytes that the allocator reserves beside what is allocated."""
        step = self.step
        if not step.on_gpu:
            return 0
        whole = max(self._trained_weights(block, adapters=False) for block in self.parts.blocks)
        source = "gathered" if step.num_shards > 1 else "device"
        from_host = step.placement.offload.blocks > 0
        if step.gathers_from_host:
            source = "host"
        itemsize = step.precision.compute_dtype.itemsize
        # weights of experts that are decoded together
        group = GROUP_BYTES["cuda"] // itemsize
        largest = max(
            max(math.prod(shape[-2:]), min(math.prod(shape), group))
            for shape in self.parts.matrices
        )
        of_trained = FACTORS["trained from host" if source == "host" else "trained"]
        exchanged = 0.0
        if step.layout.context_size > 1:
            exchanged = FACTORS["exchanged"] * self.hidden
        moved = 0.0
        if step.on_host.blocks:
            of_block = self.activations.moved_bytes / step.on_host.blocks
            moved = FACTORS["moved beside host" if from_host else "moved"] * of_block
        of_weights = FACTORS[source] * largest * itemsize + of_trained * 4 * whole
        # Graphs' memory is planned with its gaps; factors for what the host has contain them.
        has_gaps = not (self.graphs or from_host or step.gathers_from_host or step.on_host.blocks)
        gaps = max(block.gaps for block in self.blocks) if has_gaps else 0
        if step.on_host.inputs:
            gaps = min(gaps, MOST_OF_GAPS)
        return int(of_weights + exchanged + moved) + gaps

    def _gathered(self, module: nn.Module, *, from_host: bool | None = None) -> int:
        """Bytes of a module's unsharded weights, without adapters.

        Args:
            from_host: whether some come from there; by default if all weights are there.
        """
        step = self.step
        param_dtype = self.step.precision.param_dtype
        if from_host is None:
            from_host = step.placement.offload.embeddings
        # On one rank frozen weights are used where they are; what trains is cast to param_dtype.
        is_whole = step.num_shards == 1 and not from_host
        total = 0
        for kind, count in self.parts.kinds(module).items():
            trains = kind.category == "trainable"
            if kind.in_adapter or (is_whole and not trains):
                continue
            dtype = param_dtype if param_dtype and trains else kind.dtype
            total += count * kind.numel * dtype.itemsize
        return total

    def _as_gathered(self, weights: int) -> int:
        """Bytes of this number of trainable weights as FSDP2 gathers them."""
        return weights * (self.step.precision.param_dtype or torch.float32).itemsize

    def _trained_weights(self, module: nn.Module, *, adapters: bool = True) -> int:
        """The number of weights of a module that train, with or without those of adapters."""
        return sum(
            count * kind.num_weights
            for kind, count in self.parts.kinds(module).items()
            if kind.category == "trainable" and (adapters or not kind.in_adapter)
        )
