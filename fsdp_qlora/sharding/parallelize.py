"""From a checkpoint to a sharded model, in this order: quantize, adapt, checkpoint activations, shard, load."""

import logging
import math
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
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_qlora.adapters.first_values import check_init
from fsdp_qlora.adapters.insert import (
    LoraOptions,
    adapter_modules,
    add_adapters,
    add_experts_lora,
    magnitudes,
    train_in_full,
)
from fsdp_qlora.adapters.peft_format import check_fits_peft
from fsdp_qlora.adapters.targets import check_patterns, select_parameters, select_targets
from fsdp_qlora.distributed import SHARDING_STRATEGIES, shard_bounds, shard_rank, shard_size
from fsdp_qlora.errors import UserError
from fsdp_qlora.models import build_meta_model, find_blocks, has_tied_embeddings
from fsdp_qlora.precision import Precision
from fsdp_qlora.quantizers.bnb_4bit_format import Bnb4bitSettings
from fsdp_qlora.quantizers.experts import quantizable_weights
from fsdp_qlora.quantizers.table import quantize_experts, quantize_linears
from fsdp_qlora.sharding.host_arena import split_arena
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
        quantizer_options: those of the train type's quantizer, as QUANTIZER_OPTIONS names them.
        prequantized: how the checkpoint is quantized already; it then decides which layers are, and how.
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
    gather move frozen bytes only. DoRA's magnitudes are a group of their own, which is gathered in fp32.
    """
    _, reshard_after_forward = SHARDING_STRATEGIES[sharding_strategy]
    policy = MixedPrecisionPolicy(
        param_dtype=precision.param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()

    def shard(modules: nn.Module | list[nn.Module], *, reshard: bool | None) -> None:
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    for block in find_blocks(model):
        if in_fp32 := magnitudes(block):
            keep = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
            fully_shard(in_fp32, mesh=mesh, reshard_after_forward=False, mp_policy=keep)
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
    """Give the sharded meta parameters memory: offloaded ones in one arena on the CPU, others on `device`.

    Buffers hold real values since construction; they are moved, not emptied. Afterwards the shards are where
    they stay: padded where a split is uneven, pinned where they are offloaded.
    """
    on_device = {id(module) for adapter in adapter_modules(model) for module in adapter.modules()}
    modules = [module for module in model.modules() if cpu_offload and id(module) not in on_device]
    offloaded = {id(parameter): parameter for module in modules for parameter in module.parameters(recurse=False)}
    places = _offloaded_places(offloaded, pinned=device.type == "cuda") if offloaded else {}

    def place(parameter: torch.Tensor) -> torch.Tensor:
        return places[id(parameter)] if id(parameter) in places else torch.empty_like(parameter, device=device)

    # Children first: an FSDP2 module settles its group's shards when it is applied to, and all of them have memory.
    for module in reversed(list(model.modules())):
        buffers = {name: buffer.to(device) for name, buffer in module.named_buffers(recurse=False)}
        module._apply(place, recurse=False)
        for name, buffer in buffers.items():
            setattr(module, name, buffer)
    model.tie_weights()
    for parameter in offloaded.values():
        _leave_out_padding(parameter)


def _offloaded_places(parameters: Mapping[int, nn.Parameter], *, pinned: bool) -> dict[int, DTensor]:
    """For each sharded parameter one whose local tensor lies in a common arena and has FSDP2's padding.

    With the padding FSDP2 takes the local tensor as it is; otherwise it would make a padded copy.
    """
    shapes = {key: (_padded_rows(parameter), *parameter.shape[1:]) for key, parameter in parameters.items()}
    sizes = [math.prod(shape) * parameters[key].element_size() for key, shape in shapes.items()]
    places = {}
    for (key, shape), part in zip(shapes.items(), split_arena(sizes, pinned=pinned), strict=True):
        parameter = parameters[key]
        assert isinstance(parameter, DTensor)
        places[key] = DTensor.from_local(
            part.view(parameter.dtype).view(shape),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return places


def _padded_rows(parameter: torch.Tensor) -> int:
    """What FSDP2 gathers from every rank: as many rows as the first one has."""
    assert isinstance(parameter, DTensor)
    return shard_bounds(parameter.shape[0], rank=0, size=shard_size(parameter.device_mesh))[1]


@torch.no_grad()
def _leave_out_padding(parameter: torch.Tensor) -> None:
    """Make the local tensor of a shard the rows that are its own; FSDP2 keeps its own view with the padding."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    first, last = shard_bounds(parameter.shape[0], rank=shard_rank(mesh), size=shard_size(mesh))
    parameter._local_tensor = parameter._local_tensor[: last - first]  # as FSDP2 does it


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
