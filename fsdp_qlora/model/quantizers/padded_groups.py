"""Experts that are padded to the longest of their group, and multiplied by one batched product.

It takes no kernel but torch.bmm, so that it runs on every device and in every dtype. torch's
grouped kernel needs no padding, but takes bf16 on few GPUs (expert_groups.py).

The experts of a layer are put in order of their rows, so that those of a group have similar
numbers. Their order and the groups follow from the counts that the host reads for every layer, and
the device puts them in the same order itself: the host waits for nothing else.

Shapes, beside those of expert_groups.py: L rows of the longest expert of a group, P = G L rows with
padding.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fsdp_qlora.model.kernels.in_use import PLAIN
from fsdp_qlora.model.quantizers.base import Matrix
from fsdp_qlora.model.quantizers.expert_groups import (
    Group,
    add_rows,
    chosen_matrices,
    has_grouped_kernel,
)

log = logging.getLogger("fsdp_qlora")

PADDED = "padded"
# The longest expert of a group has at most twice the rows of the shortest, unless it has this few:
# a GPU multiplies blocks of 16 rows in any case.
_FEW_ROWS = 16
# Multiplications of an expert's matrix from which on it is alone: padding would take a GPU longer
# than the host takes to launch one expert's kernels (0.1 ms, at about 80 TFLOPs).
LARGE_PRODUCT = 2**32


class PaddedGroup(NamedTuple):
    """Experts with the same number of rows each, some of which are padding.

    A row of padding repeats the last row of its expert. What is made of it is dropped.
    """

    experts: list[int]
    """Their numbers, those with most rows first."""
    where: torch.Tensor
    """The same on the device [G]."""
    rows: slice
    """Their choices among all N."""
    length: int
    """L."""
    sources: torch.Tensor
    """For each row with padding, the choice among all N whose row it is [P]."""
    places: torch.Tensor
    """For each choice of the group, its place among the rows with padding [C]."""
    is_padding: torch.Tensor
    """Which of the rows are padding [P, 1]."""

    @property
    def num_rows(self) -> int:
        """The number of rows that are multiplied, P."""
        return len(self.experts) * self.length

    def matrices(self, shape: tuple[int, ...]) -> Matrix:
        """The experts' matrices in a quantized weight of this shape."""
        return chosen_matrices(shape, self.experts, self.where)

    def take(self, choices: torch.Tensor) -> torch.Tensor:
        """The group's rows of all choices' [N, ..], with padding [P, ..]."""
        return choices.index_select(0, self.sources)

    def without_padding(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of the group's choices, in their order: [P, ..] -> [C, ..]."""
        return rows.index_select(0, self.places)

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiply rows a [P, m] with their expert's matrix of b [G, m, n] -> [P, n]."""
        return torch.bmm(self._by_expert(a), b).flatten(0, 1)

    def add_product(self, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add multiply(a, b) to y [P, n]."""
        self._by_expert(y).baddbmm_(self._by_expert(a), b)

    def outer(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Sums over each expert's rows of a [P, m] and b [P, n] -> [G, m, n]."""
        # One factor without padding is enough, and the narrower one takes less time.
        if a.shape[1] <= b.shape[1]:
            a = a.masked_fill(self.is_padding, 0)
        else:
            b = b.masked_fill(self.is_padding, 0)
        return torch.bmm(self._by_expert(a).mT, self._by_expert(b))

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """For each row, its expert's row of all experts' rows [E, n] -> [P, n]."""
        return rows[self.where, None].expand(-1, self.length, -1).flatten(0, 1)

    def add_rows(self, y: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Add rows [C, n] to the rows of their tokens [C] in y, always in the same order."""
        add_rows(y, tokens, rows, len(self.experts))

    def _by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (len(self.experts), self.length))


AnyGroup = Group | PaddedGroup


class PaddedChoices(NamedTuple):
    """The tokens' choices of experts, sorted by expert: those with most choices first.

    Places of experts are counted in this order.
    """

    tokens: torch.Tensor
    """The row of each choice's token [N]."""
    experts: list[int]
    """The number of the expert at each place [E]."""
    counts: list[int]
    """The choices of each [E]."""
    where: torch.Tensor
    """`experts` on the device, int64."""
    rows: torch.Tensor
    """The first choice of each, and their number, int32 [2, E]."""
    among_rows: torch.Tensor
    """The place of each choice's expert, and its row among that expert's, int32 [2, N]."""

    def groups(
        self, weight_bytes: int, row_bytes: int, most: int, most_rows: int
    ) -> list[AnyGroup]:
        """The experts that are chosen, in groups of at most `most` bytes of weights and rows.

        A group has one expert at least, and one alone if it has more than `most_rows`.
        """
        spans = list[range]()
        for place, count in enumerate(self.counts):
            if not count:
                break
            first = spans[-1].start if spans else place
            longest = self.counts[first]
            num_bytes = (place + 1 - first) * (weight_bytes + longest * row_bytes)
            is_similar = longest <= max(_FEW_ROWS, 2 * count)
            if spans and is_similar and longest <= most_rows and num_bytes <= most:
                spans[-1] = range(first, place + 1)
            else:
                spans.append(range(place, place + 1))
        return self._groups(spans)

    def _groups(self, spans: Sequence[range]) -> list[AnyGroup]:
        groups = list[AnyGroup]()
        start = 0
        offsets = torch.arange(max(self.counts), device=self.where.device, dtype=torch.int32)
        for span in spans:
            stop = start + sum(self.counts[span.start : span.stop])
            rows = slice(start, stop)
            if len(span) == 1:
                expert = self.experts[span.start]
                one = slice(expert, expert + 1)
                groups.append(Group([expert], one, rows, [stop - start], self.where))
            else:
                groups.append(self._padded(span, rows, offsets))
            start = stop
        return groups

    def _padded(self, span: range, rows: slice, offsets: torch.Tensor) -> PaddedGroup:
        """The group of the experts at some places. offsets: as many as its longest's rows."""
        length = self.counts[span.start]
        at = slice(span.start, span.stop)
        offsets = offsets[:length]
        starts, counts = self.rows[:, at, None]
        sources = starts + torch.minimum(offsets, counts - 1)
        places, among = self.among_rows[:, rows]
        return PaddedGroup(
            self.experts[at],
            self.where[at],
            rows,
            length,
            sources.flatten(),
            (places - span.start) * length + among,
            (offsets >= counts).view(-1, 1),
        )


def experts_way(device: torch.device, dtype: torch.dtype) -> str:
    """The way of experts that a run takes by itself, `PADDED` or `PLAIN`.

    Without a grouped kernel each expert would be launched alone. Many small experts then take
    longer than padded ones on any GPU, and large ones stay alone in either way. So nothing is
    timed, and two runs with the same options have the same bits.
    """
    return PLAIN if has_grouped_kernel(device, dtype) else PADDED


def sort_by_rows(
    choices: torch.Tensor, ends: Sequence[int], ends_on_device: torch.Tensor
) -> PaddedChoices:
    """Put choices [N] that are sorted by expert in the order of `PaddedChoices`, as its tokens.

    ends: where each expert's choices end [E], on the host and on the device.
    """
    starts = [0, *ends[:-1]]
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    # Stable, as on the device, so that equal numbers have the same order on both.
    experts = sorted(range(len(counts)), key=lambda expert: -counts[expert])
    device = choices.device
    # int32, since a layer's indices stay until its backward pass.
    ends_on_device = ends_on_device.int()
    counts_E = ends_on_device.diff(prepend=ends_on_device.new_zeros(1))
    sorted_E, where = counts_E.sort(descending=True, stable=True)
    first_before = (ends_on_device - counts_E)[where]
    first = sorted_E.cumsum(0, dtype=torch.int32) - sorted_E
    # With `output_size` the host does not wait for the sum of the counts.
    places = torch.arange(len(counts), device=device, dtype=torch.int32)
    places = places.repeat_interleave(sorted_E, output_size=len(choices))
    among = torch.arange(len(choices), device=device, dtype=torch.int32) - first[places]
    return PaddedChoices(
        choices[first_before[places] + among],
        experts,
        [counts[expert] for expert in experts],
        where,
        torch.stack((first, sorted_E)),
        torch.stack((places, among)),
    )


def log_padding(groups: Sequence[AnyGroup]) -> None:
    """Say how many rows of the groups are padding, once for a process."""
    if _Logged.is_done:
        return
    _Logged.is_done = True
    rows = sum(group.num_rows for group in groups)
    choices = sum(group.rows.stop - group.rows.start for group in groups)
    log.info(
        "Experts are multiplied in %s groups, padded to the longest of each: %s rows of padding "
        "for %s rows in the first layer (%.0f%%).",
        len(groups),
        rows - choices,
        choices,
        100 * (rows - choices) / choices,
    )


class _Logged:
    is_done = False
