"""Parameters that transformers renames or assembles from several tensors of the files."""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, dot_natural_key

from fsdp_qlora.model.formats.stored_tensors import DecodedTensor, ReadStored
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
        # The first of the parameters that the conversion makes, by which transformers calls it.
        self._first = name
        self._converters = converters
        self._model = model
        self._sources: dict[str, list[str]] = {}  # the converter's pattern -> tensors that match it

    def add(self, source: str, pattern: str) -> None:
        """Add a tensor of the files, which matches this pattern of the conversion."""
        self._sources.setdefault(pattern, []).append(source)

    @property
    def _converter(self) -> WeightConverter:
        # The first pattern that was found says which conversion it is.
        pattern, *_ = self._sources
        for converter in self._converters:
            if pattern in converter.source_patterns:
                return converter
        raise AssertionError(pattern)

    def missing(self) -> list[str]:
        """Names of the parts that the files do not have."""
        absent = [
            pattern for pattern in self._converter.source_patterns if pattern not in self._sources
        ]
        for pattern, sources in self._sources.items():
            # transformers' "*." stands for the number of an expert, the index in the first dim.
            numbered = re.compile(pattern.replace("*.", r"(\d+)\."))
            matches = [match for match in map(numbered.search, sources) if match and match.groups()]
            if matches:
                indices = {int(match[1]) for match in matches}
                start, end = matches[0].span(1)
                before = matches[0].string[:start]
                after = matches[0].string[end:]
                absent += [f"{before}{i}{after}" for i in range(self.shape[0]) if i not in indices]
        return absent

    def define(self, files: WeightFiles) -> None:
        """Define the parameter in the files: as a concatenation of its parts, or else as computed.

        Raises UserError if the shapes of the parts do not fit together.
        """
        sources = sorted(source for group in self._sources.values() for source in group)
        forms = {source: files.form(source) for source in sources}
        result = self._convert(_on_meta(forms))[self.name]
        # A concatenation is preferred: ranks read only their own elements of it, while a computed
        # parameter needs all of its parts on each.
        is_split = len(self._converter.target_patterns) > 1
        order = self._rows(files, *sources) if is_split else self._order(files, sources)
        if order:
            files.join(self.name, order, result.shape)
        else:
            files.define(self.name, _Converted(self.name, forms, result, self._convert))

    def siblings(self, files: WeightFiles) -> Iterator["MergedTensor"]:
        """The other parameters that the conversion makes from the same parts.

        Such as keys and values beside queries, where the files have all in one tensor.
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
        # Convert a small tensor of consecutive integers, of all rows and two columns. Neighbouring
        # rows come out as consecutive integers; columns that change places do not.
        shape = files.shape(source)
        if len(shape) > 1:
            numbers = torch.arange(2 * shape[0]).view(-1, 2)
        else:
            numbers = torch.arange(shape[0])
        try:
            converted = self._convert({source: numbers})[self.name].flatten()
        except (UserError, KeyError):  # several parts, or the conversion requires all columns
            return None
        first = int(converted[0])
        last = first + len(converted)
        if others or not torch.equal(converted, torch.arange(first, last)):
            return None
        # Elements of the tensor for each of the integers.
        scale = shape.numel() // numbers.numel()
        return [TensorSlice(source, first * scale, last * scale)]

    def _order(self, files: WeightFiles, sources: list[str]) -> list[TensorSlice] | None:
        """The parts in the order in which they are the flattened parameter; None if none is."""
        # Convert small tensors of consecutive integers: their order in the result is the order of
        # all elements. Two in each dim, so that a transposed dim shows.
        side = 2
        integers = {}
        for index, source in enumerate(sources):
            dims = [side] * len(files.shape(source))
            count = side ** len(dims)
            integers[source] = torch.arange(index * count, (index + 1) * count).view(dims)
        try:
            order = self._convert(integers)[self.name].flatten()
        except UserError:  # the conversion requires the real shapes
            return None
        # One row for each part, which must hold all integers of one part, in their order.
        runs = order.view(len(sources), -1)
        count = runs.shape[1]
        indices = runs[:, 0] // count
        if not torch.equal(runs, torch.arange(count) + indices[:, None] * count):
            return None
        slices: list[TensorSlice] = []
        for index in indices.tolist():
            slices += files.parts(sources[index])
        return slices

    def _convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the parts' values by transformers' conversion. Returns parameter -> value."""
        # A copy: a converter collects tensors, and keeps those of an earlier call.
        converter = copy.deepcopy(self._converter)
        for pattern, sources in self._sources.items():
            for source in sorted(sources, key=dot_natural_key):
                converter.add_tensor(self._first, source, pattern, tensors[source])
        try:
            results = converter.convert(self._first, model=self._model, config=self._model.config)
        # torch's and transformers' errors about shapes that do not fit together.
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise UserError(
                f"The parts of {self.name} in the weight files do not fit together: {error}"
            ) from error
        return {
            name: result[0] if isinstance(result, list) else result
            for name, result in results.items()
        }


class ModelAsInFiles:
    """A model as conversions ask for it: each weight has its shape in the files.

    Quantized layers of the real model have packed weights of other shapes.
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
    """A parameter that transformers' conversion computes, such as one with its rows reordered.

    form: the parameter on the meta device. convert: `MergedTensor._convert`.
    """

    def __init__(
        self,
        name: str,
        forms: Mapping[str, TensorForm],
        form: torch.Tensor,
        convert: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]],
    ) -> None:
        # One unit: a conversion needs whole tensors.
        super().__init__([*forms], form.shape, form.dtype, unit=form.numel())
        self._name = name
        self._forms = forms
        self._convert = convert

    def decode_units(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        whole = {
            part: read(part, 0, math.prod(form.shape)).view(form.shape)
            for part, form in self._forms.items()
        }
        return self._convert(whole)[self._name].contiguous()
