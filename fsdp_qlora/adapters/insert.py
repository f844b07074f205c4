"""Adapters under PEFT's names: options, kinds, insertion into a model, and names of their weights."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.adapters.dora import DoraAdapter, DoraLinear, Magnitude
from fsdp_qlora.adapters.lora import ExpertsLora, LoraAdapter, LoraExperts, LoraLinear
from fsdp_qlora.adapters.targets import find_pattern
from fsdp_qlora.errors import UserError
from fsdp_qlora.model.models import canonical_name, has_tied_embeddings
from fsdp_qlora.ranks.shards import local_part

# adapter kind -> the layer that replaces a linear layer, given rank, scaling and dropout.
Adapted = LoraLinear | LoraExperts

ADAPTERS: dict[str, Callable[..., nn.Module]] = {"lora": LoraLinear, "dora": DoraLinear}


@dataclass(frozen=True)
class LoraOptions:
    """Options of an adapter, with the meaning of PEFT's LoraConfig.

    rank_pattern, alpha_pattern: regular expression for the end of a layer's path -> rank or alpha of that layer.
    use_rslora: scale by alpha / sqrt(rank) (Kalajdzievski 2023), not alpha / rank.
    init: initial values: true (A random, B zero), pissa, pissa_niter_N, olora or loftq.
    modules_to_save: embeddings and head that train in full. keeps_start: keep the values that training starts from too.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: Sequence[str] = ("all",)
    target_parameters: Sequence[str] = ()
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    init: str = "true"
    modules_to_save: Sequence[str] = ()
    keeps_start: bool = False

    def rank_of(self, path: str) -> int:
        """The rank of the adapter on the layer at `path`."""
        key = find_pattern(self.rank_pattern, path)
        return self.rank if key is None else self.rank_pattern[key]

    def scaling_of(self, path: str) -> float:
        """The factor of B A on the layer at `path`."""
        key = find_pattern(self.alpha_pattern, path)
        return self.scaling(self.rank_of(path), self.alpha if key is None else self.alpha_pattern[key])

    def scaling(self, rank: int, alpha: float) -> float:
        """alpha / rank, or rsLoRA's alpha / sqrt(rank)."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def add_adapters(model: nn.Module, kind: str, targets: Iterable[str], options: LoraOptions) -> None:
    """Freeze the model and put an adapter (fp32, meta device) beside each target layer."""
    model.requires_grad_(False)
    for path in targets:
        wrapped = ADAPTERS[kind](
            model.get_submodule(path),
            rank=options.rank_of(path),
            scaling=options.scaling_of(path),
            dropout=options.dropout,
        )
        model.set_submodule(path, wrapped)


def add_experts_lora(model: nn.Module, parameters: Iterable[str], options: LoraOptions) -> None:
    """Put LoRA adapters (fp32, meta device) beside the 3-D expert parameters of a frozen model."""
    modules: dict[str, list[str]] = {}
    for path in parameters:
        module, _, name = path.rpartition(".")
        modules.setdefault(module, []).append(name)
    for module, names in modules.items():
        experts = model.get_submodule(module)
        scaling = options.scaling(options.rank, options.alpha)
        wrapped = LoraExperts(experts, names, rank=options.rank, scaling=scaling)
        model.set_submodule(module, wrapped)


def train_in_full(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Let the embeddings or the head of a frozen model train, in fp32. Raises UserError if they share their weights."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    trainable = {path: module for path, module in model.named_modules() if module in ends}
    for name in names:
        chosen = [module for path, module in trainable.items() if path == name or path.endswith("." + name)]
        if not chosen:
            raise UserError(
                f"modules_to_save {name}: only embeddings and head can train in full beside an adapter, in this model "
                f"{', '.join(trainable)}."
            )
        if has_tied_embeddings(model):
            raise UserError(
                f"modules_to_save {name}: embeddings and head of this model share one tensor, which PEFT would save "
                "twice. Leave it out, or use --train_type full."
            )
        for module in chosen:
            for key, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, key, nn.Parameter(torch.empty_like(parameter, dtype=torch.float32)))


def adapter_modules(module: nn.Module) -> list[nn.Module]:
    """The adapters inside a block, in the order of the model."""
    return [child for child in module.modules() if isinstance(child, LoraAdapter | ExpertsLora)]


def adapted_layers(module: nn.Module) -> list[Adapted]:
    """The layers inside a block that have an adapter."""
    return [child for child in module.modules() if isinstance(child, Adapted)]


@contextlib.contextmanager
def as_at_start(layers: Iterable[Adapted]) -> Iterator[None]:
    """In this block of code these layers are what they were when training started."""
    for layer in layers:
        layer.is_adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_adapted = True


def keep_start(model: nn.Module) -> None:
    """Give each adapter of a model on the meta device a frozen copy, for the values that training starts from."""
    for layer in adapted_layers(model):
        layer.start = start = copy.deepcopy(layer.lora).requires_grad_(False)
        if isinstance(start, LoraAdapter):
            start.dropout = 0.0


@torch.no_grad()
def fill_start(model: nn.Module) -> None:
    """Copy the adapters' values, of this rank's shards, to what `keep_start` has made."""
    for layer in adapted_layers(model):
        if layer.start is not None:
            for kept, current in zip(layer.start.parameters(), layer.lora.parameters(), strict=True):
                local_part(kept).copy_(local_part(current))


def magnitudes(module: nn.Module) -> list[nn.Module]:
    """The parts of a block's adapters that are gathered in fp32."""
    return [child for child in module.modules() if isinstance(child, Magnitude)]


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in PEFT's file, parameter) of every adapter weight."""
    for path, module in model.named_modules():
        if isinstance(module, LoraAdapter) and not path.endswith(".start"):
            prefix = "base_model.model." + canonical_name(path).removesuffix(".lora")
            yield f"{prefix}.lora_A.weight", module.lora_A.weight
            yield f"{prefix}.lora_B.weight", module.lora_B.weight
            if isinstance(module, DoraAdapter):
                yield f"{prefix}.lora_magnitude_vector", module.magnitude.weight
        elif isinstance(module, LoraExperts):
            # PEFT nests one wrapper per parameter around the experts module, the first parameter's innermost.
            prefix = "base_model.model." + canonical_name(path)
            for lora in reversed(list(module.lora.children())):
                assert isinstance(lora, ExpertsLora)
                yield f"{prefix}.lora_A.weight", lora.lora_A.weight
                yield f"{prefix}.lora_B.weight", lora.lora_B.weight
                prefix += ".base_layer"


def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in PEFT's file, parameter) of the modules that train in full beside the adapters."""
    in_adapters = {parameter for adapter in adapter_modules(model) for parameter in adapter.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in in_adapters:
            yield "base_model.model." + canonical_name(name), parameter
