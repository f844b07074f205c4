"""Initial values of adapters, from the weights in the files or from a pretrained adapter."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.distributed.process_group import raise_on_all_ranks
from fsdp_qlora.distributed.shards import own_rows, store_rows
from fsdp_qlora.model.adapters import first_values
from fsdp_qlora.model.adapters.first_values import adapted_weights
from fsdp_qlora.model.adapters.insert import adapter_parameters, full_parameters
from fsdp_qlora.model.adapters.lora import LoraLinear
from fsdp_qlora.model.adapters.peft_folder import PretrainedAdapter, tensor_differences
from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.sharding.loading.weight_files import Weights
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.hub import is_hub_name

log = logging.getLogger("fsdp_qlora")


@torch.no_grad()
def decompose_weights(
    model: nn.Module,
    weights: Weights,
    mesh: DeviceMesh,
    device: torch.device,
) -> None:
    """Initialize adapters by LoftQ from the weights in the files, before the weights are loaded.

    Collective. The layers are distributed over the ranks: each rank reads one whole weight at a
    time and broadcasts A and B.
    """
    layers = list(adapted_weights(model).items())
    size = dist.get_world_size()
    rank = dist.get_rank()
    for start in range(0, len(layers), size):
        group = layers[start : start + size]
        factors: tuple[torch.Tensor, ...] = ()
        if rank < len(group):
            name, layer = group[rank]
            weight = weights.read_whole(name).to(device)
            factors = _decompose(weight, layer)
            # Freed before the broadcasts: a whole weight is large beside what a rank holds.
            del weight
        # Every rank takes part in all broadcasts of the group, in the order of its layers, and also
        # in the last group, where a rank beyond its layers has computed nothing.
        for owner, (_, layer) in enumerate(group):
            for index, parameter in enumerate((layer.lora.lora_A.weight, layer.lora.lora_B.weight)):
                if owner == rank:
                    whole = factors[index]
                else:
                    whole = torch.empty(parameter.shape, device=device)
                dist.broadcast(whole, src=owner)
                first, last = own_rows(parameter, mesh)
                store_rows(parameter, whole[first:last])
    log.info("Initialized %d adapters from the model's weights (loftq).", len(layers))


def _decompose(weight: torch.Tensor, layer: LoraLinear) -> first_values.Factors:
    """The quantization error's factors (LoftQ, Li et al. 2023).

    With one iteration, PEFT's default, the base is the quantized weight itself, which anyone can
    reproduce.
    """
    assert isinstance(layer.base_layer, QuantizedWeight)
    # In float32: the error is the small difference of two numbers of 16 bits.
    error = weight.float() - layer.base_layer.quantize_whole(weight).float()
    lora_A, lora_B = first_values.principal_factors(
        error, layer.lora.lora_A.out_features, layer.lora.scaling
    )
    # NCCL broadcasts contiguous tensors only.
    return lora_A.contiguous(), lora_B.contiguous()


# --- a pretrained adapter: each rank reads its own rows ---


def check_fits(
    adapter: PretrainedAdapter, model: nn.Module, *, model_name: str, declared_base: str | None
) -> None:
    """Refuse an adapter whose base has another name on the hub, or whose tensors do not fit.

    declared_base: the option --base_name.
    """
    base = adapter.base_name
    names = (model_name.lower(), (declared_base or "").lower())
    if is_hub_name(base) and is_hub_name(model_name) and base.lower() not in names:
        raise UserError(
            f"--adapter {adapter.folder} was trained on {base}, and --model_name is {model_name}. "
            "If the weights are the same, in other bits or under another name, give --base_name "
            f"{base}."
        )
    shapes = {name: tuple(parameter.shape) for name, parameter in adapter_parameters(model)}
    shapes |= {name: tuple(parameter.shape) for name, parameter in full_parameters(model)}
    differences = tensor_differences(adapter.shapes, shapes)
    if differences:
        raise UserError(
            f"--adapter {adapter.folder} does not fit this model and these options (its base is "
            f"{base or 'not named'}):\n  " + "\n  ".join(differences)
        )


@torch.no_grad()
def fill_from(
    model: nn.Module, adapter: PretrainedAdapter, mesh: DeviceMesh, device: torch.device
) -> None:
    """Copy the values of a pretrained adapter to the adapter of a loaded model. Collective."""
    parameters = [*adapter_parameters(model), *full_parameters(model)]
    # Each rank reads the file by itself, so one may fail alone: all end with its error.
    with raise_on_all_ranks(UserError, device):
        try:
            with safe_open(adapter.weights, framework="pt") as file:
                for name, parameter in parameters:
                    store_rows(parameter, _rows(file, adapter, name, parameter, mesh))
        except (OSError, SafetensorError, UserError) as error:
            raise UserError(
                f"--adapter {adapter.folder} cannot be used: {error}. Restore the file."
            ) from error
    log.info("The adapter starts from %s (%d tensors).", adapter.folder, len(parameters))


def _rows(
    file: Any, adapter: PretrainedAdapter, name: str, parameter: torch.Tensor, mesh: DeviceMesh
) -> torch.Tensor:
    """This rank's rows of a tensor, float32."""
    first, last = own_rows(parameter, mesh)
    rows = file.get_slice(adapter.names[name])[first:last].float()
    if not rows.isfinite().all():
        raise UserError(f"{name} has values that are not finite")
    return rows
