"""The elementwise part of a gated MLP, compiled by torch: one kernel forward and one backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_qlora.lean.functions import Compiled
from fsdp_qlora.lean.gated_mlp import GatedMlp

Backend = str | Callable[..., Any]  # torch.compile's


def compile_gate(activation: Callable[[torch.Tensor], torch.Tensor], *, backend: Backend = "inductor") -> Compiled:
    """Compiled when they are first called, for any number of tokens."""

    def multiply(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return activation(gate) * up

    def gradients(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        activated, pull_back = torch.func.vjp(activation, gate)  # type: ignore[misc]
        return pull_back(grad * up)[0], grad * activated

    options = {"dynamic": True, "fullgraph": True, "backend": backend}
    return Compiled(torch.compile(multiply, **options), torch.compile(gradients, **options))  # type: ignore[call-overload]


def compile_gates(model: nn.Module, device: torch.device, dtype: torch.dtype, *, backend: Backend = "inductor") -> str:
    """Compile the gated MLPs' elementwise parts, each kind of activation once, and try them on a few numbers.

    Returns:
        Why they are not compiled; then they stay as they were.
    """
    compiled: dict[str, Compiled] = {}
    mlps = [module for module in model.modules() if isinstance(module, GatedMlp)]
    gate, up = torch.linspace(-3, 3, 64, device=device, dtype=dtype).view(2, 4, 8)
    for mlp in mlps:
        if (kind := _kind(mlp)) not in compiled:
            compiled[kind] = made = compile_gate(mlp.activation[0], backend=backend)
            try:
                with torch.no_grad():
                    made.gradients(made.multiply(gate, up), gate, up)
            except Exception as error:  # of many kinds: no compiler, no Triton, an operator it does not know
                return " ".join(str(error).splitlines()[:2])
    for mlp in mlps:
        mlp.compiled = compiled[_kind(mlp)]
    return ""


def _kind(mlp: GatedMlp) -> str:
    (activation,) = mlp.activation
    return f"{type(activation)} {activation if isinstance(activation, nn.Module) else id(activation)}"
