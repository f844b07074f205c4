"""From a checkpoint to a sharded model, in this order: quantize, adapt, checkpoint activations, shard, load."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_qlora.adapters import adapter_modules, add_experts_lora, add_lora, select_parameters, select_targets
from fsdp_qlora.distributed import SHARDING_STRATEGIES
from fsdp_qlora.errors import UserError
from fsdp_qlora.experts import expert_parameters, router_linears
from fsdp_qlora.models import block_linears, build_meta_model, find_blocks, has_tied_embeddings
from fsdp_qlora.packed import Bnb4bitSettings
from fsdp_qlora.precision import Precision
from fsdp_qlora.quantize import quantize_experts, quantize_linears
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
    lora_rank: int,
    lora_alpha: float,
    lora_dropout: float,
    lora_target_modules: list[str],
    lora_target_parameters: Sequence[str] = (),
    prequantized: Bnb4bitSettings | None = None,
    new_blocks: Sequence[int] = (),
) -> MetaModel:
    """Build the model on the meta device with its layers quantized and adapted as the train type says.

    Trainable parameters are float32; frozen ones have the precision's dtypes.

    Args:
        quantizer_options: those of the train type's quantizer, as QUANTIZER_OPTIONS names them.
        prequantized: how the checkpoint is quantized already; it then decides which layers are, and how.
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
        experts_implementation="eager" if train_type.quantizer or lora_target_parameters else None,
    )
    everywhere = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    routers = router_linears(model)
    linears = [path for path in block_linears(model) if path not in routers]
    if not linears:
        raise UserError(
            f"{type(model).__name__} has no linear layers in its decoder blocks, so nothing can be quantized or "
            "adapted. Choose a model of another family."
        )
    experts = expert_parameters(model)
    targets = select_targets(linears, lora_target_modules, config.model_type) if train_type.adapter else []
    target_parameters = select_parameters(experts, lora_target_parameters)
    # A model that bitsandbytes quantized: its settings, and what it left alone stays so, experts too.
    quantized, quantized_experts = linears, experts
    if prequantized:
        quantizer_options = {"quant_type": prequantized.quant_type, "double_quant": prequantized.double_quant}
        quantized, quantized_experts = [path for path in linears if prequantized.is_quantized(path)], []
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
    if train_type.adapter == "lora":
        add_lora(model, targets, rank=lora_rank, alpha=lora_alpha, dropout=lora_dropout)
        add_experts_lora(model, target_parameters, rank=lora_rank, alpha=lora_alpha)
    return MetaModel(model, everywhere, targets, experts, target_parameters)


def checkpoint_activations(model: nn.Module, *, offload: bool) -> None:
    """Keep only each block's input for the backward pass, on the CPU with `offload`; recompute the rest."""
    blocks = find_blocks(model)
    for index, block in enumerate(blocks):
        block = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        blocks[index] = offload_wrapper(block) if offload else block


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    sharding_strategy: str,
    precision: Precision,
    cpu_offload: bool,
) -> None:
    """Apply FSDP2: per block one group of adapters and one of the rest, then embeddings, head and root.

    The adapters stay gathered from forward to backward: they are small, and so CPU offload and the second
    gather move frozen bytes only.
    """
    _, reshard_after_forward = SHARDING_STRATEGIES[sharding_strategy]
    policy = MixedPrecisionPolicy(
        param_dtype=precision.param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()

    def shard(modules: nn.Module | list[nn.Module], *, reshard: bool | None) -> None:
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    for block in find_blocks(model):
        if adapters := adapter_modules(block):
            fully_shard(adapters, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        shard(block, reshard=reshard_after_forward)
    head = model.get_output_embeddings()
    if head is not None and not has_tied_embeddings(model):
        shard(model.get_input_embeddings(), reshard=reshard_after_forward)
        # Its backward pass comes straight after its forward pass.
        shard(head, reshard=False)
    # None: FSDP2 keeps the root gathered after its forward, since its backward comes next.
    shard(model, reshard=None if reshard_after_forward else False)


def materialize(model: PreTrainedModel, device: torch.device, *, cpu_offload: bool) -> None:
    """Give the sharded meta parameters uninitialized memory: offloaded ones on the CPU, others on `device`.

    Buffers hold real values since construction; they are moved, not emptied. Afterwards the shards are where
    they stay: padded where a split is uneven, pinned where they are offloaded.
    """
    on_device = {id(module) for adapter in adapter_modules(model) for module in adapter.modules()}
    # Children first: an FSDP2 module settles its group's shards in its own to_empty, when all of them have memory.
    for module in reversed(list(model.modules())):
        buffers = {name: buffer.to(device) for name, buffer in module.named_buffers(recurse=False)}
        offloaded = cpu_offload and id(module) not in on_device
        module.to_empty(device="cpu" if offloaded else device, recurse=False)
        for name, buffer in buffers.items():
            setattr(module, name, buffer)
    model.tie_weights()


def fsdp_modules(model: nn.Module) -> Iterable[FSDPModule]:
    """Every module that is, or is in, an FSDP2 group."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard_all(model: nn.Module) -> None:
    """Free all gathered weights, so that `model.parameters()` are shards again (after a forward alone)."""
    for module in fsdp_modules(model):
        module.reshard()


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass reduces gradients over ranks, or adds them up locally."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(enabled)
