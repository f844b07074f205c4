"""LoRA adapters under PEFT's names: which layers get one, its forward pass, its first values, its file."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, TaskType
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PretrainedConfig

from fsdp_qlora.distributed import derive_seed
from fsdp_qlora.errors import UserError
from fsdp_qlora.experts import AdaptedMatrix, is_transposed
from fsdp_qlora.models import canonical_name


class LoraAdapter(nn.Module):
    """B A x: the low-rank update of one linear layer (Hu et al. 2021), in_features -> rank -> out_features.

    One module with one forward, so that the adapters of a block can be one FSDP2 group.
    """

    def __init__(self, in_features: int, out_features: int, *, rank: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        options = {"bias": False, "device": "meta", "dtype": torch.float32}
        self.lora_A = nn.Linear(in_features, rank, **options)  # type: ignore[arg-type]
        self.lora_B = nn.Linear(rank, out_features, **options)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lora_B(self.lora_A(self.dropout(x)))


class LoraLinear(nn.Module):
    """base_layer(x) + lora_alpha / rank * B A x."""

    def __init__(self, base_layer: nn.Module, *, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scaling = alpha / rank
        self.lora = LoraAdapter(
            base_layer.in_features,  # type: ignore[arg-type]
            base_layer.out_features,  # type: ignore[arg-type]
            rank=rank,
            dropout=dropout,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The adapter first: it alone keeps something for the backward pass, so the recomputation of a checkpointed
        # block can stop before the product of the block's last base layer.
        update = self.lora(x)
        return torch.add(self.base_layer(x), update, alpha=self.scaling)


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

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All A [experts, rank, in] and all B [experts, out, rank]."""
        lora_A, lora_B = self.lora_A.weight, self.lora_B.weight
        all_A = lora_A.view(self.num_experts, -1, lora_A.shape[1])
        return all_A, lora_B.view(lora_B.shape[0], -1, self.num_experts).permute(2, 0, 1)


@dataclass(frozen=True)
class _AdaptedExperts:
    """Stands for the 3-D parameter during a forward pass; `self[e]` is expert e's adapted matrix."""

    base: Any
    all_lora: tuple[torch.Tensor, torch.Tensor]
    scaling: float
    transposed: bool

    def __getitem__(self, index: Any) -> AdaptedMatrix:
        expert = int(index)
        lora_A, lora_B = (weights[expert] for weights in self.all_lora)
        return AdaptedMatrix(self.base[expert], lora_A, lora_B, scaling=self.scaling, transposed=self.transposed)


class LoraExperts(nn.Module):
    """An experts module whose 3-D parameters `names` are used with an adapter.

    The adapters are called once per forward pass, whatever experts are hit, because FSDP2 gathers a module's
    weights when it is called and ranks must gather in the same order.
    """

    def __init__(self, base_layer: nn.Module, names: Iterable[str], *, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scaling = alpha / rank
        self.transposed = is_transposed(base_layer)
        self.lora = nn.ModuleDict(
            {
                name: ExpertsLora(getattr(base_layer, name).shape, transposed=self.transposed, rank=rank)
                for name in names
            }
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        adapted = {
            name: _AdaptedExperts(getattr(self.base_layer, name), lora(), self.scaling, self.transposed)
            for name, lora in self.lora.items()
        }
        # An instance's own attributes are found before its parameters and submodules.
        vars(self.base_layer).update(adapted)
        try:
            return self.base_layer(*args, **kwargs)
        finally:
            for name in adapted:
                del vars(self.base_layer)[name]


def select_parameters(parameters: Sequence[str], requested: Sequence[str]) -> list[str]:
    """The 3-D expert parameters that get an adapter, named by their last path components as in PEFT.

    Raises:
        UserError: a name matches nothing.
    """
    unmatched = [name for name in requested if not any(_is_named(path, [name]) for path in parameters)]
    if unmatched:
        named = sorted({".".join(path.rsplit(".", 3)[1:]) for path in parameters})
        raise UserError(
            f"lora_target_parameters: no expert parameter of the decoder blocks is named {', '.join(unmatched)}. "
            f"Those of this model: {', '.join(named) or 'none'}."
        )
    return [path for path in parameters if _is_named(path, requested)]


def select_targets(linears: Sequence[str], requested: Sequence[str], model_type: str) -> list[str]:
    """The linear layers that get an adapter.

    Args:
        linears: paths of the linear layers of the decoder blocks.
        requested: "all", "default" (PEFT's choice for the model type), or names: a layer is meant by its
            last path components, as in PEFT.
    Raises:
        UserError: a name matches nothing, or PEFT has no default for the model type.
    """
    leaves = sorted({path.rsplit(".", 1)[-1] for path in linears})
    if list(requested) == ["all"]:
        return list(linears)
    if list(requested) == ["default"]:
        if model_type not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
            raise UserError(
                f"lora_target_modules default: PEFT has no default for model type {model_type!r}. "
                f"Use all, or name some of: {', '.join(leaves)}."
            )
        requested = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[model_type]
    chosen = [path for path in linears if _is_named(path, requested)]
    unmatched = [name for name in requested if not any(_is_named(path, [name]) for path in linears)]
    if unmatched:
        raise UserError(
            f"lora_target_modules: no linear layer of the decoder blocks is named {', '.join(unmatched)}. "
            f"Linear layers of this model: {', '.join(leaves)} (or all)."
        )
    return chosen


def _is_named(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.endswith("." + name) for name in names)


def add_lora(model: nn.Module, targets: Iterable[str], *, rank: int, alpha: float, dropout: float) -> None:
    """Freeze the model and put a LoRA adapter (fp32, meta device) beside each target layer."""
    model.requires_grad_(False)
    for path in targets:
        wrapped = LoraLinear(model.get_submodule(path), rank=rank, alpha=alpha, dropout=dropout)
        model.set_submodule(path, wrapped)


def add_experts_lora(model: nn.Module, parameters: Iterable[str], *, rank: int, alpha: float) -> None:
    """Put LoRA adapters (fp32, meta device) beside the 3-D expert parameters of a frozen model."""
    modules: dict[str, list[str]] = {}
    for path in parameters:
        module, _, name = path.rpartition(".")
        modules.setdefault(module, []).append(name)
    for module, names in modules.items():
        model.set_submodule(module, LoraExperts(model.get_submodule(module), names, rank=rank, alpha=alpha))


def adapter_modules(module: nn.Module) -> list[nn.Module]:
    """The adapters inside a block, in the order of the model."""
    return [child for child in module.modules() if isinstance(child, LoraAdapter | ExpertsLora)]


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in PEFT's file, parameter) of every adapter weight."""
    for path, module in model.named_modules():
        if isinstance(module, LoraAdapter):
            prefix = "base_model.model." + canonical_name(path).removesuffix(".lora")
            yield f"{prefix}.lora_A.weight", module.lora_A.weight
            yield f"{prefix}.lora_B.weight", module.lora_B.weight
        elif isinstance(module, LoraExperts):
            # PEFT nests one wrapper per parameter around the experts module, the first parameter's innermost.
            prefix = "base_model.model." + canonical_name(path)
            for lora in reversed(list(module.lora.children())):
                assert isinstance(lora, ExpertsLora)
                yield f"{prefix}.lora_A.weight", lora.lora_A.weight
                yield f"{prefix}.lora_B.weight", lora.lora_B.weight
                prefix += ".base_layer"


def first_adapter_value(name: str, shape: torch.Size, *, seed: int) -> torch.Tensor:
    """A's or B's first value, float32 on the CPU: a pure function of name and seed, on any number of ranks.

    As in PEFT: A is Kaiming-uniform with a = sqrt(5), B is zero, so that training starts from the base model.
    """
    value = torch.zeros(shape)
    if name.endswith("lora_A.weight"):
        generator = torch.Generator().manual_seed(derive_seed("lora", seed, name))
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


def _is_renamed(leaf: str, config: PretrainedConfig) -> bool:
    """Whether PEFT, given a linear layer's name for this model, adapts the experts that once had that name."""
    renamed = LoraConfig(target_modules=[leaf])
    try:
        convert_peft_config_for_transformers(renamed, SimpleNamespace(config=config), None)
    except ValueError:  # it wants gate_proj and up_proj together
        return True
    return renamed.target_modules != {leaf}


def peft_config(
    linears: Sequence[str],
    targets: Sequence[str],
    parameters: Sequence[str],
    *,
    rank: int,
    alpha: float,
    dropout: float,
    base_model: str,
    model_config: PretrainedConfig,
) -> LoraConfig:
    """The adapter's PEFT configuration. Layers are named by their last component where that is unambiguous.

    Args:
        linears: paths of all linear layers of the blocks. targets: those with an adapter.
        parameters: paths of the 3-D parameters with an adapter.
    """
    # Shared experts beside routed ones: PEFT takes names like up_proj for the routed ones, and reaches these
    # layers, with the same computation and names in the file, by their weights.
    renamed = {leaf for leaf in {path.rsplit(".", 1)[-1] for path in targets} if _is_renamed(leaf, model_config)}
    by_weight = [path for path in targets if path.rsplit(".", 1)[-1] in renamed]
    targets = [path for path in targets if path not in by_weight]
    target_parameters = [*(f"{path}.weight" for path in by_weight), *parameters]
    leaves = {path.rsplit(".", 1)[-1] for path in targets}
    named = [path for path in linears if path.rsplit(".", 1)[-1] in leaves]
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        # Only training knows dropout, and PEFT refuses it beside parameters.
        lora_dropout=0.0 if target_parameters else dropout,
        target_modules=sorted(leaves) if len(named) == len(targets) else list(targets),
        target_parameters=target_parameters or None,
        bias="none",
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base_model,
        inference_mode=True,
    )
