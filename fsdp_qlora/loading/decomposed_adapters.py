"""Initial values of adapters computed from the weights in the files, before the weights are loaded."""

import logging
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.adapters import first_values
from fsdp_qlora.adapters.first_values import adapted_weights, reduces_base
from fsdp_qlora.adapters.lora import KeptShard, LoraLinear
from fsdp_qlora.loading.weight_files import Weights
from fsdp_qlora.quantizers.base import QuantizedWeight
from fsdp_qlora.ranks.distributed import derive_seed, own_rows, store_rows

log = logging.getLogger("fsdp_qlora")


@torch.no_grad()
def decompose_weights(
    model: nn.Module,
    weights: Weights,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    init: str,
    seed: int,
) -> None:
    """Initialize adapters from the weights in the files, before the weights are loaded. Called on every rank.

    The layers are distributed over the ranks: each rank reads one whole weight at a time and broadcasts A and B.
    If their product is subtracted from the base, A and B are rounded to bf16. Then a bf16 run gathers exactly the
    values that were subtracted, and their product does not depend on how it is split.

    Args:
        weights: what `match_tensors` gives.
        init: pissa, pissa_niter_N, olora or loftq.
    """
    started = time.perf_counter()
    layers = list(adapted_weights(model).items())
    size, rank = dist.get_world_size(), dist.get_rank()
    for start in range(0, len(layers), size):
        turn = layers[start : start + size]
        mine: tuple[torch.Tensor, ...] = ()
        if rank < len(turn):
            name, layer = turn[rank]
            weight = weights.read_whole(name).to(device)
            mine = _decompose(weight, layer, init, derive_seed("decompose", seed, name))
            del weight
        for owner, (_, layer) in enumerate(turn):
            for index, parameter in enumerate((layer.lora.lora_A.weight, layer.lora.lora_B.weight)):
                whole = mine[index] if owner == rank else torch.empty(parameter.shape, device=device)
                dist.broadcast(whole, src=owner)
                first, last = own_rows(parameter, mesh)
                store_rows(parameter, whole[first:last])
            layer.is_decomposed = True
            if reduces_base(init):
                layer.subtracted = KeptShard(layer.lora.lora_A.weight), KeptShard(layer.lora.lora_B.weight)
    seconds = time.perf_counter() - started
    log.info("Adapters start from their weights: %s of %d, computed in %.1f s.", init, len(layers), seconds)


def _decompose(weight: torch.Tensor, layer: LoraLinear, init: str, seed: int) -> first_values.Factors:
    rank, scaling = layer.lora.lora_A.out_features, layer.scaling
    if init == "loftq":
        assert isinstance(layer.base_layer, QuantizedWeight)
        lora_A, lora_B = first_values.loftq(weight, rank, scaling, quantize=layer.base_layer.quantize_whole)
    elif init == "olora":
        lora_A, lora_B = first_values.olora(weight.float(), rank)
    elif init == "pissa":
        lora_A, lora_B = first_values.pissa(weight.float(), rank, scaling)
    else:
        iterations = int(init.removeprefix("pissa_niter_"))
        lora_A, lora_B = first_values.pissa_niter(weight.float(), rank, scaling, iterations=iterations, seed=seed)
    if reduces_base(init):
        lora_A, lora_B = lora_A.bfloat16().float(), lora_B.bfloat16().float()
    return lora_A.contiguous(), lora_B.contiguous()
