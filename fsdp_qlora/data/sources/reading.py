"""Rows of a file or a table as readers give them, and which of them are needed."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fsdp_qlora.data.content import BadRow, Row

ChooseColumns = Callable[[Sequence[str]], Collection[str]]
"""The file's columns that are used."""


@dataclass(frozen=True)
class Skipped:
    """Rows that a reader left out because they are not needed, up to the number it comes with."""

    count: int


NumberedRows = Iterator[tuple[int, Row | BadRow]]
NeededRows = Iterator[tuple[int, Row | BadRow | Skipped]]
"""The needed rows by their numbers, behind one `Skipped` at least."""


def _unknown() -> float:
    return 0.0


@dataclass
class Reading:
    """Which rows of a file or a table are needed, and how much of it has been read."""

    used: ChooseColumns = tuple
    after: int = 0
    """The rows up to this number are not needed, and do not count as skipped."""
    skip: int = 0
    """So many of the next rows are not needed either."""
    share: Callable[[], float] = _unknown
    """The share that has been read, 0 to 1. The reader sets it when it begins."""


def read_over(rows: Iterable[tuple[int, Row | BadRow]], reading: Reading) -> NeededRows:
    """The needed ones of rows that cannot be skipped without being read."""
    numbered = iter(rows)
    last = 0
    num_skipped = 0
    for row_number, row in numbered:
        if row_number > reading.after:
            if num_skipped == reading.skip:
                yield last, Skipped(num_skipped)
                yield row_number, row
                yield from numbered
                return
            num_skipped += 1
        last = row_number
    yield last, Skipped(num_skipped)


Ranges = Sequence[tuple[float, float]]
"""Where ranges of a part begin and end, in units of its size, in order."""


@dataclass(frozen=True)
class Part:
    """A file of a dataset, or a table, to be read row by row."""

    name: str
    unit: str
    """The unit of a row's number, see SourceFile."""
    read: Callable[[Reading], NeededRows]
    size: int
    """Bytes of a file, or rows of a table."""
    num_rows: Callable[[], int] | None = None
    """Gives the number of rows, if it is known without reading them."""
    read_ranges: Callable[[ChooseColumns, Ranges], NumberedRows] | None = None
    """The rows that begin in some ranges, if what is before these need not be read."""
    is_file: bool = True
    """Whether it is a file, so that its size is in bytes."""
    is_remote: bool = False
    """Whether reading downloads the file."""


class Progress:
    """How much of a source's rows has been read."""

    def __init__(self) -> None:
        self.begin([])

    def begin(
        self, parts: Sequence[Part], *, start: int = 0, before: int = 0, most: int | None = None
    ) -> None:
        """The reading of `parts` begins, or goes on.

        Args:
            start: the first row that counts.
            before: rows from this one on that were read earlier.
            most: rows that are read in all, None for all that there are.
        """
        self._sizes = [part.size for part in parts]
        self._start = start
        self._before = before
        self._most = most
        self._size_before = 0  # of the parts that have been read
        self._part = 0
        self._reading = Reading()
        self._first = 0.0
        self._count = 0
        self._has_ended = False

    def begin_part(self, index: int, reading: Reading) -> None:
        """The reading of a part begins."""
        self._size_before += sum(self._sizes[self._part : index])
        self._part = index
        self._reading = reading

    def skip(self) -> None:
        """Rows that are not needed were left out."""
        if not self._count:
            self._first = self._position()

    def count(self) -> None:
        """A row was read."""
        self._count += 1

    def end(self) -> None:
        """All rows were read."""
        self._has_ended = True

    def share(self) -> float | None:
        """An estimate of the share that has been read, 0 to 1; None before the first row."""
        if self._has_ended:
            return 1.0
        if not self._count:
            return None
        # Where the first row is that counts: those behind it are taken to be as long as those
        # before it.
        left_out = self._start + self._before
        begin = self._first * self._start / left_out if left_out else 0.0
        of_content = (self._position() - begin) / max(1e-9, 1 - begin)
        of_rows = (self._before + self._count) / self._most if self._most else 0.0
        return min(1.0, max(of_content, of_rows))

    def rows_in_all(self) -> int:
        """An estimate of the rows that all parts have, by those that were read."""
        passed = self._position()
        return round((self._start + self._before + self._count) / max(1e-9, passed))

    def _position(self) -> float:
        """The share of the parts' content that was read or left out."""
        in_part = self._reading.share() * self._sizes[self._part]
        return (self._size_before + in_part) / max(1, sum(self._sizes))
