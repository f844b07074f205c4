"""Rows that a dataset gives whole: their content is read, rendered and tokenized."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fsdp_qlora.config.objectives import TEXTS, RowKind
from fsdp_qlora.data.batches import tokenization
from fsdp_qlora.data.batches.report import DataReport
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.columns import COLUMNS
from fsdp_qlora.data.content import FOLDER, Content, Row, with_template_kwargs
from fsdp_qlora.data.dataset_text import DatasetText
from fsdp_qlora.data.options import TextOptions
from fsdp_qlora.data.text import preferences
from fsdp_qlora.data.text.formats import FORMATS, Format
from fsdp_qlora.data.text.recognition import Reading, reads
from fsdp_qlora.data.text.rendering import Renderer
from fsdp_qlora.data.text.template_kwargs import read_kwargs
from fsdp_qlora.utils.errors import UserError


class TextRows:
    """The rows of a dataset, all of one format: read as content, and tokenized."""

    def __init__(self, text: DatasetText) -> None:
        self._text = text
        self._options = text.options.text
        self._reading: Reading | None = None  # known from the first rows on
        self._columns: Sequence[str] = ()
        self._template_columns: Mapping[str, str] = {}
        self._read: Callable[[Row], Content]
        self._row_kind: RowKind
        self._renderer: Renderer

    def look_at(self, columns: Sequence[str], rows: Sequence[Row], report: DataReport) -> None:
        """Find the format of the rows; see `KindOfRows`."""
        requested = self._text.requested
        if self._reading:
            # Later rows may have more columns, but the format of the first ones stays.
            requested = requested._replace(name=self._reading.dataset_format)
        reading = requested.find(columns, rows, report.origin)
        if not self._options.image_processor:
            reading = reading.without_images()
        _check_objective(reading, self._options, rows, report.origin)
        self._use(reading, columns)
        self.describe(report)

    def _use(self, reading: Reading, columns: Sequence[str]) -> None:
        """Read rows so from now on. columns: of all rows until now."""
        self._reading = reading
        self._columns = columns
        row_format = FORMATS[reading.dataset_format]
        self._template_columns = self._text.template_columns(row_format, columns, reading.names)
        self._read = _reader(row_format, self._options)
        self._row_kind = row_format.row_kind
        if self._options.has_teacher:
            self._row_kind = self._options.row_kind
        self._renderer = self._text.renderer(row_format, self._text.learn)

    def describe(self, report: DataReport) -> None:
        """Set the format of the rows and the columns that are not used, as far as known."""
        if self._reading is None:
            return
        report.dataset_format = self._reading.dataset_format
        used = {*self._reading.names, *self._teacher_columns, *self._template_columns}
        report.unused_columns = [column for column in self._columns if column not in used]

    @property
    def state(self) -> dict[str, Any]:
        """How rows are read, as JSON for `restore`."""
        assert self._reading is not None
        reading = self._reading
        return {
            "dataset_format": reading.dataset_format,
            "names": dict(reading.names),
            "watched": list(reading.watched),
        }

    def restore(self, state: Mapping[str, Any], columns: Sequence[str]) -> None:
        """Read rows as when `state` was asked. columns: of all rows until then."""
        self._use(Reading(**state), columns)

    def read(self, row: Row, folder: str) -> Content:
        """Read the content of a row; see `KindOfRows`."""
        assert self._reading is not None
        template_kwargs = read_kwargs(row, self._template_columns)
        named = dict(self._reading.named(row))
        named |= {name: row[name] for name in self._teacher_columns if name in row}
        named[FOLDER] = folder
        return with_template_kwargs(self._read(named), template_kwargs)

    def tokenize(
        self, contents: Sequence[tuple[int, Content]], report: DataReport
    ) -> tuple[TokenizedRows, list[int]]:
        """The tokens of rows, and the number of each row's before any are cut."""
        return tokenization.tokenize_batch(
            contents,
            self._row_kind,
            self._renderer,
            self._text.tokenizer,
            self._text.options.longest_row,
            report,
        )

    @property
    def _teacher_columns(self) -> tuple[str, ...]:
        return COLUMNS["teacher"] if self._options.has_teacher else ()


def _reader(row_format: Format, options: TextOptions) -> Callable[[Row], Content]:
    """The function that reads a row with the format's names of columns."""
    read = row_format.read
    if options.rating_threshold is not None:
        read = partial(read, threshold=options.rating_threshold)
    if options.has_teacher:
        return partial(preferences.read_with_teacher, asked=row_format.asks[0], read=read)
    return read


def _check_objective(
    reading: Reading, options: TextOptions, first_rows: Sequence[Row], origin: str
) -> None:
    """Refuse rows that the objective cannot learn from. Raises UserError."""
    kind = FORMATS[reading.dataset_format].row_kind
    needed = options.row_kind
    can_teach = kind == TEXTS and FORMATS[reading.dataset_format].asks
    has_prompt = any(row.keys() & {*COLUMNS["teacher"]} for row in first_rows)
    if kind == needed or (options.has_teacher and can_teach and has_prompt):
        return
    if needed != TEXTS:
        raise UserError(
            f"{origin}: --objective {options.objective} needs {needed.described}, and no column "
            "with a known name has them. Name the columns with --columns."
        )
    alone = ""
    if {"chosen", "rejected_response"} & {*reading.names.values()}:
        columns, text_format = preferences.chosen_alone(first_rows[0], reading.names)
        if reads(first_rows, columns, text_format):
            options_alone = f"--columns {shlex.join(columns)} --dataset_format {text_format}"
            alone = f"; or train on the chosen answers alone, with {options_alone}"
    say = f"Say how to learn from them, such as --objective {kind.objective}"
    raise UserError(f"{origin}: these rows are {kind.described}. {say}{alone}.")
