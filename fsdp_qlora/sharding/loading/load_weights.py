"""Fills a sharded model from weight files. Each rank reads only its own shards."""

import functools
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm
from transformers import PreTrainedModel

from fsdp_qlora.distributed.shards import own_rows, store_rows
from fsdp_qlora.model.adapters.insert import adapter_modules
from fsdp_qlora.model.adapters.token_rows import with_token_rows
from fsdp_qlora.model.architecture.names import ModelNames, shared_names
from fsdp_qlora.model.architecture.structure import canonical_name, persistent_buffers
from fsdp_qlora.model.quantizers.base import (
    NOT_FINITE,
    QuantizedExperts,
    QuantizedWeight,
    is_finite,
)
from fsdp_qlora.model.quantizers.bnb_4bit import PACKED_STATE, Bnb4bitWeight
from fsdp_qlora.model.quantizers.stored import write_bytes
from fsdp_qlora.sharding.loading.conversions import MergedTensor, ModelAsInFiles
from fsdp_qlora.sharding.loading.weight_files import TensorSlice, WeightFiles, Weights, read_ahead
from fsdp_qlora.utils.errors import UserError

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOST_PROBLEMS = 8  # lines of a message: a wrong folder differs in every tensor


def load_weights(
    model: PreTrainedModel,
    weights: Weights,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    max_bytes_in_flight: int = 128 * 2**20,
    show_progress: bool,
) -> None:
    """Fill every parameter of the sharded model except adapters from the weight files.

    Adapters get their first values from first_adapters.py and model/adapters/first_values.py.

    Each rank reads only its part of each tensor, and holds only its shards and the parts in flight,
    at most `max_bytes_in_flight`: threads read ahead while earlier parts are copied to the device
    and quantized. If the weights in the files are quantized already, the ranks do not communicate,
    so one may fail alone.

    Raises:
        UserError: a file cannot be read, or a weight is not finite.
    """
    targets = _targets(model, packed=weights.packed)
    # File by file, so that reading ahead stays within one. The sort is stable: within a file the
    # order is the model's, and so the same on all ranks.
    files = weights.files
    sources = weights.sources
    names = sorted(targets, key=lambda name: str(files.files[sources[name]]))
    parts = [_part(files, sources[name], targets[name], mesh) for name in names]
    sizes = [(part.stop - part.start) * files.dtype(part.name).itemsize for part in parts]
    hidden = not show_progress or not sys.stderr.isatty()
    with tqdm(
        total=sum(sizes), unit="B", unit_scale=True, desc="Loading rank 0's part", disable=hidden
    ) as bar:
        values = read_ahead(files, parts, max_bytes=max_bytes_in_flight)
        # All ranks store the same tensors in the same order, with a part of each: a quantizer whose
        # `load_shard` asks other ranks finds them at the same tensor.
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
    if target.bounds is None:
        return TensorSlice(source, 0, files.shape(source).numel())
    start, stop = target.bounds(mesh)
    return TensorSlice(source, start, stop)


def _store(
    target: _Target, values: torch.Tensor, mesh: DeviceMesh, device: torch.device, name: str
) -> None:
    # Quantized on the device, where the kernels are; others are copied into their shard at once.
    values = values.to(device) if target.on_device else values
    # Before they are stored: a code has no NaN, so a damaged weight would pass unnoticed.
    check_finite(values, name)
    target.store(values, mesh)


def check_finite(values: torch.Tensor, name: str) -> None:
    """Raise UserError if a value of the weight `name` is not finite."""
    if values.is_floating_point() and not is_finite(values):
        raise UserError(f"Weight {name} has {NOT_FINITE}. Download the model again.")


def _targets(model: nn.Module, *, packed: bool) -> dict[str, _Target]:
    """Name in the weight files -> target, for every tensor of the model that the files contain."""
    targets: dict[str, _Target] = {}
    not_in_files: set[nn.Parameter] = set()
    for adapter in adapter_modules(model):
        not_in_files.update(adapter.parameters())
    for _, rows in with_token_rows(model).values():
        not_in_files.update(rows.parameters())
    for weight, layer in quantized_layers(model).items():
        for name, parameter in layer.named_parameters():
            # Codes and statistics of this layer have other names and shapes in the files.
            if name != "bias":
                not_in_files.add(parameter)
        if packed:
            targets.update(_stored_parts(weight, layer))
        else:
            targets[weight] = _quantized(layer)
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
    """Name of a weight in the files -> the layer that keeps it quantized, in the model's order."""
    return {
        canonical_name(f"{path}.{module.weight_name}".rstrip(".")): module
        for path, module in model.named_modules()
        if isinstance(module, QuantizedWeight)
    }


def _stored_parts(weight: str, layer: QuantizedWeight) -> dict[str, _Target]:
    """The tensors of a quantized weight, as bytes (flat, or of each expert).

    Each rank reads those of its shards.
    """
    targets: dict[str, _Target] = {}
    num_experts = layer.shape[0] if isinstance(layer, QuantizedExperts) else 1
    for suffix, form in layer.stored_forms().items():
        size, rest = divmod(form.num_bytes, num_experts)
        shape = torch.Size([form.num_bytes] if rest else [num_experts, size])
        bounds = functools.partial(layer.stored_range, suffix)
        store = functools.partial(_store_bytes, layer, suffix, weight + suffix)
        # Bytes alone do not tell a matrix from its transpose, so rows are compared, too.
        # bitsandbytes' codes are one column, whatever the matrix is.
        is_matrix = not suffix and not isinstance(layer, Bnb4bitWeight)
        rows = tuple(layer.shape[:-1]) if is_matrix else ()
        targets[weight + suffix] = _Target(shape, bounds, store, rows=rows)
    # Every rank reads and checks the whole tensor: it is small, and describes all shards.
    for suffix in layer.stored_whole():
        store = functools.partial(_load_whole, layer, suffix, weight + suffix)
        targets[weight + suffix] = _Target(None, None, store)
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

    # In place, into the memory that FSDP2 has views of: a new tensor would not be gathered.
    return _Target(
        parameter.shape, bounds, lambda values, mesh: store_rows(parameter, values), is_weight=True
    )


def _replicated(buffer: torch.Tensor) -> _Target:
    return _Target(buffer.shape, None, lambda values, mesh: store_rows(buffer, values))


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
            "the decoder blocks' linear layers, which is not supported. Give the model with 16- or "
            "32-bit weights."
        )
    # Without its parts a conversion fails with an error of its own; `_problems` names the parts.
    for tensor in match.merged.values():
        if not tensor.missing():
            tensor.define(files)
    for name in {*grown} & match.sources.keys():
        files.grow(match.sources[name], targets[name].shape or torch.Size())
    problems = list(_problems(match, files, targets))
    if problems:
        # Not problems by themselves, but a missing tensor may be here under another name.
        problems += [
            f"not in this architecture: {name} (in {files.files[name].name})"
            for name in match.extra
        ]
        lines = problems[:_MOST_PROBLEMS]
        if len(problems) > _MOST_PROBLEMS:
            lines.append(f"... and {len(problems) - _MOST_PROBLEMS} more")
        shown = "\n  ".join(lines)
        raise UserError(
            f"The weights in {files.folder} do not match the {type(model).__name__} that its "
            f"config.json describes:\n  {shown}\nDownload the model again, or give another folder."
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
    # FSDP2 has put its own class before the model's, with this prefix.
    kind = type(model).__name__.removeprefix("FSDP")
    examples = ", ".join(names[:3])
    line = (
        f"{weights.files.folder} has tensors that {kind} does not build: {examples} ({len(names)} "
        "in all). transformers ignores them, and so they are not used here."
    )
    return f"{line} {in_result}" if in_result else line


def _match(
    model: PreTrainedModel, files: WeightFiles, expected: Mapping[str, torch.Size | None]
) -> _Match:
    """Map each tensor of the files to its name in the model, as transformers renames and merges."""
    names = ModelNames(model, expected)
    shared = shared_names(model)
    match = _Match({}, {}, [], [], {})
    as_in_files = ModelAsInFiles(model, expected)
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
            # What transformers' class declares, such as layers that predict further tokens.
            ignored = model._keys_to_ignore_on_load_unexpected or []
            if any(re.search(pattern, name) for pattern in ignored):
                match.left_out.append(source)
            else:
                match.extra.append(source)
    # Names of the files lead to the first parameter of a conversion only. A list: the loop adds.
    for tensor in list(match.merged.values()):
        for sibling in tensor.siblings(files):
            if sibling.name in expected:
                match.merged[sibling.name] = sibling
    match.sources.update({name: name for name in match.merged})
    for source, name in match.copies.items():
        # The files have only the head of a tied model, and the model calls it the embedding.
        if name not in match.sources:
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
        rows = targets[name].rows
        # Of codes and statistics only the number of bytes is compared: formats shape them freely.
        if form.dtype == torch.uint8 and not targets[name].is_weight:
            has_shape = shape is None or shape.numel() == form.num_bytes
        else:
            has_shape = shape is None or shape == form.shape
        if not has_shape:
            yield f"wrong shape: {where} is {list(form.shape)}, the model's is {list(shape or ())}"
        elif form.shape[: len(rows)] != rows:
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
