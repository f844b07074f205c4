"""Plans a model before a weight is read: builds it on the meta device and checks it."""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from peft import LoraConfig
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from fsdp_qlora.config.marks import of_quantizer
from fsdp_qlora.config.objectives import Reference
from fsdp_qlora.config.options import TrainConfig, names_marked
from fsdp_qlora.config.text import pairs
from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.distributed.store import once_per_machine
from fsdp_qlora.model.adapters.insert import LoraOptions, magnitudes
from fsdp_qlora.model.adapters.peft_config import peft_config
from fsdp_qlora.model.adapters.peft_folder import read_adapter, read_config, token_ids
from fsdp_qlora.model.adapters.token_rows import (
    NewTokens,
    add_token_rows,
    add_tokens,
    with_token_rows,
)
from fsdp_qlora.model.architecture.attention import (
    can_share,
    choose,
    describe_kernel,
    sees_images_whole,
)
from fsdp_qlora.model.architecture.config import load_config, most_positions, new_blocks
from fsdp_qlora.model.architecture.precision import PRECISIONS, Precision, choose_precision
from fsdp_qlora.model.architecture.structure import canonical_name
from fsdp_qlora.model.architecture.token_mixers import has_convolution, missing_kernels
from fsdp_qlora.model.architecture.tokenizer import end_tokens, load_tokenizer
from fsdp_qlora.model.build_model import LayerOptions, MetaModel, build_model
from fsdp_qlora.model.experts import padding_notes
from fsdp_qlora.model.formats.methods import take_format
from fsdp_qlora.model.formats.published import PublishedFormat
from fsdp_qlora.model.formats.settings import is_quantized
from fsdp_qlora.model.model_parts import ModelParts, count_parameters
from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.model.quantizers.bnb_4bit import BITSANDBYTES
from fsdp_qlora.model.row_sharing import check_context
from fsdp_qlora.planning.image_memory import ImageMemory
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.sharding.loading.first_adapters import check_fits
from fsdp_qlora.sharding.loading.heads import needs_weights, settle_head
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import tensor_names
from fsdp_qlora.utils.text import fit_line, format_bytes, format_count

log = logging.getLogger("fsdp_qlora")

_MIN_QUANTIZED_SHARE = 0.9  # of the decoder blocks; usually only norms and biases remain


@dataclass(frozen=True)
class ModelPlan:
    """The model before its weights are read."""

    machine: Machine
    precision: Precision
    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    meta: MetaModel
    """The model on the meta device, quantized and adapted."""
    documents: str | None
    """Attention implementation for rows without padding; None if there is none, or rows are padded.
    """
    packed: PublishedFormat | None
    """How the weight files are quantized, if they are trained on as they are."""
    stored: PublishedFormat | None
    """The format of weight files that are decoded as they are read."""
    adapter: LoraConfig | None
    """Configuration of the saved adapter; None where a whole model is saved."""

    @cached_property
    def image_memory(self) -> ImageMemory:
        """Counts the memory that images take in the model's towers."""
        return ImageMemory(self.meta.parts, self.precision)

    @property
    def pads_images(self) -> bool:
        """Whether rows with images are planned with padding."""
        return self.documents is None or sees_images_whole(self.meta.model)

    def shares_tokens(self, context_size: int) -> bool:
        """Whether tokens that documents begin with are computed once.

        context_size: ranks that share a row; in hybrids they have one state for a document.
        """
        has_states = any(map(has_convolution, self.meta.model.modules()))
        return can_share(self.documents) and not (has_states and context_size > 1)

    @property
    def trains_whole_modules(self) -> bool:
        """Whether more than an adapter trains.

        Whole modules' gradients do not add up unsharded, and their state is not gathered.
        """
        return self.adapter is None or bool(self.adapter.modules_to_save)


def read_model(
    config: TrainConfig, *, with_weights: bool = False, once: hub.Once | None = None
) -> tuple[Path, PretrainedConfig, PreTrainedTokenizerBase]:
    """The model's folder, which is downloaded if needed, its configuration and its tokenizer.

    Args:
        with_weights, once: as for `hub.find_model_folder`.
    """
    name = config.model_name
    trusted = config.trust_remote_code
    folder = hub.find_model_folder(
        name, with_weights=with_weights, with_code=trusted, is_preview=config.is_preview, once=once
    )
    model_config = load_config(folder, name, trust_remote_code=trusted)
    return folder, model_config, load_tokenizer(folder, name, trust_remote_code=trusted)


def plan_model(config: TrainConfig, machine: Machine, store: dist.Store | None) -> ModelPlan:
    """Find the model, build it without weights as the train type says, and describe it."""
    # Weights are downloaded last, after all checks that do not need them: a wrong option is told
    # within seconds. One process of a machine downloads; the others wait and find the files.
    once = partial(once_per_machine, machine.ranks, store) if store else None
    folder, model_config, tokenizer = read_model(config, once=once)
    if once:
        fetch_early(config, folder, model_config, once)
    plan = build_plan(config, machine, folder, model_config, tokenizer)
    # transformers has made it of config.json alone, but generation_config.json and the tokenizer
    # may name other tokens that end an answer.
    generation_config = plan.meta.model.generation_config
    if generation_config is not None:
        generation_config.eos_token_id = end_tokens(plan.folder, plan.tokenizer)
    dtype = plan.precision.compute_dtype
    device = machine.ranks.device
    kernel = describe_kernel(plan.meta.model.config, dtype, device, plan.documents)
    for note in notes_of(config, plan):
        log.info("%s", note)
    log_plan(config, *describe_model(plan.meta, plan.precision), kernel)
    max_positions = most_positions(plan.config)
    if config.context_length != "auto" and max_positions and config.longest_row > max_positions:
        log.warning(
            "context_length %d is more than the model's own limit of %d positions.",
            config.longest_row,
            max_positions,
        )
    return plan


def fetch_early(
    config: TrainConfig, folder: Path, model_config: PretrainedConfig, once: hub.Once
) -> None:
    """Download the weights of a model before its plan, where only they tell what is planned."""
    # The names of their tensors say whether the model has a head of its own, and which layers are
    # quantized. Usually an index says that, too, and it is here already.
    tell_layers = is_quantized(model_config, folder) and tensor_names(folder) is None
    if tell_layers or needs_weights(
        model_config, folder, trust_remote_code=config.trust_remote_code
    ):
        hub.fetch_weights(
            config.model_name,
            folder,
            lambda work, what: once(work, f"{what}, before it is planned"),
        )


def log_plan(config: TrainConfig, first: str, *details: str | None) -> None:
    """Log what is planned: all of it in a dry run, else the first line, cut to the screen.

    The details are then logged with --verbose only.
    """
    log.info("%s", first if config.dry_run or config.verbose else fit_line(first))
    for line in filter(None, details):
        log.log(logging.INFO if config.dry_run else logging.DEBUG, "%s", line)


def describe_model(meta: MetaModel, precision: Precision) -> list[str]:
    """Two lines: architecture, parameters and precision; then attention and quantized blocks."""
    counts = count_parameters(meta.parts)
    # in_blocks is 0 where all weights train.
    share_in_blocks = 100 * counts["quantized"] / max(counts["in_blocks"], 1)
    adapted = ""
    if meta.targets:
        kind = "DoRA" if magnitudes(meta.model) else "LoRA"
        adapted = f"{kind} on {len(meta.targets)} layers"
        if meta.target_parameters:
            adapted += f" and {len(meta.target_parameters)} expert parameters"
        adapted = f" ({adapted})"
    return [
        f"Model: {type(meta.model).__name__}, {format_count(counts['total'])} parameters, "
        f"{100 * counts['quantized'] / counts['total']:.1f}% quantized; "
        f"{format_count(counts['trainable'])} train{adapted}, {precision.name}",
        f"  attention {meta.model.config._attn_implementation}; "
        f"{share_in_blocks:.1f}% of the decoder blocks quantized",
    ]


def notes_of(config: TrainConfig, plan: ModelPlan) -> Iterator[str]:
    """One sentence about each thing in a model that is not as its options alone say."""
    meta = plan.meta
    if plan.stored:
        yield plan.stored.describe_decoding(quantizes=config.kind.quantizer is not None)
    if plan.packed:
        yield plan.packed.describe_use(
            quant_type=config.quant_type, double_quant=config.double_quant
        )
        if config.merge_aware:
            yield (
                f"Each weight is rounded to {plan.packed.name} with its adapter's update, in each "
                "pass. The adapter is of use merged only: fsdp-qlora merge."
            )
    for reason in dict.fromkeys(meta.left_out.values()):
        paths = [path for path, why in meta.left_out.items() if why == reason]
        # The same module of all blocks is named once, without the blocks' numbers.
        counts = Counter(re.sub(r"^.*\.\d+\.", "", path) for path in paths)
        modules = ", ".join(f"{name} ({count})" for name, count in counts.items())
        yield f"Neither quantized nor adapted, since {reason}: {modules}."
    if meta.targets and meta.quantized_experts and not meta.target_parameters:
        ends = {".".join(path.rsplit(".", 3)[1:]) for path in meta.quantized_experts}
        yield (
            "The routed experts have no adapter, which they get with --lora_target_parameters "
            f"{','.join(sorted(ends))}."
        )
    missing = " ".join(missing_kernels(meta.model))
    if missing:
        yield (
            "Convolutions and states run in plain PyTorch, which is much slower on a GPU. Install "
            f"the kernels: pip install {missing}"
        )
    if config.kernels != "plain":
        yield from padding_notes(meta.model, plan.machine.device, plan.precision.compute_dtype)
    for path, (module, rows) in with_token_rows(meta.model).items():
        # value, gradient and two moments in float32
        needs = format_bytes(16 * rows.trainable_tokens_delta.numel())
        yield (
            f"New tokens: {len(rows.indices)} of the {len(module.weight):,} rows of {path} train "
            f"({needs} with AdamW's state)."
        )
    towers = meta.parts.towers
    if towers:
        parameters = [each for tower in towers.values() for each in tower.parameters()]
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        size = format_bytes(sum(parameter.nbytes for parameter in frozen))
        names = ", ".join(towers)
        adapters = meta.parts.tower_adapters
        learned = f"train by {len(adapters)} adapters" if adapters else "do not train"
        yield f"The parts for images are sharded as they are and {learned} ({names}: {size})."


def build_plan(
    config: TrainConfig,
    machine: Machine,
    folder: Path,
    model_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> ModelPlan:
    """Plan a model with a given configuration and tokenizer, to which new tokens are added.

    Raises:
        UserError: the options, the adapter to start from or the quantizer do not fit the model.
    """
    train_type = config.kind
    device = machine.ranks.device
    precision = _precision_of(config, machine)
    # Before the model is built: transformers would build modules of the files' quantizer, and a
    # head as config.json says, whatever the files have.
    packed, stored = take_formats(config, model_config, folder)
    was_tied = settle_head(
        model_config, folder, stored, packed=packed, trust_remote_code=config.trust_remote_code
    )
    tokenizer, new_tokens = with_new_tokens(config, model_config, tokenizer)
    if new_tokens and was_tied:
        raise _ties_rows(config.model_name)
    layers = layer_options(config, model_config, packed)
    meta = build_model(
        model_config,
        train_type,
        precision,
        device,
        layers,
        attn_implementation="auto" if machine.is_elsewhere else config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    if new_tokens:
        add_token_rows(meta.model, new_tokens, looks_up=meta.parts.looks_up)
    if config.adapter:
        start = read_adapter(Path(config.adapter).expanduser())
        name = hub.public_name(config.model_name)
        check_fits(start, meta.model, model_name=name, declared_base=config.base_name)
    if train_type.quantizer:
        check_quantized_share(meta.parts, allow_unquantized=config.allow_unquantized)
    kernel = choose(
        meta.model.config, precision.compute_dtype, device, requested=config.attn_implementation
    )
    check_context(meta.parts, kernel, config.context_size)
    return ModelPlan(
        machine=machine,
        precision=precision,
        folder=folder,
        config=model_config,
        tokenizer=tokenizer,
        meta=meta,
        documents=None if config.batching == "padded" else kernel,
        packed=packed,
        stored=stored,
        adapter=_adapter_config(config, model_config, meta, layers.lora, new_tokens),
    )


def _precision_of(config: TrainConfig, machine: Machine) -> Precision:
    """The number formats of the planned devices."""
    # GPUs that are elsewhere cannot be asked. All since Ampere (2020) compute in bf16.
    if machine.is_elsewhere and config.precision == "auto":
        return PRECISIONS[choose_precision("bf16", machine.ranks.device)]
    return PRECISIONS[choose_precision(config.precision, machine.ranks.device)]


def _adapter_config(
    config: TrainConfig,
    model_config: PretrainedConfig,
    meta: MetaModel,
    lora: LoraOptions,
    new_tokens: NewTokens | None,
) -> LoraConfig | None:
    """PEFT's configuration of the adapter that the run saves; None where a whole model is saved."""
    if not config.kind.adapter:
        return None
    adapter = peft_config(
        meta.modules,
        meta.targets,
        meta.target_parameters,
        config.kind.adapter,
        lora,
        base_model=config.base_name or hub.public_name(config.model_name),
        model_config=model_config,
    )
    if meta.parts.tower_adapters:
        # Names alone reach the decoder only, where an adapter is trained further.
        by_weight = adapter.target_parameters or ()
        adapter.target_modules = {
            path for path in meta.targets if f"{path}.weight" not in by_weight
        }
    if new_tokens:
        # PEFT trains these rows of each module, and saves no other rows.
        adapter.trainable_token_indices = {
            path: [*new_tokens.ids] for path in with_token_rows(meta.model)
        }
    return adapter


def _ties_rows(name: str) -> UserError:
    return UserError(
        f"--add_tokens: {name} has a head of its own, and its config.json ties it to the "
        "embeddings, so PEFT would load one set of rows for both. "
        "Set tie_word_embeddings to false in config.json."
    )


def take_formats(
    config: TrainConfig, model_config: PretrainedConfig, folder: Path
) -> tuple[PublishedFormat | None, PublishedFormat | None]:
    """Take the quantization of a model's weight files out of its configuration.

    Returns:
        The format of files that are trained on as they are, and the format of files that are
        decoded as they are read; at least one is None.
    Raises:
        UserError: the format is unknown, or the train type trains other models.
    """
    packed = take_format(model_config, config.model_name, folder)
    kind = TRAIN_TYPES[config.train_type]
    if packed is None or not packed.is_kept(kind.quantizer, config.quant_type):
        if config.merge_aware:
            raise UserError(
                "--merge_aware rounds to the format of the base's files, and model_name "
                f"{config.model_name} is not in MXFP4, NVFP4, FP8 or bitsandbytes' 4 bits. "
                f"Quantize it first: fsdp-qlora quantize {config.model_name} --format nvfp4 "
                "--out DIR."
            )
        return None, packed
    if kind.quantizer != BITSANDBYTES or kind.trains_new_blocks:
        raise UserError(
            f"model_name {config.model_name} is quantized to 4 bits, which train_type "
            f"{config.train_type} cannot train. Use --train_type qlora, or give the model "
            "with 16- or 32-bit weights."
        )
    return packed, None


def with_new_tokens(
    config: TrainConfig, model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedTokenizerBase, NewTokens | None]:
    """The tokenizer with the tokens of --add_tokens or of --adapter, and these tokens.

    The configuration's vocabulary grows by them.
    """
    folder = Path(config.adapter or "").expanduser()
    tokens = None
    adapter_ids = token_ids(folder, read_config(folder)) if config.adapter else None
    if adapter_ids:
        # The adapter's rows belong to the ids of its own tokenizer.
        if (folder / "tokenizer_config.json").is_file():
            tokenizer = load_tokenizer(
                folder, str(folder), trust_remote_code=config.trust_remote_code
            )
        tokens = NewTokens(adapter_ids)
        if not {*add_tokens(tokenizer, config.add_tokens, 0)[1].ids} <= {*adapter_ids}:
            raise UserError(
                f"--adapter {folder} has other new tokens than --add_tokens. Leave out "
                "--add_tokens."
            )
    elif config.add_tokens:
        tokenizer, tokens = add_tokens(
            tokenizer, config.add_tokens, model_config.get_text_config().vocab_size
        )
    if tokens:
        tokens.grow(model_config)
    return tokenizer, tokens


def layer_options(
    config: TrainConfig, model_config: PretrainedConfig, packed: PublishedFormat | None = None
) -> LayerOptions:
    """How layers are quantized and adapted.

    Args:
        packed: the format of weight files that are trained on as they are.
    """
    train_type = config.kind
    reference = config.objective_row.reference_beside(config)
    return LayerOptions(
        lora=config.pick(
            LoraOptions,
            prefix="lora_",
            init=config.init_lora_weights,
            keeps_start=reference is Reference.START,
            rank_pattern={name: int(value) for name, value in pairs(config.rank_pattern)},
            alpha_pattern={name: float(value) for name, value in pairs(config.alpha_pattern)},
        ),
        quantizer=quantizer_options(config, train_type.quantizer),
        prequantized=packed,
        new_blocks=new_blocks(model_config, config.model_name)
        if train_type.trains_new_blocks
        else (),
    )


def quantizer_options(config: TrainConfig, quantizer: str | None) -> dict[str, Any]:
    """The quantizer's own options."""
    options = {name: getattr(config, name) for name in names_marked(of_quantizer(quantizer))}
    # auto is the type of quantized weight files, where there are some; other weights become nf4.
    if options.get("quant_type") == "auto":
        options["quant_type"] = "nf4"
    return options


def check_quantized_share(parts: ModelParts, *, allow_unquantized: bool) -> None:
    """Refuse a quantized base if too much of its decoder blocks would stay in 16 bits.

    Raises:
        UserError: less than 90% of the decoder blocks' parameters are quantized, and that is not
            allowed.
    """
    counts = count_parameters(parts)
    share = counts["quantized"] / counts["in_blocks"]
    if share >= _MIN_QUANTIZED_SHARE or allow_unquantized:
        return
    plain = {
        canonical_name(f"{path}.{name}"): parameter.numel()
        for path, module in parts.blocks[-1].named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if not isinstance(module, QuantizedWeight) and not parameter.requires_grad
    }
    largest = ", ".join(sorted(plain, key=lambda name: -plain[name])[:2])
    raise UserError(
        f"Only {100 * share:.1f}% of the parameters of {type(parts.model).__name__}'s decoder "
        "blocks can be quantized; the rest would stay in 16 bits or more, most of it in "
        f"{largest}. If there is memory for that, give --allow_unquantized true."
    )
