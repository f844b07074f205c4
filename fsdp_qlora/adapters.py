"""LoRA adapters under PEFT's names: which layers get one, its forward pass, its first values, its file."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from peft import LoraConfig, TaskType
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn

from fsdp_qlora.distributed import derive_seed
from fsdp_qlora.errors import UserError
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


def adapter_modules(module: nn.Module) -> list[nn.Module]:
    """The adapters inside a block, in the order of the model."""
    return [child for child in module.modules() if isinstance(child, LoraAdapter)]


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in PEFT's file, parameter) of every adapter weight."""
    for path, module in model.named_modules():
        if isinstance(module, LoraAdapter):
            prefix = "base_model.model." + canonical_name(path).removesuffix(".lora")
            yield f"{prefix}.lora_A.weight", module.lora_A.weight
            yield f"{prefix}.lora_B.weight", module.lora_B.weight


def first_adapter_value(name: str, shape: torch.Size, *, seed: int) -> torch.Tensor:
    """A's or B's first value, float32 on the CPU: a pure function of name and seed, on any number of ranks.

    As in PEFT: A is Kaiming-uniform with a = sqrt(5), B is zero, so that training starts from the base model.
    """
    value = torch.zeros(shape)
    if name.endswith("lora_A.weight"):
        generator = torch.Generator().manual_seed(derive_seed("lora", seed, name))
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


def peft_config(
    linears: Sequence[str], targets: Sequence[str], *, rank: int, alpha: float, dropout: float, base_model: str
) -> LoraConfig:
    """The adapter's PEFT configuration. Layers are named by their last component where that is unambiguous."""
    leaves = {path.rsplit(".", 1)[-1] for path in targets}
    named = [path for path in linears if path.rsplit(".", 1)[-1] in leaves]
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=sorted(leaves) if len(named) == len(targets) else list(targets),
        bias="none",
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base_model,
        inference_mode=True,
    )
