"""Finds the quantized weights among the tensors of files, to decode them or to keep their bytes."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from fsdp_qlora.model.formats.published import PublishedFormat
from fsdp_qlora.model.formats.stored_tensors import (
    ADVICE,
    WEIGHT_TYPES,
    DecodedTensor,
    Float32Tensor,
    Part,
    StoredTensor,
    StoredWeight,
)
from fsdp_qlora.utils.errors import UserError

_OF_INPUTS = ".pre_quant_scale"  # ending of modelopt's factors of what comes into a layer
# Endings of a weight's other tensors, below its name here.
_STATISTICS = (".scale", ".global_scale", ".zero_point", ".g_idx")


class _Found(NamedTuple):
    """The tensors of files in a format."""

    weights: list[StoredWeight]
    others: dict[str, Part]
    """Name here -> a tensor that has no scale and is none."""
    unused: set[str]
    """Names in the files of tensors that no weight needs."""


def decode_weights(
    stored: PublishedFormat | None, entries: Mapping[str, StoredTensor]
) -> tuple[dict[str, DecodedTensor], set[str]]:
    """Find the tensors that must be decoded.

    Args:
        stored: the format of the weights; None for plain ones.
        entries: all tensors of the files.
    Returns:
        Name in the model -> tensor decoded as it is read; and names of tensors that the model
        itself does not have.
    """
    decoded: dict[str, DecodedTensor] = {
        name: Float32Tensor(Part(name, entry))
        for name, entry in entries.items()
        if entry.dtype == torch.float64
    }
    if stored is None:
        return decoded, set()
    found = _find(stored, entries)
    formats = stored.formats_of([weight.name for weight in found.weights])
    for weight in found.weights:
        form = formats[weight.name]
        form.check(weight)
        decoded[weight.name] = form.decode(weight)
    for name, part in found.others.items():
        stored.check_without_scale(name, part)
    unknown = found.unused
    # Codes may have the very name of the weight in the model: only other names are unknown to it.
    for name, tensor in decoded.items():
        unknown |= {source for source in tensor.parts if source != name}
    return decoded, unknown


def keep_weights(
    packed: PublishedFormat, entries: dict[str, StoredTensor]
) -> tuple[dict[str, DecodedTensor], set[str]]:
    """Find the tensors of weights that are kept as they are. Returns the same as `decode_weights`.

    Their codes and statistics become bytes in `entries`, under the names that quantized layers give
    them.
    """
    # bitsandbytes' are bytes in the files, too.
    if not packed.endings:
        return {}, set()
    found = _find(packed, entries)
    formats = packed.formats_of([weight.name for weight in found.weights])
    for weight in found.weights:
        formats[weight.name].check_kept(weight)
    decoded: dict[str, DecodedTensor] = {}
    unknown = found.unused
    for weight in found.weights:
        parts = {
            weight.name: weight.codes,
            f"{weight.name}.scale": weight.scale,
            f"{weight.name}.global_scale": weight.global_scale,
        }
        for name, part in parts.items():
            if part is None:
                continue
            is_codes = name == weight.name
            rounded = None if is_codes else formats[weight.name].keep_statistic(part)
            if rounded is None:
                entries[name] = entries.pop(part.source).in_bytes()
            else:
                decoded[name] = rounded
                unknown.add(part.source)
    return decoded, unknown


def _find(stored: PublishedFormat, entries: Mapping[str, StoredTensor]) -> _Found:
    """Put the tensors of each weight together, in the order of the codes in the files."""
    parts, unused = _parts(stored, entries)
    weights: list[StoredWeight] = []
    others: dict[str, Part] = {}
    for name, part in parts.items():
        scale = parts.get(f"{name}.scale")
        if scale is None:
            if not _is_statistic(name, parts):
                others[name] = part
            continue
        weight = StoredWeight(
            name=name,
            codes=part,
            scale=scale,
            global_scale=parts.get(f"{name}.global_scale"),
            zero_point=parts.get(f"{name}.zero_point"),
            group_index=parts.get(f"{name}.g_idx"),
        )
        weights.append(weight)
    return _Found(weights, others, unused)


def _is_statistic(name: str, parts: Mapping[str, Part]) -> bool:
    """Whether a tensor is one of a weight with a scale."""
    weight, _, statistic = name.rpartition(".")
    return f".{statistic}" in _STATISTICS and f"{weight}.scale" in parts


def _parts(
    stored: PublishedFormat, entries: Mapping[str, StoredTensor]
) -> tuple[dict[str, Part], set[str]]:
    """Name here -> tensor of the files; and names that are unused."""
    for name in entries:
        if name.endswith(_OF_INPUTS):
            raise UserError(
                f"{entries[name].file.parent}: {name} multiplies what comes into a quantized "
                "layer (modelopt's AWQ), which is not supported. Give the model with 16- or "
                "32-bit weights, or one quantized without AWQ."
            )
    names = {name: stored.name_here(name) for name in entries}
    codes = {here for name, here in names.items() if entries[name].dtype not in WEIGHT_TYPES}
    result: dict[str, Part] = {}
    for name, name_here in names.items():
        if name_here is None:
            continue
        # A model may have a parameter `scale` of its own, of a module that has no codes.
        is_parameter = name_here.endswith(_STATISTICS) and name_here.rpartition(".")[0] not in codes
        key = name if is_parameter else name_here
        if key in result:
            raise UserError(
                f"The files have {name} and {result[key].source}, which cannot both be {key}. "
                f"{ADVICE}"
            )
        result[key] = Part(name, entries[name])
    return result, {name for name, name_here in names.items() if name_here is None}
