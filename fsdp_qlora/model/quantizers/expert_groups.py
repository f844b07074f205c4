"""Experts that are multiplied together, and how the tokens' choices are put into such groups.

Shapes: N choices of E experts, sorted by expert; a group has G of these experts.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fsdp_qlora.model.quantizers.base import Matrix

log = logging.getLogger("fsdp_qlora")

# Bytes that rows of the grouped kernel's matrices are multiples of (torch.nn.functional.grouped_mm)
_ALIGNED_BYTES = 16


class Group(NamedTuple):
    """Experts that are decoded and multiplied together."""

    experts: list[int]
    """Their numbers, ascending."""
    where: slice | torch.Tensor
    """Selects them in a tensor [E, ..]."""
    rows: slice
    """Their choices among all N."""
    ends: list[int]
    """Where each expert's rows end within `rows` [G]."""
    on_device: torch.Tensor
    """The same, int32, for several experts; unused for one."""

    @property
    def num_rows(self) -> int:
        """The number of rows that are multiplied."""
        return self.ends[-1]

    def matrices(self, shape: tuple[int, ...]) -> Matrix:
        """The experts' matrices in a quantized weight of this shape, which one kernel decodes."""
        return chosen_matrices(shape, self.experts, self.where)

    def take(self, choices: torch.Tensor) -> torch.Tensor:
        """The group's rows of all choices' [N, ..]."""
        return choices[self.rows]

    def without_padding(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of the group's choices among those that are multiplied, which here are all."""
        return rows

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiply rows a [N, m] with their expert's matrix of b [G, m, n] -> [N, n]."""
        if self._has_kernel(a, b):
            return F.grouped_mm(a, b, offs=self.on_device)
        # Every row is one expert's, so that all of y is written.
        y = a.new_empty(len(a), b.shape[2])
        for index, rows in enumerate(self._parts()):
            torch.mm(a[rows], b[index], out=y[rows])
        return y

    def add_product(self, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add multiply(a, b) to y [N, n]."""
        if self._has_kernel(a, b):
            y.add_(self.multiply(a, b))
            return
        # The sum inside of the product needs no memory for it.
        for index, rows in enumerate(self._parts()):
            y[rows].addmm_(a[rows], b[index])

    def outer(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Sums over each expert's rows of a [N, m] and b [N, n] -> [G, m, n]."""
        if self._has_kernel(a, b):
            return F.grouped_mm(a.T, b, offs=self.on_device)
        # An expert without rows in the group does not occur: groups are made of those with choices.
        shape = (len(self.experts), a.shape[1], b.shape[1])
        sums = a.new_empty(shape)
        for index, rows in enumerate(self._parts()):
            torch.mm(a[rows].T, b[rows], out=sums[index])
        return sums

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """For each choice, its expert's row of all experts' rows [E, n] -> [N, n]."""
        if len(self.experts) == 1:
            return rows[self.where].expand(self.ends[-1], -1)
        # With `output_size` the host does not wait for the sum of the counts.
        counts = self.on_device.diff(prepend=self.on_device.new_zeros(1))
        return rows[self.where].repeat_interleave(counts, dim=0, output_size=self.ends[-1])

    def add_rows(self, y: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Add rows [N, n] to the rows of their tokens [N] in y, always in the same order."""
        add_rows(y, tokens, rows, len(self.experts))

    def _parts(self) -> Iterator[slice]:
        return map(slice, [0, *self.ends[:-1]], self.ends)

    def _has_kernel(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        # For one expert a plain product is the same without the kernel's conditions.
        if len(self.experts) == 1 or a.is_meta:
            return False
        # A stride of 0 is that of an expanded tensor, which the kernel cannot read.
        strides = (*a.stride(), *b.stride())
        steps = [stride for stride in strides if stride != 1]
        counts = (a.shape[1], *b.shape[1:], *steps)
        sizes = [count * a.element_size() for count in counts]
        addresses = [a.data_ptr(), b.data_ptr()]
        is_aligned = not any(number % _ALIGNED_BYTES for number in sizes + addresses)
        return can_group(a.device, a.dtype, is_aligned and 0 not in steps)


class Choices(NamedTuple):
    """The tokens' choices of experts, sorted by expert."""

    tokens: torch.Tensor
    """The row of each choice's token [N]."""
    ends: list[int]
    """Where each expert's choices end [E], on the host."""
    on_device: torch.Tensor
    """The same on the device, int32."""

    def groups(self, weight_bytes: int, row_bytes: int, most: int) -> list[Group]:
        """The experts that are chosen, in groups of at most `most` bytes of weights and rows.

        A group has one expert at least.
        """
        starts = [0, *self.ends[:-1]]
        groups = list[list[int]]([[]])
        for expert, (start, end) in enumerate(zip(starts, self.ends, strict=True)):
            if end == start:
                continue
            experts = [*groups[-1], expert]
            num_rows = end - starts[experts[0]]
            if len(experts) * weight_bytes + num_rows * row_bytes > most:
                groups.append([])
            groups[-1].append(expert)
        # The first group stays empty if its first expert alone is larger than `most`.
        groups = [experts for experts in groups if experts]
        chosen = None
        # A group with gaps is selected by a tensor, which indexing would copy from the host, and
        # wait. So the device sorts experts with choices to the front itself, and nobody reads it.
        if any(_has_gaps(experts) for experts in groups):
            is_idle = self.on_device.diff(prepend=self.on_device.new_zeros(1)) == 0
            chosen = is_idle.byte().sort(stable=True).indices
        # One longer than the groups: how many experts come before each.
        firsts = accumulate(map(len, groups), initial=0)
        return [
            self._group(experts, first, chosen)
            for experts, first in zip(groups, firsts, strict=False)
        ]

    def _group(self, experts: list[int], first: int, chosen: torch.Tensor | None) -> Group:
        """A group of these experts.

        chosen: the experts with choices, and then the others. first: the number of experts with
        choices before these.
        """
        start = self.ends[experts[0] - 1] if experts[0] else 0
        where: slice | torch.Tensor = slice(experts[0], experts[-1] + 1)
        if chosen is not None and _has_gaps(experts):
            where = chosen[first : first + len(experts)]
        ends = [self.ends[expert] - start for expert in experts]
        # One expert's product needs no ends on the device: a kernel less.
        on_device = self.on_device[where] - start if len(experts) > 1 else self.on_device
        return Group(experts, where, slice(start, start + ends[-1]), ends, on_device)


def chosen_matrices(
    shape: tuple[int, ...], experts: Sequence[int], where: slice | torch.Tensor
) -> Matrix:
    """Some experts' matrices in a quantized weight of this shape.

    where: selects the experts in the same order, and as a tensor in any order.
    """
    first = min(experts)
    among = None
    if not isinstance(where, slice):
        among = (where - first, max(experts) + 1 - first)
    matrix_shape = shape[1:]
    return Matrix((len(experts), *matrix_shape), first * math.prod(matrix_shape), among=among)


def add_rows(y: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, num_experts: int) -> None:
    """Add rows [N, n] of some experts to those of their tokens [N] in y, always in one order."""
    # On a GPU index_add_ adds with atomics, in any order, and a token may occur twice if there are
    # several experts; index_put_ sorts first. One expert has each token at most once.
    if y.is_cuda and num_experts > 1:
        y.index_put_((tokens,), rows, accumulate=True)
    else:
        y.index_add_(0, tokens, rows)


def _has_gaps(experts: list[int]) -> bool:
    """Whether ascending numbers leave any out."""
    return len(experts) <= experts[-1] - experts[0]


def has_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel that multiplies groups on this device."""
    # Elsewhere on GPUs torch's grouped_mm falls back to a loop that waits for the device.
    return device.type != "cuda" or (
        dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)
    )


# Cached, so that the log line comes once for each case.
@cache
def can_group(device: torch.device, dtype: torch.dtype, is_aligned: bool = True) -> bool:
    """Whether torch multiplies such groups in one kernel, without waiting for the device.

    Says once if it does not.
    """
    if not has_grouped_kernel(device, dtype):
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
