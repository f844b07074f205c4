"""The plan of a model, made before a weight is read: how it is built, where its weights lie, the memory of a rank."""

import dataclasses
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from fsdp_qlora.config.marks import of_quantizer
from fsdp_qlora.config.options import TrainConfig, names_marked
from fsdp_qlora.config.text import pairs
from fsdp_qlora.config.train_types import TrainType
from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.store import all_gather_via_store, download_once
from fsdp_qlora.model.adapters.insert import LoraOptions, magnitudes, peft_config, reduces_base
from fsdp_qlora.model.adapters.peft_folder import read_adapter
from fsdp_qlora.model.architecture import models
from fsdp_qlora.model.architecture.attention import choose, describe_kernel
from fsdp_qlora.model.architecture.precision import PRECISIONS, Precision, choose_precision
from fsdp_qlora.model.build_model import LayerOptions, MetaModel, build_model
from fsdp_qlora.model.model_parts import count_parameters
from fsdp_qlora.model.quantizers import bnb_4bit
from fsdp_qlora.planning import checks, fit
from fsdp_qlora.planning.blocks import BlockBytes, measure_blocks
from fsdp_qlora.planning.fit import Placement
from fsdp_qlora.planning.memory import Memory, Step, estimate_memory
from fsdp_qlora.sharding.loading import decoded
from fsdp_qlora.sharding.loading.first_adapters import check_fits
from fsdp_qlora.sharding.optimizer import OPTIMIZERS
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import fit as fit_line
from fsdp_qlora.utils.text import format_bytes, format_count

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True)
class Machine:
    """The devices that a run computes on.

    device: of its ranks; in a dry run often a GPU that is not here. world_size: ranks of the run. ranks: this process.
    free: bytes of a GPU that is elsewhere, if it is known.
    """

    device: torch.device
    world_size: int
    ranks: Ranks
    free: int | None = None

    @classmethod
    def of(cls, config: TrainConfig, ranks: Ranks) -> "Machine":
        """The machine of a run; of a dry run the one that its options ask for, even if this one lacks the GPUs."""
        if not config.dry_run:
            return cls(ranks.device, ranks.world_size, ranks)
        asked = int(os.environ.get("WORLD_SIZE") or 1)
        if asked <= 1:
            asked = config.nproc_per_node
        if asked < 1:
            asked = 1 if config.device == "cpu" else max(1, torch.cuda.device_count())
        is_elsewhere = config.device != "cpu" and ranks.device.type == "cpu"
        return cls(torch.device("cuda") if is_elsewhere else ranks.device, asked, ranks)

    def data_size(self, context_size: int) -> int:
        """Groups of so many ranks that get other rows than each other. Raises UserError if there are none."""
        return self.ranks.layout("full_shard", self.world_size, context_size).data_size

    @property
    def per_node(self) -> int:
        """Ranks of one machine."""
        return self.ranks.layout("full_shard", self.world_size).per_node

    @property
    def is_elsewhere(self) -> bool:
        return self.device.type != self.ranks.device.type

    @property
    def gpu_memory(self) -> tuple[int, int] | None:
        """Bytes free and in all of the GPU that is planned for, or is here; None if it is not known."""
        if self.free is not None:
            return self.free, self.free
        return torch.cuda.mem_get_info(self.ranks.device) if self.ranks.device.type == "cuda" else None


@dataclass(frozen=True)
class ModelPlan:
    """The model before its weights are read.

    Attributes:
        meta: the model on the meta device, quantized and adapted.
        documents: attention implementation for rows without padding; None if there is none, or rows are padded.
        is_packed: whether the weight files are in 4 bits already.
        stored: the format of weight files that are decoded as they are read.
        adapter: configuration of the adapter that is saved; None where a whole model is saved.
        notes: decisions about the model, one sentence each.
    """

    machine: Machine
    train_type: TrainType
    precision: Precision
    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    meta: MetaModel
    documents: str | None
    is_packed: bool
    stored: decoded.StoredFormat | None
    adapter: LoraConfig | None
    notes: tuple[str, ...]

    @property
    def trains_whole_modules(self) -> bool:
        """Whether more than an adapter trains. Its gradients do not add up unsharded, and its state is not gathered."""
        return self.adapter is None or bool(self.adapter.modules_to_save)


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


def read_model(
    config: TrainConfig, *, with_weights: bool = False, once: hub.Once | None = None
) -> tuple[Path, PretrainedConfig, PreTrainedTokenizerBase]:
    """The model's folder, which is downloaded if needed, its configuration and its tokenizer.

    Args:
        with_weights, once: as for `hub.find_model_folder`.
    """
    name, trusted = config.model_name, config.trust_remote_code
    folder = hub.find_model_folder(
        name, with_weights=with_weights, with_code=trusted, is_preview=config.is_preview, once=once
    )
    model_config = models.load_config(folder, name, trust_remote_code=trusted)
    return folder, model_config, models.load_tokenizer(folder, name, trust_remote_code=trusted)


def plan_model(config: TrainConfig, machine: Machine, store: dist.Store | None) -> ModelPlan:
    """Find the model, build it without weights as the train type says, and describe it."""
    # Weights are downloaded last, after all checks that do not need them.
    once = download_once(machine.ranks, store) if store else None
    plan = build_plan(config, machine, *read_model(config, once=once))
    dtype, device = plan.precision.compute_dtype, machine.ranks.device
    kernel = describe_kernel(plan.meta.model.config, dtype, device, plan.documents)
    for note in plan.notes:
        log.info("%s", note)
    log_plan(config, *describe_model(plan.meta, plan.precision), kernel)
    most = models.most_positions(plan.config)
    if config.context_length != "auto" and most and config.longest_row > most:
        log.warning("context_length %d is more than the model's own limit of %d positions.", config.longest_row, most)
    return plan


def log_plan(config: TrainConfig, first: str, *details: str | None) -> None:
    """Log what is planned: in a dry run all of it, else the first line, cut to the screen, with verbose all."""
    log.info("%s", first if config.dry_run or config.verbose else fit_line(first))
    for line in filter(None, details):
        log.log(logging.INFO if config.dry_run else logging.DEBUG, "%s", line)


def describe_model(meta: MetaModel, precision: Precision) -> list[str]:
    """Architecture, parameters, quantized and trainable ones, precision; and attention and the quantized blocks."""
    counts = count_parameters(meta.parts)
    share = 100 * counts["quantized"] / max(counts["in_blocks"], 1)  # there are none where all trains
    kind = "DoRA" if magnitudes(meta.model) else "LoRA"
    experts = f" and {len(meta.target_parameters)} expert parameters" if meta.target_parameters else ""
    adapted = f" ({kind} on {len(meta.targets)} layers{experts})" if meta.targets else ""
    quantized = 100 * counts["quantized"] / counts["total"]
    return [
        f"Model: {type(meta.model).__name__}, {format_count(counts['total'])} parameters, {quantized:.1f}% quantized; "
        f"{format_count(counts['trainable'])} train{adapted}, {precision.name}",
        f"  attention {meta.model.config._attn_implementation}; {share:.1f}% of the decoder blocks quantized",
    ]


def build_plan(
    config: TrainConfig,
    machine: Machine,
    folder: Path,
    model_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> ModelPlan:
    """The plan of a model with a given configuration and tokenizer."""
    train_type, device = config.kind, machine.ranks.device
    # GPUs that are elsewhere are taken for newer ones.
    asked = "bf16" if machine.is_elsewhere and config.precision == "auto" else config.precision
    precision = PRECISIONS[choose_precision(asked, device)]
    layers, stored, notes = resolve_layers(config, model_config)
    meta = build_model(
        model_config,
        train_type,
        precision,
        device,
        layers,
        attn_implementation="auto" if machine.is_elsewhere else config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    check_model(config, meta)
    if counts := Counter(re.sub(r"^.*\.\d+\.", "", path) for path in meta.left_out):
        named = ", ".join(f"{name} ({count})" for name, count in counts.items())
        notes.append(f"Neither quantized nor adapted, since other modules read their weights: {named}.")
    if towers := meta.parts.towers:
        size = sum(parameter.nbytes for tower in towers.values() for parameter in tower.parameters())
        named = ", ".join(towers)
        notes.append(f"The parts for images are sharded as they are and do not train ({named}: {format_bytes(size)}).")
    adapter = None
    if train_type.adapter:
        adapter = peft_config(
            meta.linears,
            meta.targets,
            meta.target_parameters,
            train_type.adapter,
            layers.lora,
            base_model=config.base_name or hub.public_name(config.model_name),
            model_config=model_config,
        )
    kernel = choose(meta.model.config, precision.compute_dtype, device, requested=config.attn_implementation)
    checks.check_context(meta.parts, kernel, config.context_size)
    return ModelPlan(
        machine=machine,
        train_type=train_type,
        precision=precision,
        folder=folder,
        config=model_config,
        tokenizer=tokenizer,
        meta=meta,
        documents=None if config.batching == "padded" else kernel,
        is_packed=layers.prequantized is not None,
        stored=stored,
        adapter=adapter,
        notes=tuple(notes),
    )


def resolve_layers(
    config: TrainConfig, model_config: PretrainedConfig
) -> tuple[LayerOptions, decoded.StoredFormat | None, list[str]]:
    """How layers are quantized and adapted, the format of the weight files if it is decoded, and sentences on both."""
    train_type, notes = config.kind, []
    stored = decoded.take_format(model_config)
    if stored:
        notes.append(stored.describe_use(quantizes=train_type.quantizer is not None))
    prequantized = bnb_4bit.take_packed(model_config, config.model_name)
    if prequantized:
        if train_type.quantizer != "bnb_4bit" or train_type.trains_new_blocks:
            raise UserError(
                f"model_name {config.model_name} is quantized to 4 bits, which train_type {config.train_type} cannot "
                "train. Use --train_type qlora, or give the model with 16- or 32-bit weights."
            )
        notes.append(prequantized.describe_use(quant_type=config.quant_type, double_quant=config.double_quant))
    layers = LayerOptions(
        lora=config.pick(
            LoraOptions,
            prefix="lora_",
            init=config.init_lora_weights,
            rank_pattern={name: int(value) for name, value in pairs(config.rank_pattern)},
            alpha_pattern={name: float(value) for name, value in pairs(config.alpha_pattern)},
        ),
        quantizer=quantizer_options(config, train_type.quantizer),
        prequantized=prequantized,
        new_blocks=models.new_blocks(model_config, config.model_name) if train_type.trains_new_blocks else (),
    )
    return layers, stored, notes


def quantizer_options(config: TrainConfig, quantizer: str | None) -> dict[str, Any]:
    """The quantizer's own options."""
    return {name: getattr(config, name) for name in names_marked(of_quantizer(quantizer))}


def check_model(config: TrainConfig, meta: MetaModel) -> None:
    """Refuse a model that the adapter to start from does not fit, or of which too little would be quantized."""
    if config.adapter:
        adapter, name = read_adapter(Path(config.adapter).expanduser()), hub.public_name(config.model_name)
        check_fits(adapter, meta.model, model_name=name, declared_base=config.base_name, init=config.init_lora_weights)
    if config.kind.quantizer:
        checks.check_quantized_share(meta.parts, allow_unquantized=config.allow_unquantized)


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
    if checks.context_blocker(plan.meta.parts, plan.documents):
        return [1]
    return [size for size in checks.sizes_that_divide_heads(plan.meta.parts) if plan.machine.per_node % size == 0]


def candidates(config: TrainConfig, plan: ModelPlan) -> list[Placement]:
    """The placements that the options leave open, the fastest first."""
    is_paged_whole = OPTIMIZERS[config.optimizer].is_paged and plan.trains_whole_modules  # it pages from the GPU
    ways = (True, False) if config.gradient_accumulation_steps > 1 else (True,)
    blocks = len(plan.meta.parts.blocks)
    if (asked := config.use_cpu_offload) not in ("auto", True, False) and int(asked) > blocks:
        raise UserError(
            f"--use_cpu_offload {asked}: the model has {blocks} decoder blocks. Give at most that, or true for the "
            "embeddings too."
        )
    return fit.candidates(
        config.sharding_strategy,
        fit.possible_offloads(config.use_cpu_offload, blocks, can_offload=not is_paged_whole),
        world_size=plan.machine.world_size,
        per_node=plan.machine.per_node,
        on_gpu=plan.machine.device.type == "cuda",
        accumulates=(False,) if plan.trains_whole_modules else ways,
    )


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
        offloads_activations=config.use_activation_cpu_offload,
        buffer_bytes=config.loading_buffer_mib * 2**20,
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
