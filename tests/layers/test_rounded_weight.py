"""Quantized weights that are rounded again with an update."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_qlora.model.quantizers.rounded_weight import Update
from fsdp_qlora.model.quantizers.stored import write_bytes
from fsdp_qlora.model.quantizers.table import QUANTIZERS

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
