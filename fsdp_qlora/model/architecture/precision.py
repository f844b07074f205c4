"""The dtypes in which a run stores, gathers and computes."""

from typing import NamedTuple

import torch


class Precision(NamedTuple):
    """The dtypes of a run.

    name: value of --precision.
    compute_dtype: dtype of matrix products, decoded 4-bit weights and quant_storage.
    frozen_dtype: dtype of frozen weights that are not quantized.
    param_dtype: FSDP2 casts trainable weights to it when it gathers them; None keeps fp32.
    autocast: whether the forward pass runs under autocast to compute_dtype.

    Trainable weights are always stored, and their gradients reduced, in fp32. Buffers (rotary
    tables) keep transformers' fp32; its norms compute in fp32 internally.
    """

    name: str
    compute_dtype: torch.dtype
    frozen_dtype: torch.dtype
    param_dtype: torch.dtype | None
    autocast: bool

    def autocasting(self, device: torch.device) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(device.type, self.compute_dtype, enabled=self.autocast)


_BF16 = torch.bfloat16
_FP16 = torch.float16
_FP32 = torch.float32
_ALL = (
    Precision("fp32", _FP32, _FP32, _FP32, autocast=False),
    Precision("bf16", _BF16, _BF16, _BF16, autocast=False),
    Precision("bf16_autocast", _BF16, _FP32, None, autocast=True),
    Precision("fp16", _FP16, _FP16, _FP16, autocast=False),
    Precision("fp16_autocast", _FP16, _FP32, None, autocast=True),
    # In 2024: bf16 weights with buffers kept in fp32. Buffers are never cast here, so this is bf16.
    Precision("bf16_buffers_autocast", _BF16, _BF16, _BF16, autocast=False),
)
PRECISIONS = {precision.name: precision for precision in _ALL}


def autocast_kind(tensor: torch.Tensor) -> str:
    """The device type whose autocast applies to a tensor."""
    # torch has no autocast for the meta device: the plan runs under the CPU's.
    return "cpu" if tensor.is_meta else tensor.device.type


def choose_precision(name: str, device: torch.device) -> str:
    """Resolve `auto`: bf16 on Ampere GPUs and newer, fp16 on older GPUs, fp32 on the CPU."""
    if name != "auto":
        return name
    if device.type != "cuda":
        return "fp32"
    # torch emulates bf16 on older GPUs, and without the argument calls that supported.
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
