"""4-bit layers against bitsandbytes' own functions and against autograd on the decoded weight."""

import itertools
from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch

from fsdp_qlora.quantizers.bnb_4bit import Bnb4bitLinear
from tests.layers.shards import SHAPES, relative_error, shards, weight_of

pytestmark = pytest.mark.quick

KINDS = [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False)]


def _make(shape: tuple[int, int], quant_type: str, double_quant: bool) -> tuple[Bnb4bitLinear, torch.Tensor]:
    linear = torch.nn.Linear(shape[1], shape[0], bias=False, device="meta")
    layer = Bnb4bitLinear(linear, quant_type=quant_type, double_quant=double_quant, compute_dtype=torch.bfloat16)
    return layer, weight_of(shape).to(torch.bfloat16)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shards_are_bitsandbytes_own_bytes_on_any_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    keys = [(shape, *kind) for shape, kind in itertools.product(SHAPES, KINDS)]
    for (shape, quant_type, double_quant), parts in zip(keys, shards(world_size, _make, keys, tmp_path), strict=True):
        weight = weight_of(shape).to(torch.bfloat16)
        codes, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=double_quant, quant_type=quant_type)
        expected = {"weight": codes, "absmax": state.absmax}
        if double_quant:
            expected["nested_absmax"] = state.state2.absmax
            assert all(torch.equal(part["absmax_offset"], state.offset) for part in parts)
        for name, value in expected.items():
            value, joined = value.reshape(-1).view(torch.uint8), torch.cat([part[name] for part in parts])
            assert torch.equal(joined[: len(value)], value), (shape, name)
            assert not joined[len(value) :].any()
        decoded = bnb.dequantize_4bit(codes, state)
        assert all(torch.equal(part["decoded"], decoded) for part in parts)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("shape", [(96, 128), (50, 33), (50, 96)])  # the last: rows of one and a half blocks
def test_forward_and_gradient_are_those_of_the_decoded_weight(
    quant_type: str, double_quant: bool, shape: tuple[int, int]
) -> None:
    out_features, in_features = shape
    linear = torch.nn.Linear(in_features, out_features)
    layer = Bnb4bitLinear(linear, quant_type=quant_type, double_quant=double_quant, compute_dtype=torch.float32)
    codes, state = bnb.quantize_4bit(
        linear.weight.data, blocksize=64, compress_statistics=double_quant, quant_type=quant_type
    )
    _fill(layer, "weight", codes)
    _fill(layer, "absmax", state.absmax)
    if double_quant:
        _fill(layer, "nested_absmax", state.state2.absmax)
        layer.absmax_offset.copy_(state.offset)
    x = torch.randn(2, 9, in_features, requires_grad=True)
    grad_y = torch.randn(2, 9, out_features)
    y = layer(x)
    y.backward(grad_y)

    weight = _decode(codes, state, shape)
    x64 = x.detach().double().requires_grad_()
    y64 = torch.nn.functional.linear(x64, weight, linear.bias.detach().double())
    y64.backward(grad_y.double())
    assert relative_error(y, y64) < 1e-6
    assert x.grad is not None and x64.grad is not None
    assert relative_error(x.grad, x64.grad) < 1e-6


def _decode(codes: torch.Tensor, state: bnb.QuantState, shape: tuple[int, int]) -> torch.Tensor:
    """The format's definition in float64: a table of 16 values, the high half of a byte first, times the absmax."""
    absmax = state.absmax
    if state.nested:
        absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
    table = bnb.get_4bit_type(state.quant_type, "cpu").double()
    flat = codes.flatten().long()
    values = table[torch.stack((flat >> 4, flat & 15), dim=1).flatten()][: shape[0] * shape[1]]
    return (values * absmax.double().repeat_interleave(64)[: len(values)]).view(shape)


def _fill(layer: Bnb4bitLinear, name: str, value: torch.Tensor) -> None:
    parameter = torch.zeros_like(getattr(layer, name), device="cpu")
    value = value.reshape(-1).view(torch.uint8)
    parameter.view(-1).view(torch.uint8)[: len(value)] = value
    setattr(layer, name, torch.nn.Parameter(parameter, requires_grad=False))
