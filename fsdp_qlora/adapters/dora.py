"""DoRA (Liu et al. 2024, arXiv 2402.09353): LoRA with a trainable magnitude for each row of the weight.

W' = m * (W + s B A) / ||W + s B A||, the norm per output row and held constant in the backward pass (section 4.3).

Shapes: x [.., in], W [out, in], lora_A [rank, in], lora_B [out, rank], m [out].
"""

from typing import Any

import torch
from torch import nn

from fsdp_qlora.adapters.lora import LoraAdapter
from fsdp_qlora.quantizers.base import QuantizedWeight

_PIECE = 2**20  # elements multiplied at a time for the magnitude's gradient


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

    def forward(self, x: torch.Tensor, base_layer: nn.Module) -> torch.Tensor:
        """x W'^T + b. With dropout as in PEFT: x W^T + b + x' (W' - W)^T, where x' is x with parts dropped."""
        bias: torch.Tensor | None = base_layer.bias  # type: ignore[assignment]
        if self.training and isinstance(self.dropout, nn.Dropout):
            dropped = self.dropout(x)
            base, base_of_dropped, product = self._base_products(base_layer, x, dropped)
            scale = self._scale(product, bias)
            change = self._scaled(base_of_dropped, dropped, scale) - base_of_dropped
            return base + (change if bias is None else change + _rest_of_bias(bias, scale, change))
        base, product = self._base_products(base_layer, x)
        scale = self._scale(product, bias)
        adapted = self._scaled(base, x, scale)
        return adapted if bias is None else adapted + _rest_of_bias(bias, scale, adapted)

    def _scaled(self, base: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        update = self.lora_B(self.lora_A(x))
        scaled: torch.Tensor = _ScaleRows.apply(torch.add(base, update, alpha=self.scaling), scale)
        return scaled

    def _base_products(self, base_layer: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The base layer's outputs for the inputs, and for the rows of A, [rank, out], without a gradient.

        Computed as one product, which decodes W once, if copying the inputs (and their gradients in the backward
        pass) costs less than decoding W again.
        """
        lora_A = self.lora_A.weight.detach().to(inputs[0].dtype)
        rows = [x.shape[:-1].numel() for x in inputs]
        num_in, num_out = self.lora_A.in_features, self.lora_B.out_features
        if sum(rows) * (num_in + num_out) > num_in * num_out:
            with torch.no_grad():
                product = base_layer(lora_A)
            return [*(base_layer(x) for x in inputs), product]
        everything = base_layer(torch.cat([*(x.flatten(0, -2) for x in inputs), lora_A]))
        *outputs, product = everything.split([*rows, lora_A.shape[0]])
        return [*(y.view(*x.shape[:-1], num_out) for x, y in zip(inputs, outputs, strict=True)), product.detach()]

    def _scale(self, product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """m / ||W + s B A||, float32 [out], differentiable in m alone.

        ||W + s B A||^2 = ||W||^2 + 2 s (W A^T . B) + s^2 (B A A^T . B), summed over each row: W is needed only for
        its product with the few rows of A.

        Args:
            product: A W^T + b, [rank, out].
        """
        magnitude, row_squares = self.magnitude(None)
        # Autocast would run these float32 products in 16 bits.
        with torch.no_grad(), torch.autocast(product.device.type, enabled=False):
            lora_A, lora_B = self.lora_A.weight.float(), self.lora_B.weight.float()
            product = (product if bias is None else product - bias).float()
            with_update = 2 * self.scaling * product.T + self.scaling**2 * torch.mm(lora_B, torch.mm(lora_A, lora_A.T))
            squares = row_squares + (with_update * lora_B).sum(dim=1)
            norm = squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt()  # a row may be zero
        return magnitude / norm


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
        result: torch.Tensor = self.lora(x, self.base_layer)
        return result

    @torch.no_grad()
    def base_row_squares(self) -> torch.Tensor:
        """||W||^2 per row of the base, float32 [out]. Only while its parameters are gathered."""
        base = self.base_layer
        weight = base.dequantize() if isinstance(base, QuantizedWeight) else base.weight
        return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()


def _rest_of_bias(bias: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """b - scale * b, to be added to an output scaled with its bias: DoRA does not scale the bias."""
    return (bias - scale * bias).to(like.dtype)


class _ScaleRows(torch.autograd.Function):
    """y * scale for y [.., out] of any dtype and scale float32 [out], without a float32 copy of y."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y, scale)
        return torch.mul(y, scale, out=torch.empty_like(y))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (grad,) = grads
        y, scale = ctx.saved_tensors
        return torch.mul(grad, scale, out=torch.empty_like(grad)), _sum_of_products(grad, y)


def _sum_of_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a * b summed over all dims but the last, in float32 (fp16 would overflow), in pieces to save memory."""
    a, b = a.flatten(0, -2), b.flatten(0, -2)
    total = torch.zeros(a.shape[-1], dtype=torch.float32, device=a.device)
    rows = max(1, _PIECE // a.shape[-1])
    for piece_a, piece_b in zip(a.split(rows), b.split(rows), strict=True):
        total += (piece_a.float() * piece_b).sum(dim=0)
    return total
