"""Estimates the seconds of a step.

Operations and bytes are counted from the shapes, and divided by rates that published runs achieved.

33 published runs of the 2024 program, planned by the others of their GPU, have a median error of
3%, at most 17%; for runs of other programs, which decided less, the median is 10%.
"""

import math
from typing import NamedTuple

from fsdp_qlora.model.architecture.shapes import BlockShape, block_shapes
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.planning.gpus import ACHIEVED, Gpu
from fsdp_qlora.planning.placement import PlacedModel

# Fitted to the published runs together with `Gpu.achieved`.
MEMORY_SHARE = 0.75  # of a GPU's bandwidth, for decoding and elementwise functions
_OVERLAP = 0.3  # of the shorter of computing and communicating
# Over a token's hidden state in a block: norms, gates, rotary embeddings, adapters, read and
# written. The more, the better are the published runs planned; with more than this some GPU would
# achieve more than its peak.
_PASSES = 400
# Time of the host to launch what a block does in a pass: a step takes no less. An H200's host took
# 5.4 ms (the 8B, one row of 2,048), an EPYC on the stand-in for CUDA 4.1.
BLOCK_SECONDS = 5e-3
# The same for a token that is generated: 88 to 98 ms for 32 blocks on that host, for 1 as for 64
# answers at a time.
_TOKEN_SECONDS = 2.8e-3
# Time of the host for a product with an expert's matrix, in whose layer host and GPU wait for each
# other: 12 blocks of Qwen3-30B-A3B took 0.46 s on an H200, of whose matrices three passes multiply
# 9,216, in groups.
_PRODUCT_SECONDS = 3e-5


class Work(NamedTuple):
    """The work of a rank in a micro-batch."""

    operations: float
    """Floating-point operations of matrix products."""
    memory: float
    """Bytes read and written in GPU memory."""
    link: float
    """Bytes received from other ranks."""
    host: float
    """Bytes received from host memory."""
    products: float = 0
    """Matrix products with one expert each."""
    blocks: float = 0
    """Passes through a block, whether forward, recomputed or backward."""


class MicroBatchSize(NamedTuple):
    """The micro-batches of all ranks. The longest decides how long they take."""

    tokens: float
    """Tokens of the longest micro-batch, padding included."""
    squares: float
    """Sum of the squared lengths of its documents."""
    useful: float
    """Tokens of all ranks' rows, without padding."""

    def seen(self, window: int | None) -> float:
        """Twice the pairs of tokens of which one sees the other."""
        if window:
            return min(self.squares, 2 * self.tokens * window)
        return self.squares


class Experts(NamedTuple):
    """The experts of a layer, of which each token chooses some."""

    experts: int
    """Number of experts in a layer."""
    chosen: int
    """Number of experts that work on a token."""
    parameters: int
    """Number of 3-D parameters of all blocks."""
    weights: int
    """Number of their weights that work on a token."""

    def hit(self, tokens: float) -> float:
        """The maximum number of experts in a layer that get tokens."""
        return min(self.experts, tokens * self.chosen)


class Size(NamedTuple):
    """The sizes that a model's time depends on."""

    blocks: int
    shapes: tuple[BlockShape, ...]
    linear: int
    """Number of weights that work on a token in the blocks' matrices."""
    head: int
    """Number of weights of the head."""
    adapter: int
    """Number of weights of the adapters."""
    stored: int
    """Bytes of the base."""
    decoding: float
    """Bytes moved to decode a weight once; 0 if the base is not quantized."""
    trains_all: bool = False
    trains: bool = True
    """False for a forward pass alone."""
    experts: Experts = Experts(0, 1, 0, 0)

    def decoded(self, tokens: float) -> float:
        """Number of weights of the blocks that a pass decodes."""
        # An expert is decoded once for all of its tokens. `linear` has the experts of one token.
        more = self.experts.hit(tokens) / self.experts.chosen - 1
        return self.linear + self.experts.weights * more

    def products(self, tokens: float) -> float:
        """Products that the host launches one by one for the experts of a pass, if quantized."""
        return self.experts.hit(tokens) * self.experts.parameters * (self.decoding > 0)


def count_work(
    size: Size,
    micro_batch: MicroBatchSize,
    *,
    num_shards: int,
    recomputed_share: float,
    host_share: float,
    frees_blocks: bool = True,
    references: int = 0,
) -> Work:
    """The work of a micro-batch.

    Args:
        recomputed_share: share of the blocks that recompute.
        host_share: share of the base that comes from the host.
        frees_blocks: whether a block's gathered weights are freed after its forward pass.
        references: forward passes without adapters.
    """
    again = recomputed_share + references
    trains = size.trains
    # forward, again, gradients of inputs, and of weights
    passes = 1 + again + trains * (1 + size.trains_all)
    # An adapter's weights always train, and it is off in a reference. The head does not recompute.
    of_adapter = 1 + 2 * trains + recomputed_share
    of_head = 1 + trains + references
    per_token = 2 * (passes * size.linear + of_adapter * size.adapter + of_head * size.head)
    # Causal: half of the scores; the backward pass takes 2.5 times the forward pass.
    pairs = 2 * sum(shape.attended * micro_batch.seen(shape.window) for shape in size.shapes)
    attention = (1 + 2.5 * trains + again) * pairs
    decoding = passes * size.decoding * size.decoded(micro_batch.tokens)
    # _PASSES counts a forward, a recomputed and a backward pass, which is two; in 16 bits.
    hidden_states = micro_batch.tokens * size.blocks * size.shapes[0].hidden
    elementwise = hidden_states * 2 * _PASSES * (1 + 2 * trains + again) / 4
    # A ring's all-gather brings each rank all shards but its own.
    gathers = 2 if frees_blocks and trains else 1
    gathered = gathers * size.stored * (num_shards - 1) / num_shards
    from_host = (1 + trains) * host_share * size.stored / num_shards
    products = passes * size.products(micro_batch.tokens)
    operations = micro_batch.tokens * per_token + attention
    memory = decoding + elementwise
    block_passes = (1 + trains + again) * size.blocks
    return Work(operations, memory, gathered, from_host, products, block_passes)


def exchanged_bytes(size: Size, tokens: float, num_ranks: int) -> float:
    """Bytes that a rank sends to the others for the attention of all blocks, in one direction.

    Args:
        tokens: those of a rank.
    """
    # Queries and outputs of all heads, keys and values of as many as the ranks need: fewer heads
    # than ranks are repeated (distributed/context.py). All in 16 bits.
    heads = sum(
        shape.attended + math.lcm(shape.groups, num_ranks) * shape.head_dim for shape in size.shapes
    )
    return 2 * 2 * tokens * heads * (num_ranks - 1) / num_ranks


def seconds(work: Work, gpu: Gpu, block_seconds: float = BLOCK_SECONDS) -> float:
    """Time of a micro-batch on a GPU.

    Args:
        block_seconds: the host's time for a block and pass; less for other programs.
    """
    computing = work.operations / (gpu.tflops * 1e12 * (gpu.achieved or ACHIEVED))
    computing += work.memory / (gpu.bandwidth * 1e9 * MEMORY_SHARE)
    # The host launches ahead of the GPU, so the slower of them decides.
    computing = max(computing, work.products * _PRODUCT_SECONDS + work.blocks * block_seconds)
    communicating = (work.link + work.host) / (gpu.link * 1e9)
    return computing + communicating - _OVERLAP * min(computing, communicating)


def tokens_per_second(
    plan: PlacedModel, size: Size, micro_batch: MicroBatchSize, gpu: Gpu
) -> float:
    """Tokens per second of all ranks together. size: of the model's parts."""
    ranks = plan.layout.context_size
    references = plan.step.passes - 1
    again = plan.memory.recomputing / size.blocks * size.trains
    # Ranks that share a row have equal parts of its tokens and, in attention, of its heads.
    share = micro_batch._replace(
        tokens=micro_batch.tokens / ranks, squares=micro_batch.squares / ranks
    )
    work = count_work(
        size,
        share,
        num_shards=plan.layout.num_shards,
        recomputed_share=again,
        host_share=plan.placement.offload.blocks / size.blocks,
        frees_blocks=plan.layout.frees_blocks,
        references=references,
    )
    exchanged = (1 + size.trains + again + references) * exchanged_bytes(size, share.tokens, ranks)
    work = work._replace(link=work.link + exchanged)
    return micro_batch.useful / seconds(work, gpu)


def seconds_per_pass(plan: PlacedModel, gpu: Gpu, tokens: int, *, gathered: bool) -> float:
    """Time in which a rank's model generates one token of each of its completions.

    All ranks work at the same time.

    Args:
        tokens: number of completions, of each of which a pass computes a token.
        gathered: whether weights stay gathered from pass to pass.
    """
    size = size_of(plan.model.meta.parts)
    num_shards = plan.layout.num_shards
    # Matrix products of a few tokens take less time than reading the weights: 2 bytes in 16 bits.
    memory = size.decoded(tokens) * (size.decoding or 2) / (gpu.bandwidth * 1e9 * MEMORY_SHARE)
    host = size.blocks * _TOKEN_SECONDS + size.products(tokens) * _PRODUCT_SECONDS
    moved = 0.0
    if plan.layout.frees_blocks and not gathered:
        moved = size.stored * (num_shards - 1) / num_shards
    moved += size.stored / num_shards * plan.placement.offload.blocks / size.blocks
    return max(host, memory, moved / (gpu.link * 1e9))


def size_of(parts: ModelParts) -> Size:
    """The size of a built model; experts count as far as they work on a token."""
    kinds = [item for block in parts.blocks for item in parts.kinds(block).items()]
    shapes = block_shapes(parts.model.config)
    active = max(shape.chosen for shape in shapes)
    # A convolution's shape has three sizes too.
    routed = [shape for shape in parts.matrices if active and len(shape) == 3 and shape[1] > 1]
    experts = max((shape[0] for shape in routed), default=0)
    chosen = min(active or 1, experts or 1)
    quantized = [module for module in parts.blocks.modules() if isinstance(module, QuantizedWeight)]
    weights = sum(chosen * math.prod(shape[1:]) for shape in routed)
    return Size(
        blocks=len(parts.blocks),
        shapes=shapes,
        linear=sum(map(math.prod, parts.matrices)) - sum(map(math.prod, routed)) + weights,
        experts=Experts(experts, chosen, len(routed), weights),
        head=parts.embedding.weight.numel(),  # type: ignore[operator]
        adapter=sum(count * kind.num_weights for kind, count in kinds if kind.in_adapter),
        stored=sum(count * kind.num_bytes for kind, count in kinds if not kind.in_adapter),
        decoding=max((module.decoding_bytes for module in quantized), default=0.0),
        trains_all=any(kind.category == "trainable" and not kind.in_adapter for kind, _ in kinds),
    )
