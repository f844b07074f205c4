"""What an adapter changes in each weight of its base, told by the layers that PEFT itself builds for it.

Shapes: a weight is [.., rows, columns], where the first dims number the experts; A [rank, in], B [out, rank].
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from peft import get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.errors import UserError
from fsdp_qlora.merging.peft_folder import PeftFolder
from fsdp_qlora.models import canonical_name

_PREFIX = "base_model.model."
_NAME = "default"  # PEFT's, of the only adapter
_MOST_NAMES = 5


@dataclass(frozen=True)
class LowRank:
    """W + s L R for each matrix of a weight; with a magnitude its rows are scaled to that length (DoRA).

    left [experts, rows, rank], right [experts, rank, columns], magnitude [rows]: float32.
    """

    left: torch.Tensor
    right: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None = None

    def apply(self, values: torch.Tensor, first: int) -> torch.Tensor:
        """Change, in place, rows of the weight.

        Args:
            values: float32 [n, columns], rows `first` to `first + n` of the experts' rows one below the other.
        """
        rows = self.left.shape[1]
        done = 0
        while done < len(values):
            expert, row = divmod(first + done, rows)
            part = values[done : done + rows - row]
            part.addmm_(self.left[expert, row : row + len(part)], self.right[expert], alpha=self.scaling)
            if self.magnitude is not None:
                norm = torch.linalg.vector_norm(part, dim=1).clamp_min(torch.finfo(torch.float32).tiny)
                part.mul_((self.magnitude[row : row + len(part)] / norm)[:, None])
            done += len(part)
        return values

    def reduced(self, values: torch.Tensor, first: int) -> torch.Tensor:
        """`values` + s L0 R0 in float64, where L0 and R0 are the second half of L and R: a base that an adapter of
        doubled rank was trained on, which is W without its first values (adapters/first_values.py)."""
        half = self.left.shape[2] // 2
        update = self.left[0, first : first + len(values), half:].double() @ self.right[0, half:].double()
        return (values.double() + update * self.scaling).float()

    def trained(self) -> "LowRank":
        """The first half of L and R: what was trained on that base."""
        half = self.left.shape[2] // 2
        return LowRank(self.left[..., :half], self.right[:, :half], self.scaling, self.magnitude)


@dataclass(frozen=True)
class Replacement:
    """The weight becomes the tensor `name` of the adapter's file.

    is_copy: it is a module's own; else it takes the place of the base's tensor, which embeddings and head may share.
    """

    name: str
    shape: torch.Size
    is_copy: bool


class Changes:
    """The changes of an adapter, by the weights' names in the model.

    Args:
        model: of the base, on the meta device; PEFT's layers are put into it.
    Raises:
        UserError: tensors of the adapter are missing, unknown, or do not fit this base.
    """

    def __init__(self, model: PreTrainedModel, adapter: PeftFolder) -> None:
        self._adapter = adapter
        shapes = {canonical_name(name): tensor.shape for name, tensor in model.named_parameters(remove_duplicate=False)}
        with warnings.catch_warnings(action="ignore"):
            try:
                wrapped = get_peft_model(model, adapter.config, low_cpu_mem_usage=True)
            except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
                raise UserError(f"--adapter {adapter.path} does not fit this base: {error}") from error
            expected = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        self._layers = dict(_lora_layers(wrapped, adapter))
        self._replaced = _replacements(adapter, shapes, expected.keys())
        self._check(expected)

    def names(self, *, low_rank: bool = False) -> set[str]:
        """The weights that change. low_rank: those to which something is added."""
        return set(self._layers) | (set() if low_rank else set(self._replaced))

    def low_rank(self, weight: str) -> LowRank | None:
        """What is added to a weight, or to what replaces it; read from the adapter's file."""
        return _low_rank(*self._layers[weight], self._adapter) if weight in self._layers else None

    def replaced(self, weight: str) -> Replacement | None:
        return self._replaced.get(weight)

    def _check(self, expected: dict[str, torch.Tensor]) -> None:
        files, path = self._adapter.files, self._adapter.path
        known = expected.keys() | {change.name for change in self._replaced.values()}
        problems = [
            f"missing: {name} {list(tensor.shape)}" for name, tensor in expected.items() if name not in files.files
        ]
        problems += [f"not in this base: {name}" for name in files.files if name not in known]
        own = {change.name for change in self._replaced.values()}
        problems += [
            f"wrong shape: {name} is {list(files.shape(name))}, and this base needs {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in files.files and name not in own and files.shape(name) != tensor.shape
        ]
        if problems:
            more = [f"... and {len(problems) - _MOST_NAMES} more"] * (len(problems) > _MOST_NAMES)
            shown = "\n  ".join([*problems[:_MOST_NAMES], *more])
            raise UserError(f"--adapter {path} does not fit this base:\n  {shown}\nGive the base it was trained on.")


def _lora_layers(wrapped: nn.Module, adapter: PeftFolder) -> Iterator[tuple[str, tuple[str, LoraLayer]]]:
    """(weight that is changed, (path of PEFT's layer in the file, that layer))."""
    for path, layer in wrapped.named_modules():
        if not isinstance(layer, LoraLayer) or _NAME not in layer.r:
            continue
        variants = [type(variant).__name__ for variant in layer.lora_variant.values()]
        if variants not in ([], ["DoraLinearVariant"]) or (variants and layer.fan_in_fan_out):
            raise UserError(f"--adapter {adapter.path}: {path} is of a kind that cannot be merged ({variants[0]}).")
        leaf = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        yield f"{canonical_name(path).removeprefix(_PREFIX)}.{leaf}", (path, layer)


def _replacements(adapter: PeftFolder, shapes: dict[str, torch.Size], expected: set[str]) -> dict[str, Replacement]:
    """Tensors of the adapter's file that take the place of the base's: modules_to_save, biases, resized embeddings."""
    found = {}
    for name in adapter.files.files:
        weight = canonical_name(name).removeprefix(_PREFIX)
        if weight in shapes:
            found[weight] = Replacement(name, adapter.files.shape(name), is_copy=name in expected)
    return found


def _low_rank(path: str, layer: LoraLayer, adapter: PeftFolder) -> LowRank:
    scaling = layer.scaling[_NAME]
    if f"{path}.lora_embedding_A" in adapter.files.files:  # [rank, rows] and [columns, rank]
        lora_A, lora_B = (adapter.read(f"{path}.lora_embedding_{which}") for which in "AB")
        return LowRank(lora_A.T[None], lora_B.T[None], scaling)
    lora_A, lora_B = (adapter.read(f"{path}.lora_{which}.weight") for which in "AB")
    magnitude = f"{path}.lora_magnitude_vector"
    lengths = adapter.read(magnitude).flatten() if magnitude in adapter.files.files else None
    experts = layer.num_experts if isinstance(layer, ParamWrapper) else 1
    all_A = lora_A.view(experts, -1, lora_A.shape[1])
    all_B = lora_B.view(lora_B.shape[0], -1, experts).permute(2, 0, 1)  # the order of PEFT's ParamWrapper
    is_upright = not layer.fan_in_fan_out
    if isinstance(layer, ParamWrapper) and experts > 1:
        is_upright = layer._did_swap_in_out_features
    if is_upright:
        return LowRank(all_B, all_A, scaling, lengths)
    return LowRank(all_A.mT, all_B.mT, scaling, lengths)
