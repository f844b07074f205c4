"""Models whose weight files are quantized already, in a format that a row of QUANTIZERS trains as it is or in integers.

What is read here is config.json's quantization_config, as bitsandbytes, transformers (FP8, MXFP4), compressed-tensors,
modelopt, AutoAWQ and GPTQ's programs write it.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import TensorForm

# The formats of compressed-tensors that are written, by --quant_type: name, type of scales, settings of weights.
_WRITTEN: Mapping[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "mxfp4": ("mxfp4-pack-quantized", torch.uint8, {"num_bits": 4, "group_size": 32, "strategy": "group"}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        torch.float8_e4m3fn,
        {"num_bits": 4, "group_size": 16, "strategy": "tensor_group"},
    ),
    "fp8": ("naive-quantized", torch.float32, {"num_bits": 8, "group_size": None, "strategy": "channel"}),
}
EXPERTS_KEY = "fsdp_qlora_experts"
# Ending of a tensor's name in the files -> its ending here, where a weight's statistics are named below it; None for
# tensors that are unused: scales of 8-bit activations, which have 16 bits here.
_UNUSED: dict[str, str | None] = dict.fromkeys(
    (".input_scale", ".activation_scale", ".input_global_scale", ".k_scale", ".v_scale", ".q_scale", ".kv_scale")
)
_FP8 = {**_UNUSED, "_scale": ".scale", "_scale_inv": ".scale"}
_COMPRESSED = {
    **_UNUSED, ".weight_shape": None, ".input_zero_point": None, "_packed": "", "_global_scale": ".global_scale",
    "_scale": ".scale", ".weight_zero_point": ".weight.zero_point", ".weight_g_idx": ".weight.g_idx",
}  # fmt: skip
_QUANTIZED = {
    ".qweight": ".weight", ".qzeros": ".weight.zero_point", ".scales": ".weight.scale", ".g_idx": ".weight.g_idx",
}  # fmt: skip
_MODELOPT = {**_UNUSED, "_scale_2": ".global_scale", "_scale": ".scale"}
_GPT_OSS = {"_blocks": "", "_scales": ".scale"}
BITSANDBYTES, INTEGERS = "bnb_4bit", "integers"


class PackedFormat(NamedTuple):
    """The format of a model's weight files, from its quantization_config.

    name: for people. quantizer: its row of QUANTIZERS, or INTEGERS, which are only decoded. options: arguments of its
    layers (or of the tensors that are decoded); None if only the files' tensors tell them. skipped: modules that were
    not quantized. has_linears, has_experts: whether linear layers and expert parameters are. endings: see above.
    """

    name: str
    quantizer: str
    options: Mapping[str, Any] | None
    skipped: Sequence[str] | None = None
    has_linears: bool = True
    has_experts: bool = True
    endings: Mapping[str, str | None] = MappingProxyType({})

    def is_quantized(self, path: str) -> bool:
        """Whether the weight at `path`, a linear layer or expert parameter of a decoder block, is quantized."""
        if self.quantizer == BITSANDBYTES:
            return bool(should_convert_module(path, self.skipped))
        return not any(_names(pattern, path) for pattern in self.skipped or ())

    def is_kept(self, quantizer: str | None, quant_type: str) -> bool:
        """Whether a run trains the weights as they are, and does not decode them as they are read.

        quantizer: that of the run's train type. quant_type: the run's.
        """
        is_trained = self.quantizer != INTEGERS and self.options is not None
        return self.quantizer == BITSANDBYTES or (quantizer == BITSANDBYTES and quant_type == "auto" and is_trained)

    def name_here(self, name: str) -> str | None:
        """The name that a tensor of the files has here; None for one that is unused."""
        for ending, own in self.endings.items():
            if name.endswith(ending):
                return None if own is None else name.removesuffix(ending) + own
        return name

    def describe_decoding(self, *, quantizes: bool) -> str:
        """Describe in one line that the weights are decoded."""
        use = "and quantized again" if quantizes else "and kept in the precision of this run"
        to = "the type of their scales" if self.quantizer == INTEGERS else "bf16"
        return f"The model is stored in {self.name}: its weights are decoded to {to} as they are read, {use}."

    def describe_use(self, *, quant_type: str, double_quant: bool) -> str:
        """Describe in one line that the model's own weights are used, and the options that they override."""
        if self.quantizer != BITSANDBYTES or self.options is None:
            return (
                f"The model is stored in {self.name}: its weights are trained on as they are. --quant_type nf4 "
                "quantizes them again."
            )
        given = {"quant_type": quant_type, "double_quant": double_quant}
        ignored = [
            f"--{name} {str(value).lower()}"
            for name, value in given.items()
            if value not in ("auto", self.options[name])
        ]
        return f"The model is quantized already ({self.name}): its own 4-bit weights are used as they are" + (
            f", and {' and '.join(ignored)} has no effect." if ignored else "."
        )


def quantization_settings(config: PretrainedConfig) -> Mapping[str, Any]:
    """A model's quantization_config; empty if it has none."""
    settings = getattr(config, "quantization_config", None) or {}
    return settings if isinstance(settings, dict) else settings.to_dict()


def compressed_config(quant_type: str, skipped: Sequence[str]) -> dict[str, Any]:
    """The quantization_config of a model that is written in a format of compressed-tensors.

    skipped: paths of linear layers that are not quantized.
    """
    name, _, form = _WRITTEN[quant_type]
    weights = {**form, "type": "float", "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": name}}
    about = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": name}
    return about | {"config_groups": groups, "ignore": list(skipped)}


def compressed_forms(quant_type: str, name: str, shape: tuple[int, ...]) -> dict[str, TensorForm]:
    """The tensors of a weight [out, in] in such a model. Raises UserError if it has no such form."""
    _, dtype, form = _WRITTEN[quant_type]
    size = form["group_size"] or shape[-1]
    if len(shape) != 2 or not name.endswith(".weight") or shape[1] % size:
        raise UserError(f"{name} {list(shape)} cannot be in {quant_type}: it must be a matrix with rows of {size}s.")
    scales = {f"{name}_scale": TensorForm(dtype, (shape[0], shape[1] // size))}
    if quant_type == "nvfp4":
        scales[f"{name}_global_scale"] = TensorForm(torch.float32, (1,))
    if quant_type == "fp8":
        return {name: TensorForm(torch.float8_e4m3fn, shape), **scales}
    return {f"{name}_packed": TensorForm(torch.uint8, (shape[0], shape[1] // 2)), **scales}


def take_packed(config: PretrainedConfig, name: str) -> PackedFormat | None:
    """Remove a quantization from a model's configuration and return it. Raises UserError for an unknown format."""
    if not (settings := quantization_settings(config)):
        return None
    # The model is built with plain layers, which ours then replace.
    del config.quantization_config
    if packed := _bitsandbytes(settings) or _transformers(settings) or _integers(settings) or _grouped(settings):
        return packed
    method = str(settings.get("quant_method", "an unnamed format"))
    label = "8-bit bitsandbytes" if method == "bitsandbytes" else method.upper() if len(method) < 6 else method
    layout = _layout(settings)
    raise UserError(
        f"model_name {name} is quantized as {label}{f' ({layout})' * bool(layout)}, which is not supported. Give the "
        "model with 16- or 32-bit weights (train_type qlora quantizes it while loading), or in bitsandbytes' 4 bits, "
        "MXFP4, NVFP4, FP8, AWQ, GPTQ or integers of compressed-tensors."
    )


def _bitsandbytes(settings: Mapping[str, Any]) -> PackedFormat | None:
    if not settings.get("load_in_4bit", settings.get("_load_in_4bit")):
        return None
    quant_type = settings.get("bnb_4bit_quant_type", "fp4")
    double_quant = bool(settings.get("bnb_4bit_use_double_quant", False))
    return PackedFormat(
        f"{quant_type}, {'' if double_quant else 'no '}double quantization",
        BITSANDBYTES,
        {"quant_type": quant_type, "double_quant": double_quant},
        settings.get("llm_int8_skip_modules"),
        has_experts=bool(settings.get(EXPERTS_KEY, False)),
    )


def _transformers(settings: Mapping[str, Any]) -> PackedFormat | None:
    """The formats that transformers itself names."""
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method == "mxfp4":  # gpt_oss: experts alone, stored as [experts, out, in]
        return PackedFormat("MXFP4", "mxfp4", {"is_upright": True}, has_linears=False, endings=_GPT_OSS)
    if method not in ("fp8", "fbgemm_fp8"):
        return None
    options: dict[str, Any] | None = {} if method == "fbgemm_fp8" else None
    if block:
        options = {"block": tuple(block)}
    elif settings.get("activation_scheme") == "static":  # one scale for each matrix
        options = {"num_parts": 1}
    return PackedFormat("FP8", "fp8", options, settings.get("modules_to_not_convert"), endings=_FP8)


def _layout(settings: Mapping[str, Any]) -> str:
    """The layout of a format's files that a configuration names; empty if none."""
    return str(next(filter(None, map(settings.get, ("checkpoint_format", "format", "version"))), "")).lower()


def _integers(settings: Mapping[str, Any]) -> PackedFormat | None:
    """AWQ or GPTQ, for which its settings must be the same for all layers."""
    method, bits, layout = settings.get("quant_method"), settings.get("bits", 0), _layout(settings)
    is_awq = (method, bits) == ("awq", 4) and layout in ("", "gemm")
    is_gptq = method == "gptq" and bits in (2, 3, 4, 8) and layout in ("", "gptq", "gptq_v2")
    if not (is_awq or is_gptq) or settings.get("dynamic"):
        return None
    form = {"bits": bits, "is_transposed": True, "is_awq": is_awq, "zero_shift": is_gptq and layout != "gptq_v2"}
    return PackedFormat(str(method).upper(), INTEGERS, form, endings=_QUANTIZED)


def _grouped(settings: Mapping[str, Any]) -> PackedFormat | None:
    """A format of compressed-tensors or modelopt, if it is the same for all layers."""
    method, groups = settings.get("quant_method"), [*(settings.get("config_groups") or {}).values()]
    rotates = settings.get("transform_config") or "SVD" in str(settings.get("quant_algo"))
    if method not in ("compressed-tensors", "modelopt") or rotates:
        return None
    weights, is_modelopt = [group.get("weights") or {} for group in groups], method == "modelopt"
    if method == "compressed-tensors" and settings.get("format") == "float-quantized" and not groups:
        weights = [{"type": "float", "num_bits": 8}]
    if len(weights) != 1 or any(group.get("targets") not in (None, ["Linear"]) for group in groups):
        return None
    (form,) = weights
    kind, bits, size, strategy = (form.get(key) for key in ("type", "num_bits", "group_size", "strategy"))
    options: dict[str, Any] | None = {}
    if kind == "int" and _layout(settings) in ("pack-quantized", "int-quantized", "naive-quantized"):
        return PackedFormat(f"INT{bits}", INTEGERS, {"bits": bits}, endings=_COMPRESSED)
    if (kind, bits, size) == ("float", 4, 16):
        name, options = "NVFP4", {"num_parts": 1, "multiplies": is_modelopt}
    elif (kind, bits, size) == ("float", 4, 32) and not is_modelopt:
        name = "MXFP4"
    elif (kind, bits) == ("float", 8):
        blocks = {"block": tuple(form.get("block_structure") or ())}
        name = "FP8"
        known: dict[str, dict[str, Any]] = {"block": blocks, "channel": {}, "tensor": {"num_parts": 1}}
        options = known.get(strategy or "tensor" * is_modelopt)
    else:
        return None
    endings = _FP8 if name == "FP8" else _MODELOPT if is_modelopt else _COMPRESSED
    return PackedFormat(name, name.lower(), options, settings.get("ignore"), endings=endings)


def _names(pattern: str, path: str) -> bool:
    """Whether a pattern of a skipped module, as these programs write them, is for the layer at `path`."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), path) is not None
    if "*" in pattern:
        return fnmatch(path, pattern)
    return f".{pattern}." in f".{path}."
