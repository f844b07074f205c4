"""The changes of an adapter to the weights of its base: PEFT's own layers tell them.

Shapes: a weight is [.., rows, columns], where the first dims number the experts; A [rank, in], B
[out, rank].
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.model.adapters import peft_folder
from fsdp_qlora.model.adapters.peft_folder import (
    PREFIX,
    read_header,
    tensor_differences,
    weights_file,
)
from fsdp_qlora.model.adapters.token_rows import NewTokens, TokenRows
from fsdp_qlora.model.architecture.structure import canonical_name
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.errors import UserError

_NAME = "default"  # PEFT's, of the only adapter


class PeftFolder(NamedTuple):
    """config: without the initial values, which the saved tensors replace. files: tensors by their
    names.
    """

    path: Path
    config: LoraConfig
    files: WeightFiles

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, float32 on the CPU. Raises UserError if it is not finite."""
        values = self.files.read_rows(name, 0, self.files.shape(name)[0]).float()
        if not values.isfinite().all():
            raise UserError(
                f"--adapter {self.path}: {name} has values that are not finite. Restore the file."
            )
        return values


def open_adapter(path: Path) -> PeftFolder:
    """Open an adapter's folder; its tensors stay in the file until they are read. Raises UserError
    if damaged.
    """
    peft_folder.read_config(path)
    weights = weights_file(path)
    read_header(weights)
    try:
        with warnings.catch_warnings(action="ignore"):
            config = LoraConfig.from_pretrained(str(path))
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(
            f"--adapter {path}: its adapter_config.json cannot be used ({error})."
        ) from error
    config.init_lora_weights = True
    config.inference_mode = True
    return PeftFolder(path, config, WeightFiles(path, file=weights.name))


@dataclass(frozen=True)
class LowRankUpdate:
    """W + s L R for each matrix of a weight; with a magnitude its rows are scaled to that length
    (DoRA).

    left [experts, rows, rank], right [experts, rank, columns], magnitude [rows]: float32.
    """

    left: torch.Tensor
    right: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None = None

    def write_into(self, values: torch.Tensor, first: int) -> torch.Tensor:
        """Change rows of the weight in place.

        values: float32 [n, columns], rows `first` to `first + n` of the experts' matrices,
        concatenated.
        """
        rows = self.left.shape[1]
        done = 0
        while done < len(values):
            expert, row = divmod(first + done, rows)
            part = values[done : done + rows - row]
            part.addmm_(
                self.left[expert, row : row + len(part)], self.right[expert], alpha=self.scaling
            )
            if self.magnitude is not None:
                norm = torch.linalg.vector_norm(part, dim=1).clamp_min(
                    torch.finfo(torch.float32).tiny
                )
                part.mul_((self.magnitude[row : row + len(part)] / norm)[:, None])
            done += len(part)
        return values


@dataclass(frozen=True)
class Replacement:
    """The weight becomes the tensor `name` of the adapter's file.

    is_copy: it is a module's own; else it takes the place of the base's tensor, which embeddings
    and head may share.
    """

    name: str
    is_copy: bool


class Changes:
    """The changes of an adapter, by the weights' names in the model. Raises UserError if they do
    not fit the base.

    Args:
        model: the base on the meta device; PEFT's layers are put into it.
    Attributes:
        layers: weight to which something is added -> path of PEFT's layer in the file, and that
        layer. new_rows: of these the weights of which rows of new tokens are replaced. replaced:
        weight -> the tensor that takes its place: of modules_to_save, biases, resized embeddings.
    """

    def __init__(self, model: PreTrainedModel, adapter: PeftFolder) -> None:
        self.adapter = adapter
        weights = {
            canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)
        }
        with warnings.catch_warnings(action="ignore"):
            try:
                wrapped = get_peft_model(model, adapter.config, low_cpu_mem_usage=True)
            except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
                raise UserError(
                    f"--adapter {adapter.path} does not fit this base: {error}"
                ) from error
            expected = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        self.layers = dict(_lora_layers(wrapped, adapter))
        self.new_rows = {
            name
            for name, (_, layer) in self.layers.items()
            if isinstance(layer, TrainableTokensLayer)
        }
        self.replaced = {
            weight: Replacement(name, is_copy=name in expected)
            for name in adapter.files.files
            if (weight := canonical_name(name).removeprefix(PREFIX)) in weights
        }
        # which may have other shapes, and none in `expected`
        own = {change.name for change in self.replaced.values()}
        stored = {
            name: adapter.files.shape(name) for name in adapter.files.files if name not in own
        }
        wanted = {name: tensor.shape for name, tensor in expected.items() if name not in own}
        problems = "; ".join(tensor_differences(stored, wanted))
        if problems:
            path = adapter.path
            raise UserError(
                f"--adapter {path} does not fit this base: {problems}. Give the base "
                "it was trained on."
            )

    def changes_any(self, weights: Iterable[str]) -> bool:
        return not {*self.layers, *self.replaced}.isdisjoint(weights)

    def update(self, weight: str) -> "LowRankUpdate | TokenRows | None":
        """Read what changes a weight, or the tensor that replaces it."""
        if weight not in self.layers:
            return None
        (path, layer) = self.layers[weight]
        adapter = self.adapter
        if weight in self.new_rows:
            return TokenRows(
                NewTokens(layer.token_indices[_NAME]),
                adapter.read(f"{path}.trainable_tokens_delta"),
            )
        scaling = layer.scaling[_NAME]
        if f"{path}.lora_embedding_A" in adapter.files.files:  # [rank, rows] and [columns, rank]
            lora_A, lora_B = (adapter.read(f"{path}.lora_embedding_{which}") for which in "AB")
            return LowRankUpdate(lora_A.T[None], lora_B.T[None], scaling)
        lora_A, lora_B = (adapter.read(f"{path}.lora_{which}.weight") for which in "AB")
        magnitude = f"{path}.lora_magnitude_vector"
        lengths = adapter.read(magnitude).flatten() if magnitude in adapter.files.files else None
        experts = layer.num_experts if isinstance(layer, ParamWrapper) else 1
        all_A = lora_A.view(experts, -1, lora_A.shape[1])
        # the order of PEFT's ParamWrapper
        all_B = lora_B.view(lora_B.shape[0], -1, experts).permute(2, 0, 1)
        of_experts = isinstance(layer, ParamWrapper) and experts > 1
        if layer._did_swap_in_out_features if of_experts else not layer.fan_in_fan_out:
            return LowRankUpdate(all_B, all_A, scaling, lengths)
        return LowRankUpdate(all_A.mT, all_B.mT, scaling, lengths)


def _lora_layers(
    wrapped: nn.Module, adapter: PeftFolder
) -> Iterator[tuple[str, tuple[str, LoraLayer]]]:
    """(weight that is changed, (path of PEFT's layer in the file, that layer))."""
    for path, layer in wrapped.named_modules():
        if isinstance(layer, TrainableTokensLayer) and not layer.tied_adapter:
            yield (
                f"{canonical_name(path).removeprefix(PREFIX).removesuffix('.token_adapter')}.weight",
                (path, layer),
            )
        if not isinstance(layer, LoraLayer) or _NAME not in layer.r:
            continue
        variants = [type(variant).__name__ for variant in layer.lora_variant.values()]
        if variants not in ([], ["DoraLinearVariant"]) or (variants and layer.fan_in_fan_out):
            raise UserError(
                f"--adapter {adapter.path}: {path} is of a kind that cannot be merged "
                f"({variants[0]})."
            )
        leaf = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        yield f"{canonical_name(path).removeprefix(PREFIX)}.{leaf}", (path, layer)
