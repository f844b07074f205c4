"""Quantized weights to which a low-rank update is added, rounded to their own format again.

Merge-aware training computes with round(W + s B A), and `merge` writes it to files. Both call
`RoundedWeight.rounded`, so that they have the same bits: W is decoded to float32, the update is
added in float64, and the sum is rounded to float32 and then to the format. In float64 neither the
device nor the number of threads or pieces of a sum changes what it is rounded to, but by chance at
a distance of 1e-16 from the next float32.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fsdp_qlora.model.architecture.precision import autocast_kind
from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, ways_in_use
from fsdp_qlora.model.kernels.low_rank import Factors
from fsdp_qlora.model.kernels.rounding import has_triton
from fsdp_qlora.model.quantizers.base import Matrix, QuantizedWeight
from fsdp_qlora.model.quantizers.stored import write_bytes

# Weights at a time, of 24 bytes each: of float32, and twice of float64.
_PIECE = {"cpu": 2**18, "cuda": 2**22}
# Read and written to round a weight that is not quantized, for the planned speed.
PLAIN_BYTES = 50.0


class Update(NamedTuple):
    """s B A, with A [rank, in] and B [out, rank] in float32, as adapters are saved."""

    lora_A: torch.Tensor
    lora_B: torch.Tensor
    scaling: float

    def or_nan(self) -> "Update":
        """The update, or NaN if a number of it may not be finite.

        Formats without infinity would clip such a number, and a diverged run would go on.
        """
        rank = len(self.lora_A)
        most = self.lora_A.abs().amax().double() * self.lora_B.abs().amax() * self.scaling * rank
        # Also false for NaN. Beside weights there is room for a sum of the same size.
        is_finite = most.abs() < torch.finfo(torch.float32).max / 2
        return self._replace(lora_B=torch.where(is_finite, self.lora_B, torch.nan))

    def factors(self) -> Factors:
        """The update as kernels read it."""
        return Factors.of(self.lora_A, self.lora_B, self.scaling)

    def added_to(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """Rows [n, in] of a weight from row `start` on, in float32, with the update."""
        rows = self.lora_B[start : start + len(values)]
        # CUDA's autocast leaves float64 as it is, but a new device's may not.
        with torch.autocast(autocast_kind(values), enabled=False):
            total = values.double()
            total.addmm_(rows.double(), self.lora_A.double(), alpha=self.scaling)
        rounded = total.float()
        # An update of zero would take the sign of a negative zero, which codes have.
        return torch.where(rounded == values, values, rounded)


class RoundedWeight(QuantizedWeight):
    """A weight whose format takes changed values. Base of the quantizers that can be merged into.

    Statistics of a whole weight stay: a scale of a matrix, which layers that a server fuses share,
    and the mean of absmax. Those of blocks change where the values need it.

    is_rounded_again: whether each product rounds it with an update, which its codes are not for.
    """

    is_rounded_again = False
    # of GPU memory that torch's operators read and write to round a weight, for the planned speed
    rounding_bytes = 95.0

    @property
    def rounded_together(self) -> int:
        """Number of weights that can only be rounded together, from a multiple of it on."""
        raise NotImplementedError

    @property
    def part_weights(self) -> int:
        """Number of weights in each part that has a scale of its own which stays."""
        return math.prod(self.shape)

    @property
    def joins_matrices(self) -> bool:
        """Whether experts can only be rounded together, since some share a statistic."""
        return False

    def round_part(self, values: torch.Tensor, part: Matrix, tensors: Any) -> Any:
        """Round float32 values [n, in], those of a part of the weight.

        tensors: of the weight as it is stored. Returns the part's codes and statistics.
        """
        raise NotImplementedError

    def join_parts(self, parts: Sequence[Any], tensors: Any) -> Any:
        """The tensors of a weight, as `tensors()` gives them, from all of its parts in order."""
        raise NotImplementedError

    @torch.no_grad()
    def rounded(self, update: Update, tensors: Any) -> Any:
        """The tensors of round(W + s B A), for the weight W [out, in] of `tensors`."""
        return self.join_parts(self.rounded_parts(self.whole, update, tensors), tensors)

    @property
    def fits_kernel(self) -> bool:
        """Whether the kernel takes a weight of this shape."""
        raise NotImplementedError

    def round_by_kernel(self, matrix: Matrix, update: Update, tensors: Any) -> Any:
        """Round a matrix [out, in] of the weight with its update, to what `round_part` returns."""
        raise NotImplementedError

    def rounded_parts(self, matrix: Matrix, update: Update, tensors: Any) -> list[Any]:
        """The parts, for `join_parts`, of a matrix of the weight after `rounded`."""
        way = ways_in_use().rounding
        if not (self.fits_kernel and has_triton(tensors.weight.device)):
            way = PLAIN
        return WAYS[way](self, matrix, update.or_nan(), tensors)

    def rounded_pieces(self, matrix: Matrix, update: Update, tensors: Any) -> list[Any]:
        """All parts of the matrix after `round_part`."""
        parts = []
        for start, part in self._pieces(matrix, tensors.weight.device):
            values = self.decode_tensors(part, torch.float32, tensors)
            parts.append(self.round_part(update.added_to(values, start), part, tensors))
            # Freed before the next piece is decoded.
            del values
        return parts

    def store(self, tensors: Any) -> None:
        """Keep the whole weight of these tensors, where this rank alone has the layer."""
        for name in ("weight", *self.statistics):
            write_bytes(getattr(self, name), getattr(tensors, name))

    def _pieces(self, matrix: Matrix, device: torch.device) -> Iterator[tuple[int, Matrix]]:
        """A matrix in pieces of whole rows, each with its first row."""
        num_rows, num_columns = matrix.shape
        aligned = math.lcm(num_columns, self.rounded_together) // num_columns
        step = _rows_at_a_time(num_columns, aligned, device)
        # No piece is in two parts that have a scale each.
        part_rows = min(num_rows, self.part_weights // num_columns)
        for begin in range(0, num_rows, part_rows):
            end = min(begin + part_rows, num_rows)
            for start in range(begin, end, step):
                count = min(step, end - start)
                yield start, Matrix((count, num_columns), matrix.first + start * num_columns)


@torch.no_grad()
def rounded_plain(weight: torch.Tensor, update: Update, dtype: torch.dtype) -> torch.Tensor:
    """W + s B A in `dtype`, for a weight W [out, in] that files have in it and is not quantized."""
    step = _rows_at_a_time(weight.shape[1], 1, weight.device)
    parts = []
    for number, rows in enumerate(weight.split(step)):
        parts.append(update.added_to(rows.float(), number * step).to(dtype))
    return torch.cat(parts)


def _rows_at_a_time(num_columns: int, aligned: int, device: torch.device) -> int:
    """The number of rows in a piece, a multiple of `aligned`."""
    most = _PIECE["cpu" if device.type == "cpu" else "cuda"]
    return max(1, most // (num_columns * aligned)) * aligned


def _by_torch(layer: RoundedWeight, matrix: Matrix, update: Update, tensors: Any) -> list[Any]:
    return layer.rounded_pieces(matrix, update, tensors)


def _by_triton(layer: RoundedWeight, matrix: Matrix, update: Update, tensors: Any) -> list[Any]:
    return [layer.round_by_kernel(matrix, update, tensors)]


WAYS = {PLAIN: _by_torch, TRITON: _by_triton}
