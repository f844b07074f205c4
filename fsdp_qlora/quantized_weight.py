"""What every quantizer's layers have in common: one frozen weight, kept quantized in parameters that FSDP2 shards."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_qlora.distributed import shard_bounds


class QuantizedWeight(nn.Module):
    """One frozen weight of any shape, kept quantized. Base of the layers in QUANTIZERS."""

    shape: tuple[int, ...]
    # The weight's name below the module's own in a checkpoint; empty where the module stands for a parameter.
    weight_name: str = ""
    # Names of the parameters that hold quantization statistics, for the byte account.
    statistics: tuple[str, ...] = ()

    def dequantize(self) -> torch.Tensor:
        """The weight in its own shape and the compute dtype. Only while the parameters are gathered."""
        raise NotImplementedError

    def shard_range(self, mesh: DeviceMesh) -> tuple[int, int]:
        """Elements [start, stop) of the row-major flattened weight that this rank quantizes and keeps."""
        raise NotImplementedError

    def load_shard(self, values: torch.Tensor, mesh: DeviceMesh) -> None:
        """Quantize and keep `values`, the weights of `shard_range`; every rank of the shard group calls it."""
        raise NotImplementedError

    def quantize_whole(self, weight: torch.Tensor) -> torch.Tensor:
        """What `dequantize` must give for the whole `weight`, from one unsharded computation."""
        raise NotImplementedError


def write_bytes(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Store the bytes of `values` in this rank's part of a parameter; the rest of it is zeroed."""
    assert isinstance(parameter, DTensor)
    target = parameter.to_local().view(-1).view(torch.uint8)
    source = values.reshape(-1).view(torch.uint8)
    target[: source.numel()] = source.to(target.device)
    target[source.numel() :] = 0


def write_rows(parameter: nn.Parameter, whole: torch.Tensor, rank: int, size: int) -> None:
    """Store this rank's rows of a statistic that is known as a whole."""
    row_bytes = parameter.shape[1] * parameter.element_size()
    first, last = shard_bounds(parameter.shape[0], rank=rank, size=size)
    write_bytes(parameter, whole.reshape(-1).view(torch.uint8)[first * row_bytes : last * row_bytes])
