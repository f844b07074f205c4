"""RMS norms (Zhang and Sennrich 2019) by torch's own function, one kernel on a GPU; found by what they compute."""

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_qlora.lean.functions import Remade
from fsdp_qlora.lean.twin import twin

Form = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def _normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], None, eps).to(x.dtype)


# Where models round to 16 bits, and how their weight counts: functions of x, the weight and epsilon.
FORMS: dict[str, Form] = {
    "rounded, then weighted": lambda x, weight, eps: weight * _normalized(x, eps),
    "weighted, then rounded": lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps).to(x.dtype),
    "weighted by 1 + weight": lambda x, weight, eps: (_normalized(x.float(), eps) * (1 + weight.float())).to(x.dtype),
}


class RmsNorm(nn.Module):
    """A model's own norm, with its weight.

    is_lean: in the backward pass its output is computed again, so that nobody keeps it.
    """

    is_lean = False

    def __init__(self, weight: nn.Parameter, form: str, eps: float) -> None:
        super().__init__()
        self.weight, self.form, self.eps = weight, form, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        form, weight, eps = FORMS[self.form], self.weight, self.eps
        if not self.is_lean or weight.requires_grad or not x.requires_grad:
            # The gradients of x by its parts are added up before others' are, so that being lean changes no bit.
            return form(x.view_as(x), weight, eps)
        y: torch.Tensor = Remade.apply(x, lambda x: form(x, weight, eps))
        return y

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, {self.form}"


def as_rms_norm(module: nn.Module) -> RmsNorm | None:
    """The same norm by torch's function; None if the module, on the meta device, computes something else."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len([*module.parameters(), *module.buffers(), *module.children()]) != 1:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    for eps in {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1}:
        for form in FORMS:
            if _agrees(module, form, eps):
                return RmsNorm(weight, form, eps)
    return None


@torch.no_grad()
def _agrees(module: nn.Module, form: str, eps: float) -> bool:
    """Whether the module computes this, by random numbers of very different sizes, with the same rounding."""
    random = torch.Generator("cpu").manual_seed(0)
    width = module.weight.shape[0]  # type: ignore[index]
    weight = torch.rand(width, generator=random) + 0.5  # type: ignore[arg-type]
    x = torch.randn(8, width, generator=random) * torch.logspace(-4, 2, 8)[:, None]  # type: ignore[arg-type]
    for dtype in (torch.float32, torch.bfloat16):
        parameter = nn.Parameter(weight.to(dtype), requires_grad=False)
        try:
            found = twin(module, parameters={"weight": parameter})(x.to(dtype))
        except (RuntimeError, TypeError, AttributeError):
            return False
        expected = FORMS[form](x.to(dtype), parameter, eps)
        if not isinstance(found, torch.Tensor) or found.dtype != expected.dtype or found.shape != expected.shape:
            return False
        is_near = torch.allclose(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0)
        if not is_near or (found != expected).float().mean() > (0.01 if dtype == torch.bfloat16 else 1):
            return False
    return True
