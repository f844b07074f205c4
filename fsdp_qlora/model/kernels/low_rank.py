"""Low-rank updates as Triton's kernels add them to weights: in float64, rounded once to float32."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsdp_qlora.model.kernels.rounding import jit, tl


class Factors(NamedTuple):
    """A and s B in float64, as kernels read them: A [rank, in], s B [rank, out].

    Numbers are converted here, once: a card whose float64 is slow converts as slowly.
    """

    lora_A: torch.Tensor
    scaled_B: torch.Tensor

    @classmethod
    def of(cls, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float) -> Factors:
        """The factors of A [rank, in] and B [out, rank], float32."""
        return cls(lora_A.double().contiguous(), (lora_B.double() * scaling).T.contiguous())

    @property
    def rank(self) -> int:
        return len(self.lora_A)

    def of_pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A's even and its odd columns, [rank, in / 2] each."""
        return self.lora_A[:, ::2].contiguous(), self.lora_A[:, 1::2].contiguous()


@jit
def updated(
    values,
    lora_A,
    scaled_B,
    rows,
    columns,
    num_rows,
    num_columns,
    rank,
):
    """float32 values [rows, columns] of a weight with its update."""
    in_rows = rows < num_rows
    in_columns = columns < num_columns
    total = tl.zeros(values.shape, tl.float64)
    for place in range(rank):
        of_rows = tl.load(scaled_B + place * num_rows + rows, mask=in_rows, other=0.0)
        of_columns = tl.load(lora_A + place * num_columns + columns, mask=in_columns, other=0.0)
        total = tl.fma(of_rows[:, None], of_columns[None, :], total)
    rounded = (values.to(tl.float64) + total).to(tl.float32)
    # A negative zero stays one.
    return tl.where(rounded == values, values, rounded)


@jit
def divisor(scale):
    """The float32 divisor of values for a scale. A scale of zero has codes of zero."""
    return tl.where(scale == 0.0, float("inf"), scale)


@jit
def magnitude(x):
    """The bits of |x|, float32, as int32: in the order of magnitudes, NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def e4m3_code(x):
    """The E4M3 code of |x|, float32: to the nearest, ties to even, at most 448."""
    bits = magnitude(x)
    is_nan = bits > 0x7F800000
    bits = tl.minimum(bits, 0x43E00000)  # 448
    # From 2**-6 on three bits of the mantissa are left; their exponent's bias is 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below, codes are multiples of 2**-9, which is the last bit of what is above 2**14.
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
    return tl.where(is_nan, 127, tl.where(bits < 0x3C800000, small, normal))


@jit
def e5m2_code(x):
    """The E5M2 code of |x|, float32: to the nearest, ties to even, at most 57,344."""
    bits = magnitude(x)
    is_nan = bits > 0x7F800000
    bits = tl.minimum(bits, 0x47600000)  # 57,344
    normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
    small = (bits.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) & 7
    return tl.where(is_nan, 127, tl.where(bits < 0x38800000, small, normal))


@jit
def spread(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """A number of each group for each of its members, [ROWS, GROUPS * SIZE]."""
    each = tl.broadcast_to(x[:, :, None], (ROWS, GROUPS, SIZE))
    return tl.reshape(each, (ROWS, GROUPS * SIZE))
