"""Weight files in FP8, MXFP4, NVFP4 and integers, decoded on the CPU as they are read.

FP8: X.weight [out, in] in float8, multiplied by its scales: X.weight_scale_inv [out / 128, in /
128] (DeepSeek-V3, Qwen3-FP8; the block size is in config.json), or X.weight_scale (or _inv) for the
whole weight or for each row. MXFP4 (gpt_oss; OCP Microscaling Formats 1.0): X_blocks [experts, out,
in / 32, 16] with two codes per byte, and X_scales [experts, out, in / 32], powers of two; decoded
to transformers' X [experts, in, out]. compressed-tensors (MXFP4, NVFP4): X.weight_packed [out, in /
2] and X.weight_scale; modelopt (NVFP4): X.weight. Integers: see `IntegerTensor`.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from fsdp_qlora.model.quantizers.base import Matrix
from fsdp_qlora.model.quantizers.e2m1 import E2m1Tensors, E2m1Weight, Mxfp4Weight, Nvfp4Weight
from fsdp_qlora.model.quantizers.fp8 import block_scales, quantize_blocks, spread_scales
from fsdp_qlora.model.quantizers.packed_format import INTEGERS, PackedFormat
from fsdp_qlora.sharding.loading.packed_integers import IntegerTensor
from fsdp_qlora.sharding.loading.stored_tensors import (
    ADVICE,
    FLOAT_TYPES,
    WEIGHT_TYPES,
    DecodedTensor,
    Encoded,
    ReadStored,
    StoredTensor,
    wrong_type,
)
from fsdp_qlora.utils.errors import UserError

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_E2M1: Mapping[str, type[E2m1Weight]] = {"mxfp4": Mxfp4Weight, "nvfp4": Nvfp4Weight}
# Endings of a weight's other tensors, below its name here.
_STATISTICS = (".scale", ".global_scale", ".zero_point", ".g_idx")
# The types of codes in the files, and of their scales.
_CODES: Mapping[str, tuple[torch.dtype, ...]] = {
    "fp8": _FP8,
    "mxfp4": (torch.uint8,),
    "nvfp4": (torch.uint8,),
}
_SCALES: Mapping[str, tuple[torch.dtype, ...]] = {
    "fp8": FLOAT_TYPES,
    "mxfp4": (torch.uint8, torch.float8_e8m0fnu),
    "nvfp4": (torch.float8_e4m3fn,),
}


def find_decoded(
    stored: PackedFormat | None, entries: Mapping[str, StoredTensor], folder: Path
) -> tuple[dict[str, DecodedTensor], set[str]]:
    """Find the tensors that must be decoded.

    Args:
        stored: the format of the weights; None for plain ones.
        entries: all tensors of the files.
    Returns:
        Name in the model -> tensor decoded as it is read; and names of tensors that the model
        itself does not have.
    """
    decoded: dict[str, DecodedTensor] = {
        name: _Float32(name, entry)
        for name, entry in entries.items()
        if entry.dtype == torch.float64
    }
    if stored is None:
        return decoded, set()
    names, unused = names_here(stored, entries)
    for name in names:
        if f"{name}.scale" in names:
            decoded[name] = _decoded_weight(name, names, entries, stored, folder)
        elif stored.quantizer == "fp8" and entries[names[name]].dtype in _FP8:
            raise UserError(f"{folder}: {name} is in FP8 and has no scale. {ADVICE}")
    # Codes may have the very name of the weight in the model: only other names are unknown to it.
    for name, tensor in decoded.items():
        unused |= {part for part in tensor.parts if part != name}
    return decoded, unused


def names_here(
    packed: PackedFormat, entries: Mapping[str, StoredTensor]
) -> tuple[dict[str, str], set[str]]:
    """Name here -> name in the files, for tensors of a packed model; and names that are unused."""
    names = {name: packed.name_here(name) for name in entries}
    codes = {here for name, here in names.items() if entries[name].dtype not in WEIGHT_TYPES}
    result: dict[str, str] = {}
    for name, name_here in names.items():
        if name_here is None:
            continue
        # A model may have a parameter `scale` of its own, of a module that has no codes.
        is_parameter = name_here.endswith(_STATISTICS) and name_here.rpartition(".")[0] not in codes
        key = name if is_parameter else name_here
        if key in result:
            raise UserError(
                f"The files have {name} and {result[key]}, which cannot both be {key}. {ADVICE}"
            )
        result[key] = name
    return result, {name for name, name_here in names.items() if name_here is None}


def find_packed(
    packed: PackedFormat, entries: dict[str, StoredTensor]
) -> tuple[dict[str, DecodedTensor], set[str]]:
    """Find the tensors of weights that are kept as they are. Returns the same as `find_decoded`.

    Their codes and statistics become bytes in `entries`.
    """
    # bitsandbytes' are bytes in the files, too.
    if packed.quantizer not in _CODES:
        return {}, set()
    names, unused = names_here(packed, entries)
    for name in names:
        if f"{name}.scale" in names:
            _check_parts(name, names, entries, packed)
            if entries[names[name]].dtype == torch.float8_e5m2:
                raise UserError(
                    f"{names[name]} is in E5M2, which is not trained on as it is. Give "
                    "--quant_type nf4, or --train_type lora, which decode it."
                )
    decoded: dict[str, DecodedTensor] = {}
    for name, source in names.items():
        base = name.removesuffix(".scale").removesuffix(".global_scale")
        entry = entries[source]
        if f"{base}.scale" not in names:
            continue
        # FP8 layers keep float32 scales; files may have them in 8 or 16 bits.
        if packed.quantizer == "fp8" and name != base and entry.dtype != torch.float32:
            decoded[name] = _Float32(source, entry, in_bytes=True)
            unused.add(source)
        else:
            entries[name] = entries.pop(source).in_bytes()
    return decoded, unused


class _Float32(DecodedTensor):
    """A tensor of other floats as float32, or as the bytes of that."""

    def __init__(self, name: str, entry: StoredTensor, *, in_bytes: bool = False) -> None:
        rounded = entry._replace(dtype=torch.float32)
        rounded = rounded.in_bytes() if in_bytes else rounded
        # One number: an element, or its four bytes.
        unit = torch.float32.itemsize // rounded.dtype.itemsize
        super().__init__([name], rounded.shape, rounded.dtype, unit=unit)

    def _decode(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        return read(self.parts[0], begin, end).float().view(self.dtype)


def _decoded_weight(
    name: str,
    names: Mapping[str, str],
    entries: Mapping[str, StoredTensor],
    stored: PackedFormat,
    folder: Path,
) -> DecodedTensor:
    if stored.quantizer == INTEGERS:
        sources = {
            ending: names[name + ending] for ending in ("", *_STATISTICS) if name + ending in names
        }
        parts_of_weight = {ending: entries[source] for ending, source in sources.items()}
        tensor = IntegerTensor(sources, parts_of_weight, **(stored.options or {}))
        problem = tensor.problem()
        if problem:
            raise UserError(f"{folder}: {name} is not in {stored.name}: {problem}. {ADVICE}")
        return tensor
    _check_parts(name, names, entries, stored)
    # In this order, by which the tensors below know codes, scales and global scale.
    parts = [
        names[part] for part in (name, f"{name}.scale", f"{name}.global_scale") if part in names
    ]
    shape = entries[parts[0]].shape
    scales = entries[parts[1]].shape
    options = dict(stored.options or {})
    if stored.quantizer == "fp8":
        if len(shape) != 2:
            raise UserError(
                f"{folder}: {parts[0]} in FP8 has shape {list(shape)} and must be a "
                f"matrix. {ADVICE}"
            )
        block = _scale_block(shape, scales, options.get("block"))
        assert block is not None
        return _Fp8Tensor(parts, entries[parts[0]], entries[parts[1]], block)
    is_transposed = options.pop("is_upright", False)
    quantizer = _E2M1[stored.quantizer]
    # gpt_oss has the groups of a row, and the bytes of a group, in two dims.
    bytes_shape = (*shape[:-2], shape[-2] * shape[-1]) if is_transposed else tuple(shape)
    # Two codes per byte, side by side in a row.
    whole = (*bytes_shape[:-1], 2 * bytes_shape[-1])
    layer = quantizer(whole, compute_dtype=torch.bfloat16, **options)
    return _E2m1Tensor(parts, layer, is_transposed)


def _check_parts(
    name: str, names: Mapping[str, str], entries: Mapping[str, StoredTensor], stored: PackedFormat
) -> None:
    """Refuse a weight whose codes and scales have types or shapes that the format does not have."""
    codes = names[name]
    scale = names[f"{name}.scale"]
    problem = wrong_type(codes, entries[codes], _CODES[stored.quantizer])
    problem = problem or wrong_type(scale, entries[scale], _SCALES[stored.quantizer])
    if not problem and stored.quantizer == "nvfp4":
        problem = _wrong_global_scale(name, names, entries)
    shape = entries[codes].shape
    scales = entries[scale].shape
    if not problem and not _fits(shape, scales, stored):
        problem = (
            f"{codes} {list(shape)} in {stored.name} has scales {list(scales)}, which do not fit "
            "its shape"
        )
    if problem:
        raise UserError(
            f"{entries[codes].file.parent}: {name} is not in {stored.name}: {problem}. {ADVICE}"
        )


def _wrong_global_scale(
    name: str, names: Mapping[str, str], entries: Mapping[str, StoredTensor]
) -> str:
    source = names.get(f"{name}.global_scale")
    if source is None:
        return f"{names[name]} has no global scale"
    if entries[source].shape.numel() != 1:
        return f"{source} has shape {list(entries[source].shape)} and must be one number"
    return wrong_type(source, entries[source], (torch.float32,))


def _fits(shape: torch.Size, scales: torch.Size, stored: PackedFormat) -> bool:
    """Whether codes of the first shape can have scales of the second one."""
    options = stored.options or {}
    if not shape.numel() or len(shape) < 2:
        return False
    if stored.quantizer == "fp8":
        # Several matrices, such as experts, have their dims first in the scales, too.
        matrices = shape[:-2]
        if scales[: len(matrices)] != matrices:
            return False
        scales_of_matrix = scales[len(matrices) :]
        return _scale_block(shape[-2:], scales_of_matrix, options.get("block")) is not None
    group_size = _E2M1[stored.quantizer].group_size
    if options.get("is_upright"):
        return len(shape) == 4 and 2 * shape[-1] == group_size and scales == shape[:-1]
    groups, rest = divmod(2 * shape[-1], group_size)
    return not rest and scales == (*shape[:-1], groups)


def _scale_block(
    shape: torch.Size, scale: torch.Size, block: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Rows and columns of a matrix that share a scale; None if scales do not fit its shape."""
    # One scale for the whole matrix is read as one for each row, all of them the same.
    if scale.numel() == 1 or scale in ((shape[0],), (shape[0], 1)):
        return 1, shape[1]
    if block is None:
        return None
    # The last block of a row or column may be cut.
    num_blocks = tuple(-(-size // side) for size, side in zip(shape, block, strict=True))
    return block if scale == num_blocks else None


class _Fp8Tensor(DecodedTensor):
    """A matrix in FP8. block: rows and columns that share a scale, unless there is only one."""

    def __init__(
        self, parts: list[str], codes: StoredTensor, scale: StoredTensor, block: tuple[int, int]
    ) -> None:
        # Rows that share their scales are decoded together.
        super().__init__(parts, codes.shape, torch.bfloat16, unit=block[0] * codes.shape[1])
        self._codes = codes
        self._block = block
        self._has_one = scale.shape.numel() == 1

    def _decode(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        # The last unit may have fewer rows.
        last = min(end * self.unit, self.shape.numel())
        values = read(self.parts[0], begin * self.unit, last)
        # In float32: the product is rounded to bf16 once, where it is copied.
        values = values.view(-1, self.shape[1]).float()
        scales = self._scales(read, begin, end)
        return values.mul_(spread_scales(scales, self._block, values.shape))

    def _scales(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        """The scales of units [begin, end), [row blocks, column blocks]; or the only one."""
        width = -(-self.shape[1] // self._block[1])
        first, last = (0, 1) if self._has_one else (begin * width, end * width)
        return read(self.parts[1], first, last).view(-1, width)

    def encode(self, read: ReadStored, start: int, values: torch.Tensor) -> Encoded:
        rows = values.float().view(-1, self.shape[1])
        begin = start // self.unit
        scale = self._scales(read, begin, begin + -(-len(values) // self.unit))
        # Keep scales unless values have grown: weights that have not changed then get their old
        # codes. Decoded weights were rounded to bf16, by up to 2**-8, which is no growth.
        if not self._has_one:
            new = block_scales(rows, self._block, self._codes.dtype).to(scale.dtype)
            has_grown = new.float() > scale.float() * (1 + 2**-8)
            scale = torch.where(has_grown, new, scale)
            yield self.parts[1], begin * scale.shape[1], scale
        codes, *_ = quantize_blocks(rows, self._block, self._codes.dtype, scale)
        yield self.parts[0], start, codes


class _E2m1Tensor(DecodedTensor):
    """A weight in MXFP4 or NVFP4.

    transposes: whether each matrix is stored as [out, in] and used as [in, out], so that it is
    decoded as a whole.
    """

    def __init__(self, parts: list[str], layer: E2m1Weight, transposes: bool) -> None:
        *matrices, rows, columns = layer.shape
        if transposes:
            shape = torch.Size([*matrices, columns, rows])
            unit = rows * columns
        else:
            shape = torch.Size(layer.shape)
            unit = layer.group_size
        super().__init__(parts, shape, torch.bfloat16, unit=unit)
        self._layer = layer
        self._transposes = transposes

    def _decode(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        codes, scale, *global_scale = self.parts
        first = begin * self.unit
        last = end * self.unit
        size = self._layer.group_size
        # Two codes per byte; a unit is whole groups, so whole bytes and whole scales.
        tensors = E2m1Tensors(
            read(codes, first // 2, last // 2),
            read(scale, first // size, last // size),
            read(global_scale[0], 0, 1) if global_scale else None,
        )
        values = self._layer.decode_tensors(Matrix((last - first,)), self.dtype, tensors)
        if self._transposes:
            return values.view(-1, self.shape[2], self.shape[1]).mT.contiguous()
        return values

    def encode(self, read: ReadStored, start: int, values: torch.Tensor) -> Encoded:
        if self._transposes:
            values = values.view(-1, *self.shape[1:]).mT.contiguous()
        # The global scale stays: it belongs to all parts of the tensor, and this is one of them.
        global_scale = read(self.parts[2], 0, 1) if len(self.parts) > 2 else None
        encoded = self._layer.quantize(values.flatten(), global_scale)
        yield self.parts[0], start // 2, encoded.weight
        yield self.parts[1], start // self._layer.group_size, encoded.scale
