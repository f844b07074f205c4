"""Places a planned model on the ranks: which of them share it, what is in host memory, how many blocks recompute."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.distributed.store import all_gather_via_store
from fsdp_qlora.model.adapters.insert import reduces_base
from fsdp_qlora.model.model_parts import Offload
from fsdp_qlora.planning import checks, fit
from fsdp_qlora.planning.blocks import BlockBytes, measure_blocks
from fsdp_qlora.planning.fit import Placement
from fsdp_qlora.planning.memory import Memory, Step, estimate_memory
from fsdp_qlora.planning.plan import Machine, ModelPlan, context_blocker, sizes_that_divide_heads
from fsdp_qlora.sharding.loading.weight_files import BUFFER
from fsdp_qlora.sharding.optimizer import OPTIMIZERS
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import bytes_of_variable


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
    """Give a model its place: as the options ask, and where they leave it open by what fits, alike on all ranks.

    Args:
        lengths: of the longest micro-batch; None for as many and as long rows as the options allow.
        store: by which the ranks agree; None if each decides alone. blocks: as measured for these rows, if they are.
    """
    lengths = lengths or longest_allowed(config)
    shares = config.context_size
    blocks = blocks or measure_blocks(plan.meta.parts, plan.precision, lengths, plan.documents, num_parts=shares)
    found = {each: _placed(config, plan, each, blocks, lengths) for each in candidates(config, plan)}
    if len(found) == 1:
        return next(iter(found.values()))
    needs = {each: fit.with_margin(placed.memory.reserved) for each, placed in found.items()}
    free = least_free(plan.machine, "the free GPU memory", store)
    chosen = fit.choose(needs, free)
    # Sharded over one rank is what a user of one GPU expects; what is shared by none is not worth a line.
    is_expected = plan.machine.world_size == 1 and free is not None and not chosen.offload.blocks
    reason = None if is_expected else fit.describe_choice(needs, free)
    return dataclasses.replace(found[chosen], reduction=fit.describe_reduction(needs, free), reason=reason)


def least_free(machine: Machine, what: str, store: dist.Store | None) -> int | None:
    """Bytes free on the GPU that has least of all ranks'; None if no GPU is known.

    Args:
        what: unique in this start. store: None asks this rank alone.
    """
    here, ranks = machine.gpu_memory, machine.ranks
    if here is None or store is None or ranks.world_size == 1:
        return here[0] if here else None
    return min(map(int, all_gather_via_store(str(here[0]), what, ranks, store)))


def longest_allowed(config: TrainConfig) -> Lengths:
    """A micro-batch of as many and as long rows as the options allow."""
    return Lengths([config.longest_row] * config.batch_size * config.row_kind.num_learned)


def context_sizes(config: TrainConfig, plan: ModelPlan) -> list[int]:
    """The numbers of ranks that may share each micro-batch, as the option and the model say, the smallest first."""
    if config.context_parallel_size != "auto":
        return [config.context_size]
    if context_blocker(plan.meta.parts, plan.documents):
        return [1]
    return [size for size in sizes_that_divide_heads(plan.meta.parts) if plan.machine.per_node % size == 0]


def candidates(config: TrainConfig, plan: ModelPlan) -> list[Placement]:
    """The placements that the options leave open, the fastest first; on a CPU there is one.

    A rank with a whole model has whole gradients in the end, so there is nothing to gain by reducing them earlier.
    Several nodes each hold the model if it fits, if need be in host memory: their link is slower than that.

    Raises:
        UserError: --use_cpu_offload is more than the model's blocks.
    """
    machine, strategy, blocks = plan.machine, config.sharding_strategy, len(plan.meta.parts.blocks)
    if (asked := config.use_cpu_offload) not in ("auto", True, False) and int(asked) > blocks:
        raise UserError(
            f"--use_cpu_offload {asked}: the model has {blocks} decoder blocks. Give at most that, or true for the "
            "embeddings too."
        )
    is_paged_whole = OPTIMIZERS[config.optimizer].is_paged and plan.trains_whole_modules  # it pages from the GPU
    nothing, everything = Offload(), Offload(blocks, embeddings=True)
    offloads = [everything if asked is True else Offload(int(asked))] if asked != "auto" else [nothing, everything]
    offloads = offloads[:1] if is_paged_whole else offloads
    is_auto, ranks = strategy == "auto", machine.world_size
    ways = (True, False) if config.gradient_accumulation_steps > 1 and ranks > 1 else (True,)
    ways = (False,) if plan.trains_whole_modules else ways
    if machine.device.type != "cuda":
        return [Placement("full_shard" if is_auto else strategy, offloads[0], ways[0])]
    possible = {"ddp": ranks > 1, "hybrid_full_shard": 1 < machine.per_node < ranks, "full_shard": True}
    return [
        Placement(name, offload, accumulates)
        for name in ([name for name, is_possible in possible.items() if is_possible] if is_auto else [strategy])
        for offload in offloads
        if not (is_auto and name == "ddp" and offload.blocks)
        for accumulates in (ways[:1] if name == "ddp" else ways)
    ]


def _placed(
    config: TrainConfig, plan: ModelPlan, chosen: Placement, blocks: Sequence[BlockBytes], lengths: Lengths
) -> PlacedModel:
    """The model in a place, with the memory of a rank there."""
    machine = plan.machine
    layout = machine.ranks.layout(chosen.sharding_strategy, machine.world_size, config.context_size)
    step = Step(
        precision=plan.precision,
        optimizer=config.optimizer,
        layout=layout,
        placement=chosen,
        num_tokens=-(-lengths.num_computed // config.context_size),
        recomputing=blocks_to_recompute(config, plan),
        has_micro_batches=config.gradient_accumulation_steps > 1,
        offloads_activations=config.recompute == "offload",
        buffer_bytes=bytes_of_variable(BUFFER),
        on_gpu=machine.device.type == "cuda",
        passes=1 + config.has_reference_beside,
        image_values=lengths.image_values,
    )
    return PlacedModel(plan, chosen, layout, estimate_memory(plan.meta.parts, blocks, step), step, blocks)


def blocks_to_recompute(config: TrainConfig, plan: ModelPlan) -> int:
    """How many decoder blocks recompute when the run starts; with auto all, until probes have found what fits.

    Raises:
        UserError: the model does not have so many.
    """
    blocks, asked = len(plan.meta.parts.blocks), config.recompute
    if isinstance(asked, int) and asked > blocks:
        raise UserError(f"--recompute {asked}: the model has {blocks} decoder blocks. Give at most that, or all.")
    return asked if isinstance(asked, int) else 0 if asked == "none" else blocks


def check_resources(config: TrainConfig, placed: PlacedModel) -> None:
    """Refuse a run whose weights alone do not fit, or whose result does not."""
    plan, ranks = placed.model, placed.model.machine.ranks
    if config.save_model and ranks.rank < ranks.local_world_size:  # the machine that saves
        size = checks.result_bytes(
            plan.meta.model, dtype=plan.precision.compute_dtype, reduces_base=reduces_base(config.init_lora_weights)
        )
        checks.check_disk(Path(config.output_dir), size)
    checks.check_resources(
        placed.memory,
        ranks.device,
        ranks_on_host=ranks.local_world_size,
        can_offload=not placed.placement.offload.blocks,
    )
