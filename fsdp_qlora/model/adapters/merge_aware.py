"""LoRA that is trained as it will be merged: y = x Wq^T + b with Wq = round(W + s B A).

Wq is in the format of W in the base's files: a quantized one (quantizers/rounded_weight.py), or 16
or 32 bits where a quantized model has left the layer out. Gradients pass straight through the
rounding, as if Wq were W + s B A. With G, the gradient of y as [N, out]:
    A: s (G B)^T x.
    B: s G^T (x A^T).
    x: G Wq.
None of them needs the gradient of W. The backward pass rounds again, so that no rounded weight
outlives its product. A and B are float32 in every precision: what is rounded are the values that
are saved. The same holds for each expert of a mixture, whose products are in quantizers/routed.py.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_qlora.model.adapters.lora import (
    ExpertsLora,
    KeptInput,
    LoraAdapter,
    LoraExperts,
    LoraLinear,
    as_before,
    low_rank_grads,
)
from fsdp_qlora.model.quantizers.products import FrozenProduct, computing_dtype, plain_product
from fsdp_qlora.model.quantizers.rounded_experts import ExpertsUpdate
from fsdp_qlora.model.quantizers.rounded_weight import RoundedWeight, Update, rounded_plain
from fsdp_qlora.model.quantizers.routed import AdaptedExperts
from fsdp_qlora.utils.errors import UserError


class RoundedLinear(NamedTuple):
    """A quantized layer with its adapter's update, in one call and its backward pass.

    tensors: of the layer, as they are gathered; FSDP2 refills them.
    """

    layer: Any
    tensors: Any
    update: Update

    @property
    def scaling(self) -> float:
        return self.update.scaling

    def product(self) -> FrozenProduct:
        """The products with Wq, which is rounded now."""
        layer = self.layer
        product: FrozenProduct = layer.frozen_product(layer.whole, layer.bias_to_add(), self._round)
        return product

    def _round(self) -> Any:
        return self.layer.rounded(self.update, self.tensors)


class RoundedPlain(NamedTuple):
    """The same of a layer that is not quantized.

    stored_dtype: of its weight in the base's files.
    """

    layer: Any
    weight: torch.Tensor
    stored_dtype: torch.dtype
    compute_dtype: torch.dtype
    update: Update

    @property
    def scaling(self) -> float:
        return self.update.scaling

    def product(self) -> FrozenProduct:
        """The products with Wq, which is rounded now."""
        rounded = rounded_plain(self.weight, self.update, self.stored_dtype)
        return plain_product(rounded, self.layer.bias, self.compute_dtype)


class _RoundedProduct(torch.autograd.Function):
    """y, and the backward pass of x, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        lora_A: torch.Tensor,
        lora_B: torch.Tensor,
        rounded: RoundedLinear | RoundedPlain,
        kept: KeptInput,
    ) -> torch.Tensor:
        # Weights are attributes for the reason given in lora.py.
        ctx.weights = (lora_A, lora_B)
        ctx.product = rounded
        ctx.kept = kept
        (y,) = rounded.product().multiply(x.flatten(0, -2))
        return as_before(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_y = grads[0].flatten(0, -2)
        x, low = ctx.kept.take()
        _, grad_A, grad_B = low_rank_grads(grad_y, x, low, ctx)
        # x may have no other owner: then its gradient can have its memory.
        del x, low
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = as_before(ctx.product.product().multiply_grad(grad_y), grads[0])
        return grad_x, grad_A, grad_B, None, None


class MergeAwareAdapter(LoraAdapter):
    """LoRA's two matrices, added to the weight of a base layer and rounded with it.

    stored_dtype: of a weight that is not quantized, in the base's files.
    """

    in_fp32 = True
    stored_dtype = torch.bfloat16

    def forward(self, x: torch.Tensor, base_layer: nn.Module, source: Any = None) -> torch.Tensor:
        """Compute x Wq^T + b, [.., out] in the base's dtype."""
        lora_A = self.lora_A.weight
        lora_B = self.lora_B.weight
        update = Update(lora_A.detach(), lora_B.detach(), self.scaling)
        rounded: RoundedLinear | RoundedPlain
        if isinstance(base_layer, RoundedWeight):
            rounded = RoundedLinear(base_layer, base_layer.tensors(), update)
            x = x.to(base_layer.compute_dtype)
        else:
            assert isinstance(base_layer, nn.Linear)
            x = x.to(computing_dtype(x))
            weight = base_layer.weight
            rounded = RoundedPlain(base_layer, weight, self.stored_dtype, x.dtype, update)
        if not torch.is_grad_enabled():
            (y,) = rounded.product().multiply(x.flatten(0, -2))
            return as_before(y, x)
        with torch.no_grad():
            low = F.linear(x.flatten(0, -2), lora_A.to(x.dtype))
        # Kept before the product runs: activation checkpointing then stops before it (kept.py).
        kept = KeptInput.of(x, low, source)
        y = _RoundedProduct.apply(x, lora_A, lora_B, rounded, kept)
        return y


class MergeAwareLinear(LoraLinear):
    """A base layer whose weight is rounded with the update of its adapter."""

    adapter = MergeAwareAdapter

    def __init__(self, base_layer: nn.Module, **options: Any) -> None:
        super().__init__(base_layer, **options)
        if isinstance(base_layer, RoundedWeight):
            base_layer.is_rounded_again = True


class MergeAwareExpertsLora(ExpertsLora):
    """LoRA's matrices of all experts, added to their quantized weights and rounded with them."""

    in_fp32 = True


class MergeAwareExperts(LoraExperts):
    """Experts whose quantized weights are rounded with the updates of their adapters."""

    adapter = MergeAwareExpertsLora

    def __init__(self, base_layer: nn.Module, names: Iterable[str], **options: Any) -> None:
        super().__init__(base_layer, names, **options)
        for name in self.lora:
            rounded: Any = base_layer.get_submodule(name)
            rounded.is_rounded_again = True

    def _adapted(self, name: str, lora_A: torch.Tensor, lora_B: torch.Tensor) -> AdaptedExperts:
        adapted = super()._adapted(name, lora_A, lora_B)
        # Views of the gathered weights, which FSDP2 refills before the backward pass.
        update = ExpertsUpdate(lora_B.detach(), lora_A.detach(), self.scaling)
        base: Any = adapted.base
        # B A is of the parameter as PEFT takes it: [out, in], or its transpose.
        if self.swaps != base.transposed:
            update = update.transposed()
        return adapted._replace(update=update)


def round_as_stored(layer: MergeAwareLinear, name: str, stored_dtype: torch.dtype) -> None:
    """Have a layer that is not quantized round to the dtype of its weight `name` in the files.

    Raises:
        UserError: the run does not keep all bits of the weight.
    """
    weight = layer.base_layer.weight
    assert isinstance(weight, torch.Tensor)
    kept_dtype = weight.dtype
    if torch.promote_types(stored_dtype, kept_dtype) != kept_dtype:
        stored, kept = (str(dtype).removeprefix("torch.") for dtype in (stored_dtype, kept_dtype))
        raise UserError(
            f"merge_aware: {name} is {stored} in the base's files, and this run keeps it in "
            f"{kept}, so it cannot be rounded as merge does. Give --precision fp32 or one with "
            f"{stored}, or name the quantized layers alone in --lora_target_modules."
        )
    for adapter in (layer.lora, layer.start):
        if adapter is not None:
            assert isinstance(adapter, MergeAwareAdapter)
            adapter.stored_dtype = stored_dtype
