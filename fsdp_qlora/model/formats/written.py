"""The formats of compressed-tensors in which models are written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import TensorForm


@dataclass(frozen=True, kw_only=True)
class WrittenFormat:
    """A format of compressed-tensors. Its codes are E2M1, packed, or E4M3."""

    name: str
    """The --quant_type."""
    layout: str
    """compressed-tensors' name."""
    num_bits: int
    group_size: int | None
    """Weights that share a scale; None for a row."""
    strategy: str
    scale_type: torch.dtype
    """The type of scales in files."""
    has_global_scale: bool = False

    def config(self, skipped: Sequence[str]) -> dict[str, Any]:
        """The quantization_config of a model in this format.

        skipped: paths of linear layers that are not quantized.
        """
        weights = {
            "num_bits": self.num_bits,
            "group_size": self.group_size,
            "strategy": self.strategy,
            "type": "float",
            "symmetric": True,
            "dynamic": False,
        }
        groups = {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "format": self.layout,
            }
        }
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.layout,
            "config_groups": groups,
            "ignore": list(skipped),
        }

    def forms(self, name: str, shape: tuple[int, ...]) -> dict[str, TensorForm]:
        """The tensors of a weight [out, in] in such a model.

        Raises UserError if it has no such form.
        """
        size = self.group_size or shape[-1]
        if len(shape) != 2 or not name.endswith(".weight") or shape[1] % size:
            raise UserError(
                f"{name} {list(shape)} cannot be in {self.name}: it must be a matrix with "
                f"rows of {size}s."
            )
        scales = {f"{name}_scale": TensorForm(self.scale_type, (shape[0], shape[1] // size))}
        if self.has_global_scale:
            scales[self.global_scale_of(name)] = TensorForm(torch.float32, (1,))
        if self.num_bits == 8:
            return {name: TensorForm(torch.float8_e4m3fn, shape)} | scales
        # Two codes of four bits per byte.
        packed_shape = (shape[0], shape[1] // 2)
        return {f"{name}_packed": TensorForm(torch.uint8, packed_shape)} | scales

    def global_scale_of(self, name: str) -> str:
        """The name of a weight's global scale."""
        return f"{name}_global_scale"
