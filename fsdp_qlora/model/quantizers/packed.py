"""Models whose weight files are quantized already.

Their format is read from a quantization_config and the tensors' names.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from fsdp_qlora.model.quantizers.packed_format import (
    BITSANDBYTES,
    GPTQ_BITS,
    INTEGERS,
    PackedFormat,
)
from fsdp_qlora.model.quantizers.settings import (
    EXPERTS_KEY,
    Scheme,
    Settings,
    as_block,
    take_settings,
)
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import tensor_names
from fsdp_qlora.utils.text import shown, shown_name

log = logging.getLogger("fsdp_qlora")

# Ending of a tensor's name in the files -> its ending here, where a weight's statistics are named
# below it; None for tensors that are unused: scales of 8-bit activations, which have 16 bits here.
# The first one that fits counts, so that a longer ending stands before one that it ends with.
_UNUSED: dict[str, str | None] = dict.fromkeys(
    (
        ".input_scale",
        ".activation_scale",
        ".input_global_scale",
        ".k_scale",
        ".v_scale",
        ".q_scale",
        ".kv_scale",
    )
)
# transformers (fp8, fbgemm_fp8): "_scale_inv" is the name that DeepSeek-V3's files have for what is
# a factor all the same.
_FP8 = _UNUSED | {"_scale": ".scale", "_scale_inv": ".scale"}
# compressed-tensors: weight_packed with weight_scale, weight_global_scale, weight_zero_point, ...
_COMPRESSED = _UNUSED | {
    ".weight_shape": None,
    ".input_zero_point": None,
    "_packed": "",
    "_global_scale": ".global_scale",
    "_scale": ".scale",
    ".weight_zero_point": ".weight.zero_point",
    ".weight_g_idx": ".weight.g_idx",
}
# AWQ and GPTQ: names below a layer, which has no tensor "weight".
_QUANTIZED = {
    ".qweight": ".weight",
    ".qzeros": ".weight.zero_point",
    ".scales": ".weight.scale",
    ".g_idx": ".weight.g_idx",
}
# modelopt's NVFP4: weight_scale of a group in E4M3, weight_scale_2 of the matrix in float32
_MODELOPT = _UNUSED | {"_scale_2": ".global_scale", "_scale": ".scale"}
# gpt_oss's MXFP4: gate_up_proj_blocks and gate_up_proj_scales
_GPT_OSS = {"_blocks": "", "_scales": ".scale"}
_INTEGER_LAYOUTS = ("pack-quantized", "int-quantized", "naive-quantized")
# modelopt's own names, where no config_groups say more.
_ALGORITHMS: Mapping[str, Scheme] = {
    "FP8": Scheme("all", ["Linear"], "", "float", 8, None, "tensor", None),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("all", ["Linear"], "", "float", 8, None, "channel", None),
    "NVFP4": Scheme("all", ["Linear"], "", "float", 4, 16, None, None),
}
# For compressed-tensors' format float-quantized without config_groups.
_FLOAT_QUANTIZED = Scheme("all", ["Linear"], "float-quantized", "float", 8, None, "", None)
_READABLE = "bitsandbytes' 4 bits, MXFP4, NVFP4, FP8, AWQ, GPTQ or integers of compressed-tensors"


class _Unreadable(Exception):
    """A format that cannot be read, and why."""


def take_packed(
    config: PretrainedConfig, name: str, folder: Path | None = None
) -> PackedFormat | None:
    """Remove a quantization from a model's configuration and return it; None if there is none.

    folder: of the model, with its weights if they are here.

    Raises:
        UserError: the configuration has a value of a wrong type, or the format cannot be read.
    """
    settings = take_settings(config, name, folder)
    if settings is None:
        return None
    reader = _READERS.get(_method_of(settings))
    if reader is None:
        raise UserError(f"{_refused(name, settings)}. {_advice(f', or in {_READABLE}')}")
    try:
        packed = reader(settings)
    except _Unreadable as error:
        raise UserError(f"{_refused(name, settings)}: {error}. {_advice()}") from error
    # Before a download there is only the configuration. The files' names say more than it does.
    names = tensor_names(folder) if folder else None
    if names is None:
        return packed
    packed = packed._replace(scaled=packed.weights_among(names))
    if packed.quantizer == BITSANDBYTES and not packed.scaled:
        log.info("%s", packed.describe_decoding(quantizes=False))
        return None
    return packed


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


def _bitsandbytes(settings: Settings) -> PackedFormat:
    fields = settings.fields
    # The defaults are those of transformers' BitsAndBytesConfig.
    quant_type = fields.get("bnb_4bit_quant_type", "fp4")
    double_quant = fields.get("bnb_4bit_use_double_quant", False)
    name = f"{quant_type}, double quantization"
    if not double_quant:
        name = f"{quant_type}, no double quantization"
    return PackedFormat(
        name,
        BITSANDBYTES,
        {"quant_type": quant_type, "double_quant": double_quant},
        skipped=settings.skipped,
        has_experts=fields.get(EXPERTS_KEY, False),
    )


def _mxfp4(settings: Settings) -> PackedFormat:
    """gpt_oss: experts alone, stored as [experts, out, in]."""
    return PackedFormat("MXFP4", "mxfp4", {"is_upright": True}, _GPT_OSS, has_linears=False)


def _fp8(settings: Settings) -> PackedFormat:
    """transformers' own FP8."""
    fields = settings.fields
    options: dict[str, Any] | None = None
    if "weight_block_size" in fields:
        options = {"block": as_block(fields["weight_block_size"])}
    elif settings.method == "fbgemm_fp8":
        # A scale for each row, which is the layers' default.
        options = {}
    elif fields.get("activation_scheme") == "static":
        # One scale for each matrix.
        options = {"num_parts": 1}
    return PackedFormat("FP8", "fp8", options, _FP8, skipped=settings.skipped)


def _awq(settings: Settings) -> PackedFormat:
    # The GEMM layout is [in, out / 8] int32, with eight codes of a row in AWQ's own order; the GEMV
    # layouts have other shapes.
    _check_integers(settings, (4,), ("", "gemm"))
    form = {"bits": 4, "is_transposed": True, "is_awq": True, "has_zeros": True}
    return PackedFormat("AWQ", INTEGERS, form, _QUANTIZED)


def _gptq(settings: Settings) -> PackedFormat:
    """GPTQ's format.

    The tensors tell the bits, groups and order of layers for which `dynamic` has other ones.
    """
    _check_integers(settings, GPTQ_BITS, ("", "gptq", "gptq_v2"))
    for pattern, changes in settings.fields.get("dynamic", {}).items():
        other = {"format", "checkpoint_format", "quant_method", "method", "pack_dtype"} & (
            changes or {}
        ).keys()
        if other:
            raise _Unreadable(f"dynamic gives the layers {shown(pattern)} another {min(other)}")
    form = {"bits": settings.fields["bits"], "is_transposed": True, "has_zeros": True}
    # Files of the first version store zero - 1 (AutoGPTQ), those of gptq_v2 (GPTQModel) the zero.
    form["subtracts_one"] = settings.layout != "gptq_v2"
    return PackedFormat("GPTQ", INTEGERS, form, _QUANTIZED)


def _check_integers(settings: Settings, bits: Sequence[int], layouts: Sequence[str]) -> None:
    given = settings.fields.get("bits")
    if given not in bits:
        raise _Unreadable(
            f"bits must be {' or '.join(map(str, bits))}, and config.json has {given or 'none'}"
        )
    if settings.layout not in layouts:
        raise _Unreadable(f"its files are in another layout than {layouts[-1]}")


def _compressed(settings: Settings) -> PackedFormat:
    fields = settings.fields
    schemes = settings.schemes
    if fields.get("transform_config"):
        raise _Unreadable("transform_config says that weights are rotated")
    sparsity = (fields.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _Unreadable(f"sparsity_config says that weights are sparse ({shown(sparsity)})")
    if not schemes and settings.layout == "float-quantized":
        schemes = [_FLOAT_QUANTIZED]
    return _of_schemes(settings, schemes)


def _modelopt(settings: Settings) -> PackedFormat:
    algorithm = settings.fields.get("quant_algo", "")
    if any(word in algorithm for word in ("SVD", "AWQ")):
        raise _Unreadable(f"quant_algo {shown_name(algorithm)} changes activations too")
    known = _ALGORITHMS.get(algorithm)
    if not settings.schemes and known is None:
        names = ", ".join(_ALGORITHMS)
        given = shown_name(algorithm) if algorithm else "none"
        raise _Unreadable(
            f"{settings.file} has no config_groups, and quant_algo {given} is not one of {names}"
        )
    schemes = settings.schemes
    if not schemes and known is not None:
        schemes = [known]
    return _of_schemes(settings, schemes)


def _of_schemes(settings: Settings, schemes: Sequence[Scheme]) -> PackedFormat:
    """The format of all groups, which may differ in the layers that they are for."""
    formats = [_of_scheme(settings, scheme) for scheme in schemes]
    if not formats:
        raise _Unreadable("config_groups has no group of weights")
    first, *others = formats
    # At most eight, since a file can have any number of groups.
    labels = dict.fromkeys(
        f"{packed.name} ({scheme.name})" for packed, scheme in zip(formats, schemes, strict=True)
    )
    listed = ", ".join([*labels][:8])
    if len({packed.name for packed in formats}) > 1:
        raise _Unreadable(f"its layers are in several formats: {listed}")
    if any(packed.options != first.options for packed in others):
        if any("block" in (packed.options or {}) for packed in formats):
            raise _Unreadable(f"its layers have blocks of several sizes: {listed}")
        # Scales of rows in some layers, and of matrices in others: the tensors tell which.
        first = first._replace(options=None)
    # Integers of a symmetric group have the zero in the middle of their range, and no tensor of it.
    if first.quantizer == INTEGERS and all(scheme.symmetric is False for scheme in schemes):
        first = first._replace(options=dict(first.options or {}) | {"has_zeros": True})
    targets = list(dict.fromkeys(target for scheme in schemes for target in scheme.targets))
    return first._replace(targets=targets, skipped=settings.skipped)


def _of_scheme(settings: Settings, scheme: Scheme) -> PackedFormat:
    is_modelopt = settings.method == "modelopt"
    kind = scheme.kind
    bits = scheme.bits
    # compressed-tensors' defaults (QuantizationArgs)
    if not is_modelopt:
        kind = kind or "int"
        bits = bits or 8
    form = (kind, bits, scheme.group_size)
    if kind == "int" and not is_modelopt:
        return _of_integers(scheme, bits or 8)
    if form == ("float", 4, 16):
        endings = _MODELOPT if is_modelopt else _COMPRESSED
        # modelopt's global scale is a factor, and that of compressed-tensors a divisor.
        return PackedFormat("NVFP4", "nvfp4", {"num_parts": 1, "multiplies": is_modelopt}, endings)
    if form == ("float", 4, 32) and not is_modelopt:
        return PackedFormat("MXFP4", "mxfp4", {}, _COMPRESSED)
    if (kind, bits) == ("float", 8) and scheme.group_size in (None, -1):
        return PackedFormat("FP8", "fp8", _fp8_options(scheme), _FP8)
    parts = {"type": scheme.kind, "num_bits": scheme.bits, "group_size": scheme.group_size}
    described = ", ".join(f"{key} {shown_name(str(value))}" for key, value in parts.items())
    raise _Unreadable(f"{scheme.name} has weights of {described}")


def _of_integers(scheme: Scheme, bits: int) -> PackedFormat:
    if bits > 8:
        raise _Unreadable(
            f"{scheme.name} has integers of {bits} bits, and only 1 to 8 bits are supported"
        )
    if scheme.layout not in _INTEGER_LAYOUTS:
        raise _Unreadable(
            f"{scheme.name} has integers in another format than {', '.join(_INTEGER_LAYOUTS)}"
        )
    return PackedFormat(f"INT{bits}", INTEGERS, {"bits": bits}, _COMPRESSED)


def _fp8_options(scheme: Scheme) -> dict[str, Any] | None:
    """Arguments of FP8 layers; None if the files alone tell what has a scale."""
    strategy = scheme.strategy
    if strategy is None:
        # compressed-tensors' rule for configurations without a strategy: -1 is a group as long as a
        # row.
        strategy = "channel" if scheme.group_size == -1 else "tensor"
    if strategy == "block" and scheme.block is None:
        raise _Unreadable(f"{scheme.name} has scales of blocks, and no block_structure")
    if strategy == "block":
        return {"block": scheme.block}
    options_by_strategy: Mapping[str, dict[str, Any]] = {
        "channel": {},
        "tensor": {"num_parts": 1},
    }
    return options_by_strategy.get(strategy)


# quant_method -> the function that reads its configuration
_READERS: Mapping[str, Callable[[Settings], PackedFormat]] = {
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}
