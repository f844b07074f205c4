"""Builds the model on the meta device, with quantized and adapted layers for the train type."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fsdp_qlora.config.train_types import TrainType
from fsdp_qlora.model.adapters.find_groups import group_linears
from fsdp_qlora.model.adapters.first_values import check_init
from fsdp_qlora.model.adapters.insert import (
    LoraOptions,
    add_adapters,
    add_experts_lora,
    check_patterns,
    keep_start,
    select_parameters,
    select_targets,
    train_in_full,
)
from fsdp_qlora.model.adapters.peft_config import check_fits_peft
from fsdp_qlora.model.architecture.fused import fuse_modules
from fsdp_qlora.model.architecture.meta_model import build_meta_model
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.model.architecture.rope import compute_rope_by_row
from fsdp_qlora.model.architecture.rotary_binding import bind_rotary
from fsdp_qlora.model.architecture.structure import block_linears, read_directly
from fsdp_qlora.model.architecture.token_mixers import keep_documents_apart
from fsdp_qlora.model.architecture.tower_inputs import keep_documents_from
from fsdp_qlora.model.architecture.towers import tower_linears
from fsdp_qlora.model.experts import quantizable_weights, route_experts, router_linears
from fsdp_qlora.model.formats.published import PublishedFormat
from fsdp_qlora.model.formats.quantized_layers import formats_of_layers
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.model.quantizers.routed import experts_forward
from fsdp_qlora.model.quantizers.table import quantize_layers
from fsdp_qlora.utils.errors import UserError

_ROUTED = "fsdp_qlora"  # the name under which transformers calls our function for experts


@dataclass(frozen=True)
class LayerOptions:
    """Options for the layers of a model. The train type decides which of them apply.

    lora: options of the adapter. quantizer: arguments of the quantizer's layers; empty without a
    quantizer. prequantized: quantization of the weight files, if any; it overrides which layers are
    quantized, and how. new_blocks: decoder blocks that stay unquantized and train in full, for
    train types that train only these.
    """

    lora: LoraOptions
    quantizer: Mapping[str, Any] = field(default_factory=dict)
    prequantized: PublishedFormat | None = None
    new_blocks: Sequence[int] = ()


@dataclass(frozen=True)
class MetaModel:
    """A model without weights, and the paths of the layers that are quantized, adapted or trained.

    modules: all. quantized: linear layers to quantize. quantized_experts: 3-D expert parameters to
    quantize, if the quantizer supports it. targets, target_parameters: linear layers and expert
    parameters with an adapter. trained: blocks that train in full. left_out: layers that are
    neither quantized nor adapted, and why. formats: of the layers to quantize, if they are
    quantized in the weight files already.
    """

    parts: ModelParts
    modules: list[str]
    quantized: list[str]
    quantized_experts: list[str]
    targets: list[str]
    target_parameters: list[str]
    trained: list[str]
    left_out: Mapping[str, str]
    formats: Mapping[str, PublishedFormat]

    @property
    def model(self) -> PreTrainedModel:
        return self.parts.model


def build_model(
    config: PretrainedConfig,
    train_type: TrainType,
    precision: Precision,
    device: torch.device,
    layers: LayerOptions,
    *,
    attn_implementation: str,
    trust_remote_code: bool = False,
) -> MetaModel:
    """Build the model on the meta device, with quantized and adapted layers for the train type.

    Trainable parameters are float32; frozen ones have the precision's dtypes.
    """
    trains_all = train_type.trains == "all"
    # transformers' own functions multiply by all experts' weights at once, which would all have to
    # be decoded.
    routes = bool(train_type.quantizer or layers.lora.target_parameters)
    # before the model is built, which refuses names that it does not know
    ALL_EXPERTS_FUNCTIONS.register(_ROUTED, experts_forward)
    model = build_meta_model(
        config,
        attn_implementation=attn_implementation,
        dtype=torch.float32 if trains_all else precision.frozen_dtype,
        compute_dtype=precision.compute_dtype,
        device=device,
        experts_implementation=_ROUTED if routes else None,
        trust_remote_code=trust_remote_code,
    )
    # They recognize a model's own modules by computing with small copies of them, so they come
    # before quantized and adapted layers, which would not be recognized.
    route_experts(model, device)
    fuse_modules(model)
    bind_rotary(model)
    keep_documents_apart(model)
    compute_rope_by_row(model)
    meta = _choose(model, config, train_type, layers)
    keep_documents_from(meta.parts.towers.values())
    if train_type.quantizer:
        _quantize(meta, train_type.quantizer, layers, precision.compute_dtype)
    if train_type.adapter:
        _adapt(meta, train_type.adapter, layers)
    # Text does not pass through towers, so they would get no gradient.
    if trains_all:
        for tower in meta.parts.towers.values():
            tower.to(precision.frozen_dtype).requires_grad_(False)
    if train_type.trains_new_blocks:
        model.requires_grad_(False)
        for path in meta.trained:
            model.get_submodule(path).to(torch.float32).requires_grad_(True)
    return meta


def _choose(
    model: PreTrainedModel, config: PretrainedConfig, train_type: TrainType, layers: LayerOptions
) -> MetaModel:
    """Choose the layers to quantize, adapt and train.

    Raises:
        UserError: the model has no such layers, or the requested adapter is not possible.
    """
    linears, experts = quantizable_weights(model)
    if not linears:
        raise UserError(
            f"{type(model).__name__} has no linear layers in its decoder blocks, so nothing can be "
            "quantized or adapted. Choose a model of another family."
        )
    towers = tower_linears(model)
    targets, target_parameters = _select_targets(
        linears, experts, towers, train_type, layers.lora, config
    )
    modules = [path for path, _ in model.named_modules()]
    parts = ModelParts(model)
    _check_blocks_share_nothing(parts.blocks, config)
    if parts.adds_tokens:
        raise UserError(
            f"The {config.model_type} model cannot be trained here: it puts its own tokens before "
            "a row's, and supports only padding on the left. Choose a model of another family."
        )
    new = {parts.blocks[index] for index in layers.new_blocks if train_type.trains_new_blocks}
    trained = [path for path, module in model.named_modules() if module in new]
    # with the dot, so that block 1 does not stand for blocks 10 to 19, too
    inside = tuple(f"{path}." for path in trained)
    frozen = [path for path in linears if not path.startswith(inside)]
    frozen_experts = [path for path in experts if not path.startswith(inside)]
    formats: dict[str, PublishedFormat] = {}
    if layers.prequantized:
        formats = formats_of_layers(model, layers.prequantized, frozen, frozen_experts)
        frozen = [path for path in frozen if path in formats]
        frozen_experts = [path for path in frozen_experts if path in formats]
    left_out: dict[str, str] = {}
    if train_type.quantizer or train_type.adapter:
        routers = router_linears(model)
        # Routers are left out on purpose (`router_linears`), which needs no reason in the log.
        for path in block_linears(model, by_class_alone=True):
            if path not in routers:
                left_out[path] = "they subclass nn.Linear and compute something else"
        left_out |= dict.fromkeys(read_directly(model), "other modules read their weights")
    return MetaModel(
        parts=parts,
        modules=modules,
        quantized=frozen,
        quantized_experts=frozen_experts,
        targets=targets,
        target_parameters=target_parameters,
        trained=trained,
        left_out=left_out,
        formats=formats,
    )


def _quantize(
    meta: MetaModel, quantizer: str, layers: LayerOptions, compute_dtype: torch.dtype
) -> None:
    """Replace the layers to quantize.

    Weight files that are quantized already determine the format of each.
    """
    # Several groups of layers may have equal formats, which are told by their identity.
    for published in {id(each): each for each in meta.formats.values()}.values() or [None]:
        linears = [path for path in meta.quantized if meta.formats.get(path) is published]
        experts = [path for path in meta.quantized_experts if meta.formats.get(path) is published]
        name = quantizer
        options = dict(layers.quantizer)
        stored = published.layer_options() if published else None
        if published and published.quantizer and stored is not None:
            name = published.quantizer
            options = dict(stored)
        options["compute_dtype"] = compute_dtype
        quantize_layers(meta.model, linears, experts, name, **options)


def _check_blocks_share_nothing(blocks: nn.ModuleList, config: PretrainedConfig) -> None:
    # Each block is an FSDP2 group of its own, and a parameter can be in one group only.
    first: dict[nn.Parameter, int] = {}
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            if first.setdefault(parameter, index) != index:
                raise UserError(
                    f"The {config.model_type} model cannot be trained here: its blocks "
                    f"{first[parameter]} and {index} share weights, so they cannot be sharded and "
                    "adapted block by block. Choose a model of another family."
                )


def _select_targets(
    linears: list[str],
    experts: list[str],
    towers: Mapping[str, Sequence[str]],
    train_type: TrainType,
    lora: LoraOptions,
    config: PretrainedConfig,
) -> tuple[list[str], list[str]]:
    """The linear layers and expert parameters that get an adapter.

    Raises:
        UserError: the options do not fit them.
    """
    if not train_type.adapter:
        return [], []
    targets = select_targets(linears, lora.target_modules, config.model_type, towers)
    if train_type.adapter != "lora" and not {*targets} <= {*linears}:
        raise UserError(
            "lora_target_modules: layers that compute images can have plain LoRA, not an adapter "
            f"of kind {train_type.adapter}. Leave them out, or choose a --train_type with LoRA."
        )
    if lora.merge_aware and not {*targets} <= {*linears}:
        raise UserError(
            "lora_target_modules: merge_aware is for layers of the decoder blocks, and layers that "
            "compute images are among these. Leave them out."
        )
    check_patterns("rank_pattern", lora.rank_pattern, targets)
    check_patterns("alpha_pattern", lora.alpha_pattern, targets)
    check_fits_peft(train_type.adapter, targets, lora, config)
    return targets, select_parameters(experts, lora.target_parameters)


def _adapt(meta: MetaModel, adapter: str, layers: LayerOptions) -> None:
    """Freeze the model except for the adapters and the requested embeddings and head."""
    add_adapters(meta.model, adapter, meta.targets, layers.lora)
    add_experts_lora(meta.model, meta.target_parameters, layers.lora)
    train_in_full(meta.model, layers.lora.modules_to_save)
    # `check_init` reads the shapes of the adapters, so it comes after they have been added.
    if layers.lora.keeps_start:
        keep_start(meta.model)
    check_init(meta.model, layers.lora.init, prequantized=layers.prequantized is not None)
    group_linears(meta.model)
