"""Turns the rows of one dataset into tokens or prompts, and reports on rows that are left out."""

import contextlib
import dataclasses
import json
import logging
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.config.objectives import OBJECTIVES, TEXTS
from fsdp_qlora.data.batches import tokenization
from fsdp_qlora.data.batches.cache import through_cache, tokenizer_identity
from fsdp_qlora.data.batches.report import NO_ROOM, NUMBERS_SHOWN, DataReport
from fsdp_qlora.data.batches.rows import NO_ROWS, TokenizedRows, join_rows
from fsdp_qlora.data.content import (
    FOLDER,
    BadRow,
    Fields,
    PromptContent,
    Rendered,
    Row,
    prompt_text,
    with_template_kwargs,
)
from fsdp_qlora.data.options import DataOptions, TextOptions
from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.data.sources import source as sources
from fsdp_qlora.data.sources.dataset_name import parse_name
from fsdp_qlora.data.sources.files import ChooseColumns
from fsdp_qlora.data.sources.source import Entry, Source
from fsdp_qlora.data.text import preferences
from fsdp_qlora.data.text.chat_template import ChatTemplate, TemplateWorker
from fsdp_qlora.data.text.formats import FORMATS, Format
from fsdp_qlora.data.text.recognition import IGNORE, Reading, RequestedFormat, parse_columns, reads
from fsdp_qlora.data.text.rendering import Renderer, over_workers
from fsdp_qlora.data.text.template_kwargs import COLUMN, columns_of, read_kwargs, read_with_kwargs
from fsdp_qlora.data.text.templates import as_chat, find_template
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

# Rows of a dataset that decide on --context_length auto; a larger one is sampled.
_MOST_MEASURED = 10_000
# Names that reward functions know for something else.
_OURS = {"prompt", "completion", "completion_ids"}


class _RenderedPrompt(NamedTuple):
    """A row's prompt as text, before it becomes a `Prompt`."""

    format_name: str
    rendered: Rendered
    for_teacher: Rendered | None
    """The text that the teacher sees instead, if it is another one."""
    content: Any
    answer: object
    """This and the content: as in `Prompt`."""


class DatasetPipeline:
    """Turns the rows of the one `options.dataset` into tokens. source: if it is known already."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        workers: Sequence[TemplateWorker],
        source: Source | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.workers = workers
        text = options.text
        self.template = find_template(text.prompt_template)
        self.requested = RequestedFormat(text.requested_format, parse_columns(text.columns))
        self._chat_template = ChatTemplate(tokenizer, self.template.chat)
        self.used: ChooseColumns = tuple if text.makes_rows or text.has_teacher else self._used
        self.prompts: list[Prompt] = []
        [dataset] = map(parse_name, options.dataset)
        self.source = source or sources.find_source(dataset)
        self.samples = options.dataset_samples or sources.DEFAULT_SAMPLES.get(dataset.name)
        # Of all rows so far: those of one batch may lack one that others have.
        self._columns: dict[str, None] = {}
        self._reading: Reading | None = None  # known from the first rows on
        self._kwargs: dict[str, str] = {}  # of `_find_kwargs`

    def _used(self, columns: Sequence[str]) -> set[str]:
        """The columns that the rows' format or the chat template may use."""
        renames = self.requested.renames
        all_names = [renames.get(column, column) for column in columns]
        may_be = columns_of(columns, renames, self._chat_template.source, lambda: all_names)
        return self.requested.used(columns) | may_be.keys()

    def _find_kwargs(self, row_format: Format, used: Collection[str] = ()) -> None:
        """Find the columns that set variables of the chat template.

        There are none if rows of this format cannot be chats.
        """
        if not (row_format.may_be_chat or self.template.is_chat):
            self._kwargs = {}
            return
        template = self._chat_template
        others = [column for column in self._columns if column not in used]
        ask = partial(template.variables, self.workers[0])
        self._kwargs = columns_of(others, self.requested.renames, template.source, ask)

    def all_rows(self) -> tuple[TokenizedRows, DataReport]:
        """All rows, from the cache or tokenized by one process at a time and kept there.

        A run that learns from its own completions gets `prompts` instead, which are not cached.
        """
        source = self.source
        if self.options.text.makes_rows:
            return self._tokenize(source.entries(self.samples))

        def make() -> tuple[TokenizedRows, DataReport]:
            tokenized = self._tokenize(
                source.entries(self.samples, used=self.used), show_progress=True
            )
            # The key has the identity from before: rows of another content must not be kept for it.
            if source.fingerprint() != source.identity:
                raise UserError(
                    f"{source.origin} was changed while it was read. Start again when it is "
                    "complete."
                )
            return tokenized

        rows, report = through_cache(self._key, make)
        # The same content may be at another path now.
        return rows, dataclasses.replace(report, origin=source.origin)

    @property
    def _key(self) -> list[object]:
        """All that the rows depend on."""
        text = self.options.text
        kind = self.options.text.row_kind
        source = self.source
        key: list[object] = [
            source.identity,
            source.start,
            source.stop,
            self.samples,
            self.requested.renames,
        ]
        key += [
            dataclasses.astuple(self.template),
            text.dataset_format,
            self.options.context_length,
            text.learn,
        ]
        key += [tokenizer_identity(self.tokenizer), self.tokenizer.chat_template]
        # Entries are added only where they matter, so that a new option leaves the keys of other
        # runs, and their cached rows, as they were.
        if text.image_processor:
            # Relative paths of images are of the dataset's folder.
            key += [*text.image_processor.identity, source.folder_of(source.parts[0].name)]
        if kind != TEXTS:
            key += [kind.name, preferences.PROMPTS, text.max_completion_length]
        if text.rating_threshold is not None:
            key.append(f"rated {text.rating_threshold}")
        return key

    def measured(self) -> DataReport:
        """The report on the uncut rows that decide on --context_length auto.

        Its num_rows were read, and num_used of them tokenized.
        """

        def make() -> tuple[TokenizedRows, DataReport]:
            num_rows, chosen = _sample_evenly(
                self.source.entries(self.samples, used=self.used), _MOST_MEASURED
            )
            _, report = self._tokenize(chosen)
            return NO_ROWS, dataclasses.replace(report, num_rows=num_rows, num_used=len(chosen))

        return through_cache(["measured", *self._key], make)[1]

    def _tokenize(
        self, entries: Iterable[Entry], *, show_progress: bool = False
    ) -> tuple[TokenizedRows, DataReport]:
        """Tokenize entries in batches, so that few rows are in memory as text."""
        pieces = [NO_ROWS]
        lengths = [0]
        report = DataReport(self.source.origin)
        left = iter(entries)
        tokenize = self._collect_prompts if self.options.text.makes_rows else self._tokenize_batch
        with tqdm(desc="Tokenizing", unit=" rows", disable=not show_progress) as bar:
            while batch := list(islice(left, sources.ROWS_PER_BATCH)):
                rows = self._rows(batch, report)
                if rows:
                    piece, piece_lengths = tokenize(rows, report)
                    pieces.append(piece)
                    lengths += piece_lengths
                bar.update(len(batch))
        if not self._columns:
            [(place, reason), *_] = report.places() or [(report.origin, "the dataset is empty")]
            if report.num_rows:
                more = f" None of its {report.num_rows:,} rows can be read."
            else:
                more = " Give one with rows."
            raise UserError(f"{place}: {reason}.{more}")
        joined = join_rows(pieces)
        # inverted_cdf gives a length that some row has; the default would interpolate.
        length = np.quantile(lengths[1:] or lengths, 0.99, method="inverted_cdf")
        report.length_of_99_percent = int(length)
        report.count(joined)
        if self.options.text.makes_rows:
            report.num_used = len(self.prompts)
            report.num_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        return joined, report

    def _rows(self, entries: Sequence[Entry], report: DataReport) -> list[tuple[int, Row, str]]:
        """(number, row, the folder of its file) of the entries that are rows.

        The others are in the report.
        """
        rows: list[tuple[int, Row, str]] = []
        for file, row_number, row in entries:
            if report.parts[-1:] != [file]:
                report.parts.append(file)
            if isinstance(row, BadRow):
                report.reject(file.offset + row_number, str(row))
            else:
                rows.append((file.offset + row_number, row, self.source.folder_of(file.name)))
        report.num_rows += len(entries)
        return rows

    def _tokenize_batch(
        self, rows: Sequence[tuple[int, Row, str]], report: DataReport
    ) -> tuple[TokenizedRows, list[int]]:
        """The tokens of rows, and the number of each row's before any are cut."""
        named = self._named(rows, report)
        row_format = FORMATS[report.dataset_format]
        text = self.options.text
        if text.rating_threshold is not None:
            read = partial(row_format.read, threshold=text.rating_threshold)
            row_format = dataclasses.replace(row_format, read=read)
        if text.has_teacher:
            taught = partial(
                preferences.read_taught, asked=row_format.asks[0], read=row_format.read
            )
            row_format = dataclasses.replace(row_format, read=taught, row_kind=text.row_kind)
        row_format = dataclasses.replace(
            row_format, read=partial(read_with_kwargs, read=row_format.read)
        )
        renderer = Renderer(
            self.tokenizer,
            self.template,
            text.learn,
            row_format.template,
            self.workers,
            text.image_processor,
        )
        length = self.options.longest_row
        return tokenization.tokenize_batch(
            named, row_format, renderer, self.tokenizer, length, report
        )

    def _named(
        self, rows: Sequence[tuple[int, Row, str]], report: DataReport
    ) -> list[tuple[int, Row]]:
        """(number, row) of the rows that can be used, with the format's names of columns."""
        num_columns = len(self._columns)
        self._columns.update(dict.fromkeys(column for _, row, _ in rows for column in row))
        if len(self._columns) > num_columns or self._reading is None:
            first_rows = [row for _, row, _ in rows[: sources.ROWS_LOOKED_AT]]
            requested = self.requested
            if self._reading:
                # Later rows may have more columns, but the format of the first ones stays.
                requested = requested._replace(name=self._reading.dataset_format)
            reading = requested.find(list(self._columns), first_rows, report.origin)
            if not self.options.text.image_processor:
                reading = reading.without_images()
            self._reading = reading
            _check_objective(self._reading, self.options.text, first_rows, report.origin)
            self._find_kwargs(FORMATS[reading.dataset_format], self._reading.names)
        report.dataset_format = self._reading.dataset_format
        teachers = preferences.TEACHERS if self.options.text.has_teacher else ()
        used = {*self._reading.names, *teachers, *self._kwargs}
        report.unused_columns = [column for column in self._columns if column not in used]
        named: list[tuple[int, Row]] = []
        for row_number, row, folder in rows:
            try:
                added: dict[str, object] = {name: row[name] for name in teachers if name in row}
                added[FOLDER] = folder
                added[COLUMN] = read_kwargs(row, self._kwargs)
                named.append((row_number, dict(self._reading.named(row)) | added))
            except BadRow as reason:
                report.reject(row_number, str(reason))
        return named

    def _prompt_reader(self) -> Callable[[Row, TemplateWorker], _RenderedPrompt]:
        """Make the function that reads and renders the prompt of a row."""
        renderers = dict[str, Renderer]()
        text = self.options.text
        may_be_taught = "teacher" in OBJECTIVES[text.objective].options

        def read(row: Row, worker: TemplateWorker) -> _RenderedPrompt:
            name, content, said = self.requested.prompt(row)
            if name not in renderers:
                of_format = FORMATS[name].template
                renderers[name] = Renderer(
                    self.tokenizer, self.template, "assistant", of_format, self.workers
                )
            taught = None
            if text.has_teacher or (may_be_taught and any(map(row.get, preferences.TEACHERS))):
                taught = self.requested.prompt(row, for_teacher=True)[1]
            kwargs = read_kwargs(row, self._kwargs)
            renderer = renderers[name]
            rendered = renderer.prompt(with_template_kwargs(content, kwargs), worker)
            for_teacher = None
            if taught is not None:
                for_teacher = renderer.prompt(with_template_kwargs(taught, kwargs), worker)
            shown = _shown(content, rendered)
            answer = _right_answer(row, said)
            return _RenderedPrompt(name, rendered, for_teacher, shown, answer)

        return read

    def _collect_prompts(
        self, rows: Sequence[tuple[int, Row, str]], report: DataReport
    ) -> tuple[TokenizedRows, list[int]]:
        """Add prompts, each with all columns, to `prompts`.

        Returns:
            No rows, since the run makes them, and the tokens of each prompt with the longest
            completion.
        """
        num_columns = len(self._columns)
        self._columns.update(dict.fromkeys(column for _, row, _ in rows for column in row))
        if len(self._columns) > num_columns:
            self._find_kwargs(FORMATS["messages"])
        if not num_columns:
            self.requested.check(list(self._columns), report.origin)
        lengths = list[int]()
        prompts = over_workers([row for _, row, _ in rows], self._prompt_reader(), self.workers[:1])
        for (row_number, row, _), prompt in zip(rows, prompts, strict=True):
            if isinstance(prompt, BadRow):
                report.reject(row_number, str(prompt))
                continue
            rendered = prompt.rendered
            report.dataset_format = report.dataset_format or prompt.format_name
            report.is_chat |= rendered.kind == "chat"
            report.is_filled |= rendered.kind == "template"
            ids = tokenization.encode_prompt(rendered, self.tokenizer)
            teacher_ids = None
            if prompt.for_teacher is not None:
                teacher_ids = tokenization.encode_prompt(prompt.for_teacher, self.tokenizer)
            longest = max(len(ids), len(teacher_ids or ()))
            lengths.append(longest + self.options.text.max_completion_length)
            if not ids:
                report.reject(row_number, "the prompt has no tokens")
            elif lengths[-1] > self.options.longest_row:
                report.reject(row_number, NO_ROOM)
            else:
                columns = self._beside(row)
                self.prompts.append(
                    Prompt(row_number, ids, prompt.content, columns, prompt.answer, teacher_ids)
                )
        return NO_ROWS, lengths

    def _beside(self, row: Row) -> Row:
        """The columns for reward functions, under the names that --columns gives."""
        columns = {self.requested.renames.get(name, name): value for name, value in row.items()}
        if isinstance(columns.get("prompt"), list):
            columns["messages"] = columns["prompt"]
        return {name: value for name, value in columns.items() if name not in {*_OURS, IGNORE}}


def _sample_evenly(items: Iterable[Entry], most: int) -> tuple[int, list[Entry]]:
    """The number of items, and up to `most` of them at even distances.

    At least half as many are kept, or all if they are fewer.
    """
    count = 0
    kept = list[Entry]()
    distance = 1
    for count, item in enumerate(items, start=1):
        if (count - 1) % distance == 0:
            kept.append(item)
        if len(kept) > most:
            # Every second one goes, so the distance doubles: one pass, without knowing the number.
            kept = kept[::2]
            distance = 2 * distance
    return count, kept


def _right_answer(row: Row, said: str | None) -> object:
    """The right answer that is in no column of its own.

    It is in an object of verl's rows, or is what the assistant says at the end.
    """
    for name in ("reward_model", "verification_info"):
        value = row.get(name)
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, Mapping) and value.get("ground_truth") is not None:
            return value["ground_truth"]
    last = row.get("completion")
    if isinstance(last, list) and last:
        last = last[-1]
    if isinstance(last, Mapping):
        last = last.get("content")
    return said or last


def _check_objective(
    reading: Reading, options: TextOptions, first_rows: Sequence[Row], origin: str
) -> None:
    """Refuse rows that the objective cannot learn from. Raises UserError."""
    kind = FORMATS[reading.dataset_format].row_kind
    wanted = options.row_kind
    can_teach = kind == TEXTS and FORMATS[reading.dataset_format].asks
    has_prompt = any(row.keys() & {*preferences.TEACHERS} for row in first_rows)
    if kind == wanted or (options.has_teacher and can_teach and has_prompt):
        return
    if wanted != TEXTS:
        raise UserError(
            f"{origin}: --objective {options.objective} learns from {wanted.described}, and these "
            "rows have none in columns of known names. Other names are given with --columns."
        )
    alone = ""
    if "chosen" in reading.names.values():
        columns, text_format = preferences.chosen_alone(first_rows[0], reading.names)
        if reads(first_rows, columns, text_format):
            options_alone = f"--columns {shlex.join(columns)} --dataset_format {text_format}"
            alone = f"; or train on the chosen answers alone, with {options_alone}"
    say = f"Say how to learn from them, such as --objective {kind.objective}"
    raise UserError(f"{origin}: these rows are {kind.described}. {say}{alone}.")


def _shown(content: PromptContent, rendered: Rendered) -> Any:
    """The prompt as reward functions get it: messages where it is a chat, else text."""
    if rendered.kind != "chat":
        return prompt_text(content)
    if isinstance(content, Fields):
        content = as_chat(dataclasses.replace(content, context=""))
    assert not isinstance(content, Rendered)
    return content.messages


def check_report(report: DataReport, options: DataOptions) -> None:
    """Log what became of the rows. Raises UserError if none is left or too many were rejected."""
    allowed = options.max_bad_rows
    num_bad = report.num_rejected
    advice = report.describe_cut(options.longest_row)
    if report.num_used == 0 or num_bad > allowed * report.num_rows:
        lines = report.describe_rejected()
        if len(lines) > NUMBERS_SHOWN:
            lines[NUMBERS_SHOWN:] = [f"... and {len(lines) - NUMBERS_SHOWN:,} other reasons"]
        cure = f"raise {'--context_length or ' if report.num_too_long else ''}--max_bad_rows"
        raise UserError(
            f"{report.origin}: {num_bad:,} of {report.num_rows:,} rows cannot be used, allowed are "
            f"{allowed:.1%}. Repair them or {cure}."
            + "".join(f"\n  {line}" for line in [*lines, *advice])
        )
    log.info("%s", report.describe())
    for line in report.describe_rejected():
        log.warning("Rows left out, %s", line)
    for line in [*report.describe_notes(), *advice]:
        log.warning("%s", line)
