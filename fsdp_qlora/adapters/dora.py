"""DoRA (Liu et al. 2024, arXiv 2402.09353): LoRA with a trainable magnitude for each row of the weight.

W' = m * (W + s B A) / ||W + s B A||, the norm per output row and held constant in the backward pass (section 4.3).

Shapes: x [.., in], W [out, in], lora_A [rank, in], lora_B [out, rank], m [out].
"""

from typing import Any

import torch
from torch import nn

from fsdp_qlora.adapters.dora_product import DoraOperands, dora_product
from fsdp_qlora.adapters.lora import LoraAdapter
from fsdp_qlora.model.fused_functions import recompute_source
from fsdp_qlora.quantizers.base import QuantizedWeight, frozen_product


class Magnitude(nn.Module):
    """One number per output row, fp32 in every precision: bf16 cannot represent changes below 0.4%.

    Parameters:
        weight: m, trainable, float32 [out].
        row_squares: ||W||^2 of the base's rows, frozen, float32 [out].
    """

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, device="meta", dtype=torch.float32))
        self.row_squares = nn.Parameter(torch.empty_like(self.weight), requires_grad=False)

    def forward(self, _: None) -> tuple[torch.Tensor, torch.Tensor]:
        """m and ||W||^2, gathered by FSDP2 for this call; FSDP2 of torch 2.11 fails on a call without arguments."""
        return self.weight, self.row_squares


class DoraAdapter(LoraAdapter):
    """LoRA's two matrices and the magnitude, applied to a base layer."""

    def __init__(self, in_features: int, out_features: int, *, rank: int, scaling: float, dropout: float) -> None:
        super().__init__(in_features, out_features, rank=rank, scaling=scaling, dropout=dropout)
        self.magnitude = Magnitude(out_features)

    def forward(self, x: torch.Tensor, base_layer: nn.Module, source: Any = None) -> torch.Tensor:
        """x W'^T + b, [.., out]. With dropout as in PEFT: x W^T + b + x' (W' - W)^T, x' with parts dropped."""
        base = frozen_product(base_layer, x, with_bias=False)
        assert base is not None
        bias: torch.Tensor | None = base_layer.bias  # type: ignore[assignment]
        magnitude, row_squares = self.magnitude(None)
        operands = DoraOperands(
            base, None if bias is None else bias.to(base.dtype), row_squares, self.scaling, self._draw_dropout()
        )
        return dora_product(x, *self.matrices(), magnitude, operands, source)


class DoraLinear(nn.Module):
    """base_layer with DoRA on its weight."""

    def __init__(self, base_layer: nn.Module, *, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora = DoraAdapter(
            base_layer.in_features,  # type: ignore[arg-type]
            base_layer.out_features,  # type: ignore[arg-type]
            rank=rank,
            scaling=scaling,
            dropout=dropout,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.lora(x, self.base_layer, recompute_source(x))
        return result

    @torch.no_grad()
    def base_row_squares(self) -> torch.Tensor:
        """||W||^2 per row of the base, float32 [out]. Only while its parameters are gathered."""
        base = self.base_layer
        weight = base.dequantize() if isinstance(base, QuantizedWeight) else base.weight
        return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
