"""FP8 in files, decoded on the CPU as it is read, and rounded to again.

X.weight [out, in] in float8, multiplied by its scales: X.weight_scale_inv [out / 128, in / 128]
(DeepSeek-V3, Qwen3-FP8; the block size is in config.json), or X.weight_scale (or _inv) for the
whole weight or for each row. "_scale_inv" is a factor all the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from fsdp_qlora.model.formats.published import UNUSED, PublishedFormat, Unreadable
from fsdp_qlora.model.formats.settings import Scheme, Settings, as_block
from fsdp_qlora.model.formats.stored_tensors import (
    ADVICE,
    FLOAT_TYPES,
    DecodedTensor,
    Encoded,
    Float32Tensor,
    Part,
    ReadStored,
    StoredWeight,
    wrong_type,
)
from fsdp_qlora.model.formats.written import WrittenFormat
from fsdp_qlora.model.quantizers.fp8 import block_scales, quantize_blocks, spread_scales
from fsdp_qlora.utils.errors import UserError

_CODE_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_ENDINGS: Mapping[str, str | None] = UNUSED | {"_scale": ".scale", "_scale_inv": ".scale"}
WRITTEN_FP8 = WrittenFormat(
    name="fp8",
    layout="naive-quantized",
    num_bits=8,
    group_size=None,
    strategy="channel",
    scale_type=torch.float32,
)


@dataclass(frozen=True, kw_only=True)
class Float8Format(PublishedFormat):
    """Floats of eight bits, E4M3 or E5M2, with scales for rows, blocks or whole matrices."""

    quantizer: ClassVar[str | None] = "fp8"

    scale_of: Literal["row", "matrix", "block"] | None
    """The part of a matrix that shares a scale; None if only the files' tensors tell it."""
    block: tuple[int, int] | None = None
    """A block's rows and columns."""

    @property
    def is_written(self) -> bool:
        return True

    def layer_options(self) -> Mapping[str, Any] | None:
        if self.scale_of == "block":
            return {"block": self.block}
        if self.scale_of == "matrix":
            return {"num_parts": 1}
        # Of a row is the layers' default.
        return {} if self.scale_of == "row" else None

    def problem(self, weight: StoredWeight) -> str:
        problem = wrong_type(weight.codes, _CODE_TYPES)
        problem = problem or wrong_type(weight.scale, FLOAT_TYPES)
        if not problem and not self._fits(weight.codes.shape, weight.scale.shape):
            problem = self.unfitting_scales(weight)
        return problem

    def _fits(self, codes: torch.Size, scales: torch.Size) -> bool:
        """Whether codes of the first shape can have scales of the second one."""
        if not codes.numel() or len(codes) < 2:
            return False
        # Several matrices, such as experts, have their dims first in the scales, too.
        matrices = codes[:-2]
        if scales[: len(matrices)] != matrices:
            return False
        return self._scale_block(codes[-2:], scales[len(matrices) :]) is not None

    def _scale_block(self, codes: torch.Size, scales: torch.Size) -> tuple[int, int] | None:
        """Rows and columns of a matrix that share a scale; None if scales do not fit its shape."""
        # One scale for the whole matrix is read as one for each row, all of them the same.
        if scales.numel() == 1 or scales in ((codes[0],), (codes[0], 1)):
            return 1, codes[1]
        if self.block is None:
            return None
        # The last block of a row or column may be cut.
        num_blocks = tuple(-(-size // side) for size, side in zip(codes, self.block, strict=True))
        return self.block if scales == num_blocks else None

    def decode(self, weight: StoredWeight) -> "Float8Tensor":
        shape = weight.codes.shape
        if len(shape) != 2:
            raise UserError(
                f"{weight.folder}: {weight.codes.source} in FP8 has shape {list(shape)} and must "
                f"be a matrix. {ADVICE}"
            )
        block = self._scale_block(shape, weight.scale.shape)
        assert block is not None
        return Float8Tensor(weight, block)

    def check_without_scale(self, name: str, part: Part) -> None:
        if part.dtype in _CODE_TYPES:
            folder = part.tensor.file.parent
            raise UserError(f"{folder}: {name} is in FP8 and has no scale. {ADVICE}")

    def check_kept(self, weight: StoredWeight) -> None:
        self.check(weight)
        if weight.codes.dtype == torch.float8_e5m2:
            raise UserError(
                f"{weight.codes.source} is in E5M2, which is not trained on as it is. Give "
                "--quant_type nf4, or --train_type lora, which decode it."
            )

    def keep_statistic(self, statistic: Part) -> Float32Tensor | None:
        # FP8 layers keep float32 scales; files may have them in 8 or 16 bits.
        if statistic.dtype == torch.float32:
            return None
        return Float32Tensor(statistic, in_bytes=True)


def read_fp8(settings: Settings) -> Float8Format:
    """transformers' own FP8 (fp8, fbgemm_fp8)."""
    fields = settings.fields
    scale_of: Literal["row", "matrix", "block"] | None = None
    block = None
    if "weight_block_size" in fields:
        scale_of = "block"
        block = as_block(fields["weight_block_size"])
    elif settings.method == "fbgemm_fp8":
        scale_of = "row"
    elif fields.get("activation_scheme") == "static":
        scale_of = "matrix"
    return Float8Format(
        name="FP8", scale_of=scale_of, block=block, endings=_ENDINGS, skipped=settings.skipped
    )


def float8_of_scheme(scheme: Scheme) -> Float8Format | None:
    """The format of a group of compressed-tensors or modelopt; None if it is another one."""
    if (scheme.kind, scheme.bits) != ("float", 8) or scheme.group_size not in (None, -1):
        return None
    strategy = scheme.strategy
    if strategy is None:
        # compressed-tensors' rule for configurations without a strategy: -1 is a group as long as a
        # row.
        strategy = "channel" if scheme.group_size == -1 else "tensor"
    if strategy == "block" and scheme.block is None:
        raise Unreadable(f"{scheme.name} has scales of blocks, and no block_structure")
    scales: Mapping[str, Literal["row", "matrix", "block"]] = {
        "block": "block",
        "channel": "row",
        "tensor": "matrix",
    }
    block = scheme.block if strategy == "block" else None
    return Float8Format(name="FP8", scale_of=scales.get(strategy), block=block, endings=_ENDINGS)


class Float8Tensor(DecodedTensor):
    """A matrix in FP8. block: rows and columns that share a scale, unless there is only one."""

    def __init__(self, weight: StoredWeight, block: tuple[int, int]) -> None:
        shape = weight.codes.shape
        parts = [weight.codes, weight.scale, weight.global_scale]
        sources = [part.source for part in parts if part is not None]
        # Rows that share their scales are decoded together.
        super().__init__(sources, shape, torch.bfloat16, unit=block[0] * shape[1])
        self._codes = weight.codes
        self._scale = weight.scale.source
        self._block = block
        self._has_one = weight.scale.shape.numel() == 1

    def decode_units(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        # The last unit may have fewer rows.
        last = min(end * self.unit, self.shape.numel())
        values = read(self._codes.source, begin * self.unit, last)
        # In float32: the product is rounded to bf16 once, where it is copied.
        values = values.view(-1, self.shape[1]).float()
        scales = self._scales(read, begin, end)
        return values.mul_(spread_scales(scales, self._block, values.shape))

    def _scales(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        """The scales of units [begin, end), [row blocks, column blocks]; or the only one."""
        width = -(-self.shape[1] // self._block[1])
        first, last = (0, 1) if self._has_one else (begin * width, end * width)
        return read(self._scale, first, last).view(-1, width)

    def encode(self, read: ReadStored, start: int, values: torch.Tensor) -> Encoded:
        code_type = self._codes.dtype
        rows = values.float().view(-1, self.shape[1])
        begin = start // self.unit
        scale = self._scales(read, begin, begin + -(-len(values) // self.unit))
        # Keep scales unless values have grown: weights that have not changed then get their old
        # codes. Decoded weights were rounded to bf16, by up to 2**-8, which is no growth.
        if not self._has_one:
            new = block_scales(rows, self._block, code_type).to(scale.dtype)
            has_grown = new.float() > scale.float() * (1 + 2**-8)
            scale = torch.where(has_grown, new, scale)
            yield self._scale, begin * scale.shape[1], scale
        codes, *_ = quantize_blocks(rows, self._block, code_type, scale)
        yield self._codes.source, start, codes
