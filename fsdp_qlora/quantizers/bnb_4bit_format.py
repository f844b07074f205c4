"""The format in which bitsandbytes and transformers save 4-bit weights: names, sizes and settings in weight files.

For a weight X [out, in], n = out * in, in blocks of 64 (m of them):
    X: the codes, two per byte, (n + 1) / 2 bytes under any dtype (bnb_4bit_quant_storage).
    X.absmax: [m], uint8 with double quantization, else float32.
    X.nested_absmax: with double quantization, float32 [(m + 255) / 256].
    X.quant_map, X.nested_quant_map: the values that the codes stand for, float32 [16] and [256].
    X.quant_state.bitsandbytes__nf4 (or fp4): JSON as bytes, with the shape and the mean of absmax.
These are the bytes of Bnb4bitWeight's parameters, so a rank's part of a file is its shard.

bitsandbytes quantizes linear layers only. A 3-D parameter of experts is stored in the same way under its own name
(X = model.layers.0.mlp.experts.gate_up_proj). Only this package reads that: in cache entries, and in models saved by
the quantize command, which have EXPERTS_KEY in their quantization_config.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import bitsandbytes.functional as bnb
import torch
from transformers import PretrainedConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from fsdp_qlora.errors import UserError

# Suffixes that bitsandbytes appends to the name of a 4-bit weight: its parts, and the state that marks it as 4-bit.
PACKED_SUFFIXES = ("", ".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")
PACKED_STATE = ".quant_state.bitsandbytes__"
EXPERTS_KEY = "fsdp_qlora_experts"
_STATE_BYTES = 256  # enough for the JSON of any shape, so a file can be laid out before the mean is known
NESTED_BLOCKSIZE = 256  # absmax values that share one nested absmax: double quantization (Dettmers et al. 2023)


class Bnb4bitSettings(NamedTuple):
    """The quantization_config of a model in 4 bits.

    skipped: modules that were not quantized. has_experts: the expert parameters are in 4 bits too.
    """

    quant_type: str
    double_quant: bool
    skipped: list[str] | None
    has_experts: bool = False

    def is_quantized(self, path: str) -> bool:
        """Whether transformers quantizes the linear layer at `path` of a decoder block."""
        return bool(should_convert_module(path, self.skipped))

    def describe_use(self, *, quant_type: str, double_quant: bool) -> str:
        """One line: the model's settings are used, and the options that they override."""
        asked = {"quant_type": quant_type, "double_quant": double_quant}
        ignored = [f"--{name} {str(asked[name]).lower()}" for name in asked if asked[name] != getattr(self, name)]
        return (
            f"The model is quantized already ({self.quant_type}, {'' if self.double_quant else 'no '}double "
            "quantization): its own 4-bit weights are used as they are"
            + (f", and {' and '.join(ignored)} has no effect." if ignored else ".")
        )


def take_settings(config: PretrainedConfig, name: str) -> Bnb4bitSettings | None:
    """Remove the quantization from a model's configuration and return it; None where there is none.

    Raises:
        UserError: the model is quantized in another way than 4-bit bitsandbytes.
    """
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    settings: Mapping[str, Any] = found if isinstance(found, dict) else found.to_dict()
    # The model is built with plain layers, which ours then replace.
    del config.quantization_config
    if not settings.get("load_in_4bit", settings.get("_load_in_4bit")):
        raise UserError(
            f"model_name {name} is quantized as {_format_name(settings)}, which is not supported. Give the model "
            "with 16- or 32-bit weights (train_type qlora quantizes it while loading), or a 4-bit bitsandbytes one."
        )
    return Bnb4bitSettings(
        quant_type=settings.get("bnb_4bit_quant_type", "fp4"),
        double_quant=bool(settings.get("bnb_4bit_use_double_quant", False)),
        skipped=settings.get("llm_int8_skip_modules"),
        has_experts=bool(settings.get(EXPERTS_KEY, False)),
    )


def _format_name(settings: Mapping[str, Any]) -> str:
    if settings.get("load_in_8bit", settings.get("_load_in_8bit")):
        return "8-bit bitsandbytes"
    method = str(settings.get("quant_method", "an unnamed format"))
    return {"fp8": "FP8", "fbgemm_fp8": "FP8 (fbgemm)"}.get(method, method.upper() if len(method) < 6 else method)


def value_tables(quant_type: str, *, double_quant: bool) -> dict[str, torch.Tensor]:
    """Suffix of the weight's name -> float32 values of its codes, and of the codes of absmax."""
    tables = {".quant_map": bnb.get_4bit_type(quant_type, device="cpu")}
    return tables | ({".nested_quant_map": bnb.create_dynamic_map()} if double_quant else {})


def write_state(
    shape: tuple[int, ...], quant_type: str, blocksize: int, offset: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """The JSON that describes a quantized weight, as uint8, padded to a fixed size.

    Args:
        offset: the mean of absmax; None without double quantization.
        dtype: of the weight before quantization.
    """
    state: dict[str, Any] = {
        "quant_type": quant_type,
        "blocksize": blocksize,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
    }
    if offset is not None:
        state |= {"nested_blocksize": NESTED_BLOCKSIZE, "nested_dtype": "float32", "nested_offset": offset}
    return torch.frombuffer(bytearray(json.dumps(state).encode().ljust(_STATE_BYTES)), dtype=torch.uint8)


def read_state(
    content: torch.Tensor, name: str, shape: tuple[int, ...], quant_type: str, blocksize: int, *, double_quant: bool
) -> float:
    """Check a stored weight's state; returns the mean of its absmax, 0 without double quantization.

    Raises:
        UserError: its quantization or its shape is not the expected one.
    """
    offset = 0.0
    try:
        state = json.loads(bytes(content.tolist()))
        found = {key: state[key] for key in ("quant_type", "blocksize", "shape")}
        if double_quant:
            found["nested_blocksize"] = state["nested_blocksize"]
            offset = float(state["nested_offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{name} does not describe a 4-bit weight ({error!r}). Download the model again.") from error
    expected = {
        "quant_type": quant_type,
        "blocksize": blocksize,
        "shape": list(shape),
        "nested_blocksize": NESTED_BLOCKSIZE,
    }
    if wrong := [f"{key} {value}, not {expected[key]}" for key, value in found.items() if value != expected[key]]:
        raise UserError(
            f"{name} describes a 4-bit weight that cannot be used here: {'; '.join(wrong)}. Give the model with "
            "16- or 32-bit weights."
        )
    return offset


def check_table(expected: torch.Tensor, content: torch.Tensor, name: str) -> None:
    """Refuse a table of values that is not bitsandbytes' own (to the last bit of float32)."""
    found = content.view(torch.float32)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=0, atol=1e-7):
        raise UserError(f"{name} is not bitsandbytes' table of 4-bit values. Download the model again.")
