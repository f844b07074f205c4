"""The changes of an adapter to the weights of its base, as PEFT's own layers describe them.

Shapes: a weight is [.., rows, columns], where the first dims number the experts; A [rank, in],
B [out, rank].
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
    """An opened adapter in PEFT's format.

    config: without initial values, which the saved tensors replace. files: its tensors by name.
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
    """Open an adapter's folder; its tensors stay in the file until they are read.

    Raises UserError if it is damaged.
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
    # PiSSA, OLoRA and LoftQ would change the base, which is on the meta device, to initialize.
    config.init_lora_weights = True
    config.inference_mode = True
    return PeftFolder(path, config, WeightFiles(path, file=weights.name))


@dataclass(frozen=True)
class LowRankUpdate:
    """W + s L R for each matrix of a weight; a magnitude scales its rows to that length (DoRA).

    left [experts, rows, rank], right [experts, rank, columns], magnitude [rows]: float32.
    """

    left: torch.Tensor
    right: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> "LowRankUpdate":
        """The update with tensors of `dtype`."""
        magnitude = None if self.magnitude is None else self.magnitude.to(dtype)
        return LowRankUpdate(
            self.left.to(dtype), self.right.to(dtype), self.scaling, magnitude=magnitude
        )

    def write_into(self, values: torch.Tensor, first: int) -> torch.Tensor:
        """Change rows of the weight in place.

        values: [n, columns] in the dtype of the update, rows `first` to `first + n` of the
        experts' matrices, concatenated.
        """
        rows = self.left.shape[1]
        done = 0
        # The rows may begin in the middle of an expert's matrix and end in another's.
        while done < len(values):
            expert, row = divmod(first + done, rows)
            part = values[done : done + rows - row]
            part.addmm_(
                self.left[expert, row : row + len(part)], self.right[expert], alpha=self.scaling
            )
            if self.magnitude is not None:
                # A row of zeros has the norm 0, and 0 / 0 would be NaN; so it stays 0.
                norm = torch.linalg.vector_norm(part, dim=1).clamp_min(
                    torch.finfo(torch.float32).tiny
                )
                part.mul_((self.magnitude[row : row + len(part)] / norm)[:, None])
            done += len(part)
        return values


@dataclass(frozen=True)
class Replacement:
    """The weight becomes the tensor `name` of the adapter's file.

    is_copy: it is the tensor of one module (modules_to_save); otherwise it takes the place of the
    base's tensor, which embeddings and head may share.
    """

    name: str
    is_copy: bool


class Changes:
    """The changes of an adapter, by the weights' names in the model.

    Raises UserError if they do not fit the base.

    Args:
        model: the base on the meta device; PEFT's layers are put into it.
    Attributes:
        layers: weight to which something is added -> path of PEFT's layer in the file, and that
            layer.
        new_rows: the weights among them in which rows of new tokens are replaced.
        replaced: weight -> the tensor that takes its place: of modules_to_save, biases, resized
            embeddings.
    """

    def __init__(self, model: PreTrainedModel, adapter: PeftFolder) -> None:
        self.adapter = adapter
        # Tied weights under all of their names: the adapter may name either one.
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
        self.replaced = {}
        for name in adapter.files.files:
            weight = canonical_name(name).removeprefix(PREFIX)
            if weight in weights:
                self.replaced[weight] = Replacement(name, is_copy=name in expected)
        # A tensor that replaces another may have another shape (resized embeddings), and PEFT
        # expects no shape of some; so only the others are compared.
        replacing = {change.name for change in self.replaced.values()}
        stored = {
            name: adapter.files.shape(name) for name in adapter.files.files if name not in replacing
        }
        needed = {name: tensor.shape for name, tensor in expected.items() if name not in replacing}
        problems = "; ".join(tensor_differences(stored, needed))
        if problems:
            raise UserError(
                f"--adapter {adapter.path} does not fit this base: {problems}. Give the base it "
                "was trained on."
            )

    def changes_any(self, weights: Iterable[str]) -> bool:
        return not {*self.layers, *self.replaced}.isdisjoint(weights)

    def update(self, weight: str) -> "LowRankUpdate | TokenRows | None":
        """Read what changes a weight, or the tensor that replaces it."""
        if weight not in self.layers:
            return None
        path, layer = self.layers[weight]
        adapter = self.adapter
        if weight in self.new_rows:
            return TokenRows(
                NewTokens(layer.token_indices[_NAME]),
                adapter.read(f"{path}.trainable_tokens_delta"),
            )
        scaling = layer.scaling[_NAME]
        # An embedding's weight is [rows, columns], A is [rank, rows] and B [columns, rank].
        if f"{path}.lora_embedding_A" in adapter.files.files:
            lora_A, lora_B = (adapter.read(f"{path}.lora_embedding_{which}") for which in "AB")
            return LowRankUpdate(lora_A.T[None], lora_B.T[None], scaling)
        lora_A, lora_B = (adapter.read(f"{path}.lora_{which}.weight") for which in "AB")
        magnitude = f"{path}.lora_magnitude_vector"
        lengths = adapter.read(magnitude).flatten() if magnitude in adapter.files.files else None
        experts = layer.num_experts if isinstance(layer, ParamWrapper) else 1
        all_A = lora_A.view(experts, -1, lora_A.shape[1])
        # PEFT's ParamWrapper keeps A as [experts * rank, in] and B as [out, rank * experts]: the
        # expert is the slowest index of A and the fastest of B.
        all_B = lora_B.view(lora_B.shape[0], -1, experts).permute(2, 0, 1)
        of_experts = isinstance(layer, ParamWrapper) and experts > 1
        is_out_by_in = not layer.fan_in_fan_out  # Conv1D of GPT-2 keeps [in, out]
        if of_experts:
            is_out_by_in = layer._did_swap_in_out_features
        if is_out_by_in:
            return LowRankUpdate(all_B, all_A, scaling, lengths)
        return LowRankUpdate(all_A.mT, all_B.mT, scaling, lengths)


def _lora_layers(
    wrapped: nn.Module, adapter: PeftFolder
) -> Iterator[tuple[str, tuple[str, LoraLayer]]]:
    """(weight that is changed, (path of PEFT's layer in the file, that layer))."""
    for path, layer in wrapped.named_modules():
        # A tied head has a layer without values of its own: the embedding's are in the file.
        if isinstance(layer, TrainableTokensLayer) and not layer.tied_adapter:
            module = canonical_name(path).removeprefix(PREFIX).removesuffix(".token_adapter")
            yield f"{module}.weight", (path, layer)
        if not isinstance(layer, LoraLayer) or _NAME not in layer.r:
            continue
        # Variants such as aLoRA and Arrow depend on the tokens, so they cannot be merged.
        variants = [type(variant).__name__ for variant in layer.lora_variant.values()]
        if variants not in ([], ["DoraLinearVariant"]) or (variants and layer.fan_in_fan_out):
            raise UserError(
                f"--adapter {adapter.path}: {path} is of a kind that cannot be merged "
                f"({variants[0]})."
            )
        leaf = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        yield f"{canonical_name(path).removeprefix(PREFIX)}.{leaf}", (path, layer)
