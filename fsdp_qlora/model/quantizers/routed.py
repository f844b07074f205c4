"""The experts of a layer, decoded in groups, with one wait of the host: an experts function for
transformers.

transformers keeps the experts of a layer in 3-D parameters, [experts, out, in] or (transposed)
[experts, in, out], and lets a function of the caller's multiply with them: `experts_forward`. A
module of experts that it gives every token (llama4) gets `all_tokens_forward`, which multiplies
those tokens alone that chose an expert.

Shapes: T tokens choose k of E experts each, N = T k choices, which are sorted by expert. An
expert's matrix is W [out, in], its bias b [out], its adapter A [rank, in] and B [out, rank], which
is scaled. The first product takes tokens [T, in] and gives a row for each choice; the second takes
such rows h [N, in], weights what it makes of them by the router's p [N], and adds it up by token.

Only what the products are given is kept for the backward pass. With g the gradient of a token's sum
and z = g W + g B A, the gradient of h is p z, and that of p is z h + g b, so that W h is not
needed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_qlora.model.architecture.kept import Kept
from fsdp_qlora.model.quantizers.base import (
    FrozenProduct,
    QuantizedExperts,
    computing_dtype,
    plain_product,
)
from fsdp_qlora.model.quantizers.expert_groups import Choices, Group, can_group

# Decoded weights and rows of a group. On a GPU decoding so many takes longer than launching what a
# group needs; on a CPU they stay in its cache.
GROUP_BYTES = {"cpu": 2 * 2**20, "cuda": 384 * 2**20}


class AdaptedExperts(NamedTuple):
    """A 3-D parameter with low-rank updates: base [E, out, in], or [E, in, out] where the module's
    are transposed.

    lora_A [E, rank, in], lora_B [E, out, rank], with which the update is scaled.
    """

    base: nn.Parameter | QuantizedExperts
    lora_A: torch.Tensor
    lora_B: torch.Tensor


class _Call(NamedTuple):
    """Inputs of a product that are no tensors.

    groups: of the experts. product: of a group's weights. gathers: x is [T, in], and [N, in]
    without. out: rows, features and dtype of y.
    """

    groups: list[Group]
    product: Callable[[Group], FrozenProduct]
    tokens: torch.Tensor
    gathers: bool
    transposed: bool
    out: tuple[int, int, torch.dtype]

    def rows(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """The rows of x that belong to these choices."""
        return x[self.tokens[group.rows]] if self.gathers else x[group.rows]


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of x [T, hidden] with indices and weights [T, k], as transformers' own
    functions do.
    """
    experts, order = top_k_index.flatten().sort(stable=True)
    numbers = torch.arange(module.num_experts, dtype=experts.dtype, device=experts.device)
    on_device = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    ends = read_ends(on_device, len(hidden_states), len(order))
    order = order[: ends[-1]]  # without choices of identities
    choices = Choices(order // top_k_index.shape[-1], ends, on_device)
    shares = top_k_weights.flatten()[order]
    h = _activated(module, hidden_states, choices)
    if not getattr(module, "has_post_expert_norm", False):
        return _multiply(module, "down_proj", h, choices, shares=shares, sums=hidden_states)
    y = module.post_expert_norm(_multiply(module, "down_proj", h, choices)) * shares[:, None]
    return y[order.argsort()].unflatten(0, top_k_index.shape).sum(1).to(hidden_states.dtype)


def identities_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: Any
) -> Any:
    """Forward of experts of which those from `num_experts` on return their input
    (longcat_flash).
    """
    kept = top_k_weights.masked_fill(top_k_index < module.num_experts, 0).sum(-1, keepdim=True)
    y = experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return y + hidden_states * kept.to(hidden_states.dtype)


def all_tokens_forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward of experts that get [E * T, hidden]: all tokens for each expert, with zeros for the
    tokens of others.
    """
    is_chosen = hidden_states.ne(0).any(-1)
    per_expert = is_chosen.unflatten(0, (module.num_experts, -1)).sum(1)
    num_tokens = len(hidden_states) // module.num_experts
    on_device = per_expert.cumsum(0, dtype=torch.int32)
    ends = read_ends(on_device, num_tokens, num_tokens)
    tokens = is_chosen.byte().sort(descending=True, stable=True).indices[: ends[-1]]
    choices = Choices(tokens, ends, on_device)
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

    On the meta device the routing's worst case for memory: one expert gets all tokens, the others
    share the rest.
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
    """A row for each choice [N, out]; with `shares` [N] their weighted sums, as many and of the
    dtype as in `sums`.
    """
    base = getattr(module, name)
    transposed = is_transposed(module)
    lora_A = lora_B = None
    if isinstance(base, AdaptedExperts):
        base, lora_A, lora_B = base
    is_plain = not isinstance(base, QuantizedExperts)
    dtype, weight = (computing_dtype(x), base) if is_plain else (base.compute_dtype, None)

    def product(group: Group) -> FrozenProduct:
        if len(group.experts) > 1:
            return FrozenProduct(
                dtype,
                lambda x: [group.multiply(x, upright(group).mT)],
                lambda grad: group.multiply(grad, upright(group)),
            )
        expert = group.experts[0]
        if is_plain:
            return plain_product(base[expert].T if transposed else base[expert], None, dtype)
        return base.frozen_product(base.expert(expert))

    def upright(group: Group) -> torch.Tensor:
        stored = (
            base[group.where].to(dtype) if is_plain else base.dequantize(group.matrices(base.shape))
        )
        return stored.mT if transposed else stored

    if lora_A is not None and lora_B is not None:
        lora_A = lora_A.to(dtype)
        lora_B = lora_B.to(dtype)
    transposed = base.transposed if isinstance(base, QuantizedExperts) else transposed
    features = base.shape[2 if transposed else 1]
    bias = getattr(module, f"{name}_bias", None)
    out = (
        (len(choices.tokens), features, dtype)
        if sums is None
        else (len(sums), features, sums.dtype)
    )
    most = (
        getattr(module, "group_bytes", GROUP_BYTES["cpu"])
        if not is_plain or can_group(x.device, dtype)
        else 0
    )
    weights = math.prod(base.shape[1:]) * dtype.itemsize
    row = sum(base.shape[1:]) * dtype.itemsize + (
        0 if shares is None else features * (dtype.itemsize + 4)
    )
    inputs = (x.to(dtype), shares, weight, bias, lora_A, lora_B)
    groups = choices.groups(weights, row, most)
    call = _Call(
        _without_repeats(groups) if x.is_meta else groups,
        product,
        choices.tokens,
        gathers,
        transposed,
        out,
    )
    if not is_plain and base.bring:
        base.bring([expert for group in call.groups for expert in group.experts])
    y: torch.Tensor = _RoutedProduct.apply(Kept(*inputs[:2]), call, *inputs)
    return y


def _without_repeats(groups: list[Group]) -> list[Group]:
    """The groups but for those that take the same memory as an earlier one, which is all that is
    asked on meta.

    A group is computed while the results of the one before are still there, so that their sizes
    count too.
    """
    sizes = [(len(group.experts), group.ends[-1]) for group in groups]
    pairs = [*zip([(0, 0), *sizes], sizes, strict=False)]
    return [
        group
        for index, group in enumerate(groups)
        if pairs.index(pairs[index]) == index or group is groups[-1]
    ]


class _RoutedProduct(torch.autograd.Function):
    """y of all experts that are chosen."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: Kept,
        call: _Call,
        x: torch.Tensor,
        shares: torch.Tensor | None,
        *weights: Any,
    ) -> torch.Tensor:
        # Weights as attributes: FSDP2 refills these same gathered tensors before the backward pass.
        ctx.kept = kept
        ctx.call = call
        ctx.weights = weights
        _, bias, lora_A, lora_B = weights
        *size, dtype = call.out
        # Sums in float32: in bf16 those of 8 experts had an error of 0.39% instead of 0.23%.
        y = (
            x.new_empty(size, dtype=dtype)
            if shares is None
            else x.new_zeros(size, dtype=torch.float32)
        )
        for group in call.groups:
            own = call.rows(x, group)
            (result,) = call.product(group).multiply(own)
            if lora_A is not None:
                low = group.multiply(own, lora_A[group.where].mT)
                group.add_product(result, low, lora_B[group.where].mT)
            if bias is not None:
                result += group.spread(bias)
            if shares is None:
                y[group.rows] = result
            else:
                group.add_rows(
                    y, call.tokens[group.rows], (result * shares[group.rows, None]).float()
                )
        return y.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Kept before the product, so that a checkpointed block is computed again up to here and not
        # beyond (kept.py).
        call = ctx.call
        weights = ctx.weights
        (x, shares) = ctx.kept.take()
        found = [
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((x, shares, *weights), ctx.needs_input_grad[2:], strict=True)
        ]
        for group in call.groups:
            _add_gradients(call, group, grads[0], (x, shares, *weights), found)
        return None, None, *found


def _add_gradients(
    call: _Call, group: Group, grad_y: torch.Tensor, inputs: tuple[Any, ...], found: list[Any]
) -> None:
    """A group's part of the gradients `found` of `inputs`: x, shares, W, b, A and B."""
    (x, shares, _, bias, lora_A, lora_B) = inputs
    rows = group.rows
    where = group.where
    grad_x, grad_shares, grad_W, grad_b, grad_A, grad_B = found
    own = call.rows(x, group)
    tokens = call.tokens[rows]
    grad = grad_y[rows] if shares is None else grad_y[tokens].to(x.dtype)
    grad_own = call.product(group).multiply_grad(grad)
    if lora_A is not None:
        grad_low = group.multiply(grad, lora_B[where])
        group.add_product(grad_own, grad_low, lora_A[where])
    share = None if shares is None else shares[rows, None]
    if share is not None:
        if grad_shares is not None:
            # z h + g b, for z = grad_own: for g (W h + b) each expert would be decoded and
            # multiplied once more.
            grad_shares[rows] = (grad_own * own).sum(-1)
            if bias is not None:
                grad_shares[rows] += (grad * group.spread(bias).to(grad.dtype)).sum(-1)
        # the latter for the weights'
        grad_own = (grad_own * share).to(x.dtype)
        own = (own * share).to(x.dtype)
    if grad_A is not None:
        grad_A[where] = group.outer(grad_low, own)
        grad_B[where] = group.outer(grad, group.multiply(own, lora_A[where].mT))
    if grad_W is not None:
        grad_W[where] = group.outer(*((own, grad) if call.transposed else (grad, own))).to(
            grad_W.dtype
        )
    if grad_b is not None:
        grad_b[where] = group.outer(
            grad.new_ones(len(grad), 1) if share is None else share.to(grad.dtype), grad
        )[:, 0].to(grad_b.dtype)
    if grad_x is not None and call.gathers:
        group.add_rows(grad_x, tokens, grad_own)
    elif grad_x is not None:
        grad_x[rows] = grad_own
