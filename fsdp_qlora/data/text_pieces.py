"""Makes the pieces of a dataset's tokenized rows, from any of them on."""

import time
from collections.abc import Iterator

from tqdm import tqdm

from fsdp_qlora.data.batches.pieces import Draft, Piece, State, num_kept
from fsdp_qlora.data.batches.report import DataReport
from fsdp_qlora.data.content import Content
from fsdp_qlora.data.dataset_text import DatasetText
from fsdp_qlora.data.disk_room import check_folder, check_room
from fsdp_qlora.data.host_room import warn_of_little_memory
from fsdp_qlora.data.row_reader import RowReader
from fsdp_qlora.data.sources.reading import ChooseColumns
from fsdp_qlora.data.sources.source import Place, Source
from fsdp_qlora.data.text_rows import TextRows
from fsdp_qlora.utils.text import format_bytes, inform_from_any_rank


class TextPieces:
    """The rows of a dataset as pieces.

    Args:
        text: how they become text.
        samples: the rows that are read; None for all.
        used: the columns that are read.
    """

    def __init__(
        self, source: Source, text: DatasetText, samples: int | None, used: ChooseColumns
    ) -> None:
        self._source = source
        self._text = text
        self._samples = samples
        self._used = used

    def make(self, before: State) -> Iterator[Piece]:
        """Yield the pieces behind a state that another one has had at its end, as if undisturbed.

        Raises:
            UserError: the rows cannot be used, or SourceChanged: none of the pieces may be kept.
        """
        # Where this process has waited for another one, which may have refused the change.
        self._source.check_untouched()
        if not before:
            check_room(self._source, self._samples)
        workers = self._text.workers if self._text.chat_template.source else ()
        warn_of_little_memory(len(workers))
        kind = TextRows(self._text)
        reader = self._reader(kind, before)
        with tqdm(desc="Tokenizing", unit=" rows", initial=num_kept(before)) as bar:
            # No name for a piece here: it would stay in memory while the next one is made.
            yield self._say_pace(time.monotonic(), self._make_piece(kind, reader, before, bar))
            while not reader.is_at_end:
                yield self._make_piece(kind, reader, _state(kind, reader), bar)

    def _reader(self, kind: TextRows, before: State) -> RowReader[Content]:
        """A reader that goes on where another one has stood."""
        if not before:
            entries = self._source.entries(self._samples, used=self._used)
            return RowReader(entries, self._source, kind)
        kind.restore(before["reading"], before["columns"])
        place = Place(*before["place"])
        entries = self._source.entries(self._samples, used=self._used, after=place)
        return RowReader(entries, self._source, kind, after=place, columns=before["columns"])

    def _make_piece(
        self, kind: TextRows, reader: RowReader[Content], before: State, bar: tqdm
    ) -> Piece:
        report = DataReport(self._source.origin)
        kind.describe(report)
        draft = Draft(report)
        is_first_batch = not before
        while True:
            contents = reader.next_batch(report)
            if contents:
                draft.add(*kind.tokenize(contents, report))
            bar.update(reader.place.num_entries - bar.n)
            if reader.is_at_end:
                self._source.check_untouched()
                # The key has the identity from before.
                self._source.check_unchanged()
                return draft.finish(before, None)
            if is_first_batch:
                check_folder(draft.fill / (self._source.share_read() or 1.0))
                is_first_batch = False
            # Until a row has columns there is nothing to go on with.
            if draft.is_full and reader.columns:
                self._source.check_untouched()
                return draft.finish(before, _state(kind, reader))

    def _say_pace(self, start: float, piece: Piece) -> Piece:
        """Say how long all pieces take and how large they are, as far as the first one tells.

        Args:
            start: when it was begun, as of `time.monotonic`.
        """
        if piece.after is None:
            return piece
        num_rows = piece.report.num_rows
        pace = num_rows / (time.monotonic() - start)
        share = self._source.share_read()
        if not share:
            inform_from_any_rank(f"Tokenizing {pace:,.0f} rows a second, piece by piece.")
            return piece
        num_read = num_kept(piece.after)
        total = max(num_read, num_read / share)
        minutes = (total - num_read) / pace / 60
        cache = format_bytes(total * piece.num_bytes / num_rows)
        inform_from_any_rank(
            f"Tokenizing {pace:,.0f} rows a second: about {total:,.0f} rows in all, {minutes:.0f} "
            f"more minutes, {cache} of cache."
        )
        return piece


def _state(kind: TextRows, reader: RowReader[Content]) -> State:
    """All that the reader knows."""
    return {
        "num_rows": reader.place.num_entries,
        "place": [*reader.place],
        "columns": reader.columns,
        "reading": kind.state,
    }
