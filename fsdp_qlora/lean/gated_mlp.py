"""MLPs with a gate (Shazeer 2020), down(activation(gate(x)) * up(x)), found by what they compute."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from fsdp_qlora.lean.functions import Compiled, CompiledGated, Gated
from fsdp_qlora.lean.twin import twin

Activation = Callable[[torch.Tensor], torch.Tensor]
_HIDDEN, _INNER = 8, 12  # of the layers that a module is tried with


class Roles(NamedTuple):
    """Names of an MLP's linear layers."""

    gate: str
    up: str
    down: str


class GatedMlp(nn.Module):
    """A model's own MLP, with its children under their names.

    is_lean: in the backward pass the input of `down` is computed again, so that nobody keeps it.
    compiled: what to compute with instead of the activation (compiled.py).
    """

    is_lean = False
    compiled: Compiled | None = None

    def __init__(self, children: dict[str, nn.Module], roles: Roles, activation: Activation) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.roles, self.activation = roles, (activation,)  # in a tuple it is not registered a second time

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self._modules[name] for name in self.roles)
        assert gate and up and down
        if self.compiled:
            inner = CompiledGated.apply(gate(x), up(x), self.compiled, self.is_lean)
        else:
            inner = Gated.apply(gate(x), up(x), self.activation[0], self.is_lean)
        y: torch.Tensor = down(inner)
        return y


def as_gated_mlp(module: nn.Module) -> GatedMlp | None:
    """The same MLP with its elementwise part in one function; None if the module computes something else."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    linears = {name: child for name, child in children.items() if isinstance(child, nn.Linear)}
    if len(linears) != 3 or len(children) > 4 or len(inspect.signature(module.forward).parameters) != 1:
        return None
    if len([*module.parameters()]) != sum(len([*linear.parameters()]) for linear in linears.values()):
        return None
    activations = [each for each in (*children.values(), *vars(module).values()) if _is_activation(each)]
    for roles, activation in itertools.product(_possible_roles(linears), activations):
        if _agrees(module, children, roles, activation):
            return GatedMlp(children, roles, activation)
    return None


def _possible_roles(linears: dict[str, nn.Linear]) -> Iterator[Roles]:
    for gate, up, down in itertools.permutations(linears):
        shapes = [linears[name].weight.shape for name in (gate, up, down)]
        if shapes[0] == shapes[1] == shapes[2][::-1] != shapes[2]:
            yield Roles(gate, up, down)


def _is_activation(value: object) -> bool:
    """Whether it is a function of one tensor that returns a new one."""
    if isinstance(value, nn.Linear) or not callable(value):
        return False
    x = torch.linspace(-2, 2, 8)
    try:
        y = value(x)
    except Exception:  # it may be anything
        return False
    return isinstance(y, torch.Tensor) and y.shape == x.shape and y.data_ptr() != x.data_ptr()


@torch.no_grad()
def _agrees(module: nn.Module, children: dict[str, nn.Module], roles: Roles, activation: Activation) -> bool:
    """Whether the module computes this with small random layers, to the bit."""
    random = torch.Generator("cpu").manual_seed(0)
    small: dict[str, nn.Module] = dict(children)
    for name in roles:
        bias = children[name].bias is not None
        sizes = (_INNER, _HIDDEN) if name == roles.down else (_HIDDEN, _INNER)
        small[name] = linear = nn.Linear(*sizes, bias=bias, device="cpu", dtype=torch.float32)
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    x = torch.randn(3, _HIDDEN, generator=random)
    try:
        found = twin(module, children=small)(x)
    except (RuntimeError, TypeError, AttributeError):
        return False
    gate, up, down = (small[name] for name in roles)
    return isinstance(found, torch.Tensor) and torch.equal(found, down(activation(gate(x)) * up(x)))
