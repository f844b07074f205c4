"""Fills a sharded model from weight files. Each rank reads only its own shards."""

import copy
import functools
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, dot_natural_key

from fsdp_qlora.distributed.shards import own_rows, store_rows
from fsdp_qlora.model.adapters.insert import adapter_modules
from fsdp_qlora.model.adapters.token_rows import with_token_rows
from fsdp_qlora.model.architecture.models import canonical_name, persistent_buffers
from fsdp_qlora.model.architecture.names import ModelNames, shared_names
from fsdp_qlora.model.quantizers.base import (
    NOT_FINITE,
    QuantizedExperts,
    QuantizedWeight,
    is_finite,
    write_bytes,
)
from fsdp_qlora.model.quantizers.bnb_4bit import PACKED_STATE, Bnb4bitWeight
from fsdp_qlora.sharding.loading.decoded import DecodedTensor, ReadStored
from fsdp_qlora.sharding.loading.weight_files import TensorSlice, WeightFiles, Weights, read_ahead
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import TensorForm

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def load_weights(
    model: PreTrainedModel,
    weights: Weights,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    max_bytes_in_flight: int = 128 * 2**20,
    show_progress: bool,
) -> None:
    """Fill every parameter of the sharded model except adapters (see `initialize_adapters`) from
    the weight files.

    Each rank reads only its part of each tensor, and holds only its shards and the parts in flight,
    at most `max_bytes_in_flight`: threads read ahead while earlier parts are copied to the device
    and quantized. If the weights in the files are quantized already, the ranks do not communicate,
    so one may fail alone.

    Raises:
        UserError: a file cannot be read, or a weight is not finite.
    """
    targets = _targets(model, packed=weights.packed)
    names = sorted(targets, key=lambda name: str(weights.files.files[weights.sources[name]]))
    parts = [_part(weights.files, weights.sources[name], targets[name], mesh) for name in names]
    sizes = [(part.stop - part.start) * weights.files.dtype(part.name).itemsize for part in parts]
    hidden = not show_progress or not sys.stderr.isatty()
    with tqdm(
        total=sum(sizes), unit="B", unit_scale=True, desc="Loading rank 0's part", disable=hidden
    ) as bar:
        values = read_ahead(weights.files, parts, max_bytes=max_bytes_in_flight)
        for name, size, value in zip(names, sizes, values, strict=True):
            _store(targets[name], value, mesh, device, name)
            bar.update(size)


def load_quantized(
    name: str,
    layer: QuantizedWeight,
    weights: Weights,
    mesh: DeviceMesh,
    device: torch.device,
) -> None:
    """Fill one quantized layer, which has memory already, from the weight `name`."""
    targets = _stored_parts(name, layer) if weights.packed else {name: _quantized(layer)}
    for tensor, target in targets.items():
        values = weights.files.read_flat(
            *_part(weights.files, weights.sources[tensor], target, mesh)
        )
        _store(target, values, mesh, device, tensor)


class _Target(NamedTuple):
    """A parameter or buffer to fill from the weight files.

    shape: shape of the tensor in the files; None for any. bounds: the range of flat elements that
    this rank reads; None for all. store: called with the values. on_device: whether they are moved
    to the device before. is_weight: whether they must be floats. rows: the first sizes of a tensor
    of codes in the files, whose `shape` counts bytes.
    """

    shape: torch.Size | None
    bounds: Callable[[DeviceMesh], tuple[int, int]] | None
    store: Callable[[torch.Tensor, DeviceMesh], None]
    on_device: bool = False
    is_weight: bool = False
    rows: tuple[int, ...] = ()


def _part(files: WeightFiles, source: str, target: _Target, mesh: DeviceMesh) -> TensorSlice:
    start, stop = target.bounds(mesh) if target.bounds else (0, files.shape(source).numel())
    return TensorSlice(source, start, stop)


def _store(
    target: _Target, values: torch.Tensor, mesh: DeviceMesh, device: torch.device, name: str
) -> None:
    values = values.to(device) if target.on_device else values
    check_finite(values, name)
    target.store(values, mesh)


def check_finite(values: torch.Tensor, name: str) -> None:
    """Raise UserError if a value of the weight `name` is not finite."""
    if values.is_floating_point() and not is_finite(values):
        raise UserError(f"Weight {name} has {NOT_FINITE}. Download the model again.")


def _targets(model: nn.Module, *, packed: bool) -> dict[str, _Target]:
    """Name in the weight files -> target, for every tensor of the model that the files contain."""
    targets: dict[str, _Target] = {}
    not_in_files = {
        parameter for adapter in adapter_modules(model) for parameter in adapter.parameters()
    }
    not_in_files |= {
        parameter for _, rows in with_token_rows(model).values() for parameter in rows.parameters()
    }
    for weight, layer in quantized_layers(model).items():
        not_in_files.update(
            parameter for name, parameter in layer.named_parameters() if name != "bias"
        )
        targets.update(_stored_parts(weight, layer) if packed else {weight: _quantized(layer)})
    for path, parameter in model.named_parameters():
        if parameter not in not_in_files:
            targets[canonical_name(path)] = _plain(parameter)
    for path, buffer in persistent_buffers(model):
        targets[canonical_name(path)] = _replicated(buffer)
    return targets


def _quantized(layer: QuantizedWeight) -> _Target:
    return _Target(
        torch.Size(layer.shape), layer.shard_range, layer.load_shard, on_device=True, is_weight=True
    )


def quantized_layers(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Name of a weight in the files -> the layer that keeps it quantized, in the order of the
    model.
    """
    return {
        canonical_name(f"{path}.{module.weight_name}".rstrip(".")): module
        for path, module in model.named_modules()
        if isinstance(module, QuantizedWeight)
    }


def _stored_parts(weight: str, layer: QuantizedWeight) -> dict[str, _Target]:
    """The tensors of a quantized weight, as bytes (flat, or of each expert). Each rank reads those
    of its shards.
    """
    targets: dict[str, _Target] = {}
    num_experts = layer.shape[0] if isinstance(layer, QuantizedExperts) else 1
    for suffix, form in layer.stored_forms().items():
        size, rest = divmod(form.num_bytes, num_experts)
        shape = torch.Size([form.num_bytes] if rest else [num_experts, size])
        bounds = functools.partial(layer.stored_range, suffix)
        store = functools.partial(_store_bytes, layer, suffix, weight + suffix)
        # bitsandbytes' codes are one column
        is_matrix = not suffix and not isinstance(layer, Bnb4bitWeight)
        rows = tuple(layer.shape[:-1]) if is_matrix else ()
        targets[weight + suffix] = _Target(shape, bounds, store, rows=rows)
    for suffix in layer.stored_whole():  # every rank reads and checks the whole tensor
        targets[weight + suffix] = _Target(
            None, None, functools.partial(_load_whole, layer, suffix, weight + suffix)
        )
    return targets


def _store_bytes(
    layer: QuantizedWeight, suffix: str, name: str, values: torch.Tensor, mesh: DeviceMesh
) -> None:
    reason = layer.unusable(suffix, values)
    if reason:
        raise UserError(f"Weight {name} has {reason}. Download the model again.")
    write_bytes(layer.stored_parameter(suffix), values)


def _load_whole(
    layer: QuantizedWeight, suffix: str, name: str, values: torch.Tensor, mesh: DeviceMesh
) -> None:
    layer.load_whole(suffix, name, values)


def _plain(parameter: nn.Parameter) -> _Target:
    def bounds(mesh: DeviceMesh) -> tuple[int, int]:
        first, last = own_rows(parameter, mesh)
        row = parameter.numel() // max(parameter.shape[0], 1)
        return first * row, last * row

    return _Target(
        parameter.shape, bounds, lambda values, mesh: store_rows(parameter, values), is_weight=True
    )


def _replicated(buffer: torch.Tensor) -> _Target:
    return _Target(buffer.shape, None, lambda values, mesh: store_rows(buffer, values))


class MergedTensor:
    """A parameter and the tensors in the files that it is assembled from, such as one per expert.

    transformers' own conversions for the model determine the tensors and their order.
    """

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        converters: Sequence[WeightConverter],
        model: "_AsInFiles",
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


class _AsInFiles:
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


class _Match(NamedTuple):
    """The tensors of the files in the model.

    sources, left_out: see Weights. merged: parameters made from several tensors. extra: tensors
    that the model does not have. copies: see Weights.
    """

    sources: dict[str, str]
    merged: dict[str, MergedTensor]
    extra: list[str]
    left_out: list[str]
    copies: dict[str, str]


def match_tensors(
    model: PreTrainedModel, files: WeightFiles, *, packed: bool = False, grown: Collection[str] = ()
) -> Weights:
    """Find every tensor that the model needs in the files of a model folder.

    Args:
        grown: parameters that may have more rows than in the files.
        packed: whether the weights in the files are quantized already, in the format of the layers.
    Raises:
        UserError: tensors are missing, have the wrong shape or are no floats. Each is named with
            its file; unknown ones are, too, since they may have been meant.
    """
    targets = _targets(model, packed=packed)
    match = _match(model, files, {name: target.shape for name, target in targets.items()})
    outside = [source for source in match.extra if PACKED_STATE in source]
    if outside:
        raise UserError(
            f"{files.folder}: {outside[0].partition(PACKED_STATE)[0]} is a 4-bit weight outside "
            "the decoder blocks' "
            "linear layers, which is not supported. Give the model with 16- or 32-bit weights."
        )
    for tensor in match.merged.values():
        if not tensor.missing():
            tensor.define(files)
    for name in {*grown} & match.sources.keys():
        files.grow(match.sources[name], targets[name].shape or torch.Size())
    problems = list(_problems(match, files, targets))
    if problems:
        problems += [
            f"not in this architecture: {name} (in {files.files[name].name})"
            for name in match.extra
        ]
        shown = "\n  ".join(
            problems[:8] + [f"... and {len(problems) - 8} more"] * (len(problems) > 8)
        )
        raise UserError(
            f"The weights in {files.folder} do not match the {type(model).__name__} that its "
            "config.json "
            f"describes:\n  {shown}\nDownload the model again, or give another folder."
        )
    return Weights(files, match.sources, packed, [*match.extra, *match.left_out], match.copies)


def describe_left_out(weights: Weights, model: PreTrainedModel, *, in_result: str = "") -> str:
    """A line about the tensors of the files that the model does not use; empty if there are none.

    Args:
        in_result: what becomes of them in the result that is written.
    """
    names = weights.left_out
    if not names:
        return ""
    kind = type(model).__name__.removeprefix("FSDP")
    some = ", ".join(names[:3])
    line = (
        f"{weights.files.folder} has tensors that {kind} does not build: {some} ({len(names)} in "
        "all). "
    )
    return line + " ".join(
        filter(None, ["transformers ignores them, and so they are not used here.", in_result])
    )


def _match(
    model: PreTrainedModel, files: WeightFiles, expected: Mapping[str, torch.Size | None]
) -> _Match:
    """Map each tensor of the files to its name in the model, by transformers' own renaming and
    merging.
    """
    names = ModelNames(model, expected)
    shared = shared_names(model)
    match = _Match({}, {}, [], [], {})
    as_in_files = _AsInFiles(model, expected)
    for source in files.files:
        name, pattern = names.find(source)
        if name in expected and pattern is not None:
            tensor = MergedTensor(
                name, expected[name] or torch.Size(), names.converters, as_in_files
            )
            match.merged.setdefault(name, tensor).add(source, pattern)
        elif name in expected:
            match.sources[name] = source
        elif name in shared:
            match.copies[source] = shared[name]
        elif not _is_needless(name):
            ignored = any(
                re.search(pattern, name)
                for pattern in model._keys_to_ignore_on_load_unexpected or []
            )
            (match.left_out if ignored else match.extra).append(source)
    for tensor in list(match.merged.values()):
        match.merged.update(
            {
                sibling.name: sibling
                for sibling in tensor.siblings(files)
                if sibling.name in expected
            }
        )
    match.sources.update({name: name for name in match.merged})
    for source, name in match.copies.items():
        if name not in match.sources:  # the files have only the head of a tied model
            files.join(name, files.parts(source), files.shape(source))
            match.sources[name] = name
    return match


def _problems(match: _Match, files: WeightFiles, targets: Mapping[str, _Target]) -> Iterator[str]:
    """The differences between the files and the model, one line each."""
    for name, tensor in match.merged.items():
        yield from (f"missing: {part} (a part of {name})" for part in tensor.missing())
    yield from (
        f"missing: {name} {list(target.shape or ())}"
        for name, target in targets.items()
        if name not in match.sources
    )
    for name, source in match.sources.items():
        if source not in files.files:
            continue
        shape = targets[name].shape
        form = files.form(source)
        where = f"{source} in {files.files[source].name}"
        # bytes, whatever their shape is
        is_packed = form.dtype == torch.uint8 and not targets[name].is_weight
        if shape is not None and (
            shape.numel() != form.num_bytes if is_packed else shape != form.shape
        ):
            yield f"wrong shape: {where} is {list(form.shape)}, the model's is {list(shape)}"
        elif form.shape[: len(rows := targets[name].rows)] != rows:
            yield (
                f"wrong shape: {where} has {list(form.shape[: len(rows)])} rows, the model's has "
                f"{list(rows)}"
            )
        if targets[name].is_weight and form.dtype not in _FLOATS:
            yield (
                f"wrong type: {where} is {str(form.dtype)[6:]}, and weights must be 16- or 32-bit "
                "floats"
            )


def _is_needless(name: str) -> bool:
    """Whether no model needs this tensor: a rotary table or mask of an old file."""
    patterns = [r"rotary_emb\.inv_freq$", r"\.(attn|attention)\.(masked_)?bias$"]
    return any(re.search(pattern, name) for pattern in patterns)
