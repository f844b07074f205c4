"""Gated MLPs (Shazeer 2020) with one function for their elementwise part.

A model's own modules are replaced where ours compute the same on random numbers. An MLP with a gate
is down(activation(gate(x)) * up(x)). MLPs of any kind compute long rows in pieces (chunking.py).
"""

import inspect
import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_qlora.model.architecture.chunking import count_pieces, in_pieces
from fsdp_qlora.model.architecture.module_copies import clone_with
from fsdp_qlora.model.architecture.output_again import Function, with_graph
from fsdp_qlora.model.kernels.gate import is_silu, silu_gradients_, silu_product
from fsdp_qlora.model.kernels.in_use import PLAIN, ways_in_use

Roles = tuple[str, str, str]  # names of an MLP's linear layers: gate, up, down
# Elements of a gate, 128 MiB in 16 bits: what is temporary in the backward pass of more comes in
# pieces of that size. A long row's peak is there, and is smaller by half of the MLP's part.
PIECE = 2**26


def gated(activation: Function, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """activation(gate) * up, in a new tensor."""
    if activation is F.silu:
        return silu_product(gate, up)
    return _times(activation(gate), up)


def _gated_gradients(
    activation: Function, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up."""
    gate, activated = with_graph(activation, gate)
    grad_gate = torch.autograd.grad(activated, gate, grad * up)[0]
    return grad_gate, _times(activated.detach(), grad)


def _times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a * b in a's memory."""
    # In place the result would have a's dtype; of two dtypes it has the wider one.
    return a.mul_(b) if a.dtype == b.dtype else a * b


class Gated(torch.autograd.Function):
    """activation(gate) * up, of which gate and up are kept.

    Args:
        activation: returns a new tensor, which is overwritten.
        inputs_only: let the next function ask for the output, and not keep it.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: Function, inputs_only: bool
    ) -> torch.Tensor:
        ctx.gives_output = inputs_only
        ctx.output_again = lambda node: gated(activation, *node.saved_tensors)
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return gated(activation, gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        gate, up = ctx.saved_tensors
        by_kernel = ctx.activation is F.silu and ways_in_use().gate != PLAIN
        if not by_kernel and gate.numel() <= PIECE:
            return *_gated_gradients(ctx.activation, grad, gate, up), None, None
        # The gradients overwrite gate and up, which were made for their product alone. Detached,
        # since autograd refuses to change saved tensors in place.
        gate = gate.detach()
        up = up.detach()
        if by_kernel:
            silu_gradients_(grad, gate, up, keeps_grad=True)
            return gate, up, None, None
        for grad_piece, gate_piece, up_piece in _row_pieces(
            grad.contiguous(), gate, up, most=PIECE
        ):
            # Both gradients are computed before either input is overwritten.
            gradients = _gated_gradients(ctx.activation, grad_piece, gate_piece, up_piece)
            gate_piece.copy_(gradients[0])
            up_piece.copy_(gradients[1])
            # Before the next piece's are made, which would be there at the same time.
            del gradients
        return gate, up, None, None


def gated_gradients_(
    activation: Function, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> None:
    """Overwrite grad by activation(gate) * up, and gate and up by their gradients.

    Args:
        grad: of the product. All are [N, width], without gaps in memory.
    """
    # Half the size: a caller that has pieces of a row has memory for whole results besides.
    for piece in _row_pieces(grad, gate, up, most=PIECE // 2):
        if activation is F.silu:
            silu_gradients_(*piece)
        else:
            _overwrite(activation, *piece)


def _overwrite(
    activation: Function, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> None:
    x, activated = with_graph(activation, gate)
    slope = torch.autograd.grad(activated, x, grad * up)[0]
    activated = activated.detach()
    product = activated * up
    up.copy_(_times(activated, grad))
    gate.copy_(slope)
    grad.copy_(product)


def _row_pieces(*tensors: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Pieces of whole rows, with at most `most` elements, of tensors [.., width]."""
    width = tensors[0].shape[-1]
    rows = max(1, most // width)
    return zip(*(tensor.view(-1, width).split(rows) for tensor in tensors), strict=True)


# --- the modules ---


class Mlp(nn.Module):
    """A model's own MLP, a function of each token alone: long rows are computed in pieces.

    inputs_only: its block keeps its activations, and it computes all tokens at once. inner: the
    largest number of features that a token has in it.
    """

    inputs_only = False
    inner = 0
    compute: Function  # of x [.., hidden]

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # Its children, parameters and attributes, which the model's own forward reads from `self`.
        vars(self).update(vars(module))
        self.compute = types.MethodType(type(module).forward, self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.numel() // x.shape[-1]
        hidden = x.shape[-1]
        if self.inputs_only or count_pieces(tokens, hidden=hidden, inner=self.inner) == 1:
            return self.compute(x)
        return in_pieces(self.compute, x)


class GatedMlp(Mlp):
    """A model's own MLP, with its children under their names.

    inputs_only: in the backward pass the input of `down` is computed again, so that nobody keeps
    it. with_adapters: computes it together with the adapters of its layers; gives None where they
    are called one by one (model/adapters/lean_mlp.py).
    """

    with_adapters: Callable[["GatedMlp", torch.Tensor], torch.Tensor | None] | None = None

    def __init__(self, children: dict[str, nn.Module], roles: Roles, activation: Function) -> None:
        nn.Module.__init__(self)
        for name, child in children.items():
            self.add_module(name, child)
        self.roles = roles
        # There are kernels for SiLU, under whichever name a model has it.
        self.activation = F.silu if is_silu(activation) else activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = None if self.with_adapters is None else self.with_adapters(self, x)
        return super().forward(x) if y is None else y

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        # By name at each call, since adapters and quantized layers have taken their places.
        gate, up, down = (self._modules[name] for name in self.roles)
        assert gate and up and down
        if not torch.is_grad_enabled():
            return down(gated(self.activation, gate(x), up(x)))
        y: torch.Tensor = down(Gated.apply(gate(x), up(x), self.activation, self.inputs_only))
        return y


def as_gated_mlp(module: nn.Module) -> GatedMlp | None:
    """An MLP with one function for its elementwise part; None if the module is no gated MLP."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    linears = linears_alone(module)
    # three linear layers, and at most an activation
    if len(linears) != 3 or len(children) > 4:
        return None
    values = (*children.values(), *vars(module).values())
    activations = [value for value in values if _is_activation(value)]
    for roles, activation in itertools.product(_possible_roles(linears), activations):
        if _is_gated_mlp(module, roles, activation):
            return GatedMlp(children, roles, activation)
    return None


def linears_alone(module: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a module that has no other parameters and takes one argument."""
    linears = {
        name: child for name, child in module._modules.items() if isinstance(child, nn.Linear)
    }
    num_inside = sum(len([*linear.parameters()]) for linear in linears.values())
    if len([*module.parameters()]) != num_inside:
        return {}
    if len(inspect.signature(module.forward).parameters) != 1:
        return {}
    return linears


def _possible_roles(linears: dict[str, nn.Linear]) -> Iterator[Roles]:
    for gate, up, down in itertools.permutations(linears):
        shapes = [linears[name].weight.shape for name in (gate, up, down)]
        # gate and up are [inner, hidden], down is [hidden, inner]; where both sizes are equal,
        # shapes do not tell them apart, and no role is taken
        if shapes[0] == shapes[1] == shapes[2][::-1] != shapes[2]:
            yield gate, up, down


def _is_activation(value: object) -> bool:
    """Whether it is a function of one tensor that returns a new one."""
    if isinstance(value, nn.Linear) or not callable(value):
        return False
    x = torch.linspace(-2, 2, 8)
    try:
        y = value(x)
    except Exception:  # it may be anything
        return False
    # A view of its input could not be overwritten (`_times`).
    return isinstance(y, torch.Tensor) and y.shape == x.shape and y.data_ptr() != x.data_ptr()


@torch.no_grad()
def _is_gated_mlp(module: nn.Module, roles: Roles, activation: Function) -> bool:
    """Whether the module computes this with small random layers, to the bit."""
    small, x = _small_copy(module, roles[0])
    gate, up, down = (small._modules[name] for name in roles)
    assert gate and up and down
    try:
        y = small(x)
    except (RuntimeError, TypeError, AttributeError):
        return False
    # To the bit: a tolerance would take gelu for its approximation by tanh, from which it differs
    # by up to 5e-4.
    return isinstance(y, torch.Tensor) and torch.equal(y, down(activation(gate(x)) * up(x)))


@torch.no_grad()
def as_own_mlp(module: nn.Module) -> Mlp | None:
    """Wrap an MLP's own code; None if its output for a token depends on other tokens.

    Tried with small random layers.
    """
    linears = linears_alone(module)
    if len(linears) < 2:
        return None
    first, *_ = linears
    small, x = _small_copy(module, first)
    try:
        mlp = Mlp(small)
        # Two pieces must give what all tokens give at once.
        in_two = torch.cat([mlp(x[:, :2]), mlp(x[:, 2:])], dim=1)
        is_near = torch.allclose(mlp(x), in_two, atol=1e-5)
    except (RuntimeError, TypeError, AttributeError):
        return None
    return Mlp(module) if is_near else None


def _small_copy(module: nn.Module, first: str) -> tuple[nn.Module, torch.Tensor]:
    """The module with small random layers of the same proportions, and tokens for layer `first`."""
    linears = linears_alone(module)
    random = torch.Generator("cpu").manual_seed(0)
    # By their common divisor sizes shrink to a few numbers and stay different where they were, so
    # that matrices fit together in the model's way alone.
    unit = math.gcd(*(size for linear in linears.values() for size in linear.weight.shape))
    small: dict[str, nn.Module | None] = dict(module._modules)
    for name, linear in linears.items():
        sizes = (linear.in_features // unit, linear.out_features // unit)
        bias = linear.bias is not None
        small[name] = nn.Linear(*sizes, bias=bias, device="cpu", dtype=torch.float32)
        for parameter in small[name].parameters():  # type: ignore[union-attr]
            nn.init.normal_(parameter, generator=random)
    x = torch.randn(1, 5, linears[first].in_features // unit, generator=random)
    return clone_with(module, _modules=small), x
