"""The formats of compressed-tensors in which models are written."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import TensorForm

# The formats of compressed-tensors that are written, by --quant_type: name, type of scales (E8M0 as
# bytes, E4M3 or float32), settings of weights.
_WRITTEN: Mapping[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "mxfp4": (
        "mxfp4-pack-quantized",
        torch.uint8,
        {"num_bits": 4, "group_size": 32, "strategy": "group"},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        torch.float8_e4m3fn,
        {"num_bits": 4, "group_size": 16, "strategy": "tensor_group"},
    ),
    "fp8": (
        "naive-quantized",
        torch.float32,
        {"num_bits": 8, "group_size": None, "strategy": "channel"},
    ),
}


def compressed_config(quant_type: str, skipped: Sequence[str]) -> dict[str, Any]:
    """The quantization_config of a model that is written in a format of compressed-tensors.

    skipped: paths of linear layers that are not quantized.
    """
    name, _, form = _WRITTEN[quant_type]
    weights = form | {"type": "float", "symmetric": True, "dynamic": False}
    groups = {
        "group_0": {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "format": name,
        }
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": name,
        "config_groups": groups,
        "ignore": list(skipped),
    }


def compressed_forms(quant_type: str, name: str, shape: tuple[int, ...]) -> dict[str, TensorForm]:
    """The tensors of a weight [out, in] in such a model.

    Raises UserError if it has no such form.
    """
    _, dtype, form = _WRITTEN[quant_type]
    # FP8 has no groups: a scale is for a row.
    size = form["group_size"] or shape[-1]
    if len(shape) != 2 or not name.endswith(".weight") or shape[1] % size:
        raise UserError(
            f"{name} {list(shape)} cannot be in {quant_type}: it must be a matrix with "
            f"rows of {size}s."
        )
    scales = {f"{name}_scale": TensorForm(dtype, (shape[0], shape[1] // size))}
    if quant_type == "nvfp4":
        scales[f"{name}_global_scale"] = TensorForm(torch.float32, (1,))
    if quant_type == "fp8":
        return {name: TensorForm(torch.float8_e4m3fn, shape)} | scales
    # Two codes of four bits per byte.
    packed_shape = (shape[0], shape[1] // 2)
    return {f"{name}_packed": TensorForm(torch.uint8, packed_shape)} | scales
