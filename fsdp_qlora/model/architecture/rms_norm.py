"""RMS norms (Zhang and Sennrich 2019) by one function.

A model's own norms are replaced where ours compute the same on random numbers.
"""

import inspect
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_qlora.model.architecture.module_copies import clone_with
from fsdp_qlora.model.architecture.output_again import InputsOnlyFunction
from fsdp_qlora.model.kernels.norm import FORMS, norm_fits, rms_norm, rms_norm_gradient


class _Normed(torch.autograd.Function):
    """A norm in one kernel each way, of which its input and a factor per token are kept.

    Args:
        inputs_only: let the next function ask for the output, and not keep it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, form: str, eps: float, inputs_only: bool
    ) -> torch.Tensor:
        ctx.gives_output = inputs_only
        ctx.output_again = _normed_again
        ctx.form = form
        ctx.eps = eps
        ctx.again = None
        y, factors = rms_norm(_rows(x), weight, eps, form)
        ctx.save_for_backward(x, weight, factors)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        # Autograd frees saved tensors after this, but not attributes.
        ctx.again = None
        x, weight, factors = ctx.saved_tensors
        rows = _rows(x)
        grad_rows = grad.reshape(rows.shape)
        grad_x = rms_norm_gradient(grad_rows, rows, weight, factors, ctx.form)
        return grad_x.view(x.shape), None, None, None, None


def _normed_again(node: Any) -> torch.Tensor:
    """The output, which is computed once however often it is asked for."""
    if node.again is None:
        x, weight, _ = node.saved_tensors
        node.again = rms_norm(_rows(x), weight, node.eps, node.form)[0].view(x.shape)
    return node.again


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, x.shape[-1])


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
        if not weight.requires_grad and norm_fits(x, weight, self.form):
            if not (torch.is_grad_enabled() and x.requires_grad):
                return rms_norm(_rows(x), weight, eps, self.form)[0].view(x.shape)
            fused: torch.Tensor = _Normed.apply(x, weight, self.form, eps, self.inputs_only)
            return fused
        if not self.inputs_only or weight.requires_grad or not x.requires_grad:
            # `view_as` is a node of its own in autograd's graph: the gradients that x has through
            # the norm are added up there, before those of other users of x are. It is the order
            # that `InputsOnlyFunction` has, too, so that saving less changes no bit.
            return form(x.view_as(x), weight, eps)
        y: torch.Tensor = InputsOnlyFunction.apply(x, lambda x: form(x, weight, eps))
        return y


def as_rms_norm(module: nn.Module) -> RmsNorm | None:
    """A norm by our function instead of this module; None if it computes something else."""
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
        except Exception:  # it may be anything
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
