"""Weight files in FP8 and MXFP4: tensors decoded to bf16 on the CPU as they are read, one part at a time.

FP8: X.weight [out, in] in float8, multiplied by its scales: X.weight_scale_inv [out / 128, in / 128] (DeepSeek-V3,
Qwen3-FP8; the block size is in config.json), or X.weight_scale (or _inv) for the whole weight or for each row.
MXFP4 (gpt_oss; OCP Microscaling Formats 1.0): X_blocks [experts, out, in / 32, 16] with two codes per byte, and
X_scales [experts, out, in / 32], powers of two; decoded to transformers' X [experts, in, out].
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from fsdp_qlora.model.quantizers.bnb_4bit import quantization_settings
from fsdp_qlora.utils.errors import UserError

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("_scale_inv", "_scale")
_UNUSED = ("activation_scale", "input_scale")  # scales of 8-bit activations, which have 16 bits here
_PIECE = 2**20  # elements decoded at a time: decoding needs several times their memory
_MXFP4_VALUES = 32  # values that share a scale
_ADVICE = "Give the model with 16- or 32-bit weights."

# (name, start, stop) -> elements [start, stop) of a row-major flattened tensor in the files, not decoded.
ReadStored = Callable[[str, int, int], torch.Tensor]


class StoredTensor(NamedTuple):
    """A tensor in a file. start: the offset of its bytes."""

    file: Path
    dtype: torch.dtype
    shape: torch.Size
    start: int


class DecodedTensor:
    """A tensor that is decoded from tensors in the files, several units (elements, rows or experts) at a time.

    parts: names of the tensors in the files. unit: number of elements that can only be decoded together.
    """

    def __init__(self, parts: list[str], shape: torch.Size, dtype: torch.dtype, *, unit: int) -> None:
        self.parts, self.shape, self.dtype, self.unit = parts, shape, dtype, unit

    def read_flat(self, read: ReadStored, start: int, stop: int) -> torch.Tensor:
        """Decode elements [start, stop) of the row-major flattened tensor."""
        decoded, last = torch.empty(stop - start, dtype=self.dtype), -(-stop // self.unit)
        step = max(1, _PIECE // self.unit)
        for begin in range(start // self.unit, last, step):
            end = min(begin + step, last)
            offset = begin * self.unit
            first, final = max(start, offset), min(stop, end * self.unit)
            values = self._decode(read, begin, end).view(-1)
            decoded[first - start : final - start] = values[first - offset : final - offset]
        return decoded

    def _decode(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        """Decode units [begin, end)."""
        raise NotImplementedError


class StoredFormat(NamedTuple):
    """A storage format that is decoded while reading. block: (rows, columns) that share an FP8 scale, if any."""

    name: str
    block: tuple[int, int] | None

    def describe_use(self, *, quantizes: bool) -> str:
        """Describe how the weights are used, in one line."""
        use = "and quantized again" if quantizes else "and kept in the precision of this run"
        return f"The model is stored in {self.name}: its weights are decoded to bf16 as they are read, {use}."


def take_format(config: PretrainedConfig) -> StoredFormat | None:
    """Remove an FP8 or MXFP4 quantization from a model's configuration and return it; None if there is none."""
    settings = quantization_settings(config)
    method, layout = settings.get("quant_method"), settings.get("format")
    if method == "mxfp4":
        stored = StoredFormat("MXFP4", None)
    elif method in ("fp8", "fbgemm_fp8") or (method, layout) == ("compressed-tensors", "float-quantized"):
        block = settings.get("weight_block_size")
        stored = StoredFormat("FP8", tuple(block) if block else None)
    else:
        return None
    del config.quantization_config
    return stored


def find_decoded(
    stored: StoredFormat | None, entries: Mapping[str, StoredTensor], folder: Path
) -> tuple[dict[str, DecodedTensor], set[str]]:
    """Find the tensors that must be decoded. entries: all tensors of a model's files.

    Returns:
        Name in the model -> tensor decoded as it is read; and names of tensors that the model itself does not have.
    """
    decoded: dict[str, DecodedTensor] = {}
    kind = stored and stored.name
    unused = {name for name in entries if kind == "FP8" and name.endswith(_UNUSED)}
    for name, entry in entries.items():
        if stored and kind == "FP8" and entry.dtype in _FP8 and name not in unused:
            decoded[name] = _fp8_weight(name, entries, stored.block, folder)
        elif kind == "MXFP4" and name.endswith("_blocks"):
            decoded[name.removesuffix("_blocks")] = _mxfp4_experts(name, entries, folder)
        elif entry.dtype == torch.float64:
            decoded[name] = _RoundedDouble(name, entry.shape)
    return decoded, unused | {part for name, tensor in decoded.items() for part in tensor.parts if part != name}


class _RoundedDouble(DecodedTensor):
    """A float64 tensor, rounded to float32."""

    def __init__(self, name: str, shape: torch.Size) -> None:
        super().__init__([name], shape, torch.float32, unit=1)

    def _decode(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        return read(self.parts[0], begin, end).float()


def _fp8_weight(
    name: str, entries: Mapping[str, StoredTensor], block: tuple[int, int] | None, folder: Path
) -> "_Fp8Weight":
    scale = next((name + suffix for suffix in _SCALES if name + suffix in entries), None)
    shape = entries[name].shape
    if scale is None or not entries[scale].dtype.is_floating_point:
        raise UserError(f"{folder}: {name} is in FP8 and has no floating-point scale. {_ADVICE}")
    if len(shape) != 2:
        raise UserError(f"{folder}: {name} is in FP8 and has shape {list(shape)}, but must be a matrix. {_ADVICE}")
    return _Fp8Weight(name, scale, shape, *_scale_block(shape, entries[scale].shape, block, name))


def _scale_block(shape: torch.Size, scale: torch.Size, block: tuple[int, int] | None, name: str) -> tuple[int, int]:
    """Rows and columns of a weight that share a scale."""
    if scale.numel() == 1:
        return shape[0], shape[1]
    if scale in ((shape[0],), (shape[0], 1)):
        return 1, shape[1]
    if block is not None and scale == tuple(-(-size // side) for size, side in zip(shape, block, strict=True)):
        return block
    raise UserError(f"{name} {list(shape)} in FP8 has scales {list(scale)}, which do not fit its shape. {_ADVICE}")


class _Fp8Weight(DecodedTensor):
    """A matrix in FP8. block_rows, block_columns: size of the blocks that share a scale."""

    def __init__(self, weight: str, scale: str, shape: torch.Size, block_rows: int, block_columns: int) -> None:
        super().__init__([weight, scale], shape, torch.bfloat16, unit=shape[1])
        self.block_rows, self.block_columns = block_rows, block_columns

    def _decode(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        """Decode rows [begin, end) to float32."""
        weight, scale = self.parts
        columns = self.shape[1]
        values = read(weight, begin * columns, end * columns).view(end - begin, columns)
        width = -(-columns // self.block_columns)
        above, below = begin // self.block_rows, (end - 1) // self.block_rows + 1
        scales = read(scale, above * width, below * width).view(-1, width).float()
        of_row = torch.arange(begin, end) // self.block_rows - above
        of_column = torch.arange(columns) // self.block_columns
        return values.float().mul_(scales[of_row][:, of_column])


def _mxfp4_experts(blocks: str, entries: Mapping[str, StoredTensor], folder: Path) -> "_Mxfp4Experts":
    scales = f"{blocks.removesuffix('_blocks')}_scales"
    shape = entries[blocks].shape
    fits = len(shape) == 4 and shape[3] * 2 == _MXFP4_VALUES and scales in entries
    if not fits or entries[scales].shape != shape[:3]:
        raise UserError(f"{folder}: {blocks} {list(shape)} does not contain experts in MXFP4. {_ADVICE}")
    experts, rows, groups, _ = shape
    return _Mxfp4Experts([blocks, scales], torch.Size([experts, groups * _MXFP4_VALUES, rows]))


class _Mxfp4Experts(DecodedTensor):
    """Experts in MXFP4. Each is decoded as a whole, since it is stored as [out, in] and used as [in, out]."""

    def __init__(self, parts: list[str], shape: torch.Size) -> None:
        super().__init__(parts, shape, torch.bfloat16, unit=math.prod(shape[1:]))

    def _decode(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = self.parts
        groups, rows = self.shape[1] // _MXFP4_VALUES, self.shape[2]
        count, size = rows * groups, _MXFP4_VALUES // 2
        return convert_moe_packed_tensors(
            read(blocks, begin * count * size, end * count * size).view(-1, rows, groups, size),
            read(scales, begin * count, end * count).view(-1, rows, groups),
            dtype=self.dtype,
            rows_per_chunk=_PIECE // _MXFP4_VALUES,
        )
