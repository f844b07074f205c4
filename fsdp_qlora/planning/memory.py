"""The memory of a rank: bytes by what they are, at each point of a run where they may be most.

From the model on the meta device and what its blocks were measured to keep and need (blocks.py). Nothing is allocated.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_qlora.model.precision import Precision
from fsdp_qlora.optimizers.sharded import OPTIMIZER_STATES
from fsdp_qlora.planning.blocks import BlockBytes
from fsdp_qlora.sharding.model_parts import Kind, ModelParts, Offload
from fsdp_qlora.sharding.vocabulary import is_shared
from fsdp_qlora.training.head_loss import logits_bytes, tokens_at_a_time

# What torch's allocator reserves and does not use, from the rows of benchmarks/standin_memory.py: so many times the
# largest matrix of a block in the compute dtype, by where blocks come from (measured 0.8 to 3.8, 2.0 to 6.0, 3.4 to
# 4.7), and for each weight of a block that trains whole so many float32 numbers (1.0 to 2.0).
ALLOCATOR = {"gathered": 2.0, "device": 4.0, "host": 3.7, "trained": 1.0}
_WORKSPACES = 16 * 2**20  # of cuBLAS, and small buffers, as counted between two steps there
_CATEGORIES = {
    "codes": "quantized weights",
    "statistics": "their statistics",
    "frozen": "other frozen weights",
    "trainable": "trainable weights (fp32)",
}
_GRADIENTS = "their gradients"

Sizes = dict[str, int]  # what it is -> bytes


@dataclass(frozen=True)
class Step:
    """What the memory of a run depends on besides its model.

    num_shards: ranks that share one copy. frees_blocks: a block's weights are freed after use; else all stay gathered
    until the backward pass. offload: weights that come from the host. num_tokens: of the longest micro-batch.
    recomputing: blocks that recompute, the first ones. accumulates: gradients of several micro-batches add up
    unsharded. offloads_activations: block inputs are kept on the host. buffer_bytes: for weights in flight.
    """

    precision: Precision
    optimizer: str
    num_shards: int
    frees_blocks: bool
    offload: Offload
    num_tokens: int
    recomputing: int
    accumulates: bool = False
    offloads_activations: bool = False
    buffer_bytes: int = 0
    on_gpu: bool = True


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank.

    weights: the fullest rank's, with the state of the optimizer, wherever they are. resident: those on the device.
    phases: what comes and goes there in addition, at each candidate peak. host: what is in host memory. block: what one
    more block without recompute keeps. recomputing: blocks that do. overhead: what the allocator reserves beside.
    """

    weights: Sizes
    resident: Sizes
    phases: dict[str, Sizes]
    host: Sizes
    recomputing: int
    block: int
    overhead: int

    @property
    def peak(self) -> str:
        """The phase in which most is allocated."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def allocated(self) -> int:
        return sum(self.resident.values()) + sum(self.phases[self.peak].values())

    @property
    def reserved(self) -> int:
        """On the device, without the context and NCCL's buffers."""
        return self.allocated + self.overhead


def estimate_memory(parts: ModelParts, blocks: Sequence[BlockBytes], step: Step) -> Memory:
    """The memory of a rank. blocks: as measured for its longest micro-batch."""
    weights, on_host = _weights(parts, step)
    resident = {name: count - on_host.get(name, 0) for name, count in weights.items()}
    gradients = resident.pop(_GRADIENTS, 0)
    host = {**on_host, "loading buffer": step.buffer_bytes}
    hidden = step.num_tokens * _hidden_bytes(parts, step)
    if step.offloads_activations:
        host["block inputs"] = step.recomputing * hidden
    if step.on_gpu:
        resident["workspaces"] = _WORKSPACES
    return Memory(
        weights=weights,
        resident=_positive(resident),
        phases={name: _positive(sizes) for name, sizes in _phases(parts, blocks, step, hidden, gradients).items()},
        host=_positive(host),
        recomputing=step.recomputing,
        block=max(each.kept for each in blocks),
        overhead=_overhead(parts, step),
    )


def _positive(sizes: Mapping[str, int]) -> Sizes:
    return {name: count for name, count in sizes.items() if count > 0}


def _weights(parts: ModelParts, step: Step) -> tuple[Sizes, Sizes]:
    """The fullest rank's weights, their gradients and optimizer state; and of these what is in host memory.

    Gradients and state are where their weights are. Adapters are not offloaded.
    """
    everywhere = _shards(parts.kinds(parts.model), step)
    if not step.on_gpu:
        return everywhere, everywhere
    there = sum(map(parts.kinds, parts.on_host(step.offload)), Counter[Kind]())
    return everywhere, _shards({kind: number for kind, number in there.items() if not kind.in_adapter}, step)


def _shards(kinds: Mapping[Kind, int], step: Step) -> Sizes:
    counts: Counter[str] = Counter()
    for kind, number in kinds.items():
        counts[kind.category] += number * kind.largest_shard(step.num_shards)
    found = {name: counts[category] for category, name in _CATEGORIES.items() if category in counts}
    trainable = counts["trainable"]
    return {**found, _GRADIENTS: trainable, "optimizer state": int(trainable * OPTIMIZER_STATES[step.optimizer])}


def _hidden_bytes(parts: ModelParts, step: Step) -> int:
    """Bytes of a token's hidden state between blocks."""
    embedded = parts.embedding.weight
    dtype = (step.precision.param_dtype if embedded.requires_grad else None) or embedded.dtype
    return parts.model.config.get_text_config().hidden_size * dtype.itemsize


def _phases(
    parts: ModelParts, blocks: Sequence[BlockBytes], step: Step, hidden: int, gradients: int
) -> dict[str, Sizes]:
    """What comes and goes at each candidate peak."""
    adapters = {"adapters as gathered": _adapters_as_gathered(parts, step)}
    if step.accumulates:
        adapters["accumulated gradients"] = 4 * _trained_weights(parts, parts.model)
    keeping, recomputing = blocks[step.recomputing :], blocks[: step.recomputing]
    kept = {
        "block inputs": hidden * (min(2, len(blocks)) if step.offloads_activations else len(blocks)),
        "kept activations": sum(each.kept for each in keeping),
    }
    # The last block's backward pass comes first; that of the last one which recomputes finds what is kept freed.
    at_work = [
        *(each.backward - each.kept for each in keeping[-1:]),
        *(each.recomputing - kept["kept activations"] for each in recomputing[-1:]),
    ]
    backward = {"gathered blocks": _gathered_blocks(parts, step), "block at work": max(at_work)}
    of_head = _trained_weights(parts, parts.head) if parts.head is not None and not parts.is_tied else 0
    states = int(gradients * OPTIMIZER_STATES[step.optimizer])
    return {
        # The head is gathered to be compared with; there is no state yet.
        "trial": {**adapters, "whole head": _gathered(parts, parts.head or parts.embedding, step) - states},
        "loss": {
            **adapters,
            **kept,
            **_at_head(parts, step, hidden),
            "head's gradient": _as_gathered(of_head, step),
        },
        "head's backward": {
            **adapters,
            **kept,
            "hidden states at the head": 2 * hidden,
            "head's gradient": _as_gathered(of_head, step) + 4 * of_head + 4 * of_head // step.num_shards,
        },
        "backward": {**adapters, **backward, **kept, "hidden states at the head": hidden},
        # At its end adapters have been freed, and all gradients are there.
        "reduction": {
            **backward,
            "block inputs": hidden,
            "gradients being reduced": 4 * max(_trained_weights(parts, block) for block in parts.blocks),
            _GRADIENTS: gradients,
        },
        "optimizer": {_GRADIENTS: gradients},
    }


def _at_head(parts: ModelParts, step: Step, hidden: int) -> Sizes:
    """What comes and goes at the head: hidden states before and after the norm, of learned tokens, their gradients."""
    _, is_shared_head = is_shared(parts, step.num_shards, step.precision.param_dtype)
    vocabulary, dtype = len(parts.embedding.weight), step.precision.compute_dtype  # type: ignore[arg-type]
    tokens = min(step.num_tokens, tokens_at_a_time(vocabulary, dtype))
    width = parts.model.config.get_text_config().hidden_size
    head = _ends(parts, step)
    return {
        "hidden states at the head": 4 * hidden,
        "head's weights": head,
        "hidden states exchanged for it": 2 * step.num_shards * tokens * width * dtype.itemsize * is_shared_head,
        # What is gathered lies in a buffer and then, beside it, in the weights.
        "logits and their gradients": max(
            logits_bytes(step.num_tokens, vocabulary, dtype), head if step.num_shards > 1 else 0
        ),
    }


def _ends(parts: ModelParts, step: Step) -> int:
    """Bytes of the embeddings or the head, whichever is more, beside the shards, while they are used."""
    shared = is_shared(parts, step.num_shards, step.precision.param_dtype)
    modules = (parts.embedding, parts.head or parts.embedding)
    found = [
        0 if elsewhere else _gathered(parts, module, step) for module, elsewhere in zip(modules, shared, strict=True)
    ]
    if shared[1] and step.offload.embeddings:  # the rank's rows
        found.append(-(-_gathered(parts, modules[1], step) // step.num_shards))
    return max(found)


def _gathered_blocks(parts: ModelParts, step: Step) -> int:
    """Bytes of blocks' unsharded weights beside the shards: the one at work and the next, or all."""
    sizes = [_gathered(parts, block, step, from_host=step.offload.blocks > 0) for block in parts.blocks]
    if step.frees_blocks or step.num_shards == 1:
        return max(map(sum, itertools.pairwise(sizes)), default=sizes[0])
    return sum(sizes)


def _overhead(parts: ModelParts, step: Step) -> int:
    """What the allocator reserves beside what is allocated."""
    if not step.on_gpu:
        return 0
    whole = max(_trained_weights(parts, block, adapters=False) for block in parts.blocks)
    kind = "host" if step.offload.blocks else "gathered" if step.num_shards > 1 else "device"
    largest = max(math.prod(shape[-2:]) for shape in parts.matrices)
    return int(ALLOCATOR[kind] * largest * step.precision.compute_dtype.itemsize + ALLOCATOR["trained"] * 4 * whole)


def _gathered(parts: ModelParts, module: nn.Module, step: Step, *, from_host: bool | None = None) -> int:
    """Bytes of a module's unsharded weights that are no adapter's; 0 for weights that FSDP2 leaves as they are.

    Args:
        from_host: whether some come from there; by default if all weights are there.
    """
    dtype = step.precision.param_dtype
    is_whole = step.num_shards == 1 and not (step.offload.embeddings if from_host is None else from_host)
    return sum(
        number * kind.numel * (dtype if dtype and kind.category == "trainable" else kind.dtype).itemsize
        for kind, number in parts.kinds(module).items()
        if not kind.in_adapter and not (is_whole and kind.category != "trainable")
    )


def _adapters_as_gathered(parts: ModelParts, step: Step) -> int:
    adapters = [number * kind.num_weights for kind, number in parts.kinds(parts.model).items() if kind.in_adapter]
    return _as_gathered(sum(adapters), step)


def _as_gathered(weights: int, step: Step) -> int:
    """Bytes of so many trainable weights as FSDP2 gathers them."""
    return weights * (step.precision.param_dtype or torch.float32).itemsize


def _trained_weights(parts: ModelParts, module: nn.Module, *, adapters: bool = True) -> int:
    trained = [item for item in parts.kinds(module).items() if item[0].category == "trainable"]
    return sum(number * kind.num_weights for kind, number in trained if adapters or not kind.in_adapter)
