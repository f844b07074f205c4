"""4-bit weights as bitsandbytes and transformers save them: their names, sizes and settings in a checkpoint.

For a weight X [out, in], n = out * in, in blocks of 64 (m of them):
    X: the codes, two per byte, (n + 1) / 2 bytes under any dtype (bnb_4bit_quant_storage).
    X.absmax: [m], uint8 with double quantization, else float32.
    X.nested_absmax: with double quantization, float32 [(m + 255) / 256].
    X.quant_map, X.nested_quant_map: the values that the codes stand for, float32 [16] and [256].
    X.quant_state.bitsandbytes__nf4 (or fp4): JSON as bytes, with the shape and the mean of absmax.
These are the bytes of Bnb4bitWeight's parameters, so a rank's part of a file is its shard.

bitsandbytes quantizes linear layers only. A 3-D parameter of experts is kept in the same way under its own name
(X = model.layers.0.mlp.experts.gate_up_proj), which only this package reads: the cache, and models that the quantize
command saves, with EXPERTS_KEY in their quantization_config.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import bitsandbytes.functional as bnb
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from fsdp_qlora.bnb_4bit import Bnb4bitWeight
from fsdp_qlora.checkpoint_files import PACKED_STATE
from fsdp_qlora.distributed import shard_bounds, shard_rank, shard_size
from fsdp_qlora.errors import UserError

EXPERTS_KEY = "fsdp_qlora_experts"
_STATE_BYTES = 256  # room for the JSON of any shape, so that a file can be laid out before the mean is known
_NESTED_BLOCKSIZE = 256


class Bnb4bitSettings(NamedTuple):
    """What config.json says of a model in 4 bits.

    skipped: modules that were left alone. has_experts: the expert parameters are in 4 bits too.
    """

    quant_type: str
    double_quant: bool
    skipped: list[str] | None
    has_experts: bool = False

    def is_quantized(self, path: str) -> bool:
        """Whether transformers quantizes the linear layer at `path` of a decoder block."""
        return bool(should_convert_module(path, self.skipped))

    def describe_use(self, *, quant_type: str, double_quant: bool) -> str:
        """One line: the checkpoint's settings are used, and which option that overrules."""
        asked = {"quant_type": quant_type, "double_quant": double_quant}
        overruled = [f"--{name} {str(asked[name]).lower()}" for name in asked if asked[name] != getattr(self, name)]
        return (
            f"The model is quantized already ({self.quant_type}, {'' if self.double_quant else 'no '}double "
            "quantization): its own 4-bit weights are used as they are"
            + (f", and {' and '.join(overruled)} has no effect." if overruled else ".")
        )


def take_settings(config: PretrainedConfig, name: str) -> Bnb4bitSettings | None:
    """Remove the quantization from a model's configuration and return it; None where there is none.

    Raises:
        UserError: the model is quantized in another way than 4-bit bitsandbytes.
    """
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    about: Mapping[str, Any] = found if isinstance(found, dict) else found.to_dict()
    # Built as a model with plain layers; ours take their place.
    del config.quantization_config
    if not about.get("load_in_4bit", about.get("_load_in_4bit")):
        raise UserError(
            f"model_name {name} is quantized as {_format_name(about)}, which is not read here. Give its checkpoint "
            "with 16- or 32-bit weights (train_type qlora quantizes that while loading), or a 4-bit bitsandbytes one."
        )
    return Bnb4bitSettings(
        quant_type=about.get("bnb_4bit_quant_type", "fp4"),
        double_quant=bool(about.get("bnb_4bit_use_double_quant", False)),
        skipped=about.get("llm_int8_skip_modules"),
        has_experts=bool(about.get(EXPERTS_KEY, False)),
    )


def _format_name(about: Mapping[str, Any]) -> str:
    if about.get("load_in_8bit", about.get("_load_in_8bit")):
        return "8-bit bitsandbytes"
    method = str(about.get("quant_method", "an unnamed format"))
    return {"fp8": "FP8", "fbgemm_fp8": "FP8 (fbgemm)"}.get(method, method.upper() if len(method) < 6 else method)


def state_name(weight: str, quant_type: str) -> str:
    """The name of the tensor that describes a quantized weight."""
    return f"{weight}{PACKED_STATE}{quant_type}"


class Stored(NamedTuple):
    """A parameter of a layer in a file. dtype, shape: as bitsandbytes writes it."""

    parameter: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def stored_parameters(layer: Bnb4bitWeight) -> dict[str, Stored]:
    """What follows the weight's name in a checkpoint -> the parameter that is stored there."""
    num_weights = math.prod(layer.shape)
    stored = {"": Stored("weight", torch.uint8, (-(-num_weights // 2), 1))}
    if not layer.double_quant:
        return stored | {".absmax": Stored("absmax", torch.float32, (layer.num_blocks,))}
    nested = -(-layer.num_blocks // _NESTED_BLOCKSIZE)
    return stored | {
        ".absmax": Stored("absmax", torch.uint8, (layer.num_blocks,)),
        ".nested_absmax": Stored("nested_absmax", torch.float32, (nested,)),
    }


def stored_maps(layer: Bnb4bitWeight) -> dict[str, torch.Tensor]:
    """What follows the weight's name -> the constant that is stored there."""
    maps = {".quant_map": bnb.get_4bit_type(layer.format.quant_type, device="cpu")}
    return maps | ({".nested_quant_map": bnb.create_dynamic_map()} if layer.double_quant else {})


def byte_range(layer: Bnb4bitWeight, stored: Stored, mesh: DeviceMesh) -> tuple[int, int]:
    """Bytes [start, stop) of the stored tensor that this rank's shard of the parameter consists of."""
    parameter = getattr(layer, stored.parameter)
    row_bytes = parameter.shape[1] * parameter.element_size()
    first, last = shard_bounds(parameter.shape[0], rank=shard_rank(mesh), size=shard_size(mesh))
    return min(first * row_bytes, stored.num_bytes), min(last * row_bytes, stored.num_bytes)


def local_bytes(layer: Bnb4bitWeight, stored: Stored) -> torch.Tensor:
    """The bytes of this rank's shard, uint8; at the end of a tensor there may be padding after `byte_range`."""
    parameter = getattr(layer, stored.parameter)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach().reshape(-1).view(torch.uint8)


def write_state(layer: Bnb4bitWeight, dtype: torch.dtype) -> bytes:
    """The JSON that describes a quantized layer, padded to a fixed size. dtype: of the weight before."""
    state: dict[str, Any] = {
        "quant_type": layer.format.quant_type,
        "blocksize": layer.format.blocksize,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(layer.shape),
    }
    if layer.double_quant:
        state |= {
            "nested_blocksize": _NESTED_BLOCKSIZE,
            "nested_dtype": "float32",
            "nested_offset": layer.absmax_offset.item(),
        }
    return json.dumps(state).encode().ljust(_STATE_BYTES)


def state_bytes() -> int:
    """The size of what `write_state` gives."""
    return _STATE_BYTES


def load_state(layer: Bnb4bitWeight, content: torch.Tensor, name: str) -> None:
    """Check that a stored layer is the one that `layer` is, and take over the mean of its absmax.

    Raises:
        UserError: it is quantized in another way, or describes another shape.
    """
    try:
        state = json.loads(bytes(content.tolist()))
        found = {key: state[key] for key in ("quant_type", "blocksize", "shape")}
        if layer.double_quant:
            found["nested_blocksize"] = state["nested_blocksize"]
            layer.absmax_offset.fill_(float(state["nested_offset"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{name} is not a description of a 4-bit weight ({error!r}). Download the model again.") from (
            error
        )
    expected = {
        "quant_type": layer.format.quant_type,
        "blocksize": layer.format.blocksize,
        "shape": list(layer.shape),
        "nested_blocksize": _NESTED_BLOCKSIZE,
    }
    if wrong := [f"{key} {value}, not {expected[key]}" for key, value in found.items() if value != expected[key]]:
        raise UserError(
            f"{name} describes a 4-bit weight that cannot be used here: {'; '.join(wrong)}. Give the checkpoint with "
            "16- or 32-bit weights."
        )


def check_map(expected: torch.Tensor, content: torch.Tensor, name: str) -> None:
    """Refuse codes that stand for other values than bitsandbytes' own (to the last bit of float32)."""
    found = content.view(torch.float32)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=0, atol=1e-7):
        raise UserError(f"{name} is not bitsandbytes' table of 4-bit values. Download the model again.")
