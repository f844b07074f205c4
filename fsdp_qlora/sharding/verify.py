"""Self-tests of the sharded model: a count of all bytes, and a layer compared bit for bit."""

import logging
import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp_qlora.distributed.process_group import gather_numbers
from fsdp_qlora.distributed.shards import local_part, shard_size
from fsdp_qlora.model.architecture.structure import canonical_name
from fsdp_qlora.model.model_parts import ModelParts, count_bytes, each_parameter
from fsdp_qlora.model.module_state import whole_weights
from fsdp_qlora.model.quantizers.base import QuantizedExperts, QuantizedWeight
from fsdp_qlora.sharding.loading.weight_files import Weights
from fsdp_qlora.utils.text import format_bytes

log = logging.getLogger("fsdp_qlora")

_IMBALANCE = 0.05  # how far a rank's bytes may exceed total / ranks


def check_byte_account(model: nn.Module, mesh: DeviceMesh) -> str:
    """Check that the ranks' shards add up to exactly one copy of the model, split evenly.

    Collective. Returns a line for the log.

    Raises:
        RuntimeError: the shards do not add up to one copy, or one rank holds more than its part.
    """
    parameters = each_parameter(model)
    total = sum(parameter.nbytes for parameter in parameters)
    local = sum(local_part(parameter).nbytes for parameter in parameters)
    size = shard_size(mesh)
    device = torch.device(mesh.device_type)
    # float64 holds every integer below 2**53, far more bytes than a model has.
    gathered = gather_numbers([local], device, mesh["shard"].get_group())
    by_rank = [int(count) for count in gathered.flatten()]
    counts = count_bytes(Counter(parameters.values()), size)
    # FSDP2 splits along dim 0, so a tensor with few rows cannot be split evenly. Only that excess
    # is allowed: for adapters, which have few rows and few bytes, all of it; for frozen weights up
    # to 1 MiB.
    uneven = {
        name: tensors.largest_shard - tensors.total // size for name, tensors in counts.items()
    }
    trainable = uneven.pop("trainable", 0)
    with_imbalance = total / size * (1 + _IMBALANCE)
    with_few_rows = total // size + min(sum(uneven.values()), 2**20)
    allowed = max(with_imbalance, with_few_rows) + trainable
    if sum(by_rank) != total or max(by_rank) > allowed:
        raise RuntimeError(
            f"The model is not sharded evenly: {total} bytes over {size} ranks, bytes on each "
            f"rank: {by_rank} (allowed {int(allowed)}). The run stops; please report the model."
        )
    if size == 1 < mesh.size():  # --sharding_strategy ddp, or chosen because it fits
        return f"each rank holds a whole copy of {format_bytes(total)}"
    return f"rank 0 has {format_bytes(by_rank[0])} of {format_bytes(total)}"


@torch.no_grad()
def check_one_layer(parts: ModelParts, weights: Weights) -> str:
    """Gather one layer of the first block and compare its weight with an unsharded computation.

    Collective. They must be equal bit for bit. If the weights in the files are 4-bit already, their
    bytes are compared. Returns a line for the log.

    Raises:
        RuntimeError: the weights differ.
    """
    block = parts.blocks[0]
    assert isinstance(block, FSDPModule)
    name, layer = _first_linear(parts, weights.sources)
    with whole_weights(block):
        if weights.packed and isinstance(layer, QuantizedWeight):
            is_equal = _has_stored_bytes(layer, f"{name}.weight", weights)
            reference = "in the file"
        else:
            is_equal, reference = _has_stored_values(layer, f"{name}.weight", weights)
    _report(is_equal, name, f"its weight {reference}")
    _check_one_expert(parts, weights)
    return f"a layer is bit-identical to its weight {reference}"


def _report(is_equal: bool, name: str, expected: str) -> None:
    if not is_equal:
        raise RuntimeError(
            f"Self-test failed: {name}, gathered from its shards, differs from {expected}. The run "
            "stops; please report the model and this machine."
        )
    log.debug("Self-test: %s, gathered from its shards, is bit-identical to %s.", name, expected)


def _check_one_expert(parts: ModelParts, weights: Weights) -> None:
    """Compare the codes of the last expert of a quantized tensor, if there is one.

    The last one has the largest offset in the file, which is computed, not read.
    """
    experts = [
        (path, module)
        for path, module in parts.model.named_modules()
        if isinstance(module, QuantizedExperts)
    ]
    if not experts:
        return
    path, layer = experts[0]
    name = canonical_name(path)
    block = next(block for block in parts.blocks if layer in {*block.modules()})
    assert isinstance(block, FSDPModule)
    with whole_weights(block):
        last = layer.shape[0] - 1
        codes = layer.weight.view(torch.uint8)
        num_bytes = math.prod(layer.shape[1:]) // layer.row_weights * codes.shape[1]
        start = last * num_bytes
        stop = (last + 1) * num_bytes
        codes = codes.flatten()[start:stop]
        files = weights.files
        source = weights.sources[name]
        if weights.packed:
            expected = files.read_flat(source, start, stop).to(codes.device)
        else:
            expected = layer.codes(files.read_rows(source, last, last + 1).to(codes.device))
        # As bytes: codes viewed as floats have NaNs, which are equal to nothing.
        is_equal = torch.equal(codes, expected.view(-1).view(torch.uint8))
    _report(is_equal, f"expert {last} of {name}", "the same expert quantized alone")


def _has_stored_values(
    layer: QuantizedWeight | nn.Linear, weight: str, weights: Weights
) -> tuple[bool, str]:
    """Whether a gathered layer equals its weight in the files; and what it was compared with."""
    whole = weights.read_whole(weight)
    if isinstance(layer, QuantizedWeight):
        decoded = layer.dequantize()
        # On the layer's device: kernels of another one may round differently.
        expected = layer.quantize_whole(whole.to(decoded.device))
        return torch.equal(decoded, expected), "quantized whole"
    return torch.equal(layer.weight, whole.to(layer.weight)), "read whole"


def _has_stored_bytes(layer: QuantizedWeight, weight: str, weights: Weights) -> bool:
    """Whether a gathered layer consists of the bytes in the files."""
    for suffix, form in layer.stored_forms().items():
        expected = weights.files.read_flat(weights.sources[weight + suffix], 0, form.num_bytes)
        if not torch.equal(layer.stored_bytes(suffix)[: form.num_bytes].cpu(), expected):
            return False
    return True


def _first_linear(
    parts: ModelParts, sources: Mapping[str, str]
) -> tuple[str, QuantizedWeight | nn.Linear]:
    """The first linear layer of the first block that the files contain, after its name there."""
    in_first_block = {*parts.blocks[0].modules()}
    for path, module in parts.model.named_modules():
        is_linear = isinstance(module, QuantizedWeight | nn.Linear)
        if is_linear and module in in_first_block:
            name = canonical_name(path)
            if f"{name}.weight" in sources:
                return name, module
    raise AssertionError("no linear layer in the blocks")
