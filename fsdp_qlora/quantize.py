"""Linear layers whose frozen weight is stored quantized, as plain parameters that FSDP2 can shard.

Shapes: weight [out, in]; a block is `blocksize` consecutive weights of the row-major flattened weight.
A quantizer is one subclass of QuantizedLinear and one row of QUANTIZERS.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import bitsandbytes.functional as bnb
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_qlora.distributed import gather_rows, shard_bounds, shard_rank, shard_size

_BLOCKSIZE = 64  # weights that share one absmax: QLoRA (Dettmers et al. 2023), bitsandbytes' default
_NESTED_BLOCKSIZE = 256  # absmax values that share one nested absmax: double quantization, same paper


class QuantizedLinear(nn.Module):
    """y = x W^T + b with a frozen W kept quantized. Base of the rows of QUANTIZERS."""

    in_features: int
    out_features: int
    # Names of the parameters that hold quantization statistics, for the byte account.
    statistics: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def dequantize(self) -> torch.Tensor:
        """The weight [out, in] in the compute dtype. Only while the parameters are gathered."""
        raise NotImplementedError

    def shard_range(self, mesh: DeviceMesh) -> tuple[int, int]:
        """Elements [start, stop) of the row-major flattened weight that this rank quantizes and keeps."""
        raise NotImplementedError

    def load_shard(self, values: torch.Tensor, mesh: DeviceMesh) -> None:
        """Quantize and keep `values`, the weights of `shard_range`; every rank of the shard group calls it."""
        raise NotImplementedError

    def quantize_whole(self, weight: torch.Tensor) -> torch.Tensor:
        """What `dequantize` must give for `weight` [out, in], from one unsharded computation."""
        raise NotImplementedError


class _Format(NamedTuple):
    shape: tuple[int, int]
    blocksize: int
    quant_type: str


class Bnb4bitLinear(QuantizedLinear):
    """NF4 or FP4 weights in bitsandbytes' packing.

    Parameters (frozen, quant_storage = compute dtype so that FSDP2 gathers their bytes unchanged):
        weight: two codes per byte, [blocks, blocksize / 2 bytes]. Rows are blocks, so that a shard is
            made of whole blocks and can be quantized by itself.
        absmax: largest magnitude of each block; 1 byte each with double_quant, else float32.
        nested_absmax: with double_quant, float32, one for each 256 absmax.
    Buffer:
        absmax_offset: with double_quant, float32 scalar, the mean of absmax.
    """

    absmax_offset: torch.Tensor

    def __init__(self, linear: nn.Linear, *, quant_type: str, double_quant: bool, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype, self.double_quant = compute_dtype, double_quant
        self.format = _Format(self.shape, _BLOCKSIZE, quant_type)
        self.num_blocks = -(-linear.weight.numel() // _BLOCKSIZE)
        self.weight = self._storage(self.num_blocks, _BLOCKSIZE // 2)
        if double_quant:
            self.absmax = self._storage(-(-self.num_blocks // compute_dtype.itemsize), compute_dtype.itemsize)
            self.nested_absmax = self._storage(-(-self.num_blocks // _NESTED_BLOCKSIZE), 4)
            self.statistics = ("absmax", "nested_absmax")
            self.register_buffer("absmax_offset", torch.zeros((), device="cpu"), persistent=False)
        else:
            self.absmax = self._storage(self.num_blocks, 4)
            self.statistics = ("absmax",)
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def _storage(self, rows: int, row_bytes: int) -> nn.Parameter:
        shape = (rows, row_bytes // self.compute_dtype.itemsize)
        return nn.Parameter(torch.empty(shape, dtype=self.compute_dtype, device="meta"), requires_grad=False)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        if self.double_quant:
            return self.weight, self.absmax, self.nested_absmax, self.absmax_offset
        return self.weight, self.absmax

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return _Matmul4bit.apply(x, bias, self.format, *self._tensors())

    def dequantize(self) -> torch.Tensor:
        return _dequantize(self.format, self.compute_dtype, *self._tensors())

    def quantize_whole(self, weight: torch.Tensor) -> torch.Tensor:
        codes, state = bnb.quantize_4bit(
            weight,
            blocksize=_BLOCKSIZE,
            compress_statistics=self.double_quant,
            quant_type=self.format.quant_type,
        )
        state.dtype = self.compute_dtype
        return bnb.dequantize_4bit(codes, state)

    def shard_range(self, mesh: DeviceMesh) -> tuple[int, int]:
        first, last = shard_bounds(self.num_blocks, rank=shard_rank(mesh), size=shard_size(mesh))
        num_weights = self.out_features * self.in_features
        return min(first * _BLOCKSIZE, num_weights), min(last * _BLOCKSIZE, num_weights)

    @torch.no_grad()
    def load_shard(self, values: torch.Tensor, mesh: DeviceMesh) -> None:
        rank, size = shard_rank(mesh), shard_size(mesh)
        if values.numel():
            codes, absmax = torch.ops.bitsandbytes.quantize_4bit(
                values, _BLOCKSIZE, self.format.quant_type, torch.uint8
            )
        else:  # fewer blocks than ranks
            codes, absmax = values.new_empty(0, dtype=torch.uint8), values.new_empty(0, dtype=torch.float32)
        write_bytes(self.weight, codes)
        if not self.double_quant:
            write_bytes(self.absmax, absmax)
            return
        # The second quantization has a mean over the whole tensor. Every rank gets the absmax of all blocks
        # (1/32 of the bf16 bytes) and repeats bitsandbytes' own computation, so it is exact on any split.
        absmax = gather_rows(absmax, self.num_blocks, mesh)
        offset = absmax.mean()
        absmax_8bit, state = bnb.quantize_blockwise(absmax - offset, blocksize=_NESTED_BLOCKSIZE)
        self.absmax_offset.copy_(offset)
        _write_rows(self.absmax, absmax_8bit, rank, size)
        _write_rows(self.nested_absmax, state.absmax, rank, size)


def write_bytes(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Store the bytes of `values` in this rank's part of a parameter; the rest of it is zeroed."""
    assert isinstance(parameter, DTensor)
    target = parameter.to_local().view(-1).view(torch.uint8)
    source = values.reshape(-1).view(torch.uint8)
    target[: source.numel()] = source.to(target.device)
    target[source.numel() :] = 0


def _write_rows(parameter: nn.Parameter, whole: torch.Tensor, rank: int, size: int) -> None:
    """Store this rank's rows of a statistic that is known as a whole."""
    row_bytes = parameter.shape[1] * parameter.element_size()
    first, last = shard_bounds(parameter.shape[0], rank=rank, size=size)
    write_bytes(parameter, whole.reshape(-1).view(torch.uint8)[first * row_bytes : last * row_bytes])


@functools.cache
def _nested_code(device: torch.device) -> torch.Tensor:
    """The 256 float32 values of bitsandbytes' dynamic 8-bit map, which encode the nested absmax."""
    return bnb.create_dynamic_map().to(device)


def _as_bytes(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)[:count]


def _unpack(
    fmt: _Format, weight: torch.Tensor, absmax: torch.Tensor, *nested: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Storage tensors -> (codes, float32 scales, keyword arguments of gemm_4bit for double quantization)."""
    num_weights = fmt.shape[0] * fmt.shape[1]
    num_blocks = -(-num_weights // fmt.blocksize)
    codes = _as_bytes(weight, -(-num_weights // 2)).view(-1, 1)
    if not nested:
        return codes, absmax.view(-1).view(torch.float32), {}
    nested_absmax, offset = nested
    return (
        codes,
        nested_absmax.view(-1).view(torch.float32),
        {
            "absmax_8bit": _as_bytes(absmax, num_blocks),
            "absmax_code": _nested_code(weight.device),
            "absmax_offset": offset,
        },
    )


def _dequantize(fmt: _Format, dtype: torch.dtype, *tensors: torch.Tensor) -> torch.Tensor:
    """Decode storage tensors to the weight [out, in] in `dtype`, with bitsandbytes' kernels."""
    codes, absmax, nested = _unpack(fmt, *tensors)
    if nested:
        absmax = torch.ops.bitsandbytes.dequantize_blockwise(
            nested["absmax_8bit"], absmax, nested["absmax_code"], _NESTED_BLOCKSIZE, torch.float32
        )
        absmax = absmax + nested["absmax_offset"]
    return torch.ops.bitsandbytes.dequantize_4bit(codes, absmax, fmt.blocksize, fmt.quant_type, fmt.shape, dtype)


class _Matmul4bit(torch.autograd.Function):
    """x W^T + b with W decoded for the product and again for its gradient, never kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, fmt: _Format, *tensors: torch.Tensor
    ) -> torch.Tensor:
        # Gathered weights: FSDP2 refills these same tensors before the backward pass. Kept as attributes and not
        # by save_for_backward, they are nothing that activation checkpointing would have to recompute.
        ctx.format, ctx.tensors = fmt, tensors
        codes, absmax, nested = _unpack(fmt, *tensors)
        return torch.ops.bitsandbytes.gemm_4bit(
            x, codes, fmt.shape, absmax, fmt.blocksize, fmt.quant_type, bias=bias, **nested
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_y,) = grads
        tensors = ctx.tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_y @ _dequantize(ctx.format, grad_y.dtype, *tensors)
        return (grad_x, None, None, *(None for _ in tensors))


QUANTIZERS: dict[str, Callable[..., QuantizedLinear]] = {"bnb_4bit": Bnb4bitLinear}


def quantize_linears(model: nn.Module, names: Iterable[str], quantizer: str, **options: Any) -> None:
    """Replace the linear layers of a meta model by quantized ones; `options` are the quantizer's own."""
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), name
        model.set_submodule(name, QUANTIZERS[quantizer](linear, **options))
