"""LoRA for linear layers and for the 3-D parameters of experts.

Shapes: x [.., in], A [rank, in], B [out, rank]; for all experts together A [experts * rank, in] and B
[out, rank * experts], as in PEFT.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_qlora.adapters.lora_product import Dropout, Product, lora_product
from fsdp_qlora.model.fused_functions import recompute_source
from fsdp_qlora.quantizers.base import frozen_product
from fsdp_qlora.quantizers.experts import AdaptedMatrix, is_transposed
from fsdp_qlora.ranks.distributed import as_shard_of


class LoraAdapter(nn.Module):
    """The low-rank update B A of one linear layer (Hu et al. 2021), in_features -> rank -> out_features.

    One module with one forward, so that the adapters of a block can be one FSDP2 group.

    ends_block: its layer may be the last of a decoder block.
    """

    def __init__(self, in_features: int, out_features: int, *, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        self.scaling, self.ends_block = scaling, True
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        options = {"bias": False, "device": "meta", "dtype": torch.float32}
        self.lora_A = nn.Linear(in_features, rank, **options)  # type: ignore[arg-type]
        self.lora_B = nn.Linear(rank, out_features, **options)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor, base_layer: nn.Module, source: Any = None) -> torch.Tensor:
        """base_layer(x) + scaling * B A x, [.., out].

        Args:
            source: `recompute_source(x)`, of x before hooks, with which FSDP2 makes another tensor of it.
        """
        base = frozen_product(base_layer, x)
        if base is None:
            return torch.add(base_layer(x), self.lora_B(self.lora_A(self.dropout(x))), alpha=self.scaling)
        product = Product(base, self.scaling, self._draw_dropout(), self.ends_block)
        return lora_product(x, *self.matrices(), product, source)

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B. Looked up by `Module.__getattr__` the four names would take the host as long as a product does."""
        lora_A, lora_B = self._modules["lora_A"], self._modules["lora_B"]
        assert lora_A and lora_B
        return lora_A._parameters["weight"], lora_B._parameters["weight"]  # type: ignore[return-value]

    def _draw_dropout(self) -> Dropout | None:
        if self.training and isinstance(self.dropout, nn.Dropout):
            return Dropout.draw(self.dropout.p)
        return None


class KeptShard:
    """A copy of a sharded parameter's current values: this rank's rows, in host memory."""

    def __init__(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, DTensor)
        self._parameter, self._local = parameter, parameter.to_local().to("cpu", copy=True)

    def whole(self) -> torch.Tensor:
        """The whole tensor, on the parameter's device. Called on every rank."""
        return as_shard_of(self._local.to(self._parameter.to_local().device), self._parameter).full_tensor()


class LoraLinear(nn.Module):
    """base_layer(x) + scaling * B A x.

    is_decomposed: A and B have been initialized from the weight.
    subtracted: the A and B whose product was subtracted from the base on loading.
    """

    def __init__(self, base_layer: nn.Module, *, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scaling = scaling
        self.is_decomposed = False
        self.subtracted: tuple[KeptShard, KeptShard] | None = None
        self.lora = LoraAdapter(
            base_layer.in_features,  # type: ignore[arg-type]
            base_layer.out_features,  # type: ignore[arg-type]
            rank=rank,
            scaling=scaling,
            dropout=dropout,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modules: Any = self._modules  # see LoraAdapter.matrices
        result: torch.Tensor = modules["lora"](x, modules["base_layer"], recompute_source(x))
        return result


class ExpertsLora(nn.Module):
    """The low-rank updates of all experts in one 3-D parameter, in the shapes of PEFT's ParamWrapper.

    Args:
        shape: [experts, out, in] of the parameter, or [experts, in, out] where `transposed`.
    """

    def __init__(self, shape: Sequence[int], *, transposed: bool, rank: int) -> None:
        super().__init__()
        num_experts, rows, columns = shape
        in_features, out_features = (rows, columns) if transposed else (columns, rows)
        self.num_experts = num_experts
        options = {"bias": False, "device": "meta", "dtype": torch.float32}
        self.lora_A = nn.Linear(in_features, rank * num_experts, **options)  # type: ignore[arg-type]
        self.lora_B = nn.Linear(rank * num_experts, out_features, **options)  # type: ignore[arg-type]

    def forward(self, _: None) -> tuple[torch.Tensor, torch.Tensor]:
        """All A [experts, rank, in] and B [experts, out, rank]; FSDP2 of torch 2.11 fails without an argument."""
        lora_A, lora_B = self.lora_A.weight, self.lora_B.weight
        all_A = lora_A.view(self.num_experts, -1, lora_A.shape[1])
        return all_A, lora_B.view(lora_B.shape[0], -1, self.num_experts).permute(2, 0, 1)


@dataclass(frozen=True)
class _AdaptedExperts:
    """Replaces the 3-D parameter during a forward pass; `self[e]` is expert e's adapted matrix."""

    base: Any
    all_lora: tuple[torch.Tensor, torch.Tensor]
    scaling: float
    transposed: bool

    def __getitem__(self, index: Any) -> AdaptedMatrix:
        expert = int(index)
        lora_A, lora_B = (weights[expert] for weights in self.all_lora)
        return AdaptedMatrix(self.base[expert], lora_A, lora_B, scaling=self.scaling, transposed=self.transposed)


class LoraExperts(nn.Module):
    """An experts module with adapters on its 3-D parameters `names`.

    Each adapter is called once per forward pass, whatever experts are chosen: FSDP2 gathers a module's weights
    when it is called, and all ranks must gather in the same order.
    """

    def __init__(self, base_layer: nn.Module, names: Iterable[str], *, rank: int, scaling: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scaling = scaling
        self.transposed = is_transposed(base_layer)
        self.lora = nn.ModuleDict(
            {
                name: ExpertsLora(getattr(base_layer, name).shape, transposed=self.transposed, rank=rank)
                for name in names
            }
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        adapted = {
            name: _AdaptedExperts(getattr(self.base_layer, name), lora(None), self.scaling, self.transposed)
            for name, lora in self.lora.items()
        }
        # Python finds an instance's own attributes before nn.Module looks up its parameters and submodules.
        vars(self.base_layer).update(adapted)
        try:
            return self.base_layer(*args, **kwargs)
        finally:
            for name in adapted:
                del vars(self.base_layer)[name]
