"""The model's names of the tensors in its files, by transformers' own renaming and merging."""

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from fsdp_qlora.model.architecture.structure import canonical_name


class ModelNames:
    """Finds the name in a model of each tensor in its files.

    Args:
        names: of the tensors that the model has.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        steps = get_model_conversion_mapping(model)
        # In transformers' order: some renamings apply only after others.
        self.converters = [step for step in steps if isinstance(step, WeightConverter)]
        self._renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        self._names = dict.fromkeys(names)
        self._prefix = model.base_model_prefix

    def find(self, source: str) -> tuple[str, str | None]:
        """The tensor's name in the model, and the pattern of the conversion that it is a part of.

        The pattern is None for a tensor that is not merged with others.
        """
        # Files that were saved with the model's own names need no renaming, and a renaming might
        # match such a name by chance.
        if source in self._names:
            return source, None
        return rename_source_key(
            source, self._renamings, self.converters, self._prefix, self._names
        )


def shared_names(model: nn.Module) -> dict[str, str]:
    """Further name of a parameter that several modules share -> its name in `named_parameters`."""
    # Parameters hash by identity, so a parameter under two names is one key.
    first: dict[nn.Parameter, str] = {}
    shared: dict[str, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = canonical_name(path)
        if first.setdefault(parameter, name) != name:
            shared[name] = first[parameter]
    return shared
