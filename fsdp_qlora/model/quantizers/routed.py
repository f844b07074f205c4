"""Functions with which transformers' experts are decoded in groups and multiplied.

The host waits for the device once per layer.

transformers keeps the experts of a layer in 3-D parameters, [E, O, I] or (transposed) [E, I, O],
and calls a function of the caller's to multiply with them: `experts_forward`. A module of experts
that gets every token (llama4) gets `all_tokens_forward`, which multiplies only the tokens that
chose an expert.

Shapes, as suffixes of tensors' names:
    T tokens, K choices of a token, H features of a token, M features inside an expert;
    N = T K choices, sorted by expert: a token's row is there once for each expert that it chose;
    E experts, G experts of a group, C the choices of a group, with its padding if it has any;
    I inputs and O outputs of an expert's matrix, R rank of its adapter.

The first product takes tokens x_TI and gives a row for each choice, y_NO. The second one takes such
rows x_NI, weights what it makes of them with the router's shares_N, and adds them up by token.

Only the inputs of a product are kept for the backward pass. With p a choice's share, g the gradient
of its token's sum and z = g W + g B A, the gradient of its row x is p z, and the gradient of p is
z x + g b: the product W x is not needed. Merge-aware, W + B A is rounded, and z is g times that.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_qlora.model.architecture.kept import Kept
from fsdp_qlora.model.kernels.in_use import ways_in_use
from fsdp_qlora.model.module_state import state_of
from fsdp_qlora.model.quantizers.base import QuantizedExperts, Tensors
from fsdp_qlora.model.quantizers.expert_groups import Choices, can_group
from fsdp_qlora.model.quantizers.padded_groups import (
    LARGE_PRODUCT,
    PADDED,
    AnyGroup,
    PaddedChoices,
    log_padding,
    sort_by_rows,
)
from fsdp_qlora.model.quantizers.products import FrozenProduct, computing_dtype, plain_product
from fsdp_qlora.model.quantizers.rounded_experts import (
    ExpertsUpdate,
    experts_to_round,
    round_experts,
)

# Decoded weights and rows of a group. On a GPU decoding so many takes longer than launching what a
# group needs; on a CPU they stay in its cache.
GROUP_BYTES = {"cpu": 2 * 2**20, "cuda": 384 * 2**20}


class AdaptedExperts(NamedTuple):
    """A 3-D parameter with low-rank updates.

    base: [E, O, I], or [E, I, O] where the module's parameters are transposed. lora_A: [E, R, I].
    lora_B: [E, O, R], scaled already. update: the same, if it is added to the quantized base before
    that is rounded to its format again (merge-aware training); A and B then only get gradients.
    """

    base: nn.Parameter | QuantizedExperts
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    update: ExpertsUpdate | None = None


class _GroupProduct(NamedTuple):
    """Products with the weights of several experts.

    decode: gives [experts, out, in], at each use, so that a pass frees them when it has multiplied.
    """

    group: AnyGroup
    decode: Callable[[], torch.Tensor]

    def multiply(self, x_CI: torch.Tensor) -> list[torch.Tensor]:
        return [self.group.multiply(x_CI, self.decode().mT)]

    def multiply_grad(self, grad_CO: torch.Tensor) -> torch.Tensor:
        return self.group.multiply(grad_CO, self.decode())


_Products = Callable[[AnyGroup], FrozenProduct | _GroupProduct]


class _Call(NamedTuple):
    """Inputs of a product that are no tensors to differentiate.

    groups: of the experts. products: gives, at the start of a pass, what gives the products with a
    group's weights. tokens_N: the token of each choice. gathers: whether x is x_TI; without, it is
    x_NI. out: rows, features and dtype of y. has_update: whether these weights contain B A.
    """

    groups: Sequence[AnyGroup]
    products: Callable[[], _Products]
    tokens_N: torch.Tensor
    gathers: bool
    transposed: bool
    out: tuple[int, int, torch.dtype]
    has_update: bool

    def rows(self, x: torch.Tensor, group: AnyGroup) -> torch.Tensor:
        """The rows of x that belong to the choices of a group [C, I]."""
        return x[group.take(self.tokens_N)] if self.gathers else group.take(x)


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of hidden_states [T, H] with indices and weights [T, K].

    Arguments and result are the same as of transformers' own functions.
    """
    # The arguments have transformers' names, since some models pass them by keyword. A stable sort
    # keeps the tokens of an expert in order, so that sums have the same order in every run.
    experts_N, order_N = top_k_index.flatten().sort(stable=True)
    numbers_E = torch.arange(module.num_experts, dtype=experts_N.dtype, device=experts_N.device)
    ends_E = torch.searchsorted(experts_N, numbers_E, right=True, out_int32=True)
    ends = read_ends(ends_E, len(hidden_states), len(order_N))
    # Choices of identities have numbers from `num_experts` on, so they are sorted to the end.
    order_N = order_N[: ends[-1]]
    choices = _sorted_choices(order_N, ends, ends_E)
    order_N = choices.tokens
    choices = choices._replace(tokens=order_N // top_k_index.shape[-1])
    shares_N = top_k_weights.flatten()[order_N]
    inner_NM = _activated(module, hidden_states, choices)
    if not getattr(module, "has_post_expert_norm", False):
        return _multiply(
            module, "down_proj", inner_NM, choices, shares=shares_N, sums=hidden_states
        )
    # A norm of each expert's output stands between product and shares, so that the product cannot
    # add up by token.
    y_NH = module.post_expert_norm(_multiply(module, "down_proj", inner_NM, choices))
    y_NH = y_NH * shares_N[:, None]
    # Back to the order of the tokens.
    inverse_N = order_N.argsort()
    y_TH = y_NH[inverse_N].unflatten(0, top_k_index.shape).sum(1)
    return y_TH.to(hidden_states.dtype)


def identities_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: Any
) -> Any:
    """Forward of experts of which some return their input: those from `num_experts` on.

    longcat_flash has such experts.
    """
    is_expert_TK = top_k_index < module.num_experts
    identity_shares_T1 = top_k_weights.masked_fill(is_expert_TK, 0).sum(-1, keepdim=True)
    y_TH = experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return y_TH + hidden_states * identity_shares_T1.to(hidden_states.dtype)


def all_tokens_forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward of experts that get all tokens for each expert, [E * T, H].

    Tokens of other experts are zeros.
    """
    is_chosen = hidden_states.ne(0).any(-1)  # [E * T]
    counts_E = is_chosen.unflatten(0, (module.num_experts, -1)).sum(1)
    num_tokens = len(hidden_states) // module.num_experts
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    ends = read_ends(ends_E, num_tokens, num_tokens)
    # nonzero() would let the host wait for the number of rows, which `ends` has already. A stable
    # sort of bytes puts the chosen rows first and keeps their order, which is by expert.
    rows_N = is_chosen.byte().sort(descending=True, stable=True).indices[: ends[-1]]
    choices = _sorted_choices(rows_N, ends, ends_E)
    y_NH = _multiply(module, "down_proj", _activated(module, hidden_states, choices), choices)
    result = torch.zeros_like(hidden_states)
    return result.index_copy(0, choices.tokens, y_NH.to(hidden_states.dtype))


def apply_gate(module: Any, gate_up: torch.Tensor) -> Any:
    """activation(gate) * up of [.., 2 M]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return module.act_fn(gate) * up


def is_transposed(module: nn.Module) -> bool:
    """Whether the experts' parameters are [E, I, O]."""
    return bool(getattr(module, "is_transposed", state_of(module).takes_all_tokens))


def read_ends(ends: torch.Tensor, num_tokens: int, num_choices: int) -> list[int]:
    """Read where each expert's choices end [E]: the layer's only wait of the host.

    On the meta device the routing's worst case for memory: one expert gets all tokens, the others
    share the rest.
    """
    if not ends.is_meta:
        return list(ends.tolist())
    others = max(1, len(ends) - 1)
    return [num_tokens + (num_choices - num_tokens) * other // others for other in range(len(ends))]


def _sorted_choices(
    choices_N: torch.Tensor, ends: list[int], ends_E: torch.Tensor
) -> Choices | PaddedChoices:
    """Choices that are sorted by expert, in the order of the way in use, as `tokens`."""
    if ways_in_use().experts == PADDED:
        return sort_by_rows(choices_N, ends, ends_E)
    return Choices(choices_N, ends, ends_E)


def _activated(module: Any, x_TH: torch.Tensor, choices: Choices | PaddedChoices) -> Any:
    """The experts' inner features of their tokens [N, M]."""
    if module.has_gate:
        return module._apply_gate(_multiply(module, "gate_up_proj", x_TH, choices, gathers=True))
    return module.act_fn(_multiply(module, "up_proj", x_TH, choices, gathers=True))


def _multiply(
    module: Any,
    name: str,
    x: torch.Tensor,
    choices: Choices | PaddedChoices,
    *,
    gathers: bool = False,
    shares: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """A row for each choice [N, O], or their weighted sums by token [T, O].

    shares: weights of the choices [N]. sums: has as many rows as the sums, and their dtype.
    """
    base = getattr(module, name)
    transposed = is_transposed(module)
    lora_A = lora_B = update = None
    if isinstance(base, AdaptedExperts):
        base, lora_A, lora_B, update = base
    is_quantized = isinstance(base, QuantizedExperts)
    if is_quantized:
        dtype = base.compute_dtype
        plain_weight = None
        # Codes may be stored upright where the module's parameters are transposed.
        transposed = base.transposed
    else:
        dtype = computing_dtype(x)
        plain_weight = base
    if lora_A is not None and lora_B is not None:
        lora_A = lora_A.to(dtype)
        lora_B = lora_B.to(dtype)
    groups = _group_choices(module, base, x, choices, dtype, shares, transposed)
    features = base.shape[2 if transposed else 1]
    if sums is None:
        out = (len(choices.tokens), features, dtype)
    else:
        out = (len(sums), features, sums.dtype)
    needed: Sequence[int] = [expert for group in groups for expert in group.experts]
    products = partial(_products, base, dtype, transposed)
    if update is not None:
        needed = experts_to_round(base, needed)
        products = partial(_rounded_products, base, needed, update)
    has_update = update is not None
    call = _Call(groups, products, choices.tokens, gathers, transposed, out, has_update)
    if is_quantized and base.bring:
        # Codes that are in the host's memory are copied now, for the backward pass too.
        base.bring(needed)
    bias = getattr(module, f"{name}_bias", None)
    inputs = (x.to(dtype), shares, plain_weight, bias, lora_A, lora_B)
    y: torch.Tensor = _RoutedProduct.apply(Kept(*inputs[:2]), call, *inputs)
    return y


def _products(
    base: Any, dtype: torch.dtype, transposed: bool, tensors: Tensors | None = None
) -> _Products:
    """A function that gives the products with a group's weights, which are decoded at each use.

    tensors: gives others than those of a quantized base.
    """
    is_quantized = isinstance(base, QuantizedExperts)

    def matrices_GOI(group: AnyGroup) -> torch.Tensor:
        if is_quantized:
            gathered = (tensors or base.tensors)()
            stored = base.decode_tensors(group.matrices(base.shape), dtype, gathered)
        else:
            stored = base[group.where].to(dtype)
        return stored.mT if transposed else stored

    def product(group: AnyGroup) -> FrozenProduct | _GroupProduct:
        if len(group.experts) > 1:
            return _GroupProduct(group, partial(matrices_GOI, group))
        expert = group.experts[0]
        if is_quantized:
            # May be fused with decoding, or in parts that stay in a CPU's cache.
            one: FrozenProduct = base.frozen_product(base.expert(expert), tensors=tensors)
            return one
        weight = base[expert].T if transposed else base[expert]
        return plain_product(weight, None, dtype)

    return product


def _rounded_products(base: Any, experts: Sequence[int], update: ExpertsUpdate) -> _Products:
    """The same for a quantized base, of which some experts are rounded with their updates now."""
    rounded = round_experts(base, experts, update, base.tensors())
    return _products(base, base.compute_dtype, base.transposed, lambda: rounded)


def _group_choices(
    module: nn.Module,
    base: Any,
    x: torch.Tensor,
    choices: Choices | PaddedChoices,
    dtype: torch.dtype,
    shares: torch.Tensor | None,
    transposed: bool,
) -> Sequence[AnyGroup]:
    """The chosen experts in groups whose weights and rows fit into the module's `group_bytes`."""
    group_bytes = state_of(module).group_bytes
    if group_bytes is None:
        group_bytes = GROUP_BYTES["cpu"]
    features = base.shape[2 if transposed else 1]
    matrix_shape = base.shape[1:]
    weight_bytes = math.prod(matrix_shape) * dtype.itemsize
    # A row of inputs and one of outputs.
    row_bytes = sum(matrix_shape) * dtype.itemsize
    if shares is not None:
        # The weighted row, and the same in float32 for the sum.
        row_bytes += features * (dtype.itemsize + 4)
    if isinstance(choices, PaddedChoices):
        # Outputs with padding, and without.
        row_bytes += features * dtype.itemsize
        most_rows = LARGE_PRODUCT // math.prod(matrix_shape)
        groups: Sequence[AnyGroup] = choices.groups(weight_bytes, row_bytes, group_bytes, most_rows)
        if groups and not x.is_meta:
            log_padding(groups)
    else:
        # Plain weights need no decoding: a group of several is of use only to the grouped kernel.
        if not isinstance(base, QuantizedExperts) and not can_group(x.device, dtype):
            group_bytes = 0
        groups = choices.groups(weight_bytes, row_bytes, group_bytes)
    return _without_repeats(groups) if x.is_meta else groups


def _without_repeats(groups: Sequence[AnyGroup]) -> Sequence[AnyGroup]:
    """The groups without those that take the same memory as an earlier one.

    Memory is all that the meta device is asked for.

    A group is computed while the results of the one before are still there, so that their sizes
    count too.
    """
    sizes = [(len(group.experts), group.num_rows) for group in groups]
    pairs = list(zip([(0, 0), *sizes], sizes, strict=False))
    return [
        group
        for index, group in enumerate(groups)
        if pairs.index(pairs[index]) == index or group is groups[-1]
    ]


class _RoutedProduct(torch.autograd.Function):
    """y of all experts that are chosen: y_NO, or the sums y_TO."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: Kept,
        call: _Call,
        x: torch.Tensor,
        shares_N: torch.Tensor | None,
        *weights: Any,
    ) -> torch.Tensor:
        # Weights as attributes: FSDP2 refills these same gathered tensors before the backward pass.
        ctx.kept = kept
        ctx.call = call
        ctx.weights = weights
        _, bias_EO, lora_A_ERI, lora_B_EOR = weights
        *size, dtype = call.out
        if shares_N is None:
            # Every choice belongs to one group, so that all rows are written.
            y = x.new_empty(size, dtype=dtype)
        else:
            # Sums in float32: in bf16 those of 8 experts had an error of 0.39% instead of 0.23%.
            y = x.new_zeros(size, dtype=torch.float32)
        product = call.products()
        for group in call.groups:
            x_CI = call.rows(x, group)
            (y_CO,) = product(group).multiply(x_CI)
            # `multiply` returns new tensors, so what follows may write to y_CO.
            if lora_A_ERI is not None and not call.has_update:
                low_CR = group.multiply(x_CI, lora_A_ERI[group.where].mT)
                group.add_product(y_CO, low_CR, lora_B_EOR[group.where].mT)
            if bias_EO is not None:
                y_CO += group.spread(bias_EO)
            y_CO = group.without_padding(y_CO)
            if shares_N is None:
                y[group.rows] = y_CO
            else:
                tokens_C = call.tokens_N[group.rows]
                share_C1 = shares_N[group.rows, None]
                # Unnamed, so that the weighted rows are freed before the next group's weights.
                group.add_rows(y, tokens_C, (y_CO * share_C1).float())
        return y.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Kept before the product, so that a checkpointed block is computed again up to here and not
        # beyond (kept.py).
        call = ctx.call
        weights = ctx.weights
        (x, shares_N) = ctx.kept.take()
        inputs = (x, shares_N, *weights)
        # Zeros, and not empty: experts that no token chose are in no group.
        gradients = [
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip(inputs, ctx.needs_input_grad[2:], strict=True)
        ]
        product = call.products()
        for group in call.groups:
            _add_gradients(call, group, product(group), grads[0], inputs, gradients)
        return None, None, *gradients


def _add_gradients(
    call: _Call,
    group: AnyGroup,
    product: FrozenProduct | _GroupProduct,
    grad_y: torch.Tensor,
    inputs: tuple[Any, ...],
    gradients: list[Any],
) -> None:
    """Add a group's part to the gradients of `inputs`: x, shares, W, b, A and B."""
    (x, shares_N, _, bias_EO, lora_A_ERI, lora_B_EOR) = inputs
    grad_x, grad_shares_N, grad_W, grad_b_EO, grad_A_ERI, grad_B_EOR = gradients
    rows = group.rows
    where = group.where
    x_CI = call.rows(x, group)
    if shares_N is None:
        grad_CO = group.take(grad_y)
    else:
        grad_CO = grad_y[group.take(call.tokens_N)].to(x.dtype)
    # z of the formulas above
    grad_x_CI = product.multiply_grad(grad_CO)
    if lora_A_ERI is not None:
        grad_low_CR = group.multiply(grad_CO, lora_B_EOR[where])
        if not call.has_update:
            group.add_product(grad_x_CI, grad_low_CR, lora_A_ERI[where])
    share_C1 = None
    if shares_N is not None:
        share_C1 = group.take(shares_N)[:, None]
        if grad_shares_N is not None:
            # z x + g b: for g (W x + b) each expert would be decoded and multiplied once more.
            grad_C = (grad_x_CI * x_CI).sum(-1)
            grad_shares_N[rows] = group.without_padding(grad_C)
            if bias_EO is not None:
                grad_C = (grad_CO * group.spread(bias_EO).to(grad_CO.dtype)).sum(-1)
                grad_shares_N[rows] += group.without_padding(grad_C)
        grad_x_CI = (grad_x_CI * share_C1).to(x.dtype)
        # The weights' gradients are products of g and p x: scaling x once is enough for W, A and B.
        x_CI = (x_CI * share_C1).to(x.dtype)
    # Each expert is in one group of the call, so its gradients are written and not added up.
    if grad_A_ERI is not None:
        grad_A_ERI[where] = group.outer(grad_low_CR, x_CI)
        grad_B_EOR[where] = group.outer(grad_CO, group.multiply(x_CI, lora_A_ERI[where].mT))
    if grad_W is not None:
        # [G, I, O] or [G, O, I], as the parameter is
        factors = (x_CI, grad_CO) if call.transposed else (grad_CO, x_CI)
        grad_W[where] = group.outer(*factors).to(grad_W.dtype)
    if grad_b_EO is not None:
        grad_b_EO[where] = _bias_gradient(group, grad_CO, share_C1).to(grad_b_EO.dtype)
    if grad_x is None:
        return
    grad_x_CI = group.without_padding(grad_x_CI)
    if call.gathers:
        # A token may have chosen several experts of the group.
        group.add_rows(grad_x, call.tokens_N[rows], grad_x_CI)
    else:
        grad_x[rows] = grad_x_CI


def _bias_gradient(
    group: AnyGroup, grad_CO: torch.Tensor, share_C1: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of the biases of a group's experts, [G, O]."""
    # A sum over the rows as a product with a column of ones, or of shares.
    if share_C1 is None:
        share_C1 = grad_CO.new_ones(len(grad_CO), 1)
    return group.outer(share_C1.to(grad_CO.dtype), grad_CO)[:, 0]
