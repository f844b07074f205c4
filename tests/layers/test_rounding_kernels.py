"""Triton's kernels round weights with an update to the bits of torch's operators."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, Ways, using_ways
from fsdp_qlora.model.kernels.trial import why_wrong
from fsdp_qlora.model.quantizers import rounded_weight
from fsdp_qlora.model.quantizers.rounded_weight import Update
from fsdp_qlora.run.decoding_trials import WeightForm, weight_forms
from fsdp_qlora.run.rounding_trials import flat, rounding_trials
from tests.layers.test_decoding_kernels import filled, new_layer

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("mxfp4", {}),
    ("nvfp4", {}),
    ("nvfp4", {"multiplies": True}),
    ("fp8", {}),
    ("fp8", {"block": (16, 128)}),
    ("fp8", {"block": (48, 256)}),
    ("fp8", {"num_parts": 1}),
    ("fp8", {"code_dtype": torch.float8_e5m2}),
    *(
        ("bnb_4bit", {"quant_type": quant_type, "double_quant": double_quant})
        for quant_type, double_quant in itertools.product(("nf4", "fp4"), (True, False))
    ),
]
# More rows than a program has, and columns that its last one has not.
SHAPE = (76, 320)
# Factors of B: updates of nothing, below the distance of codes, beyond all scales, and of no
# number.
SIZES = (0.0, 1e-3, 0.1, 100.0, float("nan"))


def _update(shape: tuple[int, int], size: float, rank: int = 5) -> Update:
    """An update of any float32 numbers, some of whose rows are zeros."""
    generator = torch.Generator().manual_seed(rank)
    lora_A = torch.randn(rank, shape[1], generator=generator)
    lora_B = size * torch.randn(shape[0], rank, generator=generator)
    lora_B[3::7] = 0
    return Update(lora_A, lora_B, 1 / 3)


def _with_zero_scales(layer: Any) -> Any:
    """The layer with scales of zero beside its codes, as files may have them for zeros."""
    name = "absmax" if hasattr(layer, "absmax") else "scale"
    layer.get_parameter(name).data.view(-1).view(torch.uint8)[: SHAPE[0]] = 0
    return layer


def differences(quantizer: str, options: dict[str, Any]) -> list[str]:
    """The tensors in which the kernel has other bits than torch, and whether it was used."""
    calls = []
    by_triton = rounded_weight.WAYS[TRITON]

    def noted(*args: Any) -> list[Any]:
        calls.append(args)
        return by_triton(*args)

    rounded_weight.WAYS[TRITON] = noted
    layer = filled(new_layer(quantizer, SHAPE, compute_dtype=torch.bfloat16, **options))
    layer = _with_zero_scales(layer)
    found = []
    for size in SIZES:
        update = _update(SHAPE, size)
        results = []
        for way in (PLAIN, TRITON):
            with using_ways(Ways(rounding=way)):
                results.append(flat(layer.rounded(update, layer.tensors())))
        for index, (plain, by_kernel) in enumerate(zip(*results, strict=True)):
            if plain.shape != by_kernel.shape or not torch.equal(_bits(plain), _bits(by_kernel)):
                found.append(f"tensor {index} at {size}")
    rounded_weight.WAYS[TRITON] = by_triton
    return found if len(calls) == len(SIZES) else [f"{len(calls)} calls"]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() and tensor.itemsize == 4:
        # NaN has many bits.
        tensor = tensor.nan_to_num()
    return tensor.flatten().view(torch.uint8)


@pytest.mark.parametrize("quantizer, options", LAYERS, ids=str)
def test_a_kernel_rounds_weight_and_update_to_torchs_bits(quantizer, options, interpreted):
    assert interpreted(differences, quantizer, options) == []


def unproven() -> list[str]:
    """The kernels of trials that are not right."""
    forms = []
    for quantizer, options in LAYERS:
        layer = new_layer(quantizer, (256, 256), compute_dtype=torch.bfloat16, **options)
        layer.is_rounded_again = True
        forms += weight_forms([layer])
    assert all(form.is_rounded for form in forms)
    found = []
    for make in rounding_trials(list(dict.fromkeys(forms)), (70, 200), CPU):
        before, after = (make().results(way) for way in (PLAIN, PLAIN))
        assert all(map(torch.equal, before, after))
        found += [why for why in why_wrong(make, [TRITON]).values() if why]
    return found


def test_a_runs_trials_prove_the_kernels_of_every_format(interpreted):
    assert interpreted(unproven) == []


def test_layers_that_no_kernel_rounds_have_no_trial():
    quarters = new_layer("nvfp4", (64, 64), compute_dtype=torch.bfloat16, num_parts=4)
    short_rows = new_layer("mxfp4", (64, 48), compute_dtype=torch.bfloat16)
    plain = new_layer("mxfp4", (64, 64), compute_dtype=torch.bfloat16)
    for layer in (quarters, short_rows):
        layer.is_rounded_again = True
    forms = weight_forms([quarters, short_rows, plain, nn.Linear(2, 2)])
    assert WeightForm("e2m1", (32, 0, False)) in forms
    assert rounding_trials(forms, (64, 64), CPU) == []
