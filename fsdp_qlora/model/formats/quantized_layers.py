"""The weights of a model that are quantized in its files, and the format of each.

A quantization_config may say something else of their names.
"""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from fsdp_qlora.model.architecture.names import ModelNames
from fsdp_qlora.model.architecture.structure import canonical_name
from fsdp_qlora.model.formats.published import PublishedFormat
from fsdp_qlora.utils.errors import UserError


def formats_of_layers(
    model: PreTrainedModel, packed: PublishedFormat, linears: Sequence[str], experts: Sequence[str]
) -> dict[str, PublishedFormat]:
    """The linear layers and expert parameters of a plain model that are quantized in its files.

    Without files, those of which the configuration says so. They are in the order of the
    arguments.

    Returns:
        Path -> one of the model's `formats`.
    Raises:
        UserError: as `PublishedFormat.chosen`, or one parameter is in several formats.
    """
    # Before a download, for a plan.
    if packed.scaled is None:
        chosen_linears, chosen_experts = packed.chosen(linears, experts)
        return dict(packed.formats_of([*chosen_linears, *chosen_experts]))
    parameters = _parameters(model, packed)
    found = {path: parameters.get(f"{path}.weight") for path in linears}
    found |= {path: parameters.get(path) for path in experts}
    return {path: form for path, form in found.items() if form is not None}


def _parameters(model: PreTrainedModel, packed: PublishedFormat) -> Mapping[str, PublishedFormat]:
    """The model's parameters that quantized weights are, or are parts of, and their formats.

    transformers' own renaming tells which.
    """
    # A dict and not a set, for the model's order.
    parameters = dict.fromkeys(canonical_name(path) for path, _ in model.named_parameters())
    model_names = ModelNames(model, parameters)
    found: dict[str, PublishedFormat] = {}
    for name, form in packed.formats_of(packed.scaled or ()).items():
        # Files may have the experts of a 3-D parameter, or gate and up, as tensors of their own.
        path = model_names.find(name)[0]
        first = found.setdefault(path, form)
        if (first.quantizer, first.layer_options()) != (form.quantizer, form.layer_options()):
            raise UserError(
                f"{path} is made of weights in {first.name} and, such as {name}, in {form.name} or "
                "with other scales. Give --train_type lora, which decodes them, or the model with "
                "16- or 32-bit weights."
            )
    return {path: form for path, form in found.items() if path in parameters}
