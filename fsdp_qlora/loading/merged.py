"""Parameters that transformers assembles from several tensors of the files, such as one per expert.

transformers' own conversion decides which tensors, and in what order.
"""

import copy
import re
from collections.abc import Sequence

import torch
from transformers.core_model_loading import WeightConverter, dot_natural_key

from fsdp_qlora.errors import UserError
from fsdp_qlora.loading.weight_files import WeightFiles


class MergedTensor:
    """A parameter and the tensors of the files that it is assembled from.

    Args:
        name, shape: of the parameter.
        converters: transformers' conversions for the model.
    """

    def __init__(self, name: str, shape: torch.Size, converters: Sequence[WeightConverter]) -> None:
        self.name, self.shape = name, shape
        self._converters = converters
        self._sources: dict[str, list[str]] = {}  # the converter's pattern -> tensors that match it

    def add(self, source: str, pattern: str) -> None:
        self._sources.setdefault(pattern, []).append(source)

    @property
    def _converter(self) -> WeightConverter:
        pattern = next(iter(self._sources))
        return next(converter for converter in self._converters if pattern in converter.source_patterns)

    def missing(self) -> list[str]:
        """Names of the parts that are missing in the files."""
        absent = [pattern for pattern in self._converter.source_patterns if pattern not in self._sources]
        for pattern, sources in self._sources.items():
            numbered = re.compile(pattern.replace("*.", r"(\d+)\."))
            found = [match for match in map(numbered.search, sources) if match and match.groups()]
            indices = {int(match[1]) for match in found}
            if found:
                before, after = found[0].string[: found[0].start(1)], found[0].string[found[0].end(1) :]
                absent += [f"{before}{i}{after}" for i in range(self.shape[0]) if i not in indices]
        return absent

    def whole(self, files: WeightFiles) -> tuple[list[str], torch.Size]:
        """The parts in the order whose concatenation is the flattened parameter, and the parameter's shape.

        Raises:
            UserError: the parameter is not a concatenation of the parts, or their shapes do not fit together.
        """
        sources = sorted(source for group in self._sources.values() for source in group)
        # Number the elements of small stand-ins: their order after the conversion shows the order of all elements.
        side = 2
        marks = {}
        for number, source in enumerate(sources):
            dims = [side] * len(files.shape(source))
            marks[source] = (torch.arange(side ** len(dims)) + number * side ** len(dims)).view(dims)
        order = self._convert(marks).flatten()
        runs = order.view(len(sources), -1)
        numbers = runs[:, 0] // runs.shape[1]
        if not torch.equal(runs, torch.arange(runs.shape[1]) + numbers[:, None] * runs.shape[1]):
            raise UserError(
                f"{files.folder} stores {self.name} in pieces that are not whole rows of it, such as "
                f"{sources[0]}. Convert it: load it with transformers, then save_pretrained."
            )
        shape = self._convert({source: torch.empty(files.shape(source), device="meta") for source in sources}).shape
        return [sources[number] for number in numbers.tolist()], shape

    def _convert(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Apply transformers' conversion to stand-ins for the parts."""
        converter = copy.deepcopy(self._converter)
        for pattern, sources in self._sources.items():
            for source in sorted(sources, key=dot_natural_key):
                converter.add_tensor(self.name, source, pattern, tensors[source])
        try:
            (result,) = converter.convert(self.name).values()
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise UserError(f"The parts of {self.name} in the weight files do not fit together: {error}") from error
        whole = result[0] if isinstance(result, list) else result
        assert isinstance(whole, torch.Tensor)
        return whole
