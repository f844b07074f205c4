"""Weights in integers of 2 to 8 bits (GPTQ, AWQ, compressed-tensors), decoded as they are read."""

import functools
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from fsdp_qlora.model.quantizers.packed_format import GPTQ_BITS
from fsdp_qlora.sharding.loading.stored_tensors import (
    ADVICE,
    FLOAT_TYPES,
    DecodedTensor,
    ReadStored,
    StoredTensor,
    wrong_type,
)
from fsdp_qlora.utils.errors import UserError

# A row of eight -> where a word has it: AWQ's kernels unpack even and odd numbers together.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class IntegerTensor(DecodedTensor):
    """A matrix [out, in] of integers: (code - zero point) * scale, in the type of the scales.

    Codes of `bits` lie densely in int32 words: along a row [out, in * bits / 32]
    (compressed-tensors; GPTQ's are transposed), or eight rows in a word (AWQ: transposed [out *
    bits / 32, in]); or unpacked as int8. Scales: [out, groups] or one. Zero points: 32 rows in
    `bits` words [out * bits / 32, groups], or int8. g_idx [in]: the group of a column; by default
    groups are columns side by side. From transposed tensors a rank reads the whole packed matrix.

    names, entries: ending here -> name in the files, tensor. subtracts_one: whether 1 was
    subtracted from zero points. has_zeros: whether there must be some.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        entries: Mapping[str, StoredTensor],
        bits: int,
        *,
        is_transposed: bool = False,
        is_awq: bool = False,
        subtracts_one: bool = False,
        has_zeros: bool = False,
    ) -> None:
        self._names = names
        self._entries = entries
        self._bits = bits
        self._subtracts_one = subtracts_one
        self._has_zeros = has_zeros
        self._is_transposed = is_transposed
        self._is_awq = is_awq
        if is_transposed and not is_awq:
            bits = self._bits = self._bits_of_shapes()
        # A shape without columns is one that `problem` refuses.
        rows, columns = self._shape_of("") if len(entries[""].shape) == 2 else (1, 0)
        is_packed = entries[""].dtype == torch.int32
        if is_packed and is_awq:
            rows = rows * 32 // bits
        elif is_packed:
            columns = columns * 32 // bits
        # 32 rows: as many as zero points of any number of bits fill whole words with.
        super().__init__(
            [*names.values()],
            torch.Size([rows, columns]),
            entries[".scale"].dtype,
            unit=32 * columns,
        )

    def problem(self) -> str:
        """The tensors that do not fit together; empty if all do."""
        if self._has_zeros and ".zero_point" not in self._names:
            return f"{self._names['']} has no zero points"
        for part, types in self._types().items():
            if part in self._names:
                reason = wrong_type(self._names[part], self._entries[part], types)
                if reason:
                    return reason
        rows, columns = self.shape
        groups = self._shape_of(".scale")[1]
        zero_points = [self._shape_of(".scale")]
        if ".zero_point" in self._names and self._entries[".zero_point"].dtype == torch.int32:
            zero_points = [(-(-rows * self._bits // 32), groups)]
        sizes = {
            ".scale": [(rows, groups), (1, 1)],
            ".zero_point": zero_points,
            ".g_idx": [(columns, 1), (1, columns)],
        }
        wrong = [
            part
            for part in sizes
            if part in self._names and self._shape_of(part) not in sizes[part]
        ]
        # Without g_idx all groups have as many columns.
        if not columns or not groups or (columns % groups and ".g_idx" not in self._names):
            wrong = ["", ".scale"]
        return " and ".join(
            f"{self._names[part]} has shape {list(self._entries[part].shape)}" for part in wrong
        )

    def _types(self) -> Mapping[str, Sequence[torch.dtype]]:
        whole = (torch.int32,) if self._is_transposed else (torch.int32, torch.int8)
        return {
            "": whole,
            ".scale": FLOAT_TYPES[:3],
            ".zero_point": whole,
            ".g_idx": (torch.int32, torch.int64),
        }

    def _bits_of_shapes(self) -> int:
        """GPTQ's bits of this matrix, which may differ from those that the configuration has.

        g_idx has as many entries as there are columns.
        """
        columns = self._entries[".g_idx"].shape.numel() if ".g_idx" in self._entries else 0
        bits = self._shape_of("")[1] * 32 / max(columns, 1)
        return int(bits) if bits in GPTQ_BITS else self._bits

    def _shape_of(self, part: str) -> tuple[int, int]:
        """The shape of a part as [out, ..]; (1, 1) of a scalar."""
        first, second = (*self._entries[part].shape, 1, 1)[:2]
        return (second, first) if self._is_transposed else (first, second)

    def read_flat(self, read: ReadStored, start: int, stop: int) -> torch.Tensor:
        # Rows of a transposed tensor lie across all of it, so each piece reads it whole: once.
        if self._is_transposed:
            read = functools.cache(read)
        return super().read_flat(read, start, stop)

    def _decode(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        codes = self._rows(read, "", begin, end)
        scale = self._rows(read, ".scale", begin, end)
        groups = self._groups(read, scale.shape[1])
        values = codes.int()
        if ".zero_point" in self._names:
            values = values - self._rows(read, ".zero_point", begin, end)[: len(codes), groups]
        # In float32, rounded once: products of 16-bit scales need more bits than they have.
        return (values * scale.float()[:, groups]).to(self.dtype)

    def _groups(self, read: ReadStored, count: int) -> torch.Tensor:
        """The group of each column, int64 [in]. count: number of groups."""
        columns = self.shape[1]
        size, rest = divmod(columns, count)
        name = self._names.get(".g_idx")
        groups = torch.full([columns], -1) if name is None else read(name, 0, columns)
        # compressed-tensors writes -1 where columns have no order of their own.
        if not rest and (groups == -1).all():
            return torch.arange(columns) // size
        # Before it is used as an index: torch would read beyond the scales, or from their end.
        lowest = int(groups.min())
        highest = int(groups.max())
        if lowest < 0 or highest >= count:
            raise UserError(
                f"{name} has groups from {lowest} to {highest}, and {self._names['.scale']} has "
                f"those from 0 to {count - 1}. {ADVICE}"
            )
        return groups.long()

    def _rows(self, read: ReadStored, part: str, begin: int, end: int) -> torch.Tensor:
        """Rows of a part, in units of 32, unpacked and centred at zero."""
        name = self._names[part]
        rows, columns = self._shape_of(part)
        is_packed = self._entries[part].dtype == torch.int32
        # Whether words hold numbers of several rows, and not of one row. 32 rows of numbers of
        # `bits` bits are `bits` rows of words.
        across_rows = is_packed and (part != "" or self._is_awq)
        unit = self._bits if across_rows else 32
        first, last = (0, 1) if rows == 1 else (begin * unit, min(end * unit, rows))
        if self._is_transposed:
            values = read(name, 0, rows * columns).view(columns, rows)[:, first:last].T
        else:
            values = read(name, first * columns, last * columns).view(last - first, columns)
        if not is_packed:
            return values
        adds_one = self._subtracts_one and part == ".zero_point"
        if adds_one:
            values = _with_ones_added(values, self._bits)
        values = _unpack(values.T, self._bits).T if across_rows else _unpack(values, self._bits)
        if self._is_awq:
            values = values.unflatten(0, (-1, 8))[:, _AWQ_ORDER].flatten(0, 1)
        if adds_one and 32 % self._bits:
            values = (values + 1) % 2**self._bits
        # Codes and zero points are centred alike, so that differences are the same; without zero
        # points the centre is the zero.
        return values - 2 ** (self._bits - 1)


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
