"""The table of formats, and the format of a model whose weight files are quantized already.

It is read from a quantization_config and the tensors' names. A further format is a subclass of
PublishedFormat in a file of its own, and a row of METHODS, or of SCHEMES for a kind of weights in
compressed-tensors and modelopt.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from fsdp_qlora.model.formats.bitsandbytes import BitsandbytesFormat, read_bitsandbytes
from fsdp_qlora.model.formats.float4 import (
    WRITTEN_MXFP4,
    WRITTEN_NVFP4,
    float4_of_scheme,
    read_gpt_oss,
)
from fsdp_qlora.model.formats.float8 import WRITTEN_FP8, float8_of_scheme, read_fp8
from fsdp_qlora.model.formats.integers import integers_of_scheme, read_awq, read_gptq
from fsdp_qlora.model.formats.mixed import MixedFormat
from fsdp_qlora.model.formats.published import PublishedFormat, Unreadable
from fsdp_qlora.model.formats.settings import Algorithm, Scheme, Settings, take_settings
from fsdp_qlora.model.formats.written import WrittenFormat
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import tensor_names
from fsdp_qlora.utils.text import shown, shown_name

log = logging.getLogger("fsdp_qlora")

# modelopt's own names, where no config_groups say more.
_ALGORITHMS: Mapping[str, Scheme] = {
    "FP8": Scheme("all", ["Linear"], "", "float", 8, None, "tensor", None),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("all", ["Linear"], "", "float", 8, None, "channel", None),
    "NVFP4": Scheme("all", ["Linear"], "", "float", 4, 16, None, None),
    "W4A16_NVFP4": Scheme("all", ["Linear"], "", "float", 4, 16, None, None),
}
# For compressed-tensors' format float-quantized without config_groups.
_FLOAT_QUANTIZED = Scheme("all", ["Linear"], "float-quantized", "float", 8, None, "", None)
_READABLE = "bitsandbytes' 4 bits, MXFP4, NVFP4, FP8, AWQ, GPTQ or integers of compressed-tensors"


def take_format(
    config: PretrainedConfig, name: str, folder: Path | None = None
) -> PublishedFormat | None:
    """Remove a quantization from a model's configuration and return it; None if there is none.

    folder: of the model, with its weights if they are here.

    Raises:
        UserError: the configuration has a value of a wrong type, or the format cannot be read.
    """
    settings = take_settings(config, name, folder, methods=METHODS.keys())
    if settings is None:
        return None
    reader = METHODS.get(_method_of(settings))
    if reader is None:
        raise UserError(f"{_refused(name, settings)}. {_advice(f', or in {_READABLE}')}")
    try:
        published = reader(settings)
    except Unreadable as error:
        raise UserError(f"{_refused(name, settings)}: {error}. {_advice()}") from error
    # Before a download there is only the configuration. The files' names say more than it does.
    names = tensor_names(folder) if folder else None
    if names is None:
        return published
    published = published.in_files(names)
    if isinstance(published, BitsandbytesFormat) and not published.scaled:
        log.info("%s", published.describe_decoding(quantizes=False))
        return None
    return published


def _method_of(settings: Settings) -> str:
    """The method's name, also where old configurations of bitsandbytes name none.

    Empty for its 8 bits, which nothing reads.
    """
    if settings.method not in ("", "bitsandbytes"):
        return settings.method
    is_4bit = settings.fields.get("load_in_4bit", settings.fields.get("_load_in_4bit"))
    return "bitsandbytes" if is_4bit else ""


def _refused(name: str, settings: Settings) -> str:
    """The beginning of a message."""
    method = shown_name(settings.method or "an unnamed format")
    layout = settings.layout
    if settings.method == "bitsandbytes":
        method = "8-bit bitsandbytes"
    elif len(method) < 6:
        # An abbreviation, such as AWQ or EETQ.
        method = method.upper()
    label = f"{method} ({shown_name(layout)})" if layout else method
    return f"model_name {name} is quantized as {label}, which is not supported"


def _advice(others: str = "") -> str:
    return (
        "Give the model with 16- or 32-bit weights (train_type qlora quantizes it while "
        f"loading){others}."
    )


def _read_compressed(settings: Settings) -> PublishedFormat:
    """The format of compressed-tensors' groups."""
    fields = settings.fields
    if fields.get("transform_config"):
        raise Unreadable("transform_config says that weights are rotated")
    sparsity = (fields.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise Unreadable(f"sparsity_config says that weights are sparse ({shown(sparsity)})")
    schemes = settings.schemes
    if not schemes and settings.layout == "float-quantized":
        schemes = [_FLOAT_QUANTIZED]
    return _of_schemes(settings, schemes)


def _read_modelopt(settings: Settings) -> PublishedFormat:
    """The format of modelopt's groups, or of its algorithm's name."""
    algorithm = settings.fields.get("quant_algo", "")
    _check_algorithm(algorithm)
    known = _ALGORITHMS.get(algorithm)
    # In models of several formats these say more than config_groups do.
    if settings.layers:
        schemes = [_scheme_of(each, layers) for each, layers in settings.layers.items()]
        return _of_schemes(settings, schemes)
    if not settings.schemes and known is None:
        names = ", ".join(_ALGORITHMS)
        given = shown_name(algorithm) if algorithm else "none"
        raise Unreadable(
            f"{settings.file} has no config_groups, and quant_algo {given} is not one of {names}"
        )
    schemes = settings.schemes
    if not schemes and known is not None:
        schemes = [known]
    return _of_schemes(settings, [scheme._replace(is_modelopt=True) for scheme in schemes])


def _check_algorithm(algorithm: str, layer: str = "") -> None:
    """Refuse an algorithm that also changes what comes into a layer."""
    if any(word in algorithm for word in ("SVD", "AWQ")):
        of_layer = f" of {shown_name(layer)}" if layer else ""
        raise Unreadable(f"quant_algo {shown_name(algorithm)}{of_layer} changes activations too")


def _scheme_of(algorithm: Algorithm, layers: Sequence[str]) -> Scheme:
    """The group of the layers that modelopt quantizes alike."""
    _check_algorithm(algorithm.name, layers[0])
    known = _ALGORITHMS.get(algorithm.name)
    if known is None:
        names = ", ".join(_ALGORITHMS)
        given = shown_name(algorithm.name) if algorithm.name else "none"
        raise Unreadable(
            f"quantized_layers has {shown_name(layers[0])} in quant_algo {given}, which is not "
            f"one of {names}"
        )
    # A group size of 0 stands for none.
    size = known.group_size and (algorithm.group_size or known.group_size)
    return known._replace(
        name=f"quant_algo {algorithm.name}", targets=[*layers], group_size=size, is_modelopt=True
    )


def _of_schemes(settings: Settings, schemes: Sequence[Scheme]) -> PublishedFormat:
    """The format of all groups, which may differ in the layers that they are for."""
    formats = [_of_scheme(scheme) for scheme in schemes]
    if not formats:
        raise Unreadable("config_groups has no group of weights")
    first = formats[0]
    if all(published == first for published in formats):
        targets = list(dict.fromkeys(target for scheme in schemes for target in scheme.targets))
        return replace(first, targets=targets, skipped=settings.skipped)
    groups = [
        replace(published, targets=scheme.targets)
        for published, scheme in zip(formats, schemes, strict=True)
    ]
    return MixedFormat.of(groups, settings.skipped)


def _of_scheme(scheme: Scheme) -> PublishedFormat:
    whole = scheme
    # compressed-tensors' defaults (QuantizationArgs)
    if not scheme.is_modelopt:
        whole = scheme._replace(kind=scheme.kind or "int", bits=scheme.bits or 8)
    for read in SCHEMES:
        published = read(whole)
        if published is not None:
            return published
    parts = {"type": scheme.kind, "num_bits": scheme.bits, "group_size": scheme.group_size}
    described = ", ".join(f"{key} {shown_name(str(value))}" for key, value in parts.items())
    raise Unreadable(f"{scheme.name} has weights of {described}")


# quant_method -> the function that reads its configuration
METHODS: dict[str, Callable[[Settings], PublishedFormat]] = {
    "bitsandbytes": read_bitsandbytes,
    "mxfp4": read_gpt_oss,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
}
# Each returns the format of a group of compressed-tensors or modelopt, or None if it is another's.
SCHEMES: Sequence[Callable[[Scheme], PublishedFormat | None]] = (
    float4_of_scheme,
    float8_of_scheme,
    integers_of_scheme,
)
# --quant_type -> the format in which a model is written; bitsandbytes' is written apart.
WRITTEN: Mapping[str, WrittenFormat] = {
    written.name: written for written in (WRITTEN_MXFP4, WRITTEN_NVFP4, WRITTEN_FP8)
}
