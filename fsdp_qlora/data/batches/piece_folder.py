"""The folder of a dataset's pieces: made one after the other, kept, verified, and made again."""

import contextlib
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError

from fsdp_qlora.data.batches.pieces import (
    Piece,
    State,
    are_current,
    num_kept,
)
from fsdp_qlora.data.batches.report import DataReport
from fsdp_qlora.data.batches.rows import TokenizedRows, join_rows
from fsdp_qlora.data.batches.whole_rows import (
    INDEX,
    ROWS,
    STAMP,
    read_index,
    read_whole,
    write_whole,
)
from fsdp_qlora.data.sources.source import SourceChanged
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import PARTIAL, remove_stale
from fsdp_qlora.utils.machine import free_disk
from fsdp_qlora.utils.text import format_bytes, inform_from_any_rank, warn_from_any_rank
from fsdp_qlora.utils.verified_files import Damaged, read_verified, write_verified
from fsdp_qlora.utils.verified_stamps import Stamp, is_of_this_start

# The library writes to a file of such a name beside the one that it is given, and renames it.
_OF_SAFETENSORS = ".tmp*"

MakePieces = Callable[[State], Iterator[Piece]]
"""Where the reading of a dataset stands -> the pieces that follow."""


class PieceFolder:
    """The pieces of one key of the cache.

    Args:
        folder: theirs, which need not exist.
        make: makes them.
    """

    def __init__(self, folder: Path, make: MakePieces) -> None:
        self._folder = folder
        self._make = make

    def read(self) -> tuple[TokenizedRows, DataReport] | None:
        """Map the rows of a finished folder; None if it is not finished, or not as it should be.

        One process of a start hashes all files.
        """
        try:
            index = read_index(self._folder)
            if index is None:
                return None
            stamp = self._stamp(index["pieces"])
            is_hashed = not stamp.is_valid
            parts = self._read_all(index["pieces"], is_hashed=is_hashed)
            if parts is None:
                return None  # the piece is named where it is made again
            found = read_whole(self._folder, index, parts, is_hashed=is_hashed)
        except Damaged as error:
            warn_from_any_rank(
                f"The index of the tokenized rows in {self._folder} is damaged ({error}): making "
                "it again."
            )
            return None
        if is_hashed:
            stamp.write()
        written = (self._folder / INDEX).stat().st_mtime
        is_current = are_current(*found, are_of_this_start=is_of_this_start(written))
        return found if is_current else None

    def remove_partial_files(self) -> None:
        """Remove what killed processes have left, once it is an hour old.

        A younger file may be of a process on another machine, whose lock is not seen here.
        """
        with contextlib.suppress(OSError):
            for pattern in (f".*{PARTIAL}", _OF_SAFETENSORS):
                remove_stale(self._folder.glob(pattern))

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces: those that are kept and good, and the others as they are made.

        A dataset of one piece is not kept here.

        Raises:
            UserError: a piece cannot be kept, or as `make` does.
        """
        state: State | None = {}
        making: Iterator[Piece] | None = None
        for number in itertools.count():
            assert state is not None
            piece = self._read_piece(number, state)
            if piece is not None:
                making = None
            else:
                if making is None:
                    self._say_kept(number, state)
                    making = self._make(state)
                piece = self._next(making)
                if number or piece.after is not None:
                    piece = self._keep(number, piece)
            yield piece
            state = piece.after
            if state is None:
                return

    def finish(self, first: Piece, others: Iterator[Piece]) -> tuple[TokenizedRows, DataReport]:
        """Write what is known of all pieces together, and map the whole.

        Raises UserError as `pieces` does, or if it cannot be written.
        """
        parts = list[TokenizedRows]()
        digests: dict[str, str] = {}
        lengths: Counter[int] = Counter()
        report = DataReport(first.report.origin)
        for number, piece in enumerate(itertools.chain([first], others)):
            parts.append(piece.rows)
            digests[_name(number)] = piece.digest
            lengths.update(piece.lengths)
            report.add(piece.report)
        report.set_length_of_99_percent(lengths)
        rows = join_rows(parts, copies_tokens=False)
        with _room_named(self._folder, report.num_rows):
            write_whole(self._folder, rows, report, digests)
        # Pieces of a preparation that ended them at other rows.
        for path in self._folder.glob("[0-9]*"):
            if path.name not in digests:
                path.unlink(missing_ok=True)
        # Each piece was verified when it was read or written.
        self._stamp(digests).write()
        return self.read() or (rows, report)

    def _stamp(self, names: Iterable[str]) -> Stamp:
        files = [self._folder / name for name in (INDEX, ROWS, *names)]
        return Stamp(self._folder / STAMP, files)

    def _read_all(
        self, digests: Mapping[str, str], *, is_hashed: bool
    ) -> list[TokenizedRows] | None:
        """Map all pieces; None if one is missing, damaged or another one."""
        parts = []
        for name, digest in digests.items():
            try:
                piece = read_verified(self._folder / name, Piece.build, is_hashed=is_hashed)
            except Damaged:
                return None
            if piece is None or (is_hashed and piece.digest != digest):
                return None
            parts.append(piece.rows)
        return parts

    def _say_kept(self, number: int, before: State) -> None:
        """Say where tokenizing goes on, unless it begins, or a piece is made again."""
        if number and not (self._folder / _name(number)).exists():
            inform_from_any_rank(
                f"Tokenizing goes on behind the {num_kept(before):,} rows that are kept."
            )

    def _next(self, making: Iterator[Piece]) -> Piece:
        try:
            return next(making)
        except SourceChanged:
            # None of these rows may be found when the dataset has its former content again.
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _read_piece(self, number: int, before: State) -> Piece | None:
        """Map a piece that is kept and good, and follows this state; None if there is none."""
        path = self._folder / _name(number)
        try:
            piece = read_verified(path, Piece.build)
        except Damaged as error:
            warn_from_any_rank(
                f"The tokenized rows in {path} are damaged ({error}): making them again."
            )
            return None
        if piece is None:
            return None
        is_new = is_of_this_start(path.stat().st_mtime)
        is_current = are_current(piece.rows, piece.report, are_of_this_start=is_new)
        return piece if is_current and piece.before == before else None

    def _keep(self, number: int, piece: Piece) -> Piece:
        """Write a piece, and map it: then it takes no memory of this process."""
        path = self._folder / _name(number)
        with _room_named(self._folder, num_kept(piece.before)):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_verified(path, piece.arrays, piece)
        kept = read_verified(path, Piece.build)
        assert kept is not None
        return kept


def num_made(folder: Path, since: float) -> int:
    """The rows of a finished folder of pieces that were read since a moment, as of `time.time`.

    It does not matter which process of the machine has read them.
    """
    num_rows = 0
    for name in (read_index(folder) or {"pieces": ()})["pieces"]:
        path = folder / name
        if path.stat().st_mtime >= since:
            piece = read_verified(path, Piece.build, is_hashed=False)
            num_rows += piece.report.num_rows if piece else 0
    return num_rows


@contextlib.contextmanager
def _room_named(folder: Path, num_rows: int) -> Iterator[None]:
    """Raise UserError if the block cannot write to a folder. num_rows: that are kept there."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"Tokenized rows cannot be written to {folder} ({error}), where "
            f"{format_bytes(free_disk(folder))} are free. Make room, or name another folder with "
            "the environment variable FSDP_QLORA_CACHE. Another start goes on behind the "
            f"{num_rows:,} rows that are kept."
        ) from error


def _name(number: int) -> str:
    return f"{number:06d}.safetensors"
