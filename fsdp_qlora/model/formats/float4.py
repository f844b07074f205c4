"""MXFP4 and NVFP4 in files, decoded on the CPU as they are read, and rounded to again.

gpt_oss (OCP Microscaling Formats 1.0): X_blocks [experts, out, in / 32, 16] with two codes per
byte, and X_scales [experts, out, in / 32], powers of two; decoded to transformers' X [experts, in,
out]. compressed-tensors: X.weight_packed [out, in / 2] with X.weight_scale [out, groups], and for
NVFP4 X.weight_global_scale [1], a divisor. modelopt (NVFP4): X.weight [out, in / 2],
X.weight_scale, and X.weight_scale_2, a factor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fsdp_qlora.model.formats.published import COMPRESSED, UNUSED, PublishedFormat
from fsdp_qlora.model.formats.settings import Scheme, Settings
from fsdp_qlora.model.formats.stored_tensors import (
    DecodedTensor,
    Encoded,
    Part,
    ReadStored,
    StoredWeight,
    wrong_type,
)
from fsdp_qlora.model.formats.written import WrittenFormat
from fsdp_qlora.model.quantizers.base import Matrix
from fsdp_qlora.model.quantizers.e2m1 import E2m1Tensors, E2m1Weight, Mxfp4Weight, Nvfp4Weight

_GPT_OSS: Mapping[str, str | None] = {"_blocks": "", "_scales": ".scale"}
_MODELOPT: Mapping[str, str | None] = UNUSED | {"_scale_2": ".global_scale", "_scale": ".scale"}
WRITTEN_MXFP4 = WrittenFormat(
    name="mxfp4",
    layout="mxfp4-pack-quantized",
    num_bits=4,
    group_size=32,
    strategy="group",
    # E8M0 as bytes
    scale_type=torch.uint8,
)
WRITTEN_NVFP4 = WrittenFormat(
    name="nvfp4",
    layout="nvfp4-pack-quantized",
    num_bits=4,
    group_size=16,
    strategy="tensor_group",
    scale_type=torch.float8_e4m3fn,
    has_global_scale=True,
)


@dataclass(frozen=True, kw_only=True)
class Float4Format(PublishedFormat):
    """Floats of four bits in groups that share a scale."""

    group_size: ClassVar[int]
    scale_types: ClassVar[tuple[torch.dtype, ...]]

    is_upright: bool = False
    """Whether weights are [experts, in, out], and their codes and scales [experts, out, ..]."""

    @property
    def is_written(self) -> bool:
        return True

    def layer(self, shape: tuple[int, ...]) -> E2m1Weight:
        """The quantizer's weight of this shape, which decodes and encodes."""
        raise NotImplementedError

    def layer_options(self) -> Mapping[str, Any]:
        return {"is_upright": True} if self.is_upright else {}

    def problem(self, weight: StoredWeight) -> str:
        problem = wrong_type(weight.codes, (torch.uint8,))
        problem = problem or wrong_type(weight.scale, self.scale_types)
        problem = problem or self._wrong_global_scale(weight)
        if not problem and not self._fits(weight.codes.shape, weight.scale.shape):
            problem = self.unfitting_scales(weight)
        return problem

    def _wrong_global_scale(self, weight: StoredWeight) -> str:
        return ""

    def _fits(self, codes: torch.Size, scales: torch.Size) -> bool:
        """Whether codes of the first shape can have scales of the second one."""
        if not codes.numel() or len(codes) < 2:
            return False
        if self.is_upright:
            return len(codes) == 4 and 2 * codes[-1] == self.group_size and scales == codes[:-1]
        groups, rest = divmod(2 * codes[-1], self.group_size)
        return not rest and scales == (*codes[:-1], groups)

    def decode(self, weight: StoredWeight) -> "Float4Tensor":
        shape = weight.codes.shape
        # gpt_oss has the groups of a row, and the bytes of a group, in two dims.
        bytes_shape = (*shape[:-2], shape[-2] * shape[-1]) if self.is_upright else tuple(shape)
        # Two codes per byte, side by side in a row.
        whole = (*bytes_shape[:-1], 2 * bytes_shape[-1])
        return Float4Tensor(weight, self.layer(whole), transposes=self.is_upright)


@dataclass(frozen=True, kw_only=True)
class Mxfp4Format(Float4Format):
    """MXFP4."""

    quantizer: ClassVar[str | None] = "mxfp4"
    group_size: ClassVar[int] = Mxfp4Weight.group_size
    scale_types: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8, torch.float8_e8m0fnu)

    def layer(self, shape: tuple[int, ...]) -> E2m1Weight:
        return Mxfp4Weight(shape, compute_dtype=torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Nvfp4Format(Float4Format):
    """NVFP4, with one global scale for each matrix of the files."""

    quantizer: ClassVar[str | None] = "nvfp4"
    group_size: ClassVar[int] = Nvfp4Weight.group_size
    scale_types: ClassVar[tuple[torch.dtype, ...]] = (torch.float8_e4m3fn,)

    multiplies: bool
    """Whether global scales are factors and not divisors."""

    def layer_options(self) -> Mapping[str, Any]:
        return {"num_parts": 1, "multiplies": self.multiplies}

    def layer(self, shape: tuple[int, ...]) -> E2m1Weight:
        return Nvfp4Weight(
            shape, compute_dtype=torch.bfloat16, num_parts=1, multiplies=self.multiplies
        )

    def _wrong_global_scale(self, weight: StoredWeight) -> str:
        part = weight.global_scale
        if part is None:
            return f"{weight.codes.source} has no global scale"
        if part.shape.numel() != 1:
            return f"{part.source} has shape {list(part.shape)} and must be one number"
        return wrong_type(part, (torch.float32,))


def read_gpt_oss(settings: Settings) -> Mxfp4Format:
    """gpt_oss's MXFP4: experts alone."""
    return Mxfp4Format(name="MXFP4", is_upright=True, endings=_GPT_OSS, has_linears=False)


def float4_of_scheme(scheme: Scheme) -> Float4Format | None:
    """The format of a group of compressed-tensors or modelopt; None if it is another one."""
    if (scheme.kind, scheme.bits) != ("float", 4):
        return None
    if scheme.group_size == 16:
        # modelopt's global scale is a factor, and that of compressed-tensors a divisor.
        endings = _MODELOPT if scheme.is_modelopt else COMPRESSED
        return Nvfp4Format(name="NVFP4", multiplies=scheme.is_modelopt, endings=endings)
    if scheme.group_size == 32 and not scheme.is_modelopt:
        return Mxfp4Format(name="MXFP4", endings=COMPRESSED)
    return None


class Float4Tensor(DecodedTensor):
    """A weight in MXFP4 or NVFP4.

    transposes: whether each matrix is stored as [out, in] and used as [in, out], so that it is
    decoded as a whole.
    """

    def __init__(self, weight: StoredWeight, layer: E2m1Weight, *, transposes: bool) -> None:
        *matrices, rows, columns = layer.shape
        if transposes:
            shape = torch.Size([*matrices, columns, rows])
            unit = rows * columns
        else:
            shape = torch.Size(layer.shape)
            unit = layer.group_size
        parts = [weight.codes, weight.scale, weight.global_scale]
        sources = [part.source for part in parts if part is not None]
        super().__init__(sources, shape, torch.bfloat16, unit=unit)
        self._codes = weight.codes.source
        self._scale = weight.scale.source
        self._global_scale = weight.global_scale
        self._layer = layer
        self._transposes = transposes

    def _read_global_scale(self, read: ReadStored) -> torch.Tensor | None:
        part: Part | None = self._global_scale
        return None if part is None else read(part.source, 0, 1)

    def decode_units(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        first = begin * self.unit
        last = end * self.unit
        size = self._layer.group_size
        # Two codes per byte; a unit is whole groups, so whole bytes and whole scales.
        tensors = E2m1Tensors(
            read(self._codes, first // 2, last // 2),
            read(self._scale, first // size, last // size),
            self._read_global_scale(read),
        )
        values = self._layer.decode_tensors(Matrix((last - first,)), self.dtype, tensors)
        if self._transposes:
            return values.view(-1, self.shape[2], self.shape[1]).mT.contiguous()
        return values

    def encode(self, read: ReadStored, start: int, values: torch.Tensor) -> Encoded:
        if self._transposes:
            values = values.view(-1, *self.shape[1:]).mT.contiguous()
        # The global scale stays: it belongs to all parts of the tensor, and this is one of them.
        encoded = self._layer.quantize(values.flatten(), self._read_global_scale(read))
        yield self._codes, start // 2, encoded.weight
        yield self._scale, start // self._layer.group_size, encoded.scale
