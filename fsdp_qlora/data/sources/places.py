"""Rows of a large source at places spread over it, so that the others need not be read."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cached_property

from fsdp_qlora.data.sources.reading import (
    NeededRows,
    NumberedRows,
    Part,
    Ranges,
    Reading,
    read_over,
)
from fsdp_qlora.data.sources.source import Source

# The rows of a run: a part of a dataset that is a thousandth of it is met once.
NUM_PLACES = 1000
# Lines are counted at so many places, in so many bytes together; in more, up to a limit, where
# these have fewer rows.
_PLACES_COUNTED = 100
_BYTES_COUNTED = 2**22
_ROWS_COUNTED = 2000
_MOST_COUNTED = 2**28
# A line with a row has two bytes at least.
_SHORTEST = 2
_GOLDEN = (math.sqrt(5) - 1) / 2


def golden_places(num_places: int) -> list[float]:
    """Where ranges begin in equal sections, from 0, the section's beginning, to 1, its end.

    Multiples of the golden ratio fill sections evenly. Rows may come in turns, and ranges at equal
    distances would meet the same turn each time.
    """
    return [place * _GOLDEN % 1 for place in range(num_places)]


def ranges_at_places(
    parts: Sequence[Part],
    share: float,
    places: Sequence[float],
    bounds: tuple[float, float] = (0.0, 1.0),
) -> list[Ranges]:
    """The ranges of each part that are read at places of all parts together.

    Args:
        share: of the content that is read.
        places: where the range begins in each of equal sections of the content, as of
            `golden_places`. At the end of the section it goes on at the beginning, so that each row
            is as likely as another.
        bounds: where the content begins and ends that counts, as shares of all of it.
    """
    size = sum(part.size for part in parts)
    first, last = (bound * size for bound in bounds)
    distance = (last - first) / len(places)
    blocks: list[tuple[float, float]] = []
    for section, place in enumerate(places):
        start = first + (section + place) * distance
        stop = start + share * distance
        if place + share > 1:
            # As computed for the next section, too: ranges that overlap would repeat a row.
            blocks.append((first + section * distance, min(start, stop - distance)))
            stop = first + (section + 1) * distance
        blocks.append((start, stop))
    of_parts: list[Ranges] = []
    before = 0
    for part in parts:
        end = before + part.size
        of_parts.append(
            [
                (max(0.0, start - before), min(part.size, stop - before))
                for start, stop in blocks
                if start < end and stop > before
            ]
        )
        before = end
    return of_parts


def rows_in_all(parts: Sequence[Part]) -> int | None:
    """The rows of all parts, if they are known without reading them."""
    numbers = [part.num_rows() for part in parts if part.num_rows is not None]
    return sum(numbers) if len(numbers) == len(parts) else None


def is_from_beginning(source: Source) -> bool:
    """Whether a file of the source can only be read from its beginning."""
    return any(part.read_ranges is None for part in source.parts)


def about_rows(source: Source, least: int) -> int:
    """About the number of rows of a source without its slice, the same on every machine.

    Lines are counted at a few places only.

    Args:
        source: one that is not `is_from_beginning`.
        least: a source that is sure to have fewer rows is not looked at.
    """
    known = rows_in_all([part for part in source.parts if part.num_rows is not None]) or 0
    lines = [part for part in source.parts if part.num_rows is None]
    size = sum(part.size for part in lines)
    most = known + size // _SHORTEST
    if not size or most < least:
        return most
    share = min(1.0, _BYTES_COUNTED / size)
    while True:
        ranges = ranges_at_places(lines, share, golden_places(_PLACES_COUNTED))
        count = sum(map(_count, lines, ranges))
        if count >= _ROWS_COUNTED or share == 1.0 or share * size > _MOST_COUNTED:
            return known + round(count / share)
        share = min(1.0, 4 * share)


def _count(part: Part, ranges: Ranges) -> int:
    assert part.read_ranges is not None
    return sum(1 for _ in part.read_ranges(tuple, ranges))


def at_places(source: Source, share: float) -> Source:
    """A share of the rows of a source: those that begin in ranges spread evenly over it.

    Each row is as likely to be among them as another. The same ones each time.

    Args:
        source: one without a slice that is not `is_from_beginning`.
    """

    def fingerprint() -> str:
        content = json.dumps([source.fingerprint(), "places", NUM_PLACES, share])
        return hashlib.sha256(content.encode()).hexdigest()

    of_parts = ranges_at_places(source.parts, share, golden_places(NUM_PLACES))
    parts = [
        _ChosenRows(part, ranges).part()
        for part, ranges in zip(source.parts, of_parts, strict=True)
    ]
    return dataclasses.replace(source, fingerprint=fingerprint, parts=parts)


class _ChosenRows:
    """The rows of a part that begin in some ranges."""

    def __init__(self, whole: Part, ranges: Ranges) -> None:
        self._whole = whole
        self._ranges = ranges

    @cached_property
    def _scale(self) -> float:
        """Rows or bytes, as row numbers count them, in a unit of the part's size."""
        if self._whole.num_rows is None:
            return 1.0
        return self._whole.num_rows() / max(1, self._whole.size)

    def part(self) -> Part:
        """A part with these rows alone."""
        whole = self._whole
        return dataclasses.replace(
            whole,
            unit="byte" if whole.num_rows is None else whole.unit,
            read=self._read,
            size=math.ceil(self._size_until(math.inf)),
            num_rows=None,
            read_ranges=None,
        )

    def _read(self, reading: Reading) -> NeededRows:
        last = reading.after

        def share() -> float:
            return self._size_until(last / self._scale) / max(1.0, self._size_until(math.inf))

        reading.share = share
        for row_number, row in read_over(self._rows_behind(reading), reading):
            # A reading that finds no more rows has passed those before it, too.
            last = max(row_number, reading.after)
            yield last, row

    def _rows_behind(self, reading: Reading) -> NumberedRows:
        """The rows of the ranges that may have some behind the reading's beginning."""
        left = [
            (start, stop)
            for start, stop in self._ranges
            if math.ceil(stop * self._scale) > reading.after
        ]
        assert self._whole.read_ranges is not None
        return self._whole.read_ranges(reading.used, left)

    def _size_until(self, place: float) -> float:
        """The size of the ranges before a place."""
        return sum(max(0.0, min(stop, place) - start) for start, stop in self._ranges)
