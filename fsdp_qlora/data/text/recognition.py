"""Recognizes the format of a dataset's rows by their columns.

Rows then get the format's names of columns.
"""

import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from fsdp_qlora.data.columns import COLUMNS, MEDIA, NOT_ASKED, WATCHED
from fsdp_qlora.data.content import FOLDER, BadRow, Chat, PromptContent, Row
from fsdp_qlora.data.text import preferences
from fsdp_qlora.data.text.formats import ALIASES, FORMATS, PROMPT_ALIASES, TRIED_LAST, Alias
from fsdp_qlora.utils.errors import UserError

IGNORE = "ignore"  # the name by --columns of a column that is not used on purpose

_MARKUP = re.compile(
    r"<\|(im_start|start_header_id|user|assistant|start)\|>|<start_of_turn>|\[INST\]"
)


class Reading(NamedTuple):
    """How the rows of a dataset are read."""

    dataset_format: str
    names: Mapping[str, str]
    """The columns that are used -> their names in the format."""
    watched: Sequence[str]
    """Columns that must be empty, because they would change what an answer means."""

    def named(self, row: Row) -> Row:
        """The columns that are used, called as in the format.

        Raises BadRow if a watched one is filled.
        """
        for column in self.watched:
            reason = self._unused_meaning(column, row.get(column))
            if reason is not None:
                raise BadRow(reason)
        return {self.names[column]: value for column, value in row.items() if column in self.names}

    def prompt(
        self, row: Row, *, for_teacher: bool = False, folder: str = ""
    ) -> tuple[PromptContent, str | None]:
        """Read a row that `RequestedFormat.find_prompt` has found a prompt in.

        Args:
            folder: of relative paths of images.
        Returns:
            The prompt, and the answer of a chat that has one.
        Raises:
            BadRow: the prompt cannot be read, or a column is filled that changes what is asked and
                is not used.
        """
        row_format = FORMATS[self.dataset_format]
        read = dict(self.named(row)) | {FOLDER: folder}
        if for_teacher:
            taught = {column: row.get(column) for column in COLUMNS["teacher"]}
            read = dict(preferences.for_teacher(read | taught, row_format.asks[0]))
        return row_format.prompt(read)

    def without_images(self) -> "Reading":
        """The same for a model of text alone: rows with images cannot be used."""
        names = {column: name for column, name in self.names.items() if name != "images"}
        return self._replace(
            names=names, watched=[*self.watched, *(self.names.keys() - names.keys())]
        )

    def _unused_meaning(self, column: str, value: object) -> str | None:
        if str(value).strip() in ("", "None", "null", "[]", "{}"):
            return None
        without = f"--columns {IGNORE}={column} trains without it"
        if column == "label" and str(value).lower() == "true":
            return None
        if column == "label" and str(value).lower() == "false":
            return (
                f"its label is false: a bad answer; {without}, --max_bad_rows 1 on good ones, "
                "--objective kto on both"
            )
        if column in MEDIA:
            return f"{column}: only text can be trained on; {without}, blind"
        return (
            f"{column} is filled, and the format {self.dataset_format} does not use it; {without}"
        )

    def can_use(self, row: Row) -> bool:
        try:
            content = FORMATS[self.dataset_format].read(self.named(row))
            if isinstance(content, Chat):
                content.refuse_unanswered()
        except (BadRow, RecursionError):
            return False
        return True


class Fit(NamedTuple):
    """A format that columns fit."""

    dataset_format: str
    names: dict[str, str]
    """The columns that are used -> their names in the format."""


class RequestedFormat(NamedTuple):
    """The format of a dataset as the options name it."""

    name: str = "auto"
    """A key of FORMATS, or "auto" for the first that fits."""
    renames: Mapping[str, str] = {}
    """The result of `parse_columns`."""

    def find(self, columns: Sequence[str], first_rows: Sequence[Row], origin: str = "") -> Reading:
        """How rows with these columns are read.

        Args:
            first_rows: tell formats apart that have the same columns.
            origin: the dataset's path or name, for the message.
        Raises:
            UserError: the format is unknown, a column to rename is not there, or columns that it
                needs are missing.
        """
        self.check(columns, origin)
        reading = self._told(columns, first_rows)
        if reading is not None:
            if reading.dataset_format == "text" and self.name == "auto":
                names = reading.names
                _refuse_other_text(
                    [{names.get(key, key): row[key] for key in row} for row in first_rows], origin
                )
            return reading
        lists = [column for column, value in first_rows[0].items() if isinstance(value, list)]
        middle = f"--rating_threshold {preferences.middle_rating(first_rows):g}"
        unasked = (
            f"{origin}: its answers have ratings. Give the rating from which an answer is good, "
            f"such as {middle} --objective"
        )
        if self.name == "auto" and any(_fitting("ratings", self.renames, lists)):
            raise UserError(f"{unasked} dpo.")
        if self.name == "label" and any(_fitting("rating", self.renames, columns)):
            raise UserError(f"{unasked} kto.")
        row_format = FORMATS.get(self.name)
        works = partial(reads, first_rows, dataset_format=self.name)
        needed = (
            f" The format {self.name} needs {', '.join(row_format.columns)}." if row_format else ""
        )
        raise UserError(
            f"{origin}: missing columns. It has: {', '.join(columns) or 'none'}.{needed} "
            f"{advise(first_rows, works)}"
        )

    def check(self, columns: Sequence[str], origin: str) -> None:
        """Raise UserError if the format is unknown, or a column to rename is not there."""
        if self.name != "auto" and self.name not in FORMATS:
            raise UserError(
                f"dataset_format: unknown format {self.name!r}. Formats: "
                f"{', '.join(['auto', *FORMATS])}."
            )
        missing = [name for name in self.renames if name not in columns]
        if missing:
            raise UserError(
                f"columns: {origin} has no column {', '.join(map(repr, missing))}. It has: "
                f"{', '.join(columns)}."
            )

    def find_prompt(self, row: Row) -> Reading:
        """How the prompt of a row is read, which may lack an answer.

        The first format that its filled columns fit decides.

        Raises:
            BadRow: no column is a prompt.
        """
        columns = tuple(column for column, value in row.items() if value)
        for name, names in _prompt_formats(self.name, tuple(self.renames.items()), columns):
            named = {names[column]: row[column] for column in columns if column in names}
            recognizes = FORMATS[name].recognizes
            if recognizes is None or self.name == name or recognizes(named):
                watched = [
                    column
                    for column in self._watched(columns)
                    if column not in {*names, *NOT_ASKED}
                ]
                return Reading(name, names, watched)
        prompt_columns = dict.fromkeys(
            column for row_format in FORMATS.values() for column in row_format.asks[-1:]
        )
        raise BadRow(
            f"no prompt in a column {', '.join((*prompt_columns, *COLUMNS['asks alone']))}"
        )

    def _told(self, columns: Sequence[str], rows: Sequence[Row]) -> Reading | None:
        """Find the format, or None if no format fits."""
        for name, names in _fitting(self.name, self.renames, columns):
            recognizes = FORMATS[name].recognizes if self.name == "auto" else None
            named = ({names[column]: row[column] for column in names.keys() & row} for row in rows)
            if recognizes is None or any(map(recognizes, named)):
                watched = [column for column in self._watched(columns) if column not in names]
                return Reading(name, names, watched)
        return None

    def _watched(self, columns: Sequence[str]) -> list[str]:
        return [column for column in columns if self.renames.get(column, column) in WATCHED]

    def used(self, columns: Sequence[str]) -> set[str]:
        """The columns that the rows' format may use, or all where no format fits."""
        used: set[str] = set()
        for name, names in _fitting(self.name, self.renames, columns):
            used |= names.keys()
            # Without a test of rows it is the format, so that of those behind it none is used.
            if FORMATS[name].recognizes is None:
                break
        if not used:
            return set(columns)
        # Images and the like take much memory: that a column has them is known without reading it.
        return used | {*self._watched(columns)} - {*MEDIA}


def _fitting(
    requested: str,
    renames: Mapping[str, str],
    columns: Sequence[str],
    aliases: Sequence[Alias] = ALIASES,
    *,
    is_answered: bool = True,
) -> Iterator[Fit]:
    """Each format that fits columns, and their names in it.

    A name of --columns is of that column alone.

    Args:
        requested, renames: as in `RequestedFormat`.
        is_answered: whether columns of the answer are needed, too.
    """
    renamed = {
        name: renames.get(name, name)
        for name in columns
        if name in renames or name not in renames.values()
    }
    shapes: list[Alias] = [(name, {}) for name in FORMATS if name not in TRIED_LAST]
    for name, alias in (*shapes, *aliases):
        if requested not in ("auto", name) or not alias.keys() <= set(renamed.values()):
            continue
        # an answer, whose question may be called otherwise
        if alias and name == "text" and len(renamed) > 1:
            continue
        ours = {column: alias.get(named, named) for column, named in renamed.items()}
        names = FORMATS[name].renames(ours.values(), is_answered=is_answered)
        if names:
            used = {column: names[named] for column, named in ours.items() if named in names}
            yield Fit(name, used)


@lru_cache
def _prompt_formats(
    requested: str, renames: tuple[tuple[str, str], ...], columns: tuple[str, ...]
) -> list[Fit]:
    """The formats that prompts with these columns fit, in the order of `FORMATS`.

    Formats for which the row has an answer, too, come first: so it is asked what it is trained on.
    Prompts of a dataset mostly have the same columns, so results are kept.
    """
    find = partial(_fitting, requested, dict(renames), columns)
    answered = [fit for fit in find(()) if fit.dataset_format != "text"]
    fits = [*answered, *find(PROMPT_ALIASES, is_answered=False)]
    return [fit for fit in fits if FORMATS[fit.dataset_format].asks]


def reads(rows: Sequence[Row], columns: Sequence[str], dataset_format: str = "auto") -> bool:
    """Whether most of the rows can be used with these options."""
    requested = RequestedFormat(dataset_format, parse_columns(columns))
    reading = requested._told(list(dict.fromkeys(itertools.chain(*rows))), rows)
    return reading is not None and sum(map(reading.can_use, rows)) > len(rows) / 2


def _refuse_other_text(rows: Sequence[Row], origin: str) -> None:
    """Raise UserError where texts are chats, or messages of one, and not documents."""
    anyway = "--dataset_format text learns all of it as it is"
    if any("parent_id" in row and "role" in row for row in rows):
        raise UserError(
            f"{origin}: each row is one message of a tree of chats, not a document: questions "
            f"would be learned, and answers without them. Give whole conversations; {anyway}."
        )
    marked = [markup for row in rows if (markup := _MARKUP.search(str(row.get("text"))))]
    if len(marked) > len(rows) / 10:  # fewer may be pages on such markup
        raise UserError(
            f"{origin}: the texts are chats that a template has filled ({marked[0][0]}): questions "
            "would be learned too, and the end token twice. Give the messages, which the model's "
            f"template fills; {anyway}."
        )


def parse_columns(columns: Sequence[str]) -> dict[str, str]:
    """("instruction=task",) -> {"task": "instruction"}.

    A column of the dataset becomes one of the format, or IGNORE.
    """
    renames: dict[str, str] = {}
    for item in columns:
        format_name, equals, column = item.partition("=")
        if not (format_name and equals and column):
            raise UserError(
                f"columns: {item!r} does not say which column is which. Write the format's name "
                "first, then the dataset's: instruction=task."
            )
        if column in renames or (format_name in renames.values() and format_name != IGNORE):
            name = column if column in renames else format_name
            raise UserError(
                f"columns: {name!r} occurs twice in {' '.join(columns)}. Name each column once."
            )
        renames[column] = format_name
    return renames


# --- advice on rows of no known format ---

# What is in the names of columns that ask, and of those that answer.
_ASKS = re.compile(
    r"^(?!.*id$).*(instruct|question|prompt|query|problem|input|task|request|dialog|article|document|message)",
    re.I,
)
_ANSWERS = re.compile(
    r"answer|response|output|completion|solution|result|summary|highlight|reply|message|bot", re.I
)
_LONG = 40  # characters, of an answer whose column is not called so
_DOCUMENT = 200  # characters, of a text among other columns
_SHOWN = 600  # characters, of a row


def advise(rows: Sequence[Row], works: Callable[[Sequence[str]], bool]) -> str:
    """Advise on rows of no known format: --columns with which it `works`, or else the first row."""
    columns = next(filter(works, _candidates(rows)), None)
    if columns:
        return f"Say which column is which, such as --columns {shlex.join(columns)}"
    row = json.dumps(rows[0], ensure_ascii=False, default=str)
    shown = row if len(row) <= _SHOWN else f"{row[:_SHOWN]}..."
    return f"No columns have texts, or questions with answers. The first row: {shown}"


def _candidates(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The best first."""
    yield from ([f"messages={name}"] for name, value in rows[0].items() if isinstance(value, list))
    columns = {
        name: [str(row[name]) for row in rows if isinstance(row.get(name), str)] for name in rows[0]
    }
    lengths = {
        name: sum(map(len, texts)) / len(rows) for name, texts in columns.items() if any(texts)
    }
    question = next(filter(_ASKS.search, lengths), None)
    if question is not None:
        behind = [name for name in lengths if name != question and _ANSWERS.search(name)]
        behind += [
            name for name in [*lengths][[*lengths].index(question) + 1 :] if lengths[name] >= _LONG
        ]
        yield from ([f"instruction={question}", f"output={name}"] for name in behind[:1])
    elif lengths:
        text, *others = sorted(lengths, key=lambda name: -lengths[name])
        if len(columns) == 1 or lengths[text] > max(
            [_DOCUMENT, *(5 * lengths[name] for name in others)]
        ):
            yield [f"text={text}"]
