"""The experts of a layer, one decoded at a time, with one wait of the host: an experts function for transformers.

transformers keeps the experts of a layer in 3-D parameters, [experts, out, in] or (transposed) [experts, in, out], and
lets a function of the caller's multiply with them: `experts_forward`. A module of experts that it gives every token
(llama4) gets `all_tokens_forward`, which multiplies those tokens alone that chose an expert.

Shapes: T tokens choose k of E experts each, N = T k choices, which are sorted by expert. An expert's matrix is W
[out, in], its bias b [out], its adapter A [rank, in] and B [out, rank], scaled by s. The first product takes tokens
[T, in] and gives a row for each choice; the second takes such rows h [N, in], weights what it makes of them by the
router's p [N], and adds it up by token.

Only what the products are given is kept for the backward pass. With g the gradient of a token's sum and
z = g W + s g B A, the gradient of h is p z, and that of p is z h + g b, so that W h is not needed.
"""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_qlora.model.architecture.kept import Kept
from fsdp_qlora.model.architecture.models import block_linears, find_blocks, read_directly
from fsdp_qlora.model.quantizers.base import FrozenProduct, QuantizedExperts, computing_dtype, plain_product


class Choices(NamedTuple):
    """The tokens' choices of experts, sorted by expert.

    tokens [N]: the row of a choice's token. parts: each expert that is chosen, and its choices.
    """

    tokens: torch.Tensor
    parts: list[tuple[int, slice]]

    @classmethod
    def of(cls, tokens: torch.Tensor, ends: list[int]) -> "Choices":
        """ends: of each expert's choices."""
        starts = [0, *ends[:-1]]
        parts = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        return cls(tokens, [(expert, part) for expert, part in enumerate(parts) if part.stop > part.start])


class AdaptedExperts(NamedTuple):
    """A 3-D parameter with low-rank updates: base [E, out, in], or [E, in, out] where the module's are transposed.

    lora_A [E, rank, in], lora_B [E, out, rank]: their products are scaled by `scaling`.
    """

    base: nn.Parameter | QuantizedExperts
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    scaling: float


class _Call(NamedTuple):
    """Inputs of a product that are no tensors.

    product: of an expert's weight. gathers: x is [T, in], and [N, in] without. out: rows, features and dtype of y.
    """

    product: Callable[[int], FrozenProduct]
    choices: Choices
    gathers: bool
    scaling: float
    transposed: bool
    out: tuple[int, int, torch.dtype]

    def rows(self, x: torch.Tensor, part: slice) -> torch.Tensor:
        """The rows of x that belong to these choices."""
        return x[self.choices.tokens[part]] if self.gathers else x[part]


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of x [T, hidden] with indices and weights [T, k], as transformers' own functions do."""
    experts, order = top_k_index.flatten().sort(stable=True)
    numbers = torch.arange(module.num_experts, dtype=experts.dtype, device=experts.device)
    ends = read_ends(torch.searchsorted(experts, numbers, right=True), len(hidden_states), len(order))
    choices = Choices.of(order // top_k_index.shape[-1], ends)
    shares = top_k_weights.flatten()[order]
    h = _activated(module, hidden_states, choices)
    if not getattr(module, "has_post_expert_norm", False):
        return _multiply(module, "down_proj", h, choices, shares=shares, sums=hidden_states)
    y = module.post_expert_norm(_multiply(module, "down_proj", h, choices)) * shares[:, None]
    return y[order.argsort()].unflatten(0, top_k_index.shape).sum(1).to(hidden_states.dtype)


def all_tokens_forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward of experts that get [E * T, hidden]: all tokens for each expert, with zeros for the tokens of others."""
    is_chosen = hidden_states.ne(0).any(-1)
    per_expert = is_chosen.unflatten(0, (module.num_experts, -1)).sum(1)
    num_tokens = len(hidden_states) // module.num_experts
    ends = read_ends(per_expert.cumsum(0), num_tokens, num_tokens)
    choices = Choices.of(is_chosen.byte().sort(descending=True, stable=True).indices[: ends[-1]], ends)
    y = _multiply(module, "down_proj", _activated(module, hidden_states, choices), choices)
    return torch.zeros_like(hidden_states).index_copy(0, choices.tokens, y.to(hidden_states.dtype))


def apply_gate(module: Any, gate_up: torch.Tensor) -> Any:
    """activation(gate) * up of [.., 2 * inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return module.act_fn(gate) * up


def is_transposed(module: nn.Module) -> bool:
    """Whether the experts' parameters are [E, in, out]."""
    return bool(getattr(module, "is_transposed", hasattr(module, "takes_all_tokens")))


def read_ends(ends: torch.Tensor, num_tokens: int, num_choices: int) -> list[int]:
    """Read where each expert's choices end [E]: the layer's only wait of the host.

    On the meta device the routing's worst case for memory: one expert gets all tokens, the others share the rest.
    """
    if not ends.is_meta:
        return list(ends.tolist())
    others = max(1, len(ends) - 1)
    return [num_tokens + (num_choices - num_tokens) * other // others for other in range(len(ends))]


def _activated(module: Any, x: torch.Tensor, choices: Choices) -> Any:
    """h [N, inner]"""
    if module.has_gate:
        return module._apply_gate(_multiply(module, "gate_up_proj", x, choices, gathers=True))
    return module.act_fn(_multiply(module, "up_proj", x, choices, gathers=True))


def _multiply(
    module: Any,
    name: str,
    x: torch.Tensor,
    choices: Choices,
    *,
    gathers: bool = False,
    shares: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """A row for each choice [N, out]; with `shares` [N] their weighted sums, as many and of the dtype as in `sums`."""
    base, scaling, transposed = getattr(module, name), 0.0, is_transposed(module)
    lora_A = lora_B = None
    if isinstance(base, AdaptedExperts):
        base, lora_A, lora_B, scaling = base
    is_plain = not isinstance(base, QuantizedExperts)
    dtype, weight = (computing_dtype(x), base) if is_plain else (base.compute_dtype, None)

    def product(expert: int) -> FrozenProduct:
        if is_plain:
            return plain_product(base[expert].T if transposed else base[expert], None, dtype)
        return base.frozen_product(base.expert(expert))

    if lora_A is not None and lora_B is not None:
        lora_A, lora_B = lora_A.to(dtype), lora_B.to(dtype)
    transposed = base.transposed if isinstance(base, QuantizedExperts) else transposed
    features, bias = base.shape[2 if transposed else 1], getattr(module, f"{name}_bias", None)
    out = (len(choices.tokens), features, dtype) if sums is None else (len(sums), features, sums.dtype)
    inputs = (x.to(dtype), shares, weight, bias, lora_A, lora_B)
    call = _Call(product, choices, gathers, scaling, transposed, out)
    y: torch.Tensor = _RoutedProduct.apply(Kept(*inputs[:2]), call, *inputs)
    return y


class _RoutedProduct(torch.autograd.Function):
    """y of all experts that are chosen."""

    @staticmethod
    def forward(
        ctx: Any, kept: Kept, call: _Call, x: torch.Tensor, shares: torch.Tensor | None, *weights: Any
    ) -> torch.Tensor:
        # Weights as attributes: FSDP2 refills these same gathered tensors before the backward pass.
        ctx.kept, ctx.call, ctx.weights = kept, call, weights
        _, bias, lora_A, lora_B = weights
        *size, dtype = call.out
        # Sums in float32: in bf16 those of 8 experts had an error of 0.39% instead of 0.23%.
        y = x.new_empty(size, dtype=dtype) if shares is None else x.new_zeros(size, dtype=torch.float32)
        for expert, part in call.choices.parts:
            own = call.rows(x, part)
            (result,) = call.product(expert).multiply(own)
            if lora_A is not None:
                result.addmm_(own @ lora_A[expert].T, lora_B[expert].T, alpha=call.scaling)
            if bias is not None:
                result += bias[expert]
            if shares is None:
                y[part] = result
            else:
                y.index_add_(0, call.choices.tokens[part], (result * shares[part, None]).float())
        return y.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Kept before the product, so that a checkpointed block is computed again up to here and not beyond (kept.py).
        call, weights, (x, shares) = ctx.call, ctx.weights, ctx.kept.take()
        found = [
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((x, shares, *weights), ctx.needs_input_grad[2:], strict=True)
        ]
        for expert, part in call.choices.parts:
            _add_gradients(call, (expert, part), grads[0], (x, shares, *weights), found)
        return None, None, *found


def _add_gradients(
    call: _Call, of: tuple[int, slice], grad_y: torch.Tensor, inputs: tuple[Any, ...], found: list[Any]
) -> None:
    """One expert's part of the gradients `found` of `inputs`: x, shares, W, b, A and B."""
    (expert, part), (x, shares, _, bias, lora_A, lora_B) = of, inputs
    grad_x, grad_shares, grad_W, grad_b, grad_A, grad_B = found
    own, tokens = call.rows(x, part), call.choices.tokens[part]
    grad = grad_y[part] if shares is None else grad_y[tokens].to(x.dtype)
    grad_own = call.product(expert).multiply_grad(grad)
    if lora_A is not None:
        grad_low = grad @ lora_B[expert]
        grad_own.addmm_(grad_low, lora_A[expert], alpha=call.scaling)
    if shares is not None:
        share = shares[part, None]
        if grad_shares is not None:
            # z h + g b, for z = grad_own: for g (W h + b) each expert would be decoded and multiplied once more.
            grad_shares[part] = (grad_own * own).sum(-1) + (0 if bias is None else grad @ bias[expert].to(grad.dtype))
        grad_own, own = (grad_own * share).to(x.dtype), (own * share).to(x.dtype)  # the latter for the weights'
    if grad_A is not None:
        grad_A[expert].addmm_(grad_low.T, own, alpha=call.scaling)
        grad_B[expert].addmm_(grad.T, own @ lora_A[expert].T, alpha=call.scaling)
    if grad_W is not None:
        grad_W[expert] = own.T @ grad if call.transposed else grad.T @ own
    if grad_b is not None:
        grad_b[expert] = grad.sum(0) if shares is None else (grad * share).sum(0)
    if grad_x is not None and call.gathers:
        grad_x.index_add_(0, tokens, grad_own)
    elif grad_x is not None:
        grad_x[part] = grad_own


# --- experts in a model ---


def _takes_all_tokens(module: nn.Module) -> bool:
    """Whether these experts are gated MLPs [experts, in, out] without biases that are given every token in turn.

    An expert gets zeros for the tokens that did not choose it, and such an MLP maps zeros to zeros.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if shapes.keys() != {"gate_up_proj", "down_proj"} or hasattr(module, "is_transposed"):
        return False
    inputs, outputs = shapes["gate_up_proj"], shapes["down_proj"]
    is_mlp = len(outputs) == 3 and inputs == (outputs[0], outputs[2], 2 * outputs[1]) and hasattr(module, "act_fn")
    return is_mlp and list(inspect.signature(type(module).forward).parameters)[1:] == ["hidden_states"]


def route_experts(model: nn.Module) -> None:
    """Let experts that transformers gives every token multiply with those that chose them alone, in a model as built.

    The attribute `is_transposed` stays away: PEFT reads it, and takes their parameters as [experts, out, in].
    """
    for module in filter(_takes_all_tokens, model.modules()):
        own = {"_apply_gate": MethodType(apply_gate, module), "forward": MethodType(all_tokens_forward, module)}
        vars(module).update(takes_all_tokens=True, has_gate=True, **own)


def loops_over_experts(module: nn.Module) -> bool:
    """Whether these experts are used one at a time: by transformers' attribute or `route_experts`'s."""
    return hasattr(module, "is_transposed") or hasattr(module, "takes_all_tokens")


def router_linears(model: nn.Module) -> list[str]:
    """Paths of the linear layers that select or weight experts: too sensitive for 4 bits or an adapter."""
    routers = []
    for path, module in model.named_modules():
        counts = {child.num_experts for child in module.children() if loops_over_experts(child)}
        for name, child in module.named_children() if counts else ():
            linears = {inner: each for inner, each in child.named_modules() if isinstance(each, nn.Linear)}
            if len(linears) == 1:  # a router that is a module of its own has no other one (gemma4)
                [(inner, linear)] = linears.items()
                if linear.out_features in ({*counts} if inner else {1, *counts}):
                    routers.append(f"{path}.{name}.{inner}".rstrip("."))
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
