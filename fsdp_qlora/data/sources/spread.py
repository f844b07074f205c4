"""A sample of a large source: blocks of rows at evenly spaced places, the rest is not read."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from fsdp_qlora.data.content import SourceFile
from fsdp_qlora.data.sources.places import ranges_at_places, rows_in_all
from fsdp_qlora.data.sources.reading import (
    ChooseColumns,
    NumberedRows,
    Part,
    Ranges,
    Reading,
    Skipped,
)
from fsdp_qlora.data.sources.source import Entry, Source

NUM_BLOCKS = 100
# A block has at most so many times its share of the rows that are asked for.
_MOST_OF_A_BLOCK = 10
# Attempts to find enough rows, where the first ones of a file are shorter than the others.
_ATTEMPTS = 3
# Bytes of texts and images in a sample: it has fewer rows if they are large.
_MOST_BYTES = 2**28
# The part of a sample that is tried next if it has more of them.
_FEWER = 8


@dataclass(frozen=True)
class Sample:
    """Some rows of a source."""

    entries: list[Entry]
    num_rows: int
    """The rows of the source: counted if all of them are in the sample, else estimated."""


def sample(source: Source, num_rows: int, limit: int | None, used: ChooseColumns) -> Sample:
    """All rows of a source, or about `num_rows` if it has more. The same each time.

    It has fewer if they are more than 256 MiB.

    Parquet, tables and lines are read in blocks at evenly spaced places; a share of the bytes, so
    that each row is as likely as another. Files that are packed, .csv and .json are read from their
    beginning, and files that are downloaded one after another.

    Args:
        limit: the rows of the source that count, from its first; None for all.
        used: the columns that are read.
    Raises:
        UserError: a file cannot be read at all.
    """
    reading = source.entries(limit, used=used)  # by a name: it is asked where it stands
    first, is_whole = _that_fit(reading, num_rows)
    num_first = len(first)
    if is_whole:
        return Sample(first, num_first)
    known = rows_in_all(source.parts)
    in_all = known or source.estimate_rows()
    if any(part.is_remote for part in source.parts):
        return Sample(first, max(in_all - source.start, num_first + 1))
    del first  # not in memory beside the blocks
    found = _spread(source, num_first, limit, used, in_all, is_known=known is not None)
    if found.entries:
        return found
    first, _ = _that_fit(source.entries(limit, used=used), num_first)
    return Sample(first, found.num_rows)


def _spread(
    source: Source,
    num_rows: int,
    limit: int | None,
    used: ChooseColumns,
    in_all: int,
    *,
    is_known: bool,
) -> Sample:
    """About `num_rows` rows in blocks.

    Args:
        in_all: the rows of all parts.
        is_known: whether `in_all` is not an estimate.
    """
    ends = [source.stop, None if limit is None else source.start + limit, in_all]
    stop = min(end for end in ends if end is not None)
    total = max(num_rows + 1, stop - source.start)
    blocks = _Blocks(source.parts, used, num_rows, in_all)
    bounds = (min(1.0, source.start / in_all), min(1.0, (source.start + total) / in_all))
    share = num_rows / total
    for _ in range(_ATTEMPTS):
        entries, is_whole = _that_fit(blocks.read(bounds, share))
        if not is_whole:
            num_rows = math.ceil(num_rows / _FEWER)
            share /= _FEWER
            continue
        if 2 * len(entries) >= num_rows or share == 1.0:
            break
        share = min(1.0, share * num_rows / max(1, len(entries)))
    if is_whole and not is_known and limit is None and source.stop is None:
        total = max(total if not entries else round(len(entries) / share), num_rows + 1)
    return Sample(entries, total)


def _that_fit(entries: Iterable[Entry], most_rows: float = math.inf) -> tuple[list[Entry], bool]:
    """The first of some entries, and whether they are all: no more than fit in a sample."""
    found: list[Entry] = []
    num_bytes = 0
    for entry in entries:
        if len(found) == most_rows or num_bytes > _MOST_BYTES:
            return found, False
        found.append(entry)
        num_bytes += _num_bytes(entry.row)
    return found, True


def _num_bytes(row: object) -> int:
    """About the bytes of a row's values."""
    total = 0
    left = [row]
    while left:
        value = left.pop()
        if isinstance(value, (str, bytes)):
            total += len(value)
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, (list, tuple)):
            left += value
        else:
            total += 8
    return total


class _Blocks:
    """Blocks of the rows of parts.

    Args:
        num_rows: of all blocks together, about.
        in_all: the rows of all parts, about.
    """

    def __init__(
        self, parts: Sequence[Part], used: ChooseColumns, num_rows: int, in_all: int
    ) -> None:
        self._parts = parts
        self._used = used
        self._most = max(1, _MOST_OF_A_BLOCK * num_rows // NUM_BLOCKS)
        self._rows_per_byte = in_all / max(1, sum(part.size for part in parts))

    def read(self, bounds: tuple[float, float], share: float) -> Iterator[Entry]:
        """Yield the entries of all blocks.

        Args:
            bounds: where the content begins and ends that counts, as shares of all of it.
            share: of this content that is read.
        """
        of_parts = ranges_at_places(self._parts, share, [0.0] * NUM_BLOCKS, bounds)
        before = 0
        for index, (part, ranges) in enumerate(zip(self._parts, of_parts, strict=True)):
            if ranges:
                file = SourceFile(part.name, "row", before)
                for row_number, row in self._read(part, ranges):
                    yield Entry(file, row_number, row, index)
            before += part.size

    def _read(self, part: Part, ranges: Ranges) -> NumberedRows:
        """The rows of a part that begin in these ranges, or as many from its beginning."""
        most = self._most * len(ranges)
        if part.read_ranges is not None:
            return islice(part.read_ranges(self._used, ranges), most)
        count = math.ceil(sum(stop - start for start, stop in ranges) * self._rows_per_byte)
        rows = part.read(Reading(self._used))
        needed = ((number, row) for number, row in rows if not isinstance(row, Skipped))
        return islice(needed, min(count, most))
