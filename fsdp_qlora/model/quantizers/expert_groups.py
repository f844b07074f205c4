"""Experts that are multiplied together, and how the tokens' choices are put into such groups.

Shapes: N choices of E experts, sorted by expert; a group has G of these experts.
"""

import logging
import math
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fsdp_qlora.model.quantizers.base import Matrix

log = logging.getLogger("fsdp_qlora")

_ALIGNED_BYTES = 16  # that rows of the grouped kernel's matrices are multiples of


class Group(NamedTuple):
    """Experts that are decoded and multiplied together.

    experts: numbers, ascending. where: selects them in a tensor [experts of the layer, ..]. rows:
    their choices. ends: of each expert's rows [G] in these; on_device: the same, int32, of several
    experts.
    """

    experts: list[int]
    where: slice | torch.Tensor
    rows: slice
    ends: list[int]
    on_device: torch.Tensor

    def matrices(self, shape: tuple[int, ...]) -> Matrix:
        """The experts' matrices in a quantized weight of this shape, which one kernel decodes."""
        first = self.experts[0]
        last = self.experts[-1]
        among = None if isinstance(self.where, slice) else (self.where - first, last + 1 - first)
        return Matrix((len(self.experts), *shape[1:]), first * math.prod(shape[1:]), among=among)

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiply rows a [N, m] with their expert's matrix of b [G, m, n] -> [N, n]."""
        if self._has_kernel(a, b):
            return F.grouped_mm(a, b, offs=self.on_device)
        y = a.new_empty(len(a), b.shape[2])
        for index, rows in enumerate(self._parts()):
            torch.mm(a[rows], b[index], out=y[rows])
        return y

    def add_product(self, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add multiply(a, b) to y [N, n]."""
        if self._has_kernel(a, b):
            y.add_(self.multiply(a, b))
            return
        for index, rows in enumerate(self._parts()):
            y[rows].addmm_(a[rows], b[index])

    def outer(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Sums over each expert's rows of a [N, m] and b [N, n] -> [G, m, n]."""
        if self._has_kernel(a, b):
            return F.grouped_mm(a.T, b, offs=self.on_device)
        sums = a.new_empty(len(self.experts), a.shape[1], b.shape[1])
        for index, rows in enumerate(self._parts()):
            torch.mm(a[rows].T, b[rows], out=sums[index])
        return sums

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """For each choice its expert's row of those of all experts [E, n] -> [N, n]."""
        if len(self.experts) == 1:
            return rows[self.where].expand(self.ends[-1], -1)
        counts = self.on_device.diff(prepend=self.on_device.new_zeros(1))
        return rows[self.where].repeat_interleave(counts, dim=0, output_size=self.ends[-1])

    def add_rows(self, y: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Add rows [N, n] to those of their tokens [N] in y,
        in an order that is always the same.
        """
        # a token may occur twice, and index_add_ adds in any order there
        if y.is_cuda and len(self.experts) > 1:
            y.index_put_((tokens,), rows, accumulate=True)
        else:
            y.index_add_(0, tokens, rows)

    def _parts(self) -> Iterator[slice]:
        return map(slice, [0, *self.ends[:-1]], self.ends)

    def _has_kernel(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        if len(self.experts) == 1 or a.is_meta:
            return False
        steps = [stride for stride in (*a.stride(), *b.stride()) if stride != 1]
        sizes = [size * a.element_size() for size in (a.shape[1], *b.shape[1:], *steps)]
        is_aligned = (
            not any(size % _ALIGNED_BYTES for size in (*sizes, a.data_ptr(), b.data_ptr()))
            and 0 not in steps
        )
        return can_group(a.device, a.dtype, is_aligned)


class Choices(NamedTuple):
    """The tokens' choices of experts, sorted by expert.

    tokens [N]: the row of a choice's token. ends, on_device [E]: of each expert's choices, on the
    host and int32.
    """

    tokens: torch.Tensor
    ends: list[int]
    on_device: torch.Tensor

    def groups(self, weight_bytes: int, row_bytes: int, most: int) -> list[Group]:
        """The experts that are chosen, in groups of at most so many bytes of weights and rows, or
        of one expert.
        """
        starts = [0, *self.ends[:-1]]
        groups = list[list[int]]([[]])
        for expert, (start, end) in enumerate(zip(starts, self.ends, strict=True)):
            experts = [*groups[-1], expert]
            if (
                end > start
                and len(experts) * weight_bytes + (end - starts[experts[0]]) * row_bytes > most
            ):
                groups.append([])
            if end > start:
                groups[-1].append(expert)
        groups = [experts for experts in groups if experts]
        chosen = None
        if any(len(experts) <= experts[-1] - experts[0] for experts in groups):
            # The device sorts experts with choices to the front, unread.
            is_idle = self.on_device.diff(prepend=self.on_device.new_zeros(1)) == 0
            chosen = is_idle.byte().sort(stable=True).indices
        firsts = accumulate(map(len, groups), initial=0)
        return [
            self._group(experts, first, chosen)
            for experts, first in zip(groups, firsts, strict=False)
        ]

    def _group(self, experts: list[int], first: int, chosen: torch.Tensor | None) -> Group:
        """chosen: the experts with choices, and then the others. first: how many of them there are
        before these.
        """
        start = self.ends[experts[0] - 1] if experts[0] else 0
        where: slice | torch.Tensor = slice(experts[0], experts[-1] + 1)
        if chosen is not None and len(experts) <= experts[-1] - experts[0]:
            where = chosen[first : first + len(experts)]
        ends = [self.ends[expert] - start for expert in experts]
        on_device = self.on_device[where] - start if len(experts) > 1 else self.on_device
        return Group(experts, where, slice(start, start + ends[-1]), ends, on_device)


@cache
def can_group(device: torch.device, dtype: torch.dtype, is_aligned: bool = True) -> bool:
    """Whether torch multiplies such groups in one kernel, without waiting for the device; says once
    if it does not.
    """
    if device.type == "cuda" and (
        dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in (9, 10)
    ):
        reason = "on GPUs bf16 on compute capability 9 and 10"
    elif not is_aligned:
        reason = f"rows of a multiple of {_ALIGNED_BYTES} bytes"
    else:
        return True
    log.info(
        "Products of experts in %s are launched one by one: torch's grouped kernel takes %s.",
        dtype,
        reason,
    )
    return False
