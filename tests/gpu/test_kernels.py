"""The quantizers' layers on a GPU against the same bytes on the CPU."""

import itertools
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import nn

from fsdp_qlora.model.adapters.first_values import principal_factors
from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.model.quantizers.bnb_4bit import quantize_blocks
from fsdp_qlora.model.quantizers.hqq import _pack, _quantize_groups
from fsdp_qlora.model.quantizers.stored import write_bytes
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from tests.gpu.check import HAS_VALUES, holds, same

# The last three: rows that end in half a block, in a part of one, and weights that do not fill
# their last block.
SHAPES = [(256, 128), (50, 96), (64, 130), (50, 33)]
ROWS = [1, 2, 7, 33, 512, 4096]
FOUR_BIT = list(itertools.product(["nf4", "fp4"], [True, False]))
# fp32 sums in another order; bf16 and fp16 keep 8 and 11 bits of what is multiplied.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _weight(shape: tuple[int, ...]) -> torch.Tensor:
    return 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def _inputs(rows: int, features: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(rows)).to(dtype)


def _layer(
    quantizer: str, shape: tuple[int, ...], *, transposed: bool = False, **options: Any
) -> Any:
    """A linear layer, or experts where the shape has three sizes."""
    layers: Any = QUANTIZERS[quantizer]
    if len(shape) == 2:
        return layers.linear(nn.Linear(shape[1], shape[0], bias=False, device="meta"), **options)
    return layers.experts(
        nn.Parameter(torch.empty(shape, device="meta")), transposed=transposed, **options
    )


def _filled(layer: QuantizedWeight, **values: torch.Tensor) -> QuantizedWeight:
    """The layer on the CPU with these bytes in its parameters."""
    for name, value in values.items():
        parameter = nn.Parameter(
            torch.zeros_like(getattr(layer, name), device="cpu"), requires_grad=False
        )
        write_bytes(parameter, value)
        setattr(layer, name, parameter)
    return layer


def four_bit(
    shape: tuple[int, ...], quant_type: str, double_quant: bool, dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    options: dict[str, Any] = {
        "quant_type": quant_type,
        "double_quant": double_quant,
        "compute_dtype": dtype,
    }
    layer = _layer("bnb_4bit", shape, transposed=False, **options)
    codes, absmax = quantize_blocks(_weight(shape), quant_type)
    if not double_quant:
        return _filled(layer, weight=codes, absmax=absmax)
    absmax_8bit, nested_absmax = layer.quantize_absmax(absmax)
    return _filled(layer, weight=codes, absmax=absmax_8bit, nested_absmax=nested_absmax)


def hqq(shape: tuple[int, ...], n_bits: int, dtype: torch.dtype = torch.float32) -> QuantizedWeight:
    options: dict[str, Any] = {"n_bits": n_bits, "group_size": 64, "compute_dtype": dtype}
    layer = _layer("hqq", shape, transposed=True, **options)
    codes, scale_zero = _quantize_groups(_weight(shape), n_bits, 64)
    return _filled(layer, weight=_pack(codes, n_bits), scale_zero=scale_zero)


def int8(
    shape: tuple[int, ...], threshold: float, dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    layer = _layer("int8", shape, int8_threshold=threshold, compute_dtype=dtype)
    codes, row_scale, _ = bnb.int8_vectorwise_quant(_weight(shape).half())
    missing = layer.weight.shape[1] * layer.weight.element_size() - shape[1]
    return _filled(layer, weight=nn.functional.pad(codes, (0, missing)), row_scale=row_scale)


def _forward_and_gradient(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    grad_y = (
        torch.ones_like(y) + torch.arange(y.shape[-1], device=y.device).to(y.dtype) / y.shape[-1]
    )
    (gradient,) = torch.autograd.grad(y, x, grad_y)
    return y.detach(), gradient


@pytest.mark.parametrize(("quant_type", "double_quant"), FOUR_BIT)
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_4bit_weights_are_decoded_to_the_same_bits(shape, quant_type, double_quant):
    layer = four_bit(shape, quant_type, double_quant)
    expected = layer.dequantize()
    same(layer.to("cuda").dequantize(), expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("quant_type", "double_quant"), FOUR_BIT)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_4bit_products_and_gradients_equal_the_cpus(shape, quant_type, double_quant, dtype):
    # The CPU multiplies what the GPU must have decoded, in fp32.
    reference = four_bit(shape, quant_type, double_quant)
    layer = four_bit(shape, quant_type, double_quant, dtype).to("cuda")
    for rows in ROWS:
        x = _inputs(rows, shape[1], dtype)
        expected = _forward_and_gradient(reference, x.float())
        for found, wanted in zip(_forward_and_gradient(layer, x.cuda()), expected, strict=True):
            assert found.dtype == dtype
            same(found.float(), wanted, tolerance=TOLERANCES[dtype])


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("shape", [(4, 64, 128), (5, 48, 96)])
def test_slices_of_4bit_experts_are_those_of_the_cpu(shape, double_quant):
    experts = four_bit(shape, "nf4", double_quant)
    x = _inputs(9, shape[2], torch.float32)
    with torch.no_grad():
        expected = [
            (experts.dequantize(experts.expert(e)), experts.product(x, experts.expert(e)))
            for e in range(shape[0])
        ]
        experts = experts.to("cuda")
        for e, (decoded, product) in enumerate(expected):
            same(experts.dequantize(experts.expert(e)), decoded)
            same(
                experts.product(x.cuda(), experts.expert(e)),
                product,
                tolerance=TOLERANCES[torch.float32],
            )


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@torch.no_grad()
def test_weights_quantized_on_a_gpu_have_the_codes_of_the_cpu(quant_type):
    values = _weight((512, 192))
    codes, absmax = quantize_blocks(values, quant_type)
    found_codes, found_absmax = quantize_blocks(values.cuda(), quant_type)
    same(found_absmax, absmax)
    assert found_codes.shape == codes.shape
    # A weight in the middle between two values may be rounded either way, and a small one to either
    # zero of FP4.
    blocks = (codes.view(-1, 32), absmax, 64, quant_type, (len(absmax), 64), torch.float32)
    decoded = torch.ops.bitsandbytes.dequantize_4bit(*blocks)
    found = torch.ops.bitsandbytes.dequantize_4bit(found_codes.cpu().view(-1, 32), *blocks[1:])
    differ = (found != decoded).float().mean().item()
    holds(differ < 1e-3, f"{differ:.2%} of the weights differ")


@pytest.mark.parametrize("n_bits", [8, 4, 3, 2])
@pytest.mark.parametrize("shape", [*SHAPES, (4, 64, 128)])
@torch.no_grad()
def test_hqq_weights_are_decoded_to_the_same_bits(shape, n_bits):
    layer = hqq(shape, n_bits)
    expected = layer.dequantize()
    same(layer.to("cuda").dequantize(), expected)


@pytest.mark.parametrize("n_bits", [8, 4, 3, 2])
def test_hqq_products_gradients_and_expert_slices_are_those_of_the_cpu(n_bits):
    layer = hqq((256, 128), n_bits)
    experts = hqq((4, 64, 128), n_bits)
    rows = {rows: _inputs(rows, 128, torch.float32) for rows in ROWS}
    expected = {count: _forward_and_gradient(layer, x) for count, x in rows.items()}
    x = _inputs(9, 64, torch.float32)
    slices = [experts.product(x, experts.expert(e)) for e in range(4)]
    layer = layer.to("cuda")
    experts = experts.to("cuda")
    for count, (y, gradient) in expected.items():
        found_y, found_gradient = _forward_and_gradient(layer, rows[count].cuda())
        same(found_y, y, tolerance=TOLERANCES[torch.float32])
        same(found_gradient, gradient, tolerance=TOLERANCES[torch.float32])
    for e, product in enumerate(slices):
        same(
            experts.product(x.cuda(), experts.expert(e)),
            product,
            tolerance=TOLERANCES[torch.float32],
        )


@torch.no_grad()
def test_hqq_solved_on_a_gpu_decodes_to_the_weights_of_the_cpu():
    values = _weight((256, 128))
    layer = hqq((256, 128), 4)
    decoded = layer.dequantize()
    codes, scale_zero = _quantize_groups(values.cuda(), 4, 64)
    found = _filled(layer, weight=_pack(codes, 4).cpu(), scale_zero=scale_zero.cpu()).dequantize()
    # Where a power is rounded in another way a code may be the next one.
    same(found, decoded, tolerance=1e-2)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("threshold", [0.0, 6.0])
# cuBLAS takes no int8 of 98 columns
@pytest.mark.parametrize("shape", [(256, 128), (52, 96), (52, 98)])
def test_int8_layers_are_those_of_the_cpu(shape, threshold, dtype):
    if threshold and not HAS_VALUES:
        pytest.skip("the stand-in finds a random number of outliers, more than fit its memory")
    reference = int8(shape, threshold)
    layer = int8(shape, threshold, dtype).to("cuda")
    with torch.no_grad():
        same(layer.dequantize().float(), reference.dequantize(), tolerance=TOLERANCES[dtype])
    for rows in ROWS:
        x = _inputs(rows, shape[1], dtype)
        x[0, 3] = 8.0  # an outlier
        expected = _forward_and_gradient(reference, x.float())
        # Activations have 8 bits: one that is rounded the other way counts, on average a few per
        # row.
        for found, wanted in zip(_forward_and_gradient(layer, x.cuda()), expected, strict=True):
            same(found.float(), wanted, tolerance=max(TOLERANCES[dtype], 1e-3))


def test_int8_products_beyond_fp16_are_those_of_the_cpu():
    reference = int8((256, 128), 0.0, torch.bfloat16)
    layer = int8((256, 128), 0.0, torch.bfloat16).to("cuda")
    x = (60_000 * torch.ones(128, 33)).bfloat16().T  # not contiguous
    weight_sums = reference.dequantize().float().sum(dim=1)
    expected = reference(x)
    holds(60_000 * weight_sums.abs().max() > torch.finfo(torch.float16).max)
    same(layer(x.cuda()), expected, tolerance=1e-2)


@pytest.mark.skipif(not HAS_VALUES, reason="the stand-in has no cuSOLVER")
@pytest.mark.parametrize("shape", [(256, 128), (50, 96)])
def test_a_full_decomposition_is_that_of_the_cpu(shape):
    weight = _weight(shape)
    expected = principal_factors(weight, 8, 2.0)
    found = principal_factors(weight.cuda(), 8, 2.0)
    # A pair of vectors may change its sign; an H200 differs by 2e-5.
    same(found[1] @ found[0], expected[1] @ expected[0], tolerance=1e-4)
