"""Triton's kernels decode quantized weights to the bits of the libraries' operators."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_qlora.model.kernels import float_decoding, nf4
from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, Ways, using_ways
from fsdp_qlora.model.quantizers.base import Matrix, QuantizedWeight, write_bytes
from fsdp_qlora.model.quantizers.bnb_4bit import quantize_blocks
from fsdp_qlora.model.quantizers.e2m1 import global_scale
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from tests.layers.shards import SHAPES, weight_of

pytestmark = pytest.mark.quick

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNELS: dict[str, dict[str, Any]] = {
    "bnb_4bit": nf4.WAYS,
    "mxfp4": float_decoding.WAYS,
    "nvfp4": float_decoding.WAYS,
}
# Of five matrices with 96 blocks each: their absmax begin inside of a block of 256.
EXPERTS = (5, 96, 64)
BNB = [
    {"quant_type": quant_type, "double_quant": double_quant}
    for quant_type, double_quant in itertools.product(("nf4", "fp4"), (True, False))
]


def _new(quantizer: str, shape: tuple[int, ...], **options: Any) -> QuantizedWeight:
    entry = QUANTIZERS[quantizer]
    if len(shape) == 2:
        return entry.linear(nn.Linear(shape[1], shape[0], bias=False, device="meta"), **options)
    assert entry.experts is not None
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    return entry.experts(parameter, transposed=False, **options)


def _fill(layer: Any) -> QuantizedWeight:
    """A layer with a random weight, some blocks of which are large and some zeros."""
    rows = math.prod(layer.shape[:-1])
    weight = weight_of((rows, layer.shape[-1]))
    weight *= torch.logspace(-3, 3, rows)[:, None]
    weight[1::5] = 0
    layer.to_empty(device="cpu")
    if getattr(layer, "double_quant", False):
        codes, absmax = quantize_blocks(weight, layer.quant_type)
        quantized = (codes, *layer.quantize_absmax(absmax))
    elif hasattr(layer, "global_scale"):
        scale = global_scale(weight.abs().max())
        scale = 1 / scale if layer.multiplies else scale
        layer.global_scale.copy_(torch.linspace(1, 2, len(layer.global_scale))[:, None] * scale)
        codes, scales, _ = layer.quantize(weight, scale.view(1, 1))
        quantized = (codes, scales, layer.global_scale)
    else:
        quantized = layer.quantize(weight)
    for name, values in zip(("weight", *layer.statistics), quantized, strict=False):
        write_bytes(getattr(layer, name), values)
    return layer


def _parts(layer: QuantizedWeight) -> list[Matrix]:
    if len(layer.shape) == 2:
        return [layer.whole]
    size = math.prod(layer.shape[1:])
    among = (torch.tensor([0, 2, 3]), 4)
    several = [Matrix((2, *layer.shape[1:]), first * size) for first in range(4)]
    return [layer.whole, *several, Matrix((3, *layer.shape[1:]), size, among=among)]


def differences(quantizer: str, shape: tuple[int, ...], options: dict[str, Any]) -> list[str]:
    """Where the kernel was not used, or gave other bits than the plain way."""
    ways = KERNELS[quantizer]
    calls = []
    by_triton = ways[TRITON]

    def noted(*args: Any) -> torch.Tensor:
        calls.append(args)
        return by_triton(*args)

    ways[TRITON] = noted
    found = []
    for dtype in DTYPES:
        layer = _fill(_new(quantizer, shape, compute_dtype=dtype, **options))
        for part in _parts(layer):
            decoded = []
            for way in (PLAIN, TRITON):
                calls.clear()
                with using_ways(Ways(decoding=way)):
                    decoded.append(layer.dequantize(part))
            assert decoded[0].any()
            if not calls or not torch.equal(*decoded):
                found.append(f"{dtype} {part} {len(calls)} calls")
    ways[TRITON] = by_triton
    return found


@pytest.mark.parametrize("options", BNB, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, EXPERTS], ids=str)
def test_4bit_blocks_have_bitsandbytes_bits(shape, options, interpreted):
    assert interpreted(differences, "bnb_4bit", shape, options) == []


FLOATS: list[tuple[str, dict[str, Any]]] = [
    ("mxfp4", {}),
    ("nvfp4", {}),
    ("nvfp4", {"num_parts": 4}),
    ("nvfp4", {"multiplies": True}),
]


@pytest.mark.parametrize("quantizer, options", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(32, 64), (3, 33), EXPERTS], ids=str)
def test_floats_of_4_bits_have_torchs_bits(shape, quantizer, options, interpreted):
    if "num_parts" in options and math.prod(shape[-2:]) % (options["num_parts"] * 16):
        pytest.skip("a group would be in two parts")
    assert interpreted(differences, quantizer, shape, options) == []


def no_blocks() -> tuple[int, ...]:
    empty = torch.empty(0, dtype=torch.uint8)
    with using_ways(Ways(decoding=TRITON)):
        absmax = torch.empty(0)
        return tuple(nf4.decode_blocks(empty, absmax, None, None, "nf4", torch.bfloat16).shape)


def test_no_blocks_are_no_weights(interpreted):
    assert interpreted(no_blocks) == (0, 64)
