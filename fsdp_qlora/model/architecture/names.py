"""The model's names of the tensors in its files, by transformers' own renaming and merging."""

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from fsdp_qlora.model.architecture.structure import canonical_name


class ModelNames:
    """Finds the name in a model of each tensor in its files. Some renamings apply only after
    others: keep the order.

    Args:
        names: of the tensors that the model has.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        steps = get_model_conversion_mapping(model)
        self.converters = [step for step in steps if isinstance(step, WeightConverter)]
        self._renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        self._names = dict.fromkeys(names)
        self._prefix = model.base_model_prefix

    def find(self, source: str) -> tuple[str, str | None]:
        """The tensor's name in the model, and the pattern of the conversion of which it is a part,
        if it is one.
        """
        if source in self._names:
            return source, None
        return rename_source_key(
            source, self._renamings, self.converters, self._prefix, self._names
        )


def shared_names(model: nn.Module) -> dict[str, str]:
    """Further name of a parameter that several modules share -> its name in `named_parameters`."""
    first: dict[nn.Parameter, str] = {}
    shared: dict[str, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = canonical_name(path)
        if first.setdefault(parameter, name) != name:
            shared[name] = first[parameter]
    return shared
