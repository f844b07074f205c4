"""Quantized weights that are rounded again with an update."""

from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import nn

from fsdp_qlora.model.kernels.nf4_rounding import round_absmax, round_blocks
from fsdp_qlora.model.quantizers import rounded_weight
from fsdp_qlora.model.quantizers.bnb_4bit import quantize_blocks
from fsdp_qlora.model.quantizers.e2m1 import Nvfp4Weight
from fsdp_qlora.model.quantizers.fp8 import Fp8Weight
from fsdp_qlora.model.quantizers.rounded_experts import ExpertsUpdate, round_experts
from fsdp_qlora.model.quantizers.rounded_weight import Update
from fsdp_qlora.model.quantizers.stored import write_bytes
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from tests.helpers.rounded_layers import FORMS, filled

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("options", [{}, {"block": (16, 16)}], ids=["rows", "blocks"])
def test_fp8_zeros_whose_scale_is_zero_can_stay_and_grow(options: dict[str, Any]):
    linear = nn.Linear(64, 32, bias=False, device="meta")
    layer = QUANTIZERS["fp8"].linear(linear, compute_dtype=torch.bfloat16, **options)
    layer.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(32, 64, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.ones_like(layer.scale)
    codes[:16, :] = 0
    scale[: len(scale) // 2] = 0
    write_bytes(layer.weight, codes)
    write_bytes(layer.scale, scale)
    lora_A = torch.randn(2, 64, generator=generator)
    lora_B = torch.randn(32, 2, generator=generator)

    def rounded(update: Update) -> torch.Tensor:
        tensors = layer.rounded(update, layer.tensors())
        return layer.decode_tensors(layer.whole, torch.float32, tensors)

    before = layer.decode_tensors(layer.whole, torch.float32, layer.tensors())
    assert torch.equal(rounded(Update(lora_A, 0 * lora_B, 1.0)), before)
    changed = rounded(Update(lora_A, lora_B, 1.0))
    expected = before + lora_B @ lora_A
    # Half the distance of two codes, and of the smallest ones.
    torch.testing.assert_close(changed, expected, rtol=2**-4, atol=2**-7)


NF4 = {"quant_type": "nf4", "double_quant": True}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mxfp4": ("mxfp4", {}),
    "nvfp4 of two parts": ("nvfp4", {"num_parts": 2}),
    "fp8 rows": ("fp8", {}),
    "fp8 short blocks": ("fp8", {"block": (40, 48)}),
    "fp8 of two parts": ("fp8", {"num_parts": 2}),
    "nf4": ("bnb_4bit", NF4 | {"double_quant": False}),
    "nf4 that shares absmax": ("bnb_4bit", NF4),
}


def random_bytes(layer: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Codes and statistics of a layer, as they are in files."""

    def positive(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) + 0.5

    found = {}
    for name in ("weight", *layer.statistics):
        form = layer.stored_forms()["" if name == "weight" else f".{name}"]
        if name == "weight" and isinstance(layer, Fp8Weight):
            values = (positive(*form.shape) - 1).to(torch.float8_e4m3fn)
        elif form.dtype == torch.float32:
            values = positive(*form.shape)
        elif isinstance(layer, Nvfp4Weight) and name == "scale":
            values = positive(*form.shape).to(torch.float8_e4m3fn)
        else:
            values = torch.randint(119, 123, form.shape, generator=generator).to(torch.uint8)
        found[name] = values.view(torch.uint8)
    return found


@pytest.mark.parametrize("case", EXPERTS)
def test_each_expert_is_rounded_as_a_layer_of_its_own(case: str, monkeypatch):
    (name, options) = EXPERTS[case]
    classes: Any = QUANTIZERS[name]
    options = options | {"compute_dtype": torch.float32}
    parameter = nn.Parameter(torch.empty(4, 80, 96, device="meta"))
    experts = classes.experts(parameter, transposed=False, **options).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    stored = random_bytes(experts, generator)
    for part, values in stored.items():
        write_bytes(getattr(experts, part), values)
    if options.get("double_quant"):
        # The mean, which is no part of what ranks share.
        experts.absmax_offset.fill_(0.25)
    left = torch.randn(4, 80, 2, generator=generator)
    update = ExpertsUpdate(left, torch.randn(4, 2, 96, generator=generator), 0.5)

    def decoded(layer: Any, tensors: Any) -> torch.Tensor:
        values: torch.Tensor = layer.decode_tensors(layer.whole, torch.float32, tensors)
        return values

    whole = decoded(experts, round_experts(experts, range(4), update, experts.tensors()))
    assert not torch.equal(whole, decoded(experts, experts.tensors()))
    # Few weights at a time, and some of the experts.
    monkeypatch.setattr(rounded_weight, "_PIECE", {"cpu": 96 * 30})
    some = decoded(experts, round_experts(experts, [3, 1], update, experts.tensors()))
    for expert in (1, 3):
        assert torch.equal(some[expert], whole[expert])
        if case == "nf4 that shares absmax":
            continue
        linear = nn.Linear(96, 80, bias=False, device="meta")
        alone = classes.linear(linear, **options).to_empty(device="cpu")
        for part, values in stored.items():
            write_bytes(getattr(alone, part), values.flatten().chunk(4)[expert])
        again = alone.rounded(update.of(expert), alone.tensors())
        assert torch.equal(decoded(alone, again), whole[expert])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e38], ids=["nan", "inf", "overflow"])
@pytest.mark.parametrize("form", FORMS)
def test_a_diverged_update_is_not_clipped_to_numbers(form: str, bad: float):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(32, 64, generator=generator)
    lora_A = torch.randn(2, 64, generator=generator)
    lora_B = torch.randn(32, 2, generator=generator)
    lora_B[3, 0] = bad
    layer = filled(form, values)
    tensors = layer.rounded(Update(lora_A, lora_B, 50.0), layer.tensors())
    assert not layer.decode_tensors(layer.whole, torch.float32, tensors)[3].isfinite().any()


def zeros_of(case: str) -> Any:
    """A layer of whose weights some or all are zero, because scales are."""
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    if case == "fp8 scale of all":
        layer = filled("fp8 whole", values)
        write_bytes(layer.scale, torch.zeros(1))
        write_bytes(layer.weight, torch.zeros(32, 64, dtype=torch.uint8))
        return layer
    if case.startswith("fp8"):
        layer = filled(case, values)
        rows = layer.block[0]
        layer.scale.view(torch.float32)[0] = 0
        layer.weight.view(torch.uint8)[:rows] = 0
        return layer
    layer = filled("nvfp4", values, multiplies=case == "nvfp4 factor of all")
    if case == "nvfp4 factor of all":
        write_bytes(layer.global_scale, torch.zeros(1))
        write_bytes(layer.weight, torch.zeros(32 * 32, dtype=torch.uint8))
        return layer
    # Four groups a row: one with a scale of zero, and one of zeros with the smallest scale.
    layer.scale.view(torch.uint8)[0, :2] = torch.tensor([0, 1], dtype=torch.uint8)
    layer.weight.view(torch.uint8)[0, :16] = 0
    return layer


@pytest.mark.parametrize(
    "case", ["fp8 scale of all", "fp8 rows", "fp8 blocks", "nvfp4 factor of all", "nvfp4 groups"]
)
def test_zeros_keep_their_bytes_until_an_update_changes_them(case: str):
    layer = zeros_of(case)
    generator = torch.Generator().manual_seed(1)
    lora_A = torch.randn(2, 64, generator=generator)
    lora_B = torch.randn(32, 2, generator=generator)
    before = layer.tensors()
    same = layer.rounded(Update(lora_A, 0 * lora_B, 1.0), before)
    for name in ("weight", *layer.statistics):
        stored, rounded = (getattr(of, name).reshape(-1).view(torch.uint8) for of in (before, same))
        assert torch.equal(stored[: len(rounded)], rounded), name
    after = layer.rounded(Update(lora_A, lora_B, 1.0), before)
    changed = layer.decode_tensors(layer.whole, torch.float32, after)
    assert changed.isfinite().all()
    # The scale of all weights stays.
    assert (changed == 0).all() == case.endswith("of all")


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_blocks_of_4_bits_are_rounded_to_bitsandbytes_codes(quant_type):
    values = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    values[64:128] = 0
    values[150] = float("nan")
    found = round_blocks(values, quant_type)
    expected = quantize_blocks(values, quant_type)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1].nan_to_num(), expected[1].nan_to_num())


def test_absmax_are_rounded_to_the_nearest_value_of_their_table():
    absmax = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    offset = absmax.mean()
    codes, nested = round_absmax(absmax, offset)
    table = bnb.create_dynamic_map().double()
    exact = (absmax - offset).double() / nested.double().repeat_interleave(256)[:1000]
    error = (table[codes.int()] - exact).abs()
    nearest = (exact[:, None] - table).abs().amin(1)
    assert len(nested) == 4 and (error <= nearest + 1e-7).all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF], ids=["of a CPU", "of a GPU"])
def test_a_group_that_is_no_number_has_an_infinite_mxfp4_scale(bits: int):
    plain = nn.Linear(32, 1, bias=False, device="meta")
    layer: Any = QUANTIZERS["mxfp4"].linear(plain, compute_dtype=torch.float32)
    largest = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    scale = layer.scale_codes(largest, None)
    assert scale.item() >= 253
