"""More weights in one tensor than an int32 counts, on the meta device."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_qlora.quantizers.bnb_4bit import Bnb4bitExperts, quantize_blocks

MOST = 2**31 - 1


class _Kernels(TorchDispatchMode):
    """Remembers how many elements bitsandbytes' kernels were given or asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "bitsandbytes":
            outputs = result if isinstance(result, tuple) else (result,)
            self.counts.append(max(tensor.numel() for tensor in (args[0], *outputs)))
        return result


def test_weights_are_quantized_in_pieces_that_the_kernel_can_count() -> None:
    values = torch.empty(2**31 + 128, device="meta", dtype=torch.bfloat16)
    with _Kernels() as kernels:
        codes, absmax = quantize_blocks(values, "nf4")
    assert max(kernels.counts) <= MOST
    assert codes.numel() == values.numel() // 2 and absmax.numel() == values.numel() // 64


@pytest.mark.parametrize("double_quant", [False, True])
def test_weights_are_decoded_in_pieces_that_the_kernel_can_count(double_quant: bool) -> None:
    parameter = nn.Parameter(torch.empty(3, 2**15, 2**15, device="meta"))
    experts = Bnb4bitExperts(
        parameter, transposed=False, quant_type="nf4", double_quant=double_quant, compute_dtype=torch.bfloat16
    )
    with _Kernels() as kernels:
        decoded = experts.dequantize()
    assert max(kernels.counts) <= MOST
    assert decoded.shape == parameter.shape
