"""The weights of a model that are quantized in its files.

A quantization_config may say something else of their names.
"""

from collections.abc import Collection, Sequence

from transformers import PreTrainedModel

from fsdp_qlora.model.architecture.names import ModelNames
from fsdp_qlora.model.architecture.structure import canonical_name
from fsdp_qlora.model.formats.published import PublishedFormat


def choose_quantized(
    model: PreTrainedModel, packed: PublishedFormat, linears: Sequence[str], experts: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The linear layers and expert parameters of a plain model that are quantized in its files.

    Without files, those of which the configuration says so. Raises UserError as
    `PublishedFormat.chosen`.
    """
    # Before a download, for a plan.
    if packed.scaled is None:
        return packed.chosen(linears, experts)
    parameters = _parameters(model, packed.scaled)
    chosen = [path for path in linears if f"{path}.weight" in parameters]
    return chosen, [path for path in experts if path in parameters]


def _parameters(model: PreTrainedModel, names: Collection[str]) -> set[str]:
    """The model's parameters that tensors with these names are, or are parts of.

    transformers' own renaming tells which.
    """
    # A dict and not a set, for the model's order.
    parameters = dict.fromkeys(canonical_name(path) for path, _ in model.named_parameters())
    model_names = ModelNames(model, parameters)
    # Files may have the experts of a 3-D parameter, or gate and up, as tensors of their own.
    return {model_names.find(name)[0] for name in names} & parameters.keys()
