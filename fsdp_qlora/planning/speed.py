"""Estimates the seconds of a step.

Operations and bytes are counted from the shapes, and divided by rates that published runs achieved.

33 published runs of the 2024 program, planned by the others of their GPU, have a median error of
3%, at most 17%; for runs of other programs, which decided less, the median is 10%.
"""

import math
from typing import NamedTuple

from torch import nn

from fsdp_qlora.model.architecture.kept_attention import LONG
from fsdp_qlora.model.architecture.shapes import BlockShape, block_shapes
from fsdp_qlora.model.kernels.in_use import Ways
from fsdp_qlora.model.model_parts import ModelParts, matrix_shapes
from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.planning.gpus import ACHIEVED, Gpu
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.program_speed import (
    Program,
    expected_rounding,
    fastest_product_seconds,
    this_program,
)
from fsdp_qlora.planning.rounding_work import RoundingWork, rounding_work

# Fitted to the published runs together with `Gpu.achieved`.
MEMORY_SHARE = 0.75  # of a GPU's bandwidth, for decoding and elementwise functions
_OVERLAP = 0.3  # of the shorter of computing and communicating
# Time of the host for a token that is generated: 88 to 98 ms for 32 blocks on an H200's host, for 1
# as for 64 answers at a time.
_TOKEN_SECONDS = 2.8e-3


class Work(NamedTuple):
    """The work of a rank in a micro-batch."""

    operations: float = 0
    """Floating-point operations of matrix products."""
    attention: float = 0
    """Floating-point operations of attention."""
    decoding: float = 0
    """Bytes read and written to decode weights."""
    hidden: float = 0
    """Bytes of one pass over the hidden states of all blocks, for a forward, a recomputed and a
    backward pass."""
    link: float = 0
    """Bytes received from other ranks."""
    host: float = 0
    """Bytes received from host memory."""
    products: float = 0
    """Matrix products with one expert each."""
    blocks: float = 0
    """Passes through a block, whether forward, recomputed or backward."""
    moved: float = 0
    """Bytes of activations that go to host memory, and come back."""
    meanwhile: float = 0
    """The share of the computation that is the forward pass of the blocks that move them."""
    rounding: RoundingWork = RoundingWork()
    """Merge-aware, the weights that are rounded with their updates."""
    last_again: tuple[float, float] = (0, 0)
    """The part of `operations` and of `decoding` in the last products of blocks that recompute."""


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
    last: int = 0
    """Number of weights of the blocks' last matrices; 0 in a model with experts."""
    experts: Experts = Experts(0, 1, 0, 0)
    kernel_share: float = 1.0
    """Share of `decoding` that a kernel moves, which reads codes and writes weights."""

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
    tokens = micro_batch.tokens
    # A forward, a recomputed and a backward pass, which is two; in 16 bits.
    hidden_states = tokens * size.blocks * size.shapes[0].hidden
    # A ring's all-gather brings each rank all shards but its own.
    gathers = 2 if frees_blocks and trains else 1
    last = recomputed_share * size.last
    return Work(
        operations=tokens * per_token,
        attention=(1 + 2.5 * trains + again) * pairs,
        decoding=passes * size.decoding * size.decoded(tokens),
        hidden=hidden_states * 2 * (1 + 2 * trains + again) / 4,
        link=gathers * size.stored * (num_shards - 1) / num_shards,
        host=(1 + trains) * host_share * size.stored / num_shards,
        products=passes * size.products(tokens),
        blocks=(1 + trains + again) * size.blocks,
        last_again=(2 * tokens * last, size.decoding * last),
    )


def _kept_operations(size: Size, micro_batch: MicroBatchSize) -> float:
    """Operations of attention whose results are kept where blocks recompute."""
    total = 0.0
    for shape in size.shapes:
        seen = micro_batch.seen(shape.window)
        if seen > LONG * micro_batch.tokens:
            total += 2 * shape.attended * seen
    return total


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


def seconds(work: Work, gpu: Gpu, program: Program) -> float:
    """Time of a micro-batch on a GPU."""
    operations = work.operations
    decoding = work.decoding
    if not program.computes_last_again:
        operations -= work.last_again[0]
        decoding -= work.last_again[1]
    operations += work.attention / program.attention
    memory = decoding * program.decoding + work.hidden * program.passes + work.rounding.moved
    computing = operations / (gpu.tflops * 1e12 * (gpu.achieved or ACHIEVED))
    computing += memory / (gpu.bandwidth * 1e9 * MEMORY_SHARE)
    computing += work.rounding.float64_seconds(gpu)
    launching = work.products * program.product_seconds + work.blocks * program.block_seconds
    # The host launches ahead of the GPU, so the slower of them decides.
    both = max(computing, launching) + program.turns * min(computing, launching)
    communicating = (work.link + work.host) / (gpu.link * 1e9)
    # Activations move meanwhile, and a backward pass takes twice as long. Only what takes longer
    # is waited for.
    moving = work.moved / (gpu.host_link * 1e9)
    forward = work.meanwhile * both
    waiting = max(0, moving - forward) + max(0, moving - 2 * forward)
    return both + communicating - _OVERLAP * min(both, communicating) + waiting


def tokens_per_second(
    plan: PlacedModel, size: Size, micro_batch: MicroBatchSize, gpu: Gpu, ways: Ways
) -> float:
    """Tokens per second of all ranks together.

    Args:
        size: of the model's parts.
        ways: by which the model is computed.
    """
    ranks = plan.layout.context_size
    references = plan.step.passes - 1
    leaving = plan.memory.recomputing
    again = (leaving - plan.step.on_host.blocks) / size.blocks * size.trains
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
    attention = work.attention
    if plan.step.on_host.attention:
        attention -= again * _kept_operations(size, share)
    exchanged = (1 + size.trains + again + references) * exchanged_bytes(size, share.tokens, ranks)
    # A reference has no update.
    rounding = rounding_work(
        plan.model.meta.parts.blocks, ways, size.experts.hit(share.tokens)
    ).times(1 + size.trains + again)
    work = work._replace(
        attention=attention,
        link=work.link + exchanged,
        moved=plan.memory.moved * share.tokens / plan.step.num_tokens,
        meanwhile=leaving / size.blocks / (3 + again + references),
        rounding=rounding,
    )
    return micro_batch.useful / seconds(work, gpu, this_program(ways, gpu, size.kernel_share))


def seconds_per_pass(
    plan: PlacedModel, gpu: Gpu, tokens: int, *, gathered: bool, is_decoded: bool
) -> float:
    """Time in which a rank's model generates one token of each of its completions.

    All ranks work at the same time.

    Args:
        tokens: number of completions, of each of which a pass computes a token.
        gathered: whether weights stay gathered from pass to pass.
        is_decoded: whether decoded weights of linear layers are kept from pass to pass.
    """
    size = size_of(plan.model.meta.parts)
    num_shards = plan.layout.num_shards
    # Matrix products of a few tokens take less time than reading the weights: 2 bytes in 16 bits.
    moved_per_weight = size.decoding or 2
    bytes_read = size.decoded(tokens) * moved_per_weight
    if is_decoded:
        bytes_read -= (size.linear - size.experts.weights) * (moved_per_weight - 2)
    blocks = plan.model.meta.parts.blocks
    ways = Ways(rounding=expected_rounding(gpu))
    rounding = rounding_work(blocks, ways, size.experts.hit(tokens), is_decoded=is_decoded)
    memory = (bytes_read + rounding.moved) / (gpu.bandwidth * 1e9 * MEMORY_SHARE)
    memory += rounding.float64_seconds(gpu)
    host = size.blocks * _TOKEN_SECONDS + size.products(tokens) * fastest_product_seconds(gpu)
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
    last = 0
    if not experts:
        last = sum(_last_weights(block, shapes[0].hidden) for block in parts.blocks)
    decoding = max((module.decoding_bytes for module in quantized), default=0.0)
    by_kernel = max((module.kernel_bytes for module in quantized), default=0.0)
    return Size(
        blocks=len(parts.blocks),
        shapes=shapes,
        linear=sum(map(math.prod, parts.matrices)) - sum(map(math.prod, routed)) + weights,
        experts=Experts(experts, chosen, len(routed), weights),
        head=parts.embedding.weight.numel(),  # type: ignore[operator]
        adapter=sum(count * kind.num_weights for kind, count in kinds if kind.in_adapter),
        stored=sum(count * kind.num_bytes for kind, count in kinds if not kind.in_adapter),
        decoding=decoding,
        kernel_share=by_kernel / decoding if decoding else 1.0,
        last=last,
        trains_all=any(kind.category == "trainable" and not kind.in_adapter for kind, _ in kinds),
    )


def _last_weights(block: nn.Module, hidden: int) -> int:
    """Number of weights of a block's last matrix, which recomputing the block leaves out."""
    # Of the matrices that give hidden states it is the largest, which an MLP has.
    giving = [shape for shape in matrix_shapes(block) if shape[-2] == hidden]
    return max(map(math.prod, giving), default=0)
