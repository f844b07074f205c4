"""LoRA for linear layers, each with its frozen layer one autograd function, and for experts.

Shapes:
    x: [.., in], of N tokens; x' is x with parts dropped.
    W: [out, in].
    A: [rank, in]; for all experts together [experts * rank, in], as in PEFT.
    B: [out, rank]; for all experts together [out, rank * experts].
    u = A x': [N, rank].
    y = x W^T + b + s B A x': [.., out].

The product keeps x and u alone for the backward pass, and not x either where it can be computed
again. The weights are read again then, W decoded again, and the dropped parts are found again from
their seed.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_qlora.model.architecture.chunking import piece_number, split_tokens
from fsdp_qlora.model.architecture.kept import Kept
from fsdp_qlora.model.architecture.output_again import output_again, output_source
from fsdp_qlora.model.quantizers.base import frozen_product
from fsdp_qlora.model.quantizers.products import FrozenProduct
from fsdp_qlora.model.quantizers.routed import AdaptedExperts, is_transposed


class Dropout(NamedTuple):
    """Dropout whose mask is drawn again from its seed, so that no mask is stored."""

    share: float
    seed: int

    @classmethod
    def draw(cls, share: float) -> "Dropout":
        """Draw a seed from the CPU's generator, another one for each piece of tokens."""
        # Activation checkpointing restores the generator's state: a recomputation draws the same.
        return cls(share, int(torch.randint(2**62, ()).item()) + piece_number.get())

    def factors(self, like: torch.Tensor) -> torch.Tensor:
        """0 or 1 / (1 - share) for each element [N, in], always the same, in pieces or not."""
        mask = torch.empty_like(like)
        # A seed for each piece of tokens, as an MLP in pieces draws them (`draw` adds the piece's
        # number), so that both ways give the same mask.
        for index, piece in enumerate(split_tokens(mask)):
            generator = None
            # the meta device has no generators
            if not like.is_meta:
                generator = torch.Generator(like.device).manual_seed(self.seed + index)
            piece.bernoulli_(1 - self.share, generator=generator)
        return mask.div_(1 - self.share)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.factors(x).mul_(x)


class KeptInput(NamedTuple):
    """x, unless `source` can compute it again (`output_source`), and u, for the backward pass."""

    kept: Kept
    source: Any
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor, low: torch.Tensor, source: Any) -> "KeptInput":
        """Keep u, which is `low`, and x where it is needed."""
        return cls(Kept(low) if source else Kept(x, low), source, x.dtype)

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x, as [N, in], and u, in the backward pass of a product, once."""
        *kept_x, low = self.kept.take()
        # Not kept where the layer before can compute it again.
        x = kept_x[0] if kept_x else output_again(self.source).to(self.dtype)
        return x.flatten(0, -2), low


class Product(NamedTuple):
    """Inputs of the product besides x, u, A and B."""

    base: FrozenProduct
    scaling: float
    dropout: Dropout | None
    kept: KeptInput


def as_before(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[N, m] -> [.., m] for x [.., n].

    Not a view in autograd's eyes: FSDP2's hooks on an adapter's output would be lost with a view.
    """
    result: torch.Tensor = torch.ops.aten._unsafe_view.default(
        rows, [*x.shape[:-1], rows.shape[-1]]
    )
    return result


class _LoraProduct(torch.autograd.Function):
    """y, given u, and the backward pass of both."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        low: torch.Tensor,
        lora_A: torch.Tensor,
        lora_B: torch.Tensor,
        product: Product,
    ) -> torch.Tensor:
        # Weights as attributes: FSDP2 refills these same gathered tensors before the backward pass,
        # and activation checkpointing does not have to compute them again.
        ctx.weights = (lora_A, lora_B)
        ctx.product = product
        return as_before(_adapted(x.flatten(0, -2), low, lora_B, product.base, product.scaling), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_y = grads[0].flatten(0, -2)
        product: Product = ctx.product
        x, low = product.kept.take()
        lora_A = ctx.weights[0]
        base = product.base
        scaling = product.scaling
        factors = product.dropout.factors(x) if product.dropout else None
        dropped = x if factors is None else x * factors
        grad_low, grad_A, grad_B = low_rank_grads(grad_y, dropped, low, ctx)
        # x may have no other owner: then its gradient can have its memory.
        del x, dropped
        grad_x = None
        if ctx.needs_input_grad[0]:
            # W^T grad_y + s A^T grad_u, both sums in the memory of the first
            grad_x = base.multiply_grad(grad_y)
            if factors is None:
                grad_x.addmm_(grad_low, lora_A.to(grad_y.dtype), alpha=scaling)
            else:
                # Only the adapter's part passed through dropout.
                grad_x.addcmul_(grad_low @ lora_A.to(grad_y.dtype), factors, value=scaling)
            grad_x = as_before(grad_x, grads[0])
        return grad_x, None, grad_A, grad_B, None


def low_rank_grads(
    grad_y: torch.Tensor, x: torch.Tensor, low: torch.Tensor, ctx: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of u / s, A and B, where `x` is x', and `low` is u.

    A and B are the first of ctx.weights, s is the scaling of ctx.product.
    """
    lora_A, lora_B = ctx.weights[:2]
    scaling = ctx.product.scaling
    # [N, rank], without the factor s, which the products below apply in their kernels
    grad_low = grad_y @ lora_B.to(grad_y.dtype)
    grad_B = _scaled_product(grad_y.T, low, scaling)
    grad_A = _scaled_product(grad_low.T, x, scaling)
    return grad_low, grad_A.to(lora_A.dtype), grad_B.to(lora_B.dtype)


def _scaled_product(a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """scaling * a b in one kernel."""
    # With beta 0 the first argument is not read, so it may be uninitialized.
    return torch.addmm(a.new_empty(a.shape[0], b.shape[1]), a, b, beta=0, alpha=scaling)


def _adapted(
    rows: torch.Tensor, low: torch.Tensor, lora_B: torch.Tensor, base: FrozenProduct, scaling: float
) -> torch.Tensor:
    """y for x as [N, in]."""
    # in the memory of the frozen layer's output, which nothing else uses
    (y,) = base.multiply(rows)
    return y.addmm_(low, lora_B.to(rows.dtype).T, alpha=scaling)


def computing_weights(adapter: "LoraAdapter | ExpertsLora") -> tuple[torch.Tensor, torch.Tensor]:
    """A and B with which an adapter computes, for one call and its backward pass.

    Gradients go to these tensors: pass them to autograd's functions. They have the run's
    `param_dtype`, in which functions compute but under autocast, where they are fp32: `.to(dtype)`
    in a function's passes costs nothing otherwise.
    """
    return adapter.copies or (adapter.lora_A.weight, adapter.lora_B.weight)


class LoraAdapter(nn.Module):
    """The low-rank update B A of one linear layer (Hu et al. 2021).

    One module with one forward, so that the adapters of a block can be one FSDP2 group.

    copies: of A and B in 16 bits, on one rank (weight_copies.py). in_fp32: whether it computes with
    A and B as they train, in every precision.
    """

    copies: tuple[torch.Tensor, torch.Tensor] | None = None
    in_fp32 = False

    def __init__(
        self, in_features: int, out_features: int, *, rank: int, scaling: float, dropout: float
    ) -> None:
        super().__init__()
        self.scaling = scaling
        self.dropout = dropout
        options = {"bias": False, "device": "meta", "dtype": torch.float32}
        self.lora_A = nn.Linear(in_features, rank, **options)  # type: ignore[arg-type]
        self.lora_B = nn.Linear(rank, out_features, **options)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor, base_layer: nn.Module, source: Any = None) -> torch.Tensor:
        """base_layer(x) + scaling * B A x, [.., out] in the base's dtype.

        Args:
            source: `output_source(x)`, of x before hooks, with which FSDP2 makes another tensor of
                it.
        """
        base = frozen_product(base_layer, x)
        lora_A, lora_B = computing_weights(self)
        # The same without autograd's function: when one token is generated at a time, the time is
        # the host's for these calls, not the GPU's.
        if not torch.is_grad_enabled() and not self.training:
            rows = x.to(base.dtype).flatten(0, -2)
            low = F.linear(rows, lora_A.to(rows.dtype))
            adapted = _adapted(rows, low, lora_B, base, self.scaling)
            return adapted.view(*x.shape[:-1], -1)
        x, low, product = self._low_rank(x, base, source)
        y: torch.Tensor = _LoraProduct.apply(x, low, lora_A, lora_B, product)
        return y

    def _low_rank(
        self, x: torch.Tensor, base: FrozenProduct, source: Any
    ) -> tuple[torch.Tensor, torch.Tensor, Product]:
        """x in the base's dtype, u, and the product's other inputs."""
        dropout = Dropout.draw(self.dropout) if self.training and self.dropout else None
        x = x.to(base.dtype)
        # `_LoraProduct.backward` computes the gradients of A, too.
        with torch.no_grad():
            rows = x.flatten(0, -2)
            dropped = dropout(rows) if dropout else rows
            low = F.linear(dropped, computing_weights(self)[0].to(x.dtype))
        # Kept before the product runs: activation checkpointing then stops before it (kept.py).
        kept = KeptInput.of(x, low, source)
        return x, low, Product(base, self.scaling, dropout, kept)


class SharedInputGroup(Protocol):
    """Layers that may be computed together (grouped.py)."""

    def output(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """The layer's output for x; None if the layer has to compute it alone."""


class LoraLinear(nn.Module):
    """base_layer(x) + scaling * B A x.

    is_adapted: false while the layer is what it was when training started (`as_at_start`). start:
    the adapter then, if it is kept. group: the layers with which it may be computed.
    """

    is_adapted = True
    adapter: type[LoraAdapter] = LoraAdapter
    group: SharedInputGroup | None = None

    def __init__(self, base_layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora = self.adapter(base_layer.in_features, base_layer.out_features, **options)  # type: ignore[arg-type]
        self.start: LoraAdapter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            grouped = self.group.output(self, x)
            if grouped is not None:
                return grouped
        lora = self.lora if self.is_adapted else self.start
        # Without a copy of its start an adapter began at zero: the layer was its base.
        if lora is None:
            plain: torch.Tensor = self.base_layer(x)
            return plain
        adapted: torch.Tensor = lora(x, self.base_layer, output_source(x))
        return adapted


class ExpertsLora(nn.Module):
    """The low-rank updates of all experts in one 3-D parameter, shaped as PEFT's ParamWrapper.

    shape: [experts, out, in] of the parameter, or [experts, in, out] where `transposed`. copies:
    as in LoraAdapter.
    """

    copies: tuple[torch.Tensor, torch.Tensor] | None = None
    in_fp32 = False

    def __init__(self, shape: Sequence[int], *, transposed: bool, rank: int) -> None:
        super().__init__()
        num_experts, rows, columns = shape
        in_features, out_features = (rows, columns) if transposed else (columns, rows)
        self.num_experts = num_experts
        options = {"bias": False, "device": "meta", "dtype": torch.float32}
        self.lora_A = nn.Linear(in_features, rank * num_experts, **options)  # type: ignore[arg-type]
        self.lora_B = nn.Linear(rank * num_experts, out_features, **options)  # type: ignore[arg-type]

    def forward(self, _: None) -> tuple[torch.Tensor, torch.Tensor]:
        """All A [experts, rank, in] and B [experts, out, rank].

        The argument is unused: FSDP2 of torch 2.11 fails without one.
        """
        lora_A, lora_B = computing_weights(self)
        # PEFT's ParamWrapper has the experts first in A's rows, and last in B's columns.
        all_A = lora_A.view(self.num_experts, -1, lora_A.shape[1])
        all_B = lora_B.view(lora_B.shape[0], -1, self.num_experts).permute(2, 0, 1)
        return all_A, all_B


class LoraExperts(nn.Module):
    """An experts module with adapters on its 3-D parameters `names`.

    Each adapter is called once per forward pass, whatever experts are chosen: FSDP2 gathers a
    module's weights when it is called, and all ranks must gather in the same order.
    """

    is_adapted = True
    adapter: type[ExpertsLora] = ExpertsLora

    def __init__(
        self, base_layer: nn.Module, names: Iterable[str], *, rank: int, scaling: float
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scaling = scaling
        # PEFT takes the parameters of a module without this attribute as [experts, out, in],
        # whatever they are.
        self.transposed = bool(getattr(base_layer, "is_transposed", False))
        self.swaps = self.transposed != is_transposed(base_layer)
        self.start: nn.ModuleDict | None = None
        self.lora = nn.ModuleDict()
        for name in names:
            self.lora[name] = self.new_adapter(name, rank)

    def new_adapter(self, name: str, rank: int) -> ExpertsLora:
        """An adapter on the meta device for a parameter of the experts."""
        parameter = getattr(self.base_layer, name)
        # A quantized one may be stored in another shape.
        shape = getattr(parameter, "parameter_shape", parameter.shape)
        return self.adapter(shape, transposed=self.transposed, rank=rank)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loras = self.lora if self.is_adapted else self.start or nn.ModuleDict()
        # before the experts, so that the order of all-gathers does not follow the router's choice
        adapted = {name: self._adapted(name, *lora(None)) for name, lora in loras.items()}
        # Python finds an instance's own attributes before nn.Module looks up its parameters and
        # submodules.
        vars(self.base_layer).update(adapted)
        try:
            return self.base_layer(*args, **kwargs)
        finally:
            for name in adapted:
                del vars(self.base_layer)[name]

    def _adapted(self, name: str, lora_A: torch.Tensor, lora_B: torch.Tensor) -> AdaptedExperts:
        # (B A)^T = A^T B^T: where PEFT takes the parameter for its transpose, the factors swap.
        first, second = (lora_B.mT, lora_A.mT) if self.swaps else (lora_A, lora_B)
        scaled = (second * self.scaling).contiguous()
        return AdaptedExperts(getattr(self.base_layer, name), first.contiguous(), scaled)
