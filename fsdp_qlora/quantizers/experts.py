"""Mixture-of-experts layers of transformers: find the expert parameters, and use one expert's matrix as an operand.

transformers keeps the experts of a layer in 3-D parameters, [experts, out, in] or (transposed) [experts, in, out],
and its eager forward multiplies with `parameter[e]`, one expert at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_qlora.model.direct_weights import read_directly
from fsdp_qlora.model.models import block_linears, find_blocks

# x @ M. The other product with an expert's matrix in transformers' eager forwards is linear(x, M) = x @ M^T.
_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm)


class ExpertMatrix:
    """Replaces an expert's matrix in products; every other operation gets it decoded.

    transposed: the matrix is stored [in, out], for x @ M, and not [out, in], for linear(x, M).
    """

    transposed: bool

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., in] -> [.., out], differentiable in x."""
        raise NotImplementedError

    def decoded(self) -> torch.Tensor:
        """The matrix in its stored orientation, as a tensor."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # .shape, .dtype, .float() and the like, which some model families use
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.decoded(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        matrix = args[1] if len(args) > 1 else None
        if isinstance(matrix, ExpertMatrix) and not isinstance(args[0], ExpertMatrix):
            if func in _MATMULS and matrix.transposed and len(args) == 2:
                return matrix.product(args[0])
            if func is F.linear and not matrix.transposed:
                y = matrix.product(args[0])
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                return y if bias is None else y + bias
        decoded = [arg.decoded() if isinstance(arg, ExpertMatrix) else arg for arg in args]
        return func(*decoded, **kwargs)


@dataclass(frozen=True, eq=False)
class AdaptedMatrix(ExpertMatrix):
    """An expert's matrix plus the product of two low-rank ones.

    base: in its stored orientation. lora_A [rank, in], lora_B [out, rank]: their product is scaled by `scaling`.
    """

    base: ExpertMatrix | torch.Tensor
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    scaling: float
    transposed: bool

    def product(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(x, self.base) if self.transposed else F.linear(x, self.base)  # type: ignore[arg-type]
        return torch.add(y, F.linear(F.linear(x, self.lora_A), self.lora_B), alpha=self.scaling)

    def decoded(self) -> torch.Tensor:
        base = self.base.decoded() if isinstance(self.base, ExpertMatrix) else self.base
        update = self.lora_B @ self.lora_A
        return base + self.scaling * (update.T if self.transposed else update)


def is_transposed(experts: nn.Module) -> bool:
    """Whether the module's parameters are [experts, in, out]."""
    return bool(getattr(experts, "is_transposed", False))


def loops_over_experts(module: nn.Module) -> bool:
    """Whether transformers chooses the implementation of these experts: it sets this attribute on such modules."""
    return hasattr(module, "is_transposed")


def router_linears(model: nn.Module) -> list[str]:
    """Paths of the linear layers that select or weight experts: too sensitive for 4 bits or an adapter."""
    routers = []
    for path, module in model.named_modules():
        counts = {child.num_experts for child in module.children() if loops_over_experts(child)}
        for name, child in module.named_children():
            if counts and isinstance(child, nn.Linear) and child.out_features in {1, *counts}:
                routers.append(f"{path}.{name}")
    return routers


def expert_parameters(model: nn.Module) -> list[str]:
    """Paths of the 3-D parameters inside the decoder blocks whose experts are used one at a time."""
    inside = {*find_blocks(model).modules()}
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if module in inside and loops_over_experts(module)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and parameter.is_floating_point()
    ]


def quantizable_weights(model: nn.Module) -> tuple[list[str], list[str]]:
    """Weights of a 4-bit base: paths of the blocks' linear layers without routers, and of their expert parameters."""
    others = {*router_linears(model), *read_directly(model)}  # who reads a weight would find codes, or miss an adapter
    return [path for path in block_linears(model) if path not in others], expert_parameters(model)
