"""PEFT-compatible adapters: options, choice of layers, insertion into a model, names of weights."""

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.config.text import ALL, is_regex
from fsdp_qlora.distributed.shards import local_part
from fsdp_qlora.model.adapters.dora import DoraAdapter, DoraLinear, Magnitude
from fsdp_qlora.model.adapters.lean_mlp import lean_mlp
from fsdp_qlora.model.adapters.lora import ExpertsLora, LoraAdapter, LoraExperts, LoraLinear
from fsdp_qlora.model.adapters.merge_aware import MergeAwareExperts, MergeAwareLinear
from fsdp_qlora.model.architecture.gated_mlp import GatedMlp
from fsdp_qlora.model.architecture.structure import canonical_name, has_tied_embeddings
from fsdp_qlora.model.quantizers.rounded_weight import RoundedWeight
from fsdp_qlora.utils.errors import UserError

Adapted = LoraLinear | LoraExperts
# adapter kind -> the layer that replaces a linear layer, called with rank, scaling and dropout.
ADAPTERS: dict[str, Callable[..., nn.Module]] = {
    "lora": LoraLinear,
    "dora": DoraLinear,
    "merge_aware": MergeAwareLinear,
}


@dataclass(frozen=True)
class LoraOptions:
    """Options of an adapter, with the meaning of PEFT's LoraConfig.

    rank_pattern, alpha_pattern: regular expression for the end of a layer's path -> rank or alpha
    of that layer. use_rslora: scale by alpha / sqrt(rank) (Kalajdzievski 2023), not alpha / rank.
    init: initial values: true (A random, B zero) or loftq. modules_to_save: embeddings and head
    that train in full. keeps_start: keep a copy of the initial values. merge_aware: train the
    adapter as it will be merged (merge_aware.py).
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
    merge_aware: bool = False

    def rank_of(self, path: str) -> int:
        """The rank of the adapter on the layer at `path`."""
        key = find_pattern(self.rank_pattern, path)
        return self.rank if key is None else self.rank_pattern[key]

    def scaling_of(self, path: str) -> float:
        """The factor of B A in the layer at `path`."""
        key = find_pattern(self.alpha_pattern, path)
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        return self.scaling(self.rank_of(path), alpha)

    def scaling(self, rank: int, alpha: float) -> float:
        """alpha / rank, or rsLoRA's alpha / sqrt(rank)."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


# --- choice of layers and parameters, by names, regular expressions and patterns as in PEFT ---


def select_targets(
    linears: Sequence[str],
    requested: Sequence[str],
    model_type: str,
    towers: Mapping[str, Sequence[str]] = {},
) -> list[str]:
    """Select the linear layers that get an adapter, named as in PEFT.

    Args:
        linears: paths of the linear layers of the decoder blocks.
        requested: "all", "default" (PEFT's choice for the model type), one regular expression for
            whole paths, or names: the last components of layers' paths; words of `towers` beside
            them.
        towers: word -> paths of the linear layers for images that it stands for. They are also
            selected by their whole paths.
    Raises:
        UserError: a name matches none.
    """
    in_towers = {path for paths in towers.values() for path in paths}
    chosen = {name for name in requested if name in in_towers}
    for word in set(requested).intersection(towers):
        if not towers[word]:
            raise UserError(
                f"lora_target_modules: {word} stands for layers that compute images, and this "
                "model has no such linear layer. Leave it out."
            )
        chosen.update(towers[word])
    others = [name for name in requested if name not in chosen and name not in towers]
    in_order = [path for paths in towers.values() for path in paths if path in chosen]
    of_decoder = _select_in_decoder(linears, others, model_type) if others else []
    return [*of_decoder, *in_order]


def _select_in_decoder(
    linears: Sequence[str], requested: Sequence[str], model_type: str
) -> list[str]:
    leaves = sorted({path.rsplit(".", 1)[-1] for path in linears})
    if len(requested) == 1 and requested[0] in ALL:
        return list(linears)
    if list(requested) == ["default"]:
        if model_type not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
            raise UserError(
                f"lora_target_modules default: PEFT has no default for model type {model_type!r}. "
                f"Use all, or names from: {', '.join(leaves)}."
            )
        requested = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[model_type]
    if len(requested) == 1 and is_regex(requested[0]):
        chosen = [path for path in linears if re.fullmatch(requested[0], path)]
        if not chosen:
            raise UserError(
                f"lora_target_modules: the regular expression {requested[0]} matches no linear "
                f"layer of the decoder blocks. It must match a whole path, such as {linears[0]}."
            )
        return chosen
    return _select_named(
        linears, requested, "lora_target_modules: no linear layer", f"{', '.join(leaves)} (or all)"
    )


def select_parameters(parameters: Sequence[str], requested: Sequence[str]) -> list[str]:
    """Select the 3-D expert parameters that get an adapter, named by the ends of their paths."""
    # such as mlp.experts.down_proj: the last component alone is often that of linear layers, too
    ends = {".".join(path.rsplit(".", 3)[1:]) for path in parameters}
    choices = ", ".join(sorted(ends)) or "none"
    return _select_named(
        parameters, requested, "lora_target_parameters: no expert parameter", choices
    )


def _select_named(
    paths: Sequence[str], names: Sequence[str], problem: str, choices: str
) -> list[str]:
    """The paths that end in one of these names. Raises UserError if a name matches none."""
    chosen: set[str] = set()
    unmatched: list[str] = []
    for name in names:
        # with the dot, so that q_proj does not stand for seq_proj, too
        matches = {path for path in paths if f".{path}".endswith(f".{name}")}
        chosen |= matches
        if not matches:
            unmatched.append(name)
    if unmatched:
        raise UserError(
            f"{problem} of the decoder blocks is named {', '.join(unmatched)}. This model's are: "
            f"{choices}."
        )
    # In the order of the model, whatever the order of the names is.
    return [path for path in paths if path in chosen]


def find_pattern(patterns: Iterable[str], path: str) -> str | None:
    """The first pattern that matches the end of a path, as in PEFT's rank_pattern; else None."""
    for pattern in patterns:
        # PEFT's own expression (`get_pattern_key`)
        if re.match(rf"(.*\.)?({pattern})$", path):
            return pattern
    return None


def check_patterns(option: str, patterns: Iterable[str], targets: Sequence[str]) -> None:
    """Refuse patterns that are not the first match of any layer with an adapter."""
    patterns = list(patterns)
    unused = set(patterns) - {find_pattern(patterns, path) for path in targets}
    if unused:
        leaves = sorted({path.rsplit(".", 1)[-1] for path in targets})
        raise UserError(
            f"{option}: {', '.join(sorted(unused))} has no effect: it matches no layer with an "
            "adapter, or only layers that an earlier pattern matches. Layers with an adapter: "
            f"{', '.join(leaves)}; a pattern is a regular expression for the end of a path."
        )


# --- insertion ---


def add_adapters(model: nn.Module, kind: str, targets: Iterable[str], options: LoraOptions) -> None:
    """Freeze the model and add an adapter (fp32, meta device) to each target layer."""
    model.requires_grad_(False)
    if options.merge_aware:
        kind = "merge_aware"
    for path in targets:
        wrapped = ADAPTERS[kind](
            model.get_submodule(path),
            rank=options.rank_of(path),
            scaling=options.scaling_of(path),
            dropout=options.dropout,
        )
        model.set_submodule(path, wrapped)
    for module in model.modules():
        if isinstance(module, GatedMlp):
            module.with_adapters = lean_mlp


def _check_rounded(experts: Mapping[str, nn.Module | nn.Parameter]) -> None:
    """Refuse weights of experts, path -> weight, that are not quantized in the base's files."""
    plain = [path for path, layer in experts.items() if not isinstance(layer, RoundedWeight)]
    if plain:
        leaves = ", ".join(sorted({path.rsplit(".", 1)[-1] for path in plain}))
        raise UserError(
            f"merge_aware rounds each weight with an adapter to the base's format, in which "
            f"{plain[0]} is not ({leaves}; {len(plain)} layers). Name the quantized experts alone "
            "in --lora_target_parameters."
        )


def add_experts_lora(model: nn.Module, parameters: Iterable[str], options: LoraOptions) -> None:
    """Add LoRA adapters (fp32, meta device) to 3-D expert parameters of a frozen model."""
    modules: dict[str, list[str]] = {}
    kept: dict[str, nn.Module | nn.Parameter] = {}
    for path in parameters:
        module, _, name = path.rpartition(".")
        modules.setdefault(module, []).append(name)
        kept[path] = getattr(model.get_submodule(module), name)
    adapted = LoraExperts
    if options.merge_aware:
        _check_rounded(kept)
        adapted = MergeAwareExperts
    for module, names in modules.items():
        experts = model.get_submodule(module)
        scaling = options.scaling(options.rank, options.alpha)
        wrapped = adapted(experts, names, rank=options.rank, scaling=scaling)
        model.set_submodule(module, wrapped)


def train_in_full(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Make the embeddings or the head of a frozen model trainable, in fp32.

    Raises:
        UserError: they share their weights, or a name belongs to another module.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    trainable = {path: module for path, module in model.named_modules() if module in ends}
    for name in names:
        chosen = [
            module
            for path, module in trainable.items()
            if path == name or path.endswith("." + name)
        ]
        if not chosen:
            raise UserError(
                f"modules_to_save {name}: only embeddings and head can train in full beside an "
                f"adapter, in this model {', '.join(trainable)}."
            )
        if has_tied_embeddings(model):
            raise UserError(
                f"modules_to_save {name}: embeddings and head of this model share one tensor, "
                "which PEFT would save twice. Leave it out, or use --train_type full."
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
    """Compute these layers with the adapters' initial values while the block runs."""
    for layer in layers:
        layer.is_adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_adapted = True


def keep_start(model: nn.Module) -> None:
    """Add a frozen copy to each adapter of a model on the meta device, for the initial values."""
    for layer in adapted_layers(model):
        layer.start = start = copy.deepcopy(layer.lora).requires_grad_(False)
        # A reference is computed without noise.
        if isinstance(start, LoraAdapter):
            start.dropout = 0.0


@torch.no_grad()
def fill_start(model: nn.Module) -> None:
    """Copy this rank's shards of the adapters to the copies that `keep_start` has added."""
    for layer in adapted_layers(model):
        if layer.start is None:
            continue
        # Both are sharded in the same way, so no rank needs rows of another.
        pairs = zip(layer.start.parameters(), layer.lora.parameters(), strict=True)
        for start, current in pairs:
            local_part(start).copy_(local_part(current))


def magnitudes(module: nn.Module) -> list[nn.Module]:
    """The magnitudes of a block's DoRA adapters, which are gathered in fp32."""
    return [child for child in module.modules() if isinstance(child, Magnitude)]


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in PEFT's file, parameter) of every adapter weight."""
    # In the order of the model, the same on all ranks: callers gather one after the other.
    for path, module in model.named_modules():
        # A copy of the start is no part of the result. That of experts is an nn.ModuleDict.
        if isinstance(module, LoraAdapter) and not path.endswith(".start"):
            prefix = "base_model.model." + canonical_name(path).removesuffix(".lora")
            yield f"{prefix}.lora_A.weight", module.lora_A.weight
            yield f"{prefix}.lora_B.weight", module.lora_B.weight
            if isinstance(module, DoraAdapter):
                yield f"{prefix}.lora_magnitude_vector", module.magnitude.weight
        elif isinstance(module, LoraExperts):
            # PEFT nests one wrapper per parameter around the experts module, the first parameter's
            # innermost.
            prefix = "base_model.model." + canonical_name(path)
            for lora in reversed(list(module.lora.children())):
                assert isinstance(lora, ExpertsLora)
                yield f"{prefix}.lora_A.weight", lora.lora_A.weight
                yield f"{prefix}.lora_B.weight", lora.lora_B.weight
                prefix += ".base_layer"


def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in PEFT's file, parameter) of the modules that train in full beside the adapters."""
    in_adapters = {
        parameter for adapter in adapter_modules(model) for parameter in adapter.parameters()
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in in_adapters:
            yield "base_model.model." + canonical_name(name), parameter
