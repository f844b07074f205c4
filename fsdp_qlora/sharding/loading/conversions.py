"""Parameters that transformers renames or assembles from several tensors of the files."""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, dot_natural_key

from fsdp_qlora.sharding.loading.stored_tensors import DecodedTensor, ReadStored
from fsdp_qlora.sharding.loading.weight_files import TensorSlice, WeightFiles
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import TensorForm


class MergedTensor:
    """A parameter and the tensors in the files that it is assembled from, such as one per expert.

    transformers' own conversions for the model determine the tensors and their order.
    """

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        converters: Sequence[WeightConverter],
        model: "ModelAsInFiles",
    ) -> None:
        self.name = name
        self.shape = shape
        # the first of the parameters that the conversion makes, by which transformers calls it
        self._first = name
        self._converters = converters
        self._model = model
        self._sources: dict[str, list[str]] = {}  # the converter's pattern -> tensors that match it

    def add(self, source: str, pattern: str) -> None:
        self._sources.setdefault(pattern, []).append(source)

    @property
    def _converter(self) -> WeightConverter:
        pattern = next(iter(self._sources))
        return next(
            converter for converter in self._converters if pattern in converter.source_patterns
        )

    def missing(self) -> list[str]:
        absent = [
            pattern for pattern in self._converter.source_patterns if pattern not in self._sources
        ]
        for pattern, sources in self._sources.items():
            numbered = re.compile(pattern.replace("*.", r"(\d+)\."))
            matches = [match for match in map(numbered.search, sources) if match and match.groups()]
            if matches:
                indices = {int(match[1]) for match in matches}
                (start, end) = matches[0].span(1)
                before = matches[0].string[:start]
                after = matches[0].string[end:]
                absent += [f"{before}{i}{after}" for i in range(self.shape[0]) if i not in indices]
        return absent

    def define(self, files: WeightFiles) -> None:
        """Define the parameter in the files: as the concatenation of its parts, or computed if that
        is not enough.

        Raises UserError if the shapes of the parts do not fit together.
        """
        sources = sorted(source for group in self._sources.values() for source in group)
        forms = {source: files.form(source) for source in sources}
        result = self._convert(_on_meta(forms))[self.name]
        is_split = len(self._converter.target_patterns) > 1
        order = self._rows(files, *sources) if is_split else self._order(files, sources)
        if order:
            files.join(self.name, order, result.shape)
        else:
            files.define(self.name, _Converted(self.name, forms, result, self._convert))

    def siblings(self, files: WeightFiles) -> Iterator["MergedTensor"]:
        """The other parameters that the conversion makes from the same parts, such as keys and
        values of fused ones.
        """
        if len(self._converter.target_patterns) == 1:
            return
        forms = {source: files.form(source) for group in self._sources.values() for source in group}
        for name, result in self._convert(_on_meta(forms)).items():
            if name != self.name:
                sibling = MergedTensor(name, result.shape, self._converters, self._model)
                sibling._sources = self._sources
                sibling._first = self._first
                yield sibling

    def _rows(self, files: WeightFiles, source: str, *others: str) -> list[TensorSlice] | None:
        """The rows of the only part that are the parameter; None if it is something else."""
        shape = files.shape(source)
        numbers = (
            torch.arange(2 * shape[0]).view(-1, 2) if len(shape) > 1 else torch.arange(shape[0])
        )
        try:
            found = self._convert({source: numbers})[self.name].flatten()
        except (UserError, KeyError):  # several parts, or the conversion requires all columns
            return None
        first = int(found[0])
        row = shape.numel() // numbers.numel()
        if others or not torch.equal(found, torch.arange(len(found)) + first):
            return None
        return [TensorSlice(source, first * row, (first + len(found)) * row)]

    def _order(self, files: WeightFiles, sources: list[str]) -> list[TensorSlice] | None:
        """The parts in an order in which their concatenation is the flattened parameter; None if
        there is none.
        """
        # Convert small tensors of consecutive integers: their order in the result is the order of
        # all elements.
        side = 2
        integers = {}
        for index, source in enumerate(sources):
            dims = [side] * len(files.shape(source))
            integers[source] = (torch.arange(side ** len(dims)) + index * side ** len(dims)).view(
                dims
            )
        try:
            order = self._convert(integers)[self.name].flatten()
        except UserError:  # the conversion requires the real shapes
            return None
        runs = order.view(len(sources), -1)
        indices = runs[:, 0] // runs.shape[1]
        if not torch.equal(runs, torch.arange(runs.shape[1]) + indices[:, None] * runs.shape[1]):
            return None
        return [part for index in indices.tolist() for part in files.parts(sources[index])]

    def _convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the parts' values by transformers' conversion. Returns parameter -> value."""
        converter = copy.deepcopy(self._converter)
        for pattern, sources in self._sources.items():
            for source in sorted(sources, key=dot_natural_key):
                converter.add_tensor(self._first, source, pattern, tensors[source])
        try:
            results = converter.convert(self._first, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise UserError(
                f"The parts of {self.name} in the weight files do not fit together: {error}"
            ) from error
        return {
            name: result[0] if isinstance(result, list) else result
            for name, result in results.items()
        }


class ModelAsInFiles:
    """A model as conversions ask for it: with each weight in its shape in the files, though layers
    keep others.
    """

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, torch.Size | None]) -> None:
        self.config = model.config
        self._dtype = model.dtype
        self._shapes = shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name] or (), dtype=self._dtype, device="meta")


def _on_meta(forms: Mapping[str, TensorForm]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(form.shape, dtype=form.dtype, device="meta")
        for name, form in forms.items()
    }


class _Converted(DecodedTensor):
    """A parameter that transformers' conversion computes from whole tensors, such as one with its
    rows reordered.

    form: the parameter on the meta device. convert: `MergedTensor._convert`.
    """

    def __init__(
        self,
        name: str,
        forms: Mapping[str, TensorForm],
        form: torch.Tensor,
        convert: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]],
    ) -> None:
        super().__init__([*forms], form.shape, form.dtype, unit=form.numel())
        self._name = name
        self._forms = forms
        self._convert = convert

    def _decode(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        shapes = {part: form.shape for part, form in self._forms.items()}
        whole = {
            part: read(part, 0, math.prod(shape)).view(shape) for part, shape in shapes.items()
        }
        return self._convert(whole)[self._name].contiguous()
