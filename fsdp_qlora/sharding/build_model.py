"""A model without weights, its layers quantized and adapted as the train type says."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_qlora.adapters.first_values import check_init
from fsdp_qlora.adapters.insert import (
    LoraOptions,
    add_adapters,
    add_experts_lora,
    train_in_full,
)
from fsdp_qlora.adapters.peft_format import check_fits_peft
from fsdp_qlora.adapters.targets import check_patterns, select_parameters, select_targets
from fsdp_qlora.errors import UserError
from fsdp_qlora.models import build_meta_model, find_blocks
from fsdp_qlora.precision import Precision
from fsdp_qlora.quantizers.bnb_4bit_format import Bnb4bitSettings
from fsdp_qlora.quantizers.experts import quantizable_weights
from fsdp_qlora.quantizers.table import quantize_experts, quantize_linears
from fsdp_qlora.train_types import TrainType

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True)
class MetaModel:
    """A model without weights, and which of its layers were changed.

    linears: paths of all its linear layers. targets: those with an adapter.
    experts: paths of all 3-D expert parameters. target_parameters: those with an adapter.
    """

    model: PreTrainedModel
    linears: list[str]
    targets: list[str]
    experts: list[str]
    target_parameters: list[str]


def build_model(
    config: PretrainedConfig,
    train_type: TrainType,
    precision: Precision,
    device: torch.device,
    *,
    attn_implementation: str,
    quantizer_options: Mapping[str, Any],
    lora: LoraOptions,
    prequantized: Bnb4bitSettings | None = None,
    trust_remote_code: bool = False,
    new_blocks: Sequence[int] = (),
) -> MetaModel:
    """Build the model on the meta device with its layers quantized and adapted as the train type says.

    Trainable parameters are float32; frozen ones have the precision's dtypes.

    Args:
        quantizer_options: arguments of the quantizer's layers; empty without a quantizer.
        prequantized: how the weight files are quantized already; it then decides which layers are, and how.
        trust_remote_code: build with code that came with the configuration.
        new_blocks: decoder blocks that are not quantized and train in full, where the train type trains these alone.
    """
    dtype = torch.float32 if train_type.trains == "all" else precision.frozen_dtype
    model = build_meta_model(
        config,
        attn_implementation=attn_implementation,
        dtype=dtype,
        compute_dtype=precision.compute_dtype,
        device=device,
        # The other implementations multiply with all experts' weights at once, so they would need them decoded.
        experts_implementation="eager" if train_type.quantizer or lora.target_parameters else None,
        trust_remote_code=trust_remote_code,
    )
    everywhere = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    linears, experts = quantizable_weights(model)
    if not linears:
        raise UserError(
            f"{type(model).__name__} has no linear layers in its decoder blocks, so nothing can be quantized or "
            "adapted. Choose a model of another family."
        )
    targets, target_parameters = _select_targets(linears, experts, train_type, lora, config)
    # A model that is in 4 bits already: its settings, and what it left alone stays so; bitsandbytes leaves experts.
    quantized, quantized_experts = linears, experts
    if prequantized:
        quantizer_options = {"quant_type": prequantized.quant_type, "double_quant": prequantized.double_quant}
        quantized = [path for path in linears if prequantized.is_quantized(path)]
        quantized_experts = experts if prequantized.has_experts else []
    if train_type.trains_new_blocks:
        new = nn.ModuleList(find_blocks(model)[index] for index in new_blocks)
        inside = {id(module) for module in new.modules()}
        quantized = [path for path in quantized if id(model.get_submodule(path)) not in inside]
        quantized_experts = [
            path for path in quantized_experts if id(model.get_submodule(path.rpartition(".")[0])) not in inside
        ]
        model.requires_grad_(False)
        new.to(torch.float32).requires_grad_(True)
    if train_type.quantizer:
        options = {**quantizer_options, "compute_dtype": precision.compute_dtype}
        quantize_linears(model, quantized, train_type.quantizer, **options)
        quantize_experts(model, quantized_experts, train_type.quantizer, **options)
    if train_type.adapter:
        add_adapters(model, train_type.adapter, targets, lora)
        add_experts_lora(model, target_parameters, lora)
        train_in_full(model, lora.modules_to_save)
        check_init(model, lora.init, prequantized=prequantized is not None)
    return MetaModel(model, everywhere, targets, experts, target_parameters)


def _select_targets(
    linears: list[str], experts: list[str], train_type: TrainType, lora: LoraOptions, config: PretrainedConfig
) -> tuple[list[str], list[str]]:
    """The linear layers and the expert parameters that get an adapter, when all that is asked of them is possible."""
    if not train_type.adapter:
        return [], []
    targets = select_targets(linears, lora.target_modules, config.model_type)
    check_patterns("rank_pattern", lora.rank_pattern, targets)
    check_patterns("alpha_pattern", lora.alpha_pattern, targets)
    check_fits_peft(train_type.adapter, targets, lora, config)
    return targets, select_parameters(experts, lora.target_parameters)
