"""Turns the rows of one dataset into tokens or prompts, and reports on rows that are left out."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from tqdm import tqdm

from fsdp_qlora.data.batches.cache import describe_pieces, through_cache, through_pieces
from fsdp_qlora.data.batches.pieces import Draft
from fsdp_qlora.data.batches.report import DataReport
from fsdp_qlora.data.batches.rows import NO_ROWS, TokenizedRows
from fsdp_qlora.data.cache_key import cache_key
from fsdp_qlora.data.dataset_text import DatasetText
from fsdp_qlora.data.prompt_cache import Keep, prompts_through_cache
from fsdp_qlora.data.prompt_rows import PromptRows
from fsdp_qlora.data.prompts import NO_PROMPTS, Prompts
from fsdp_qlora.data.row_reader import ContentT, KindOfRows, read_contents
from fsdp_qlora.data.sources.dataset_name import parse_name
from fsdp_qlora.data.sources.reading import ChooseColumns
from fsdp_qlora.data.sources.source import DEFAULT_SAMPLES, Entry, Source, find_source
from fsdp_qlora.data.sources.spread import sample
from fsdp_qlora.data.text_pieces import TextPieces
from fsdp_qlora.data.text_rows import TextRows

# Rows of a dataset that decide on --context_length auto; a larger one is sampled.
_MOST_MEASURED = 10_000


class DatasetRows(NamedTuple):
    """The rows of a dataset, and what became of them."""

    rows: TokenizedRows
    report: DataReport
    prompts: Prompts = NO_PROMPTS
    """The prompts, instead of rows, of a run that makes these."""
    described: str = ""
    """A line on what the cache has of them, if they are large."""


class DatasetPipeline:
    """Turns the rows of a dataset into tokens.

    Args:
        dataset: its name or path, as the option gives it.
        text: how its rows become text.
        source: of the dataset, if it is known already.
    """

    def __init__(self, dataset: str, text: DatasetText, source: Source | None = None) -> None:
        self._text = text
        self._source = source or find_source(dataset)
        default = DEFAULT_SAMPLES.get(parse_name(dataset).name)
        self._samples = text.options.dataset_samples or default
        options = text.options.text
        self._makes_rows = options.makes_rows
        reads_all_columns = options.makes_rows or options.has_teacher
        self._used: ChooseColumns = tuple if reads_all_columns else text.used_columns

    def all_rows(self) -> DatasetRows:
        """All rows, from the cache or tokenized by one process at a time and kept there."""
        if self._makes_rows:
            return self._prompts(self._key, lambda entries: entries)
        pieces = TextPieces(self._source, self._text, self._samples, self._used)
        key = self._key
        begun = time.time()
        rows, report = through_pieces(key, pieces.make)
        # The same content may be at another path now.
        report = dataclasses.replace(report, origin=self._source.origin)
        return DatasetRows(rows, report, described=describe_pieces(key, rows, begun))

    def prompts_of(self, row_numbers: Collection[int]) -> DatasetRows:
        """The prompts of the rows with these numbers."""

        def choose(entries: Iterable[Entry]) -> Iterable[Entry]:
            for entry in entries:
                if entry.file.offset + entry.row_number in row_numbers:
                    yield entry

        return self._prompts([*self._key, sorted(row_numbers)], choose)

    def _prompts(
        self, key: list[object], choose: Callable[[Iterable[Entry]], Iterable[Entry]]
    ) -> DatasetRows:
        """The prompts of chosen entries. key: all that they depend on."""

        def read(keep: Keep) -> DataReport:
            prompts = PromptRows(self._text, keep)
            entries = choose(self._source.entries(self._samples))
            _, report = self._tokenize(tqdm(entries, "Reading prompts", unit=" rows"), prompts)
            report.num_used = prompts.num_used
            report.num_tokens = prompts.num_tokens
            # The key has the identity from before.
            self._source.check_unchanged()
            return report

        prompts, report = prompts_through_cache(key, read)
        # The same content may be at another path now.
        report = dataclasses.replace(report, origin=self._source.origin)
        return DatasetRows(NO_ROWS, report, prompts)

    @property
    def _key(self) -> list[object]:
        return cache_key(self._text, self._source, self._samples)

    def measured(self) -> DataReport:
        """The report on the uncut rows that decide on --context_length auto.

        It is of all rows, or of some of a large dataset; see `sample`. Its num_rows are those of
        the dataset, and num_used of them were tokenized.
        """

        def make() -> tuple[TokenizedRows, DataReport]:
            found = sample(self._source, _MOST_MEASURED, self._samples, self._used)
            if self._makes_rows:
                _, report = self._tokenize(found.entries, PromptRows(self._text, lambda _: None))
            else:
                _, report = self._tokenize(found.entries, TextRows(self._text))
            num_used = len(found.entries)
            return NO_ROWS, dataclasses.replace(report, num_rows=found.num_rows, num_used=num_used)

        return through_cache(["measured", *self._key], make)[1]

    def _tokenize(
        self, entries: Iterable[Entry], kind: KindOfRows[ContentT]
    ) -> tuple[TokenizedRows, DataReport]:
        """Read and tokenize entries in batches, so that few rows are in memory as text."""
        draft = Draft(DataReport(self._source.origin))
        for contents in read_contents(entries, self._source, kind, draft.report):
            if contents:
                draft.add(*kind.tokenize(contents, draft.report))
        piece = draft.finish({}, None)
        piece.report.set_length_of_99_percent(piece.lengths)
        return piece.rows, piece.report
