"""4-bit layers against bitsandbytes' own functions and against autograd on the decoded weight."""

import itertools
import os
from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_qlora.adapters.targets import select_targets
from fsdp_qlora.errors import UserError
from fsdp_qlora.quantizers.bnb_4bit import Bnb4bitLinear
from tests.tiny import on_ranks

# Rows that ranks cannot share equally; weights that do not fill blocks of 64, nor the ranks with blocks.
SHAPES = [(128, 64), (7, 64), (5, 52), (3, 33), (300, 130), (1, 16)]


def _weight(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(torch.bfloat16)


KINDS = [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False)]


def _save_shards(folder: Path) -> int:
    """Quantize every shape in every way over the ranks, as a run does, and save each rank's part."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from fsdp_qlora.distributed import build_mesh, read_ranks, start_process_group, stop_process_group

    ranks = read_ranks()
    start_process_group(ranks)
    mesh = build_mesh(ranks, sharding_strategy="full_shard")
    for shape, (quant_type, double_quant) in itertools.product(SHAPES, KINDS):
        with torch.device("meta"):
            linear = nn.Linear(shape[1], shape[0], bias=False)
        layer = Bnb4bitLinear(linear, quant_type=quant_type, double_quant=double_quant, compute_dtype=torch.bfloat16)
        fully_shard(layer, mesh=mesh)
        layer.to_empty(device="cpu")
        start, stop = layer.shard_range(mesh)
        layer.load_shard(_weight(shape).flatten()[start:stop], mesh)
        shards = {name: parameter.to_local().clone() for name, parameter in layer.named_parameters()}
        if double_quant:
            shards["offset"] = layer.absmax_offset
        layer.unshard()
        shards["decoded"] = layer.dequantize()
        save_file(shards, _file(folder, shape, quant_type, double_quant, int(os.environ["RANK"])))
    stop_process_group()
    return 0


def _file(folder: Path, shape: tuple[int, int], quant_type: str, double_quant: bool, rank: int) -> Path:
    return folder / f"{shape}_{quant_type}_{double_quant}_{rank}.safetensors"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shards_are_bitsandbytes_own_bytes_on_any_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    statuses, output = on_ranks(world_size, _save_shards, (tmp_path,), tmp_path / "logs")
    assert statuses == [0] * world_size, output
    for shape, (quant_type, double_quant) in itertools.product(SHAPES, KINDS):
        files = [_file(tmp_path, shape, quant_type, double_quant, rank) for rank in range(world_size)]
        parts = [load_file(file) for file in files]

        def joined(name: str, parts: list[dict[str, torch.Tensor]] = parts) -> torch.Tensor:
            return torch.cat([part[name] for part in parts]).view(-1).view(torch.uint8)

        codes, state = bnb.quantize_4bit(
            _weight(shape), blocksize=64, compress_statistics=double_quant, quant_type=quant_type
        )
        expected = {"weight": codes, "absmax": state.absmax}
        if double_quant:
            expected["nested_absmax"] = state.state2.absmax
            assert all(torch.equal(part["offset"], state.offset) for part in parts)
        for name, value in expected.items():
            value = value.reshape(-1).view(torch.uint8)
            assert torch.equal(joined(name)[: len(value)], value), (shape, name)
            assert not joined(name)[len(value) :].any()
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
    assert _relative_error(y, y64) < 1e-6
    assert x.grad is not None and x64.grad is not None
    assert _relative_error(x.grad, x64.grad) < 1e-6


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


def _relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference).norm() / reference.norm()).item()


def test_target_names_are_matched_as_peft_does_and_unknown_ones_are_named() -> None:
    linears = ["model.layers.0.attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.1.attn.q_proj"]
    assert select_targets(linears, ["all"], "llama") == linears
    assert select_targets(linears, ["q_proj"], "llama") == [linears[0], linears[2]]
    assert select_targets(linears, ["layers.1.attn.q_proj"], "llama") == [linears[2]]
    with pytest.raises(UserError, match=r"named qproj.*q_proj, up_proj"):
        select_targets(linears, ["q_proj", "qproj"], "llama")
