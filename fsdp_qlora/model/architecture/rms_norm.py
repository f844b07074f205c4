"""RMS norms (Zhang and Sennrich 2019) by torch's function.

A model's own norms are replaced where ours compute the same on random numbers.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_qlora.model.architecture.module_copies import clone_with
from fsdp_qlora.model.architecture.output_again import InputsOnlyFunction

Form = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


class _MetaRmsNorm(torch.autograd.Function):
    """Stands for a GPU's kernel on the meta device, with its memory, for the plan.

    There torch would compute the norm in several operators, with copies in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        # The kernel saves its input and a factor per token, in float32.
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def _normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    y: torch.Tensor = _MetaRmsNorm.apply(x) if x.is_meta else F.rms_norm(x, x.shape[-1:], None, eps)
    return y.to(x.dtype)


def _rounded_then_weighted(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * _normalized(x, eps)


def _weighted_then_rounded(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.is_meta:
        return _normalized(x, eps) * weight
    return F.rms_norm(x, x.shape[-1:], weight, eps).to(x.dtype)


def _weighted_by_one_plus(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (_normalized(x.float(), eps) * (1 + weight.float())).to(x.dtype)


# Where models round to 16 bits, and how their weight counts: llama rounds before it multiplies by
# the weight, gemma adds 1 to the weight and rounds at the end.
FORMS: dict[str, Form] = {
    "rounded, then weighted": _rounded_then_weighted,
    "weighted, then rounded": _weighted_then_rounded,
    "weighted by 1 + weight": _weighted_by_one_plus,
}


class RmsNorm(nn.Module):
    """A model's own norm, with its weight.

    inputs_only: in the backward pass its output is computed again, so that nobody keeps it.
    """

    inputs_only = False

    def __init__(self, weight: nn.Parameter, form: str, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.form = form
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        form = FORMS[self.form]
        weight = self.weight
        eps = self.eps
        if not self.inputs_only or weight.requires_grad or not x.requires_grad:
            # `view_as` is a node of its own in autograd's graph: the gradients that x has through
            # the norm are added up there, before those of other users of x are. It is the order
            # that `InputsOnlyFunction` has, too, so that saving less changes no bit.
            return form(x.view_as(x), weight, eps)
        y: torch.Tensor = InputsOnlyFunction.apply(x, lambda x: form(x, weight, eps))
        return y


def as_rms_norm(module: nn.Module) -> RmsNorm | None:
    """A norm with torch's function instead of this module; None if it computes something else."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1:
        return None
    # A bias, a buffer or a child would be something else than a norm's weight.
    if len([*module.parameters(), *module.buffers(), *module.children()]) != 1:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    # Models name epsilon differently (eps, variance_epsilon, ...): any small number is tried.
    numbers = (value for value in vars(module).values() if isinstance(value, float))
    for eps in {number for number in numbers if 0 < number < 1}:
        for form in FORMS:
            if _is_rms_norm(module, form, eps):
                return RmsNorm(weight, form, eps)
    return None


@torch.no_grad()
def _is_rms_norm(module: nn.Module, form: str, eps: float) -> bool:
    """Whether the module computes this form of the norm, with the same rounding.

    Tried with random numbers of very different sizes.
    """
    random = torch.Generator("cpu").manual_seed(0)
    width = module.weight.shape[0]  # type: ignore[index]
    weight = torch.rand(width, generator=random) + 0.5  # type: ignore[arg-type]
    # From 1e-4 on, so that epsilon counts, to 1e2.
    x = torch.randn(8, width, generator=random) * torch.logspace(-4, 2, 8)[:, None]  # type: ignore[arg-type]
    for dtype in (torch.float32, torch.bfloat16):
        parameter = nn.Parameter(weight.to(dtype), requires_grad=False)
        try:
            y = clone_with(module, _parameters={"weight": parameter})(x.to(dtype))
        except (RuntimeError, TypeError, AttributeError):
            return False
        expected = FORMS[form](x.to(dtype), parameter, eps)
        if not isinstance(y, torch.Tensor) or y.dtype != expected.dtype:
            return False
        if y.shape != expected.shape:
            return False
        rtol = 1e-5 if dtype == torch.float32 else 1e-2
        if not torch.allclose(y, expected, rtol=rtol, atol=0):
            return False
        # bf16 is within that tolerance wherever a model rounds: rounding at another place changes
        # many numbers by their last bit, sums in another order hardly any.
        most_different = 0.01 if dtype == torch.bfloat16 else 1
        if (y != expected).float().mean() > most_different:
            return False
    return True
