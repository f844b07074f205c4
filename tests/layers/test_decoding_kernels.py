"""Triton's kernels decode quantized weights to the bits of the libraries' operators."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_qlora.model.kernels import float_decoding, fp8_decoding, hqq_decoding, nf4
from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, Ways, using_ways
from fsdp_qlora.model.kernels.trial import why_wrong
from fsdp_qlora.model.quantizers.base import Matrix, QuantizedWeight
from fsdp_qlora.model.quantizers.bnb_4bit import quantize_blocks
from fsdp_qlora.model.quantizers.e2m1 import global_scale
from fsdp_qlora.model.quantizers.fp8 import quantize_blocks as quantize_fp8
from fsdp_qlora.model.quantizers.stored import row_bytes, write_bytes
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from fsdp_qlora.run.decoding_trials import decoding_trials, weight_forms
from tests.layers.shards import SHAPES, weight_of

pytestmark = pytest.mark.quick

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNELS: dict[str, dict[str, Any]] = {
    "bnb_4bit": nf4.WAYS,
    "mxfp4": float_decoding.WAYS,
    "nvfp4": float_decoding.WAYS,
    "fp8": fp8_decoding.WAYS,
    "hqq": hqq_decoding.WAYS,
}
# Of five matrices with 96 blocks each: their absmax begin inside of a block of 256.
EXPERTS = (5, 96, 64)
BNB = [
    {"quant_type": quant_type, "double_quant": double_quant}
    for quant_type, double_quant in itertools.product(("nf4", "fp4"), (True, False))
]


def new_layer(quantizer: str, shape: tuple[int, ...], **options: Any) -> QuantizedWeight:
    entry = QUANTIZERS[quantizer]
    if len(shape) == 2:
        return entry.linear(nn.Linear(shape[1], shape[0], bias=False, device="meta"), **options)
    assert entry.experts is not None
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    return entry.experts(parameter, transposed=False, **options)


def filled(layer: Any) -> QuantizedWeight:
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
    elif hasattr(layer, "code_dtype"):
        matrices = weight.split(layer.shape[-2])
        options = (layer.block, layer.code_dtype)
        both = [quantize_fp8(matrix, *options) for matrix in matrices]
        codes = torch.cat([codes for codes, _ in both]).view(torch.uint8)
        padding = row_bytes(layer.weight) - layer.shape[-1]
        quantized = (F.pad(codes, (0, padding)), torch.cat([scale for _, scale in both]))
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
        layer = filled(new_layer(quantizer, shape, compute_dtype=dtype, **options))
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


FP8: list[dict[str, Any]] = [
    {},
    {"block": (16, 128)},
    {"block": (7, 256)},
    {"num_parts": 1},
    {"code_dtype": torch.float8_e5m2},
]


@pytest.mark.parametrize("options", FP8, ids=str)
@pytest.mark.parametrize("shape", [(40, 300), (3, 33), EXPERTS], ids=str)
def test_floats_of_8_bits_have_torchs_bits(shape, options, interpreted):
    assert interpreted(differences, "fp8", shape, options) == []


@pytest.mark.parametrize("n_bits, group_size", [(8, 64), (4, 64), (4, 32), (3, 64), (2, 16)])
@pytest.mark.parametrize("shape", [(32, 64), (3, 33), EXPERTS], ids=str)
def test_hqq_groups_have_torchs_bits(shape, n_bits, group_size, interpreted):
    options = {"n_bits": n_bits, "group_size": group_size}
    assert interpreted(differences, "hqq", shape, options) == []


def no_blocks() -> tuple[int, ...]:
    empty = torch.empty(0, dtype=torch.uint8)
    with using_ways(Ways(decoding=TRITON)):
        absmax = torch.empty(0)
        return tuple(nf4.decode_blocks(empty, absmax, None, None, "nf4", torch.bfloat16).shape)


def test_no_blocks_are_no_weights(interpreted):
    assert interpreted(no_blocks) == (0, 64)


def unproven() -> list[str]:
    """The ways of trials that are not right, or whose layer does not give the trial's form."""
    layers: list[tuple[str, dict[str, Any]]] = [
        ("bnb_4bit", {"quant_type": "nf4", "double_quant": True}),
        ("mxfp4", {}),
        ("nvfp4", {}),
        ("nvfp4", {"num_parts": 4, "multiplies": True}),
        ("fp8", {"block": (128, 128)}),
        ("fp8", {"code_dtype": torch.float8_e5m2}),
        ("hqq", {"n_bits": 3, "group_size": 64}),
    ]
    found = []
    for quantizer, options in layers:
        layer = new_layer(quantizer, (200, 256), compute_dtype=torch.bfloat16, **options)
        trials = decoding_trials(
            weight_forms([layer, nn.Linear(2, 2)]), (160, 256), torch.bfloat16, torch.device("cpu")
        )
        assert len(trials) == 2
        for make in trials:
            assert make().results(PLAIN)[0].isfinite().all()
            found += [why for why in why_wrong(make, [TRITON]).values() if why]
    return found


def test_a_runs_trials_prove_the_kernels_of_every_form(interpreted):
    assert interpreted(unproven) == []
