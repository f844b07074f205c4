"""Integers of 1 to 8 bits in files (GPTQ, AWQ, compressed-tensors), decoded as they are read.

AWQ and GPTQ have names below a layer, which has no tensor "weight": X.qweight, X.qzeros, X.scales,
X.g_idx. compressed-tensors: X.weight_packed or X.weight, X.weight_scale, X.weight_zero_point,
X.weight_g_idx. `IntegerTensor` says what is in them.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from fsdp_qlora.model.formats.published import COMPRESSED, PublishedFormat, Unreadable
from fsdp_qlora.model.formats.settings import Scheme, Settings
from fsdp_qlora.model.formats.stored_tensors import (
    ADVICE,
    FLOAT_TYPES,
    DecodedTensor,
    Encoded,
    Part,
    ReadStored,
    StoredWeight,
    wrong_type,
)
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown

_QUANTIZED: Mapping[str, str | None] = {
    ".qweight": ".weight",
    ".qzeros": ".weight.zero_point",
    ".scales": ".weight.scale",
    ".g_idx": ".weight.g_idx",
}
_COMPRESSED: Mapping[str, str | None] = COMPRESSED | {
    ".weight_zero_point": ".weight.zero_point",
    ".weight_g_idx": ".weight.g_idx",
}
_LAYOUTS = ("pack-quantized", "int-quantized", "naive-quantized")
# Those that GPTQ's programs write; 3 bits cross the borders of 32-bit words.
_GPTQ_BITS = (2, 3, 4, 8)
# A row of eight -> where a word has it: AWQ's kernels unpack even and odd numbers together.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, kw_only=True)
class IntegerFormat(PublishedFormat):
    """Integers, which are not trained on as they are."""

    decoded_type: ClassVar[str] = "the type of their scales"

    bits: int
    """GPTQ's tensors decide for layers for which the configuration has others."""
    is_transposed: bool = False
    """Whether matrices are stored as [in, out]."""
    is_awq: bool = False
    """Whether a word has eight rows, in AWQ's order."""
    subtracts_one: bool = False
    """Whether 1 was subtracted from zero points."""
    has_zeros: bool = False
    """Whether there must be zero points."""

    @property
    def is_written(self) -> bool:
        # The rows of a transposed matrix lie across all of it, and are not written one by one.
        return not self.is_transposed

    def problem(self, weight: StoredWeight) -> str:
        return self.decode(weight).problem()

    def decode(self, weight: StoredWeight) -> "IntegerTensor":
        return IntegerTensor(weight, self)


def read_awq(settings: Settings) -> IntegerFormat:
    """AutoAWQ's format."""
    # The GEMM layout is [in, out / 8] int32, with eight codes of a row in AWQ's own order; the GEMV
    # layouts have other shapes.
    _check_settings(settings, (4,), ("", "gemm"))
    return IntegerFormat(
        name="AWQ", bits=4, is_transposed=True, is_awq=True, has_zeros=True, endings=_QUANTIZED
    )


def read_gptq(settings: Settings) -> IntegerFormat:
    """GPTQ's format."""
    _check_settings(settings, _GPTQ_BITS, ("", "gptq", "gptq_v2"))
    for pattern, changes in settings.fields.get("dynamic", {}).items():
        other = {"format", "checkpoint_format", "quant_method", "method", "pack_dtype"} & (
            changes or {}
        ).keys()
        if other:
            raise Unreadable(f"dynamic gives the layers {shown(pattern)} another {min(other)}")
    return IntegerFormat(
        name="GPTQ",
        bits=settings.fields["bits"],
        is_transposed=True,
        has_zeros=True,
        # Files of the first version store zero - 1 (AutoGPTQ), those of gptq_v2 (GPTQModel) the
        # zero.
        subtracts_one=settings.layout != "gptq_v2",
        endings=_QUANTIZED,
    )


def _check_settings(settings: Settings, bits: Sequence[int], layouts: Sequence[str]) -> None:
    given = settings.fields.get("bits")
    if given not in bits:
        raise Unreadable(
            f"bits must be {' or '.join(map(str, bits))}, and config.json has {given or 'none'}"
        )
    if settings.layout not in layouts:
        raise Unreadable(f"its files are in another layout than {layouts[-1]}")


def integers_of_scheme(scheme: Scheme) -> IntegerFormat | None:
    """The format of a group of compressed-tensors; None if it is another one."""
    if scheme.kind != "int" or scheme.is_modelopt or scheme.bits is None:
        return None
    if scheme.bits > 8:
        raise Unreadable(
            f"{scheme.name} has integers of {scheme.bits} bits, and only 1 to 8 bits are supported"
        )
    if scheme.layout not in _LAYOUTS:
        raise Unreadable(f"{scheme.name} has integers in another format than {', '.join(_LAYOUTS)}")
    return IntegerFormat(
        name=f"INT{scheme.bits}",
        bits=scheme.bits,
        has_zeros=scheme.symmetric is False,
        endings=_COMPRESSED,
    )


class IntegerTensor(DecodedTensor):
    """A matrix [out, in] of integers: (code - zero point) * scale, in the type of the scales.

    Codes of `bits` lie densely in int32 words: along a row [out, in * bits / 32]
    (compressed-tensors; GPTQ's are transposed), or eight rows in a word (AWQ: transposed [out *
    bits / 32, in]); or unpacked as int8. Scales: [out, groups] or one. Zero points: 32 rows in
    `bits` words [out * bits / 32, groups], or int8. g_idx [in]: the group of a column; by default
    groups are columns side by side. From transposed tensors a rank reads the whole packed matrix.
    """

    def __init__(self, weight: StoredWeight, form: IntegerFormat) -> None:
        self._codes = weight.codes
        self._scale = weight.scale
        self._zero_point = weight.zero_point
        self._group_index = weight.group_index
        self._form = form
        self._bits = form.bits
        if form.is_transposed and not form.is_awq:
            self._bits = self._bits_of_shapes()
        # A shape without columns is one that `problem` refuses.
        rows, columns = self._shape_of(self._codes) if len(self._codes.shape) == 2 else (1, 0)
        is_packed = self._codes.dtype == torch.int32
        if is_packed and form.is_awq:
            rows = rows * 32 // self._bits
        elif is_packed:
            columns = columns * 32 // self._bits
        parts = (
            weight.codes,
            weight.scale,
            weight.global_scale,
            weight.zero_point,
            weight.group_index,
        )
        # 32 rows: as many as zero points of any number of bits fill whole words with.
        super().__init__(
            [part.source for part in parts if part is not None],
            torch.Size([rows, columns]),
            self._scale.dtype,
            unit=32 * columns,
        )

    def problem(self) -> str:
        """The tensors that do not fit together; empty if all do."""
        if self._form.has_zeros and self._zero_point is None:
            return f"{self._codes.source} has no zero points"
        for part, types in self._types():
            reason = wrong_type(part, types) if part is not None else ""
            if reason:
                return reason
        columns = self.shape[1]
        groups = self._shape_of(self._scale)[1]
        wrong = [
            part
            for part, shapes in self._possible_shapes()
            if part is not None and self._shape_of(part) not in shapes
        ]
        # Without g_idx all groups have as many columns.
        if not columns or not groups or (columns % groups and self._group_index is None):
            wrong = [self._codes, self._scale]
        return " and ".join(f"{part.source} has shape {list(part.shape)}" for part in wrong)

    def _types(self) -> Iterator[tuple[Part | None, Sequence[torch.dtype]]]:
        """The types that each part may have."""
        whole = (torch.int32,) if self._form.is_transposed else (torch.int32, torch.int8)
        yield self._codes, whole
        yield self._scale, FLOAT_TYPES[:3]
        yield self._zero_point, whole
        yield self._group_index, (torch.int32, torch.int64)

    def _possible_shapes(self) -> Iterator[tuple[Part | None, Sequence[tuple[int, int]]]]:
        """The shapes, as [out, ..], that each part but the codes may have."""
        rows, columns = self.shape
        groups = self._shape_of(self._scale)[1]
        zero_points = self._shape_of(self._scale)
        if self._zero_point is not None and self._zero_point.dtype == torch.int32:
            zero_points = (-(-rows * self._bits // 32), groups)
        yield self._scale, [(rows, groups), (1, 1)]
        yield self._zero_point, [zero_points]
        yield self._group_index, [(columns, 1), (1, columns)]

    def _bits_of_shapes(self) -> int:
        """GPTQ's bits of this matrix, which may differ from those that the configuration has.

        g_idx has as many entries as there are columns.
        """
        columns = self._group_index.shape.numel() if self._group_index is not None else 0
        bits = self._shape_of(self._codes)[1] * 32 / max(columns, 1)
        return int(bits) if bits in _GPTQ_BITS else self._bits

    def _shape_of(self, part: Part) -> tuple[int, int]:
        """The shape of a part as [out, ..]; (1, 1) of a scalar."""
        first, second = (*part.shape, 1, 1)[:2]
        return (second, first) if self._form.is_transposed else (first, second)

    def read_flat(self, read: ReadStored, start: int, stop: int) -> torch.Tensor:
        # Rows of a transposed tensor lie across all of it, so each piece reads it whole: once.
        if self._form.is_transposed:
            read = functools.cache(read)
        return super().read_flat(read, start, stop)

    def decode_units(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        codes = self._rows(read, self._codes, begin, end)
        scale = self._rows(read, self._scale, begin, end)
        groups = self._groups(read, scale.shape[1])
        values = codes.int()
        if self._zero_point is not None:
            values = values - self._rows(read, self._zero_point, begin, end)[: len(codes), groups]
        # In float32, rounded once: products of 16-bit scales need more bits than they have.
        return (values * scale.float()[:, groups]).to(self.dtype)

    def encode(self, read: ReadStored, start: int, values: torch.Tensor) -> Encoded:
        begin = start // self.unit
        end = begin - (-len(values) // self.unit)
        values = values.float().view(-1, self.shape[1])
        scale = self._rows(read, self._scale, begin, end)
        groups = self._groups(read, scale.shape[1])
        zeros = torch.zeros(1, scale.shape[1])
        if self._zero_point is not None:
            zeros = self._rows(read, self._zero_point, begin, end)[: len(values)].float()
        lowest = -(2 ** (self._bits - 1))
        highest = 2 ** (self._bits - 1) - 1
        if self._scale.shape.numel() > 1:
            scale = _grown(scale, values, groups, (lowest - zeros, highest - zeros))
            yield self._scale.source, begin * 32 * scale.shape[1], scale
        # Without a scale there is nothing but the zero.
        codes = (values / scale.float()[:, groups]).nan_to_num(0, 0, 0).round() + zeros[:, groups]
        codes = codes.clamp_(lowest, highest).long()
        first = begin * 32 * self._codes.shape[1]
        if self._codes.dtype == torch.int32:
            yield self._codes.source, first, _pack(codes - lowest, self._bits)
        else:
            yield self._codes.source, first, codes.to(self._codes.dtype)

    def _groups(self, read: ReadStored, count: int) -> torch.Tensor:
        """The group of each column, int64 [in]. count: number of groups."""
        columns = self.shape[1]
        size, rest = divmod(columns, count)
        index = self._group_index
        groups = torch.full([columns], -1) if index is None else read(index.source, 0, columns)
        # compressed-tensors writes -1 where columns have no order of their own.
        if not rest and (groups == -1).all():
            return torch.arange(columns) // size
        # Before it is used as an index: torch would read beyond the scales, or from their end.
        lowest = int(groups.min())
        highest = int(groups.max())
        if lowest < 0 or highest >= count:
            name = index.source if index is not None else None
            raise UserError(
                f"{name} has groups from {lowest} to {highest}, and {self._scale.source} has "
                f"those from 0 to {count - 1}. {ADVICE}"
            )
        return groups.long()

    def _rows(self, read: ReadStored, part: Part, begin: int, end: int) -> torch.Tensor:
        """Rows of a part, in units of 32, unpacked and centred at zero."""
        name = part.source
        rows, columns = self._shape_of(part)
        is_packed = part.dtype == torch.int32
        # Whether words hold numbers of several rows, and not of one row. 32 rows of numbers of
        # `bits` bits are `bits` rows of words.
        across_rows = is_packed and (part is not self._codes or self._form.is_awq)
        unit = self._bits if across_rows else 32
        first, last = (0, 1) if rows == 1 else (begin * unit, min(end * unit, rows))
        if self._form.is_transposed:
            values = read(name, 0, rows * columns).view(columns, rows)[:, first:last].T
        else:
            values = read(name, first * columns, last * columns).view(last - first, columns)
        if not is_packed:
            return values
        adds_one = self._form.subtracts_one and part is self._zero_point
        if adds_one:
            values = _with_ones_added(values, self._bits)
        values = _unpack(values.T, self._bits).T if across_rows else _unpack(values, self._bits)
        if self._form.is_awq:
            values = values.unflatten(0, (-1, 8))[:, _AWQ_ORDER].flatten(0, 1)
        if adds_one and 32 % self._bits:
            values = (values + 1) % 2**self._bits
        # Codes and zero points are centred alike, so that differences are the same; without zero
        # points the centre is the zero.
        return values - 2 ** (self._bits - 1)


def _grown(
    scale: torch.Tensor,
    values: torch.Tensor,
    groups: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The scales of groups, larger where values are more than half a step beyond the last code.

    ends: the lowest and the highest code above the zero point. Decoded weights are rounded to 16
    bits, by up to 2**-9, which is less than half a step. So weights that have not changed keep
    their scales, and get their old codes.
    """
    lowest, highest = (end[:, groups] for end in ends)
    per_value = torch.maximum(values / (highest + 0.5), values / (lowest - 0.5))
    needed = torch.zeros(scale.shape)
    needed.scatter_reduce_(1, groups.expand_as(per_value), per_value, "amax")
    return torch.where(needed > scale.float(), needed.to(scale.dtype), scale)


def _pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of int32 words with numbers of `bits` bits, as `_unpack` reads them."""
    rows, columns = numbers.shape
    first_bits = torch.arange(columns) * bits
    pairs = numbers << first_bits % 32
    # A number may cross into the next word. The last one is padding.
    words = numbers.new_zeros(rows, columns * bits // 32 + 1)
    words.index_add_(1, first_bits // 32, pairs & 0xFFFFFFFF)
    words.index_add_(1, first_bits // 32 + 1, pairs >> 32)
    return words[:, :-1].to(torch.int32)


def _with_ones_added(words: torch.Tensor, bits: int) -> torch.Tensor:
    """GPTQ's zero points of version 2 from those of version 1, as int64 words.

    GPTQModel subtracts 1 from each number by subtracting 0x11111111 (of 4 bits) from int32 words,
    so that a zero borrows from the next number, and adds it again. Numbers of 3 bits cross words:
    it adds 1 to each, modulo 8 (gptqmodel/utils/model.py, convert_gptq_v1_to_v2_format_module).
    """
    if 32 % bits:
        return words
    # int64: a sum of int32 words would overflow.
    return words.long() + sum(1 << at for at in range(0, 32, bits))


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers of `bits` bits in rows of int32 words, the first in the lowest bits.

    Returns int64 [rows, 32 * words / bits].
    """
    first_bits = torch.arange(words.shape[1] * 32 // bits) * bits
    # As unsigned numbers: the highest bit of a word is a bit of a number, and no sign.
    unsigned = F.pad(words, (0, 1)).long() & 0xFFFFFFFF
    # A number may cross into the next word, so each is taken from two. The last one is padding.
    index = first_bits // 32
    pairs = unsigned[:, index] | unsigned[:, index + 1] << 32
    return pairs >> first_bits % 32 & 2**bits - 1
