"""RMS norms (Zhang and Sennrich 2019) and gated MLPs (Shazeer 2020), each by one function.

A model's own modules are replaced where ours compute the same on random numbers. An MLP with a gate
is down(activation(gate(x)) * up(x)). MLPs of any kind compute long rows in pieces (chunking.py).

The elementwise functions keep their inputs alone, and their output is computed again where it is
needed: a function that takes it, and would keep it, can ask for it again in the backward pass
(`output_again`).
"""

import copy
import inspect
import itertools
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_qlora.model.architecture.chunking import count_pieces, in_pieces

Function = Callable[[torch.Tensor], torch.Tensor]
Form = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
Roles = tuple[str, str, str]  # names of an MLP's linear layers: gate, up, down
# Elements of a gate, 128 MiB in 16 bits: what is temporary in the backward pass of more comes in
# pieces of that size. A long row's peak is there, and is smaller by half of the MLP's part.
PIECE = 2**26


def output_source(x: torch.Tensor) -> Any:
    """The node of autograd's graph that can compute x again; None if x must be kept."""
    return x.grad_fn if getattr(x.grad_fn, "gives_output", False) else None


def output_again(node: Any) -> torch.Tensor:
    """The output of a node that `output_source` found, without gradient.

    Call it before the node's own backward pass, which frees what the output is computed from.
    """
    output: torch.Tensor = node.output_again(node)
    return output


class InputsOnlyFunction(torch.autograd.Function):
    """y = function(x), differentiable in x alone.

    However often y is asked for again, it is computed once.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Function) -> torch.Tensor:
        ctx.gives_output = True
        # The node is an argument: if the function referred to ctx, the two would hold each other.
        ctx.output_again = lambda node: _once(node)[1].detach()
        ctx.function = function
        ctx.again = None
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, y = _once(ctx)
        # Autograd frees saved tensors after this, but not attributes.
        ctx.again = None
        return torch.autograd.grad(y, x, grads)[0], None


def _once(node: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """x and function(x) with their graph."""
    if node.again is None:
        node.again = _with_graph(node.function, *node.saved_tensors)
    x, y = node.again
    return x, y


def _with_graph(function: Function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return x, function(x)


def _gated(activation: Function, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _times(activation(gate), up)


def _gated_gradients(
    activation: Function, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up."""
    gate, activated = _with_graph(activation, gate)
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
        ctx.output_again = lambda node: _gated(activation, *node.saved_tensors)
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return _gated(activation, gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        gate, up = ctx.saved_tensors
        if gate.numel() <= PIECE:
            return *_gated_gradients(ctx.activation, grad, gate, up), None, None
        # The gradients overwrite gate and up, which were made for their product alone. Detached,
        # since autograd refuses to change saved tensors in place.
        gate = gate.detach()
        up = up.detach()
        width = gate.shape[-1]
        rows = max(1, PIECE // width)
        pieces = zip(
            grad.contiguous().view(-1, width).split(rows),
            gate.view(-1, width).split(rows),
            up.view(-1, width).split(rows),
            strict=True,
        )
        for grad_piece, gate_piece, up_piece in pieces:
            # Both gradients are computed before either input is overwritten.
            gradients = _gated_gradients(ctx.activation, grad_piece, gate_piece, up_piece)
            gate_piece.copy_(gradients[0])
            up_piece.copy_(gradients[1])
            # Before the next piece's are made, which would be there at the same time.
            del gradients
        return gate, up, None, None


# --- the modules ---


def fuse_modules(model: nn.Module) -> None:
    """Replace the norms and MLPs of a model on the meta device, wherever ours compute the same.

    Names and parameters stay.
    """
    # A list, since modules are replaced in the loop.
    for path, module in list(model.named_modules()):
        replacement = as_rms_norm(module) or as_gated_mlp(module) or as_own_mlp(module)
        if isinstance(replacement, Mlp):
            linears = _linears_alone(module).values()
            replacement.inner = max(linear.out_features for linear in linears)
        if replacement is not None:
            model.set_submodule(path, replacement)


def set_save_inputs_only(block: nn.Module, enabled: bool) -> None:
    """Choose whether a block keeps less: norms and products of gates are then computed again.

    Otherwise long rows are computed in pieces, which takes no longer in a block with activation
    checkpointing.
    """
    for module in block.modules():
        if isinstance(module, RmsNorm | Mlp):
            module.inputs_only = enabled


def describe_fused(model: nn.Module) -> str:
    """Describe for the log how norms and gates are computed."""
    norms = sum(isinstance(module, RmsNorm) for module in model.modules())
    mlps = sum(isinstance(module, GatedMlp) for module in model.modules())
    return (
        f"{norms} norms by torch's rms_norm, {mlps} gated MLPs by one function, the rest by the "
        "model's code"
    )


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
            y = _clone_with(module, _parameters={"weight": parameter})(x.to(dtype))
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
    it.
    """

    def __init__(self, children: dict[str, nn.Module], roles: Roles, activation: Function) -> None:
        nn.Module.__init__(self)
        for name, child in children.items():
            self.add_module(name, child)
        self.roles = roles
        self.activation = activation

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        # By name at each call, since adapters and quantized layers have taken their places.
        gate, up, down = (self._modules[name] for name in self.roles)
        assert gate and up and down
        if not torch.is_grad_enabled():
            return down(_gated(self.activation, gate(x), up(x)))
        y: torch.Tensor = down(Gated.apply(gate(x), up(x), self.activation, self.inputs_only))
        return y


def as_gated_mlp(module: nn.Module) -> GatedMlp | None:
    """An MLP with one function for its elementwise part; None if the module is no gated MLP."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    linears = _linears_alone(module)
    # three linear layers, and at most an activation
    if len(linears) != 3 or len(children) > 4:
        return None
    values = (*children.values(), *vars(module).values())
    activations = [value for value in values if _is_activation(value)]
    for roles, activation in itertools.product(_possible_roles(linears), activations):
        if _is_gated_mlp(module, roles, activation):
            return GatedMlp(children, roles, activation)
    return None


def _linears_alone(module: nn.Module) -> dict[str, nn.Linear]:
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
    linears = _linears_alone(module)
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
    linears = _linears_alone(module)
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
    return _clone_with(module, _modules=small), x


def _clone_with(module: nn.Module, **attributes: Mapping[str, Any]) -> nn.Module:
    """A shallow copy of the module with other `_parameters` or `_modules`."""
    # The copy shares all other dicts with the module, whose own stay as they are.
    copied = copy.copy(module)
    vars(copied).update(attributes)
    return copied
