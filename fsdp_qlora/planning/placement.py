"""Places a planned model on the ranks.

Chooses which ranks share it, what is in host memory, and how many blocks recompute.

Checks that weights and result fit on this machine, before the first byte is read.
"""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

from fsdp_qlora.config.objectives import Reference
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.graph_lengths import MOST_TOKENS
from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.distributed.device import free_gpu_memory, shares_host_memory
from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.store import all_gather_via_store
from fsdp_qlora.model.adapters.insert import adapter_parameters
from fsdp_qlora.model.kernels.in_use import GRAPHS, using_ways, ways_in_use, ways_of_option
from fsdp_qlora.model.model_parts import Offload, each_parameter
from fsdp_qlora.model.row_sharing import context_blocker, sizes_that_divide_heads
from fsdp_qlora.planning import fit
from fsdp_qlora.planning.activations import OnHost
from fsdp_qlora.planning.blocks import BlockBytes, measure_blocks
from fsdp_qlora.planning.estimate import estimate_memory
from fsdp_qlora.planning.fit import Placement, with_margin
from fsdp_qlora.planning.graph_memory import blocks_by_graphs
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.memory import Memory, Step
from fsdp_qlora.planning.plan import ModelPlan
from fsdp_qlora.sharding.graphed import why_not
from fsdp_qlora.sharding.loading.weight_files import BUFFER
from fsdp_qlora.sharding.optimizer import OPTIMIZERS
from fsdp_qlora.utils.errors import OutOfMemory, UserError
from fsdp_qlora.utils.files import bytes_of_variable
from fsdp_qlora.utils.machine import free_disk, host_memory_free
from fsdp_qlora.utils.text import GIB

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True)
class PlacedModel:
    """A planned model with its placement on the ranks.

    Attributes:
        layout: how the ranks share the model and its rows.
        memory: of a rank for the longest rows, estimated from `step` and `blocks`.
        reduction: a sentence where gradients are reduced in each micro-batch for want of memory.
        reason: a sentence that says why this placement was chosen.
    """

    model: ModelPlan
    placement: Placement
    layout: Layout
    memory: Memory
    step: Step
    blocks: Sequence[BlockBytes]
    reduction: str | None = None
    reason: str | None = None


def place(
    config: TrainConfig,
    plan: ModelPlan,
    lengths: Lengths | None = None,
    store: dist.Store | None = None,
    blocks: Sequence[BlockBytes] | None = None,
) -> PlacedModel:
    """Place a model as the options ask; what they leave open is decided by what fits.

    All ranks decide alike.

    Args:
        lengths: of the longest micro-batch; None for as many and as long rows as the options allow.
        store: by which the ranks agree; None if each decides alone.
        blocks: as measured for these rows, if they are.
    """
    lengths = lengths or longest_allowed(config)
    if blocks is None:
        with using_ways(ways_of_option(config.kernels)):
            blocks = measure_blocks(
                plan.meta.parts,
                plan.precision,
                lengths,
                plan.documents,
                num_parts=config.context_size,
            )
    variants = {
        place: _placed(config, plan, place, blocks, lengths) for place in candidates(config, plan)
    }
    if len(variants) == 1:
        return next(iter(variants.values()))
    needs = {
        placement: fit.with_margin(placed.memory.reserved) for placement, placed in variants.items()
    }
    # Ranks with different placements would wait for each other in different collectives, so all
    # decide by the same number.
    free = least_free(plan.machine, "the free GPU memory", store)
    chosen = fit.choose(needs, free)
    # A user of one GPU expects that it holds the whole model: this is not worth a line.
    is_expected = plan.machine.world_size == 1 and free is not None and not chosen.offload.blocks
    reason = None if is_expected else fit.describe_choice(needs, free)
    return dataclasses.replace(
        variants[chosen], reduction=fit.describe_reduction(needs, free), reason=reason
    )


def least_free(machine: Machine, what: str, store: dist.Store | None) -> int | None:
    """Bytes free on the GPU that has least of all ranks'; None if no GPU is known.

    Args:
        what: unique in this start.
        store: None asks this rank alone.
    """
    memory = machine.gpu_memory
    ranks = machine.ranks
    if memory is None:
        return None
    free, _ = memory
    return _least(free, what, ranks, store)


def least_host_free(machine: Machine, what: str, store: dist.Store | None) -> int:
    """Bytes of host memory left for the rank that has least of all ranks.

    Arguments as for `least_free`.
    """
    return _least(host_memory_free(machine.per_node), what, machine.ranks, store)


def _least(free: int, what: str, ranks: Ranks, store: dist.Store | None) -> int:
    if store is None or ranks.world_size == 1:
        return free
    return min(map(int, all_gather_via_store(str(free), what, ranks, store)))


def longest_allowed(config: TrainConfig) -> Lengths:
    """A micro-batch of as many and as long rows as the options allow."""
    num_learned = config.objective_row.kind_of_rows(config).num_learned
    return Lengths([config.longest_row] * config.batch_size * num_learned)


def context_sizes(config: TrainConfig, plan: ModelPlan) -> list[int]:
    """The numbers of ranks that may share each micro-batch, the smallest first.

    The option and the model decide.
    """
    if config.context_parallel_size != "auto":
        return [config.context_size]
    if context_blocker(plan.meta.parts, plan.documents):
        return [1]
    return [
        size
        for size in sizes_that_divide_heads(plan.meta.parts)
        if plan.machine.per_node % size == 0
    ]


def candidates(config: TrainConfig, plan: ModelPlan) -> list[Placement]:
    """The placements that the options leave open, the fastest first; on a CPU there is one.

    Raises:
        UserError: --use_cpu_offload is more than the model's blocks.
    """
    machine = plan.machine
    offloads = _open_offloads(config, plan)
    ways = _open_reductions(config, plan)
    is_auto = config.sharding_strategy == "auto"
    if machine.device.type != "cuda":
        strategy = "full_shard" if is_auto else config.sharding_strategy
        return [Placement(strategy, offloads[0], ways[0])]
    strategies = [config.sharding_strategy]
    if is_auto:
        strategies = []
        if machine.world_size > 1:
            strategies.append("ddp")
        # Several nodes each hold the model if it fits, if need be in host memory: the link between
        # them is slower than the one to that.
        if 1 < machine.per_node < machine.world_size:
            strategies.append("hybrid_full_shard")
        strategies.append("full_shard")
    placements = []
    for strategy in strategies:
        for offload in offloads:
            # The base would be in host memory once for each rank.
            if is_auto and strategy == "ddp" and offload.blocks:
                continue
            # A rank with a whole model has whole gradients in the end, so there is nothing to gain
            # by reducing them earlier.
            reductions = ways[:1] if strategy == "ddp" else ways
            placements += [Placement(strategy, offload, accumulates) for accumulates in reductions]
    return placements


def _open_offloads(config: TrainConfig, plan: ModelPlan) -> list[Offload]:
    """The weights that may be in host memory, as the options allow it; the fastest first."""
    blocks = len(plan.meta.parts.blocks)
    on_host = config.use_cpu_offload
    if on_host not in ("auto", True, False) and int(on_host) > blocks:
        raise UserError(
            f"--use_cpu_offload {on_host}: the model has {blocks} decoder blocks. Give at most "
            f"{blocks}, or true for the embeddings too."
        )
    everything = Offload(blocks, embeddings=True)
    if on_host is True:
        return [everything]
    if on_host != "auto":
        return [Offload(int(on_host))]
    # A paged optimizer moves its state between GPU and host itself, for weights on the GPU.
    if plan.trains_whole_modules and OPTIMIZERS[config.optimizer].is_paged:
        return [Offload()]
    if shares_host_memory(plan.machine.ranks.device):
        return [Offload()]
    return [Offload(), everything]


def _open_reductions(config: TrainConfig, plan: ModelPlan) -> tuple[bool, ...]:
    """Whether gradients add up unsharded until the last micro-batch (`Placement.accumulates`)."""
    # Unsharded gradients of whole weights would be as large as the model on each rank.
    if plan.trains_whole_modules:
        return (False,)
    if config.gradient_accumulation_steps > 1 and plan.machine.world_size > 1:
        return (True, False)
    return (True,)


def _placed(
    config: TrainConfig,
    plan: ModelPlan,
    chosen: Placement,
    blocks: Sequence[BlockBytes],
    lengths: Lengths,
) -> PlacedModel:
    """The model in a place, with the memory of a rank there.

    Raises:
        UserError: --recompute is more than the model's blocks.
    """
    machine = plan.machine
    recomputing, on_host = _activations(config, len(plan.meta.parts.blocks))
    layout = machine.ranks.layout(chosen.sharding_strategy, machine.world_size, config.context_size)
    has_reference = config.objective_row.reference_beside(config) is not Reference.NONE
    images = plan.image_memory.of(
        lengths,
        keeps_inputs_only=bool(recomputing or on_host.blocks),
        has_reference=has_reference,
    )
    step = Step(
        precision=plan.precision,
        optimizer=config.optimizer,
        layout=layout,
        placement=chosen,
        num_tokens=-(-lengths.num_computed // config.context_size),
        recomputing=recomputing,
        has_micro_batches=config.gradient_accumulation_steps > 1,
        on_host=on_host,
        buffer_bytes=bytes_of_variable(BUFFER),
        workspace=machine.workspace,
        passes=1 + has_reference,
        images=images,
    )
    return PlacedModel(
        plan, chosen, layout, estimate_memory(plan.meta.parts, blocks, step), step, blocks
    )


def _activations(config: TrainConfig, num_blocks: int) -> tuple[int, OnHost]:
    """The number of blocks that do not keep their activations on the device at first, and what
    these keep on the host.
    """
    recompute = config.recompute
    if isinstance(recompute, int):
        if recompute > num_blocks:
            raise UserError(
                f"--recompute {recompute}: the model has {num_blocks} decoder blocks. Give at "
                "most that, or all."
            )
        return recompute, OnHost()
    if recompute == "host":
        # Those of the last block are used again at once.
        return num_blocks - 1, OnHost(blocks=num_blocks - 1)
    # auto begins with all: a probe on the GPU then finds how many need not (fit.py).
    return 0 if recompute == "none" else num_blocks, OnHost(inputs=recompute == "offload")


def check_resources(config: TrainConfig, placed: PlacedModel) -> None:
    """Refuse a run whose weights alone do not fit, or whose result does not."""
    plan = placed.model
    ranks = placed.model.machine.ranks
    # Rank 0 saves, so only its machine needs room. All of its ranks check, and give the same error.
    if config.save_model and ranks.rank < ranks.local_world_size:
        size = result_bytes(plan.meta.model, dtype=plan.precision.compute_dtype)
        check_disk(Path(config.output_dir), size)
    check_memory(
        placed.memory,
        ranks.device,
        ranks_on_host=ranks.local_world_size,
        can_offload=not placed.placement.offload.blocks,
    )


# --- what is free ---


def check_memory(
    memory: Memory, device: torch.device, *, ranks_on_host: int, can_offload: bool
) -> None:
    """Refuse a run that cannot fit, with the numbers and what would help.

    Raises:
        UserError: the device or the host has less memory than the weights alone need.
        OutOfMemory: it has less free, since others hold it, so that a later start may succeed.
    """
    if device.type == "cuda":
        free, total = free_gpu_memory(device)
        needed = sum(memory.resident.values())
        is_one = shares_host_memory(device)
        if is_one:
            needed += sum(memory.host.values())
        if needed > free:
            advice = (
                "--use_cpu_offload true keeps the frozen weights in host memory; "
                if can_offload and not is_one
                else ""
            )
            # Memory that other programs hold may be free when a supervisor starts the run again.
            raise (UserError if needed > total else OutOfMemory)(
                f"This rank's weights, gradients and optimizer state need {needed / GIB:.1f} GiB "
                f"of GPU memory, and {free / GIB:.1f} of {total / GIB:.1f} GiB are free. "
                f"{advice}more GPUs, a smaller --lora_rank or a smaller model need less."
            )
    free = host_memory_free(ranks_on_host)
    host = psutil.virtual_memory()
    needed = sum(memory.host.values())
    if needed > free:
        what = " to load its part of the model"
        if memory.moved:
            what = f", {memory.moved / GIB:.1f} GiB of them for activations"
        less = "--recompute all needs none for activations. " if memory.moved else ""
        is_held = host.available < needed * ranks_on_host <= host.total
        raise (OutOfMemory if is_held else UserError)(
            f"This rank needs {needed / GIB:.1f} GiB of host memory{what}, "
            f"and {free / GIB:.1f} GiB are free for it ({ranks_on_host} ranks on this machine). "
            f"{less}More ranks, --use_cpu_offload false or a smaller model need less."
        )


def has_room_for_graphs(placed: PlacedModel, *, may_keep: bool) -> bool:
    """Whether this rank's GPU has room for the model's blocks as CUDA graphs.

    False on a CPU, and where blocks have no graphs, such as those whose weights are copied from the
    host.

    Args:
        may_keep: blocks keep their activations if there is room; then they need no graphs.
    """
    machine = placed.model.machine
    if machine.device.type != "cuda" or machine.is_elsewhere:
        return False
    step = placed.step
    parts = placed.model.meta.parts
    reason = why_no_graphs(placed)
    if reason:
        log.info("Graphs: not for blocks: %s", reason)
        return False
    if not blocks_by_graphs(parts, step):
        return False
    free, _ = free_gpu_memory(machine.device)
    if may_keep:
        fewer = dataclasses.replace(step, recomputing=step.recomputing - 1)
        if with_margin(estimate_memory(parts, placed.blocks, fewer).reserved) <= free:
            log.debug("Graphs: not with blocks that can keep their activations.")
            return False
    with using_ways(ways_in_use()._replace(blocks=GRAPHS)):
        memory = estimate_memory(parts, placed.blocks, step)
    has_room = with_margin(memory.reserved) <= free
    if not has_room:
        log.info(
            "Graphs: not on this GPU, of which %.1f GiB are free: with them the run needs %.1f.",
            free / GIB,
            memory.reserved / GIB,
        )
    return has_room


def why_no_graphs(placed: PlacedModel) -> str:
    """The reason why short micro-batches of a run have no CUDA graphs; empty if they may."""
    step = placed.step
    if step.num_tokens > MOST_TOKENS:
        return ""
    if step.layout.context_size > 1:
        return "context parallelism"
    if placed.placement.offload.blocks > 0 and step.num_shards == 1:
        return "weights that are copied from the host"
    reasons = [*filter(None, map(why_not, placed.model.meta.parts.blocks))]
    # Others have graphs beside them.
    return reasons[0] if 2 * len(reasons) > len(placed.blocks) else ""


def check_disk(output_dir: Path, num_bytes: int) -> None:
    """Refuse a run whose result would not fit on the disk.

    Raises:
        UserError: output_dir has less room than the result takes.
    """
    free = free_disk(output_dir)
    if num_bytes > free:
        raise UserError(
            f"The result needs {num_bytes / GIB:.2f} GiB, and output_dir {output_dir} has "
            f"{free / GIB:.2f} GiB free. "
            "Free some space, or give an --output_dir on a larger disk; --save_model false saves "
            "only the metrics."
        )


def result_bytes(model: nn.Module, *, dtype: torch.dtype) -> int:
    """Size of the saved result.

    An adapter and the modules trained with it are saved in float32, a whole model in `dtype`.
    """
    kinds = each_parameter(model).values()
    if any(kind.in_adapter for kind in kinds):
        return sum(4 * kind.num_weights for kind in kinds if kind.category == "trainable")
    # With block expansion the quantized base is saved with its original weights.
    return sum(kind.num_weights for kind in kinds) * dtype.itemsize


def adapter_bytes(placed: PlacedModel) -> int:
    """Bytes of host memory on a rank for each adapter of a service."""
    # value, gradient and AdamW's two moments, in float32
    weights = sum(parameter.numel() for _, parameter in adapter_parameters(placed.model.meta.model))
    return 16 * weights // placed.layout.num_shards
