"""Formats: the meaning of a dataset's rows, recognized by their columns. A new format is a row of FORMATS."""

import dataclasses
import itertools
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from fsdp_qlora.config.objectives import LABELS, PAIRS, TEXTS, RowKind
from fsdp_qlora.data.content import BadRow, Content, Fields, Rendered, Row, Segment, refuse_media, text_of
from fsdp_qlora.data.text import chats, preferences
from fsdp_qlora.data.text import templates as prompts
from fsdp_qlora.utils.errors import UserError

HUMAN, ASSISTANT = "### Human:", "### Assistant:"  # of timdettmers/openassistant-guanaco
_SPEAKER = re.compile(r"\s*<(user|bot)>:\s*")  # of Huatuo's dialogues
SPLIT = "a dialogue of <user>: and <bot>: in its instruction, which is split into turns"
FIRST = "it has several instances, of which the first is learned"


@dataclass(frozen=True)
class Format:
    """How one kind of dataset is recognized and read."""

    columns: tuple[str, ...]
    """Columns that a dataset must have. One that has them all is of this format."""
    optional_columns: tuple[str, ...]
    """Columns that are used where they are present."""
    read: Callable[..., Content]
    """Reads a row's content; that of ratings takes --rating_threshold too. Raises BadRow."""
    template: prompts.PromptTemplate = prompts.TEMPLATES["alpaca"]
    """For `Fields`, unless --prompt_template names another."""
    recognizes: Callable[[Row], bool] | None = None
    """Tests the first rows, one of which must pass, where the columns alone do not tell the format."""
    row_kind: RowKind = TEXTS
    """The kind of rows for objectives."""

    def renames(self, columns: Collection[str]) -> dict[str, str]:
        """The columns that are used: their name -> the format's, in any case; none if one that it needs is missing."""
        found = {name: column for name, column in _matches(self.columns, columns).items() if column is not None}
        if len(found) < len(self.columns):
            return {}
        for name in self.optional_columns:
            others = [column for column in columns if column not in found.values()]
            matches = _matches((name, *SYNONYMS.get(name, ())), others)
            if (column := next(filter(None, matches.values()), None)) is not None:
                found[name] = column
        return {column: name for name, column in found.items()}


def _matches(wanted: Sequence[str], columns: Collection[str]) -> dict[str, str | None]:
    """Wanted column -> the dataset's of the same name, or the only one that differs in case and blanks alone."""
    close = {name: [column for column in columns if column.strip().lower() == name] for name in wanted}
    return {name: name if name in columns else found[0] if len(found := close[name]) == 1 else None for name in wanted}


# --- instructions, for a prompt template ---


def read_fields(row: Row, instruction: str, response: str, context: str = "context") -> Fields:
    """The columns of these names. A context that is absent, null or blank counts as none.

    `history` is LLaMA-Factory's list of pairs. Turns that were written into the instruction are history, too.
    """
    fields = Fields(
        instruction=text_of(row, instruction),
        response=text_of(row, response),
        context=text_of(row, context, required=False),
        system=text_of(row, "system", required=False),
        history=_history(row.get("history")),
    )
    if row.get("images"):
        return dataclasses.replace(fields, shows=row)
    refuse_media(fields.instruction, instruction)
    refuse_media(fields.context, context)
    before, *parts = _SPEAKER.split(fields.instruction)
    speakers, said = parts[::2], parts[1::2]
    if before.strip() or not all(said) or speakers != [*["user", "bot"] * (len(said) // 2), "user"]:
        return fields
    history = (*fields.history, *zip(said[:-1:2], said[1::2], strict=True))
    return dataclasses.replace(fields, instruction=said[-1], history=history, notes=(SPLIT,))


def _history(value: object) -> tuple[tuple[str, str], ...]:
    pairs = []
    for number, pair in enumerate(value if isinstance(value, list) else [value] if value else [], start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRow(f"history {number} is not a pair of instruction and response")
        named = dict(zip((f"history {number} instruction", f"history {number} response"), pair, strict=True))
        instruction, response = (text_of(named, name) for name in named)
        pairs.append((instruction, response))
    return tuple(pairs)


def read_instances(row: Row) -> Fields:
    """self-instruct's: an instruction with `instances` of input and output, of which the first is learned."""
    instances = row.get("instances")
    if not isinstance(instances, list) or not instances or not isinstance(instances[0], Mapping):
        raise BadRow("instances is not a list of objects")
    fields = read_fields({**row, **instances[0]}, "instruction", "output", "input")
    return dataclasses.replace(fields, notes=fields.notes + (FIRST,) * (len(instances) > 1))


def read_rationale(row: Row) -> Fields:
    """AQuA's: a question with `options`; the rationale is learned, and the letter of the `correct` one behind it."""
    options = row.get("options") or []
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise BadRow("options is not a list of texts")
    rationale, correct = text_of(row, "rationale"), text_of(row, "correct")
    if not re.search(rf"\b{re.escape(correct)}\W*$", rationale):
        rationale += f"\n\nThe answer is {correct}."
    question = "\n".join([text_of(row, "question"), *options])
    return read_fields({"question": question, "answer": rationale}, "question", "answer")


def read_question(row: Row) -> Fields:
    """The answer may be the first of several, as in SQuAD's `answers.text`."""
    answer = row.get("answer")
    answers = answer.get("text") if isinstance(answer, Mapping) else answer
    if isinstance(answers, list) and answers:
        row = {**row, "answer": answers[0]}
    return read_fields(row, "question", "answer")


# --- text ---


def read_text(row: Row) -> Rendered:
    return Rendered([Segment(text_of(row, "text"), learned=True)], "document")


def read_guanaco(row: Row) -> Rendered:
    """Turns after ### Human: and ### Assistant:. The assistant's are learned, each from the blank before it."""
    text = text_of(row, "text")
    segments: list[Segment] = []
    rest = text
    while ASSISTANT in rest:
        asked, _, rest = rest.partition(ASSISTANT)
        end = rest.find(HUMAN)
        answer = rest if end < 0 else rest[:end].rstrip()
        segments += [Segment(asked + ASSISTANT, learned=False), Segment(answer, learned=True)]
        rest = rest[len(answer) :]
    if not segments:
        raise BadRow(f"no {ASSISTANT} in the text")
    return Rendered(segments + [Segment(rest, learned=False)] * bool(rest.strip()), "text")


def is_guanaco(row: Row) -> bool:
    text = row.get("text")
    return isinstance(text, str) and text.lstrip().startswith(HUMAN) and ASSISTANT in text


# --- tokens ---

_MASKS = ("completion_mask", "assistant_masks", "loss_mask")


def read_tokens(row: Row) -> Rendered:
    """Token ids; learned is what `labels` or a mask says, else all of them."""
    ids, labels = _integers(row, "input_ids"), _integers(row, "labels", required=False)
    masks = [mask for name in _MASKS if (mask := _integers(row, name, required=False)) is not None]
    if ids is None or any(len(other) != len(ids) for other in (labels, *masks) if other is not None):
        raise BadRow("labels or mask have another length than input_ids")
    if labels is not None and any(label not in (-100, token) for label, token in zip(labels, ids, strict=True)):
        raise BadRow("labels are neither -100 nor the token of the same place: shift them back")
    learned = np.ones(len(ids), dtype=np.bool_) if labels is None else np.array(labels) != -100
    for mask in masks:
        learned &= np.array(mask) != 0
    return Rendered(kind="tokens", ids=ids, learned=learned.tolist())


def _integers(row: Row, column: str, *, required: bool = True) -> list[int] | None:
    values = row.get(column)
    if values is None and not required:
        return None
    if not isinstance(values, list) or not values:
        raise BadRow(f"empty {column}" if values in (None, []) else f"{column} is not a list of numbers")
    if not all(isinstance(value, int) for value in values):  # bool is one
        raise BadRow(f"{column} is not a list of whole numbers")
    return [int(value) for value in values]


_ASKED = ("context", "system", "history", "images")
_BESIDE = ("tools", "system", "images")
_PROMPTED = (*preferences.PROMPTS, "system", "tools")
_ANSWERED = ("completion", "messages", *_PROMPTED)
_QUESTION = prompts.TEMPLATES["question_answer"]
_read_alpaca = partial(read_fields, instruction="instruction", response="output", context="input")
_read_dolly = partial(read_fields, instruction="instruction", response="response")

# With dataset_format auto the first that fits is used, so a format precedes those that need only some of its
# columns. Raise cache.CACHE_VERSION when the order or the text of a format changes: cached rows hold the old one.
FORMATS: dict[str, Format] = {
    "alpaca": Format(("instruction", "output"), ("input", "system", "history", "images"), _read_alpaca),
    "pretokenized": Format(("input_ids",), ("labels", *_MASKS, "attention_mask"), read_tokens),
    "preference": Format(("chosen", "rejected"), _PROMPTED, preferences.read_pair, row_kind=PAIRS),
    # These are told by the objective and its threshold: a text may have a label or a rating too.
    "ratings": Format(
        ("completions",), _PROMPTED, preferences.read_ratings, recognizes=lambda row: False, row_kind=PAIRS
    ),
    "label": Format(("label",), _ANSWERED, preferences.read_labeled, recognizes=lambda row: False, row_kind=LABELS),
    "rating": Format(("rating",), _ANSWERED, preferences.read_rating, recognizes=lambda row: False, row_kind=LABELS),
    "messages": Format(("messages",), _BESIDE, partial(chats.read_turns, column="messages")),
    "sharegpt": Format(("conversations",), _BESIDE, partial(chats.read_turns, column="conversations")),
    "dolly": Format(("instruction", "response"), _ASKED, _read_dolly),
    "question_answer": Format(("question", "answer"), _ASKED, read_question, _QUESTION),
    "instances": Format(("instruction", "instances"), ("system",), read_instances),
    "rationale": Format(("question", "rationale", "correct"), ("options",), read_rationale, _QUESTION),
    "moss": Format(("chat",), ("meta_instruction",), chats.read_moss, recognizes=chats.is_moss),
    "tree": Format(("message_tree_id", "prompt"), (), chats.read_tree),
    "prompt_completion": Format(("prompt", "completion"), ("tools", "images"), preferences.read_prompt_completion),
    "guanaco": Format(("text",), (), read_guanaco, recognizes=is_guanaco),
    "text": Format(("text",), (), read_text),
}


# Other names of optional columns.
SYNONYMS = {"input": ("context",), "context": ("input",), "system": ("system_prompt",), "tools": ("functions",)}
SYNONYMS["images"] = ("image",)

# Well-known sets that call a format's columns otherwise: the format, their columns -> its own. They are tried in this
# order where the columns are of no format.
ALIASES: tuple[tuple[str, dict[str, str]], ...] = (
    ("question_answer", {"question": "question", "response": "answer"}),  # OpenOrca
    ("question_answer", {"question": "question", "solution": "answer"}),  # s1K
    ("question_answer", {"question": "question", "answers": "answer"}),  # SQuAD
    ("alpaca", {"query": "instruction", "response": "output"}),  # MetaMath, ms-swift
    ("alpaca", {"query": "instruction", "answer": "output"}),  # CodeFeedback
    ("alpaca", {"problem": "instruction", "solution": "output"}),  # Magicoder
    ("alpaca", {"prompt": "instruction", "response": "output"}),  # HelpSteer
    ("alpaca", {"input": "instruction", "output": "output"}),
    ("alpaca", {"inputs": "instruction", "targets": "output"}),  # FLAN
    ("alpaca", {"source": "instruction", "target": "output"}),
    ("alpaca", {"user": "instruction", "assistant": "output"}),
    ("sharegpt", {"conversation": "conversations"}),  # LMSYS, WildChat, Capybara, ms-swift
    ("messages", {"contents": "messages"}),  # Gemini
    ("preference", {"chosen_messages": "chosen", "rejected_messages": "rejected"}),
    ("preference", {"chosen_response": "chosen", "rejected_response": "rejected"}),  # argilla's UltraFeedback
    ("preference", {"response_j": "chosen", "response_k": "rejected"}),  # StackExchange's
    *(("rating", {name: "rating"}) for name in (*preferences.RATINGS[1:], "completions")),
    ("text", {"response": "text"}),  # ms-swift, for pretraining
)

MEDIA = ("images", "image", "audios", "audio", "videos", "video")
# Columns that change what an answer means. A row in which one is filled and not used would be learned in a wrong sense.
WATCHED = (
    "input", "context", "system", "system_prompt", "history", "query", "tools", "functions", "label", *MEDIA,
)  # fmt: skip
IGNORE = "ignore"  # the name by --columns of a column that is not used on purpose

_MARKUP = re.compile(r"<\|(im_start|start_header_id|user|assistant|start)\|>|<start_of_turn>|\[INST\]")


class Reading(NamedTuple):
    """How the rows of a dataset are read.

    names: the columns that are used -> their names in the format. watched: those that must be empty.
    """

    dataset_format: str
    names: Mapping[str, str]
    watched: Sequence[str]

    def named(self, row: Row) -> Row:
        """The columns that are used, called as in the format. Raises BadRow if a watched one is filled."""
        for column in self.watched:
            if (reason := self._unused_meaning(column, row.get(column))) is not None:
                raise BadRow(reason)
        return {self.names[column]: value for column, value in row.items() if column in self.names}

    def without_images(self) -> "Reading":
        """The same for a model of text alone: rows with images cannot be used."""
        names = {column: name for column, name in self.names.items() if name != "images"}
        return self._replace(names=names, watched=[*self.watched, *(self.names.keys() - names.keys())])

    def _unused_meaning(self, column: str, value: object) -> str | None:
        if value in (None, "", [], {}) or (isinstance(value, str) and not value.strip()):
            return None
        without = f"--columns {IGNORE}={column} trains without it"
        if column == "label" and str(value).lower() == "true":
            return None
        if column == "label" and str(value).lower() == "false":
            return (
                f"its label is false: a bad answer; {without}, --max_bad_rows 1 on good ones, --objective kto on both"
            )
        if column in MEDIA:
            return f"{column}: only text can be trained on; {without}, blind"
        return f"{column} is filled, and the format {self.dataset_format} does not use it; {without}"

    def can_use(self, row: Row) -> bool:
        try:
            FORMATS[self.dataset_format].read(self.named(row))
        except (BadRow, RecursionError):
            return False
        return True


class AskedFormat(NamedTuple):
    """The format of a dataset as the options name it.

    name: a key of FORMATS, or "auto" for the first that fits. renames: of `parse_columns`.
    """

    name: str = "auto"
    renames: Mapping[str, str] = {}

    def find(self, columns: Sequence[str], first_rows: Sequence[Row], origin: str = "") -> Reading:
        """How rows with these columns are read.

        Args:
            first_rows: tell formats apart that have the same columns.
            origin: the dataset's path or name, for the message.
        Raises:
            UserError: the format is unknown, a column to rename is not there, or columns that it needs are missing.
        """
        if self.name != "auto" and self.name not in FORMATS:
            raise UserError(f"dataset_format: unknown format {self.name!r}. Formats: {', '.join(['auto', *FORMATS])}.")
        if missing := [name for name in self.renames if name not in columns]:
            raise UserError(
                f"columns: {origin} has no column {', '.join(map(repr, missing))}. It has: {', '.join(columns)}."
            )
        if (found := self._told(columns, first_rows)) is not None:
            if found.dataset_format == "text" and self.name == "auto":
                names = found.names
                _refuse_other_text([{names.get(key, key): row[key] for key in row} for row in first_rows], origin)
            return found
        lists = [column for column, value in first_rows[0].items() if isinstance(value, list)]
        middle = f"--rating_threshold {preferences.middle_rating(first_rows):g}"
        unasked = f"{origin}: its answers have ratings. Say from which on one is good, such as {middle} --objective"
        if self.name == "auto" and any(self._replace(name="ratings")._fitting(lists)):
            raise UserError(f"{unasked} dpo.")
        if self.name == "label" and any(self._replace(name="rating")._fitting(columns)):
            raise UserError(f"{unasked} kto.")
        wanted, works = FORMATS.get(self.name), partial(reads, first_rows, dataset_format=self.name)
        needed = f" The format {self.name} needs {', '.join(wanted.columns)}." if wanted else ""
        raise UserError(
            f"{origin}: missing columns. It has: {', '.join(columns) or 'none'}.{needed} {advise(first_rows, works)}"
        )

    def _told(self, columns: Sequence[str], rows: Sequence[Row]) -> Reading | None:
        """Find the format, or None if no format fits."""
        for name, names in self._fitting(columns):
            recognizes = FORMATS[name].recognizes if self.name == "auto" else None
            named = ({names[column]: row[column] for column in names.keys() & row} for row in rows)
            if recognizes is None or any(map(recognizes, named)):
                return Reading(name, names, [column for column in self._watched(columns) if column not in names])
        return None

    def _watched(self, columns: Sequence[str]) -> list[str]:
        return [column for column in columns if column in WATCHED and self.renames.get(column) != IGNORE]

    def used(self, columns: Sequence[str]) -> set[str]:
        """The columns that the rows' format may use; all where no format fits, which is said later."""
        used: set[str] = set()
        for name, names in self._fitting(columns):
            used |= names.keys()
            if FORMATS[name].recognizes is None:
                break
        return used | {*self._watched(columns)} - {*MEDIA} if used else set(columns)

    def _fitting(self, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
        """(name, the columns that are used -> their names) of each format that fits. A name of --columns is of that
        column alone.
        """
        renames = self.renames
        given = {name: renames.get(name, name) for name in columns if name in renames or name not in renames.values()}
        shapes: list[tuple[str, dict[str, str]]] = [(name, {}) for name in FORMATS]
        for name, alias in (*shapes, *ALIASES):
            if self.name not in ("auto", name) or not alias.keys() <= set(given.values()):
                continue
            if alias and name == "text" and len(given) > 1:  # an answer, whose question may be called otherwise
                continue
            ours = {column: alias.get(named, named) for column, named in given.items()}
            if wanted := FORMATS[name].renames(ours.values()):
                yield name, {column: wanted[named] for column, named in ours.items() if named in wanted}


def reads(rows: Sequence[Row], columns: Sequence[str], dataset_format: str = "auto") -> bool:
    """Whether most of the rows can be used with these options."""
    asked = AskedFormat(dataset_format, parse_columns(columns))
    found = asked._told(list(dict.fromkeys(itertools.chain(*rows))), rows)
    return found is not None and sum(map(found.can_use, rows)) > len(rows) / 2


def _refuse_other_text(rows: Sequence[Row], origin: str) -> None:
    """Raise UserError where texts are chats, or messages of one, and not documents, some of which show such markup."""
    anyway = "--dataset_format text learns all of it as it is"
    if any("parent_id" in row and "role" in row for row in rows):
        raise UserError(
            f"{origin}: each row is one message of a tree of chats, not a document: questions would be learned, and "
            f"answers without them. Give whole conversations, or the trees; {anyway}."
        )
    marked = [found for row in rows if (found := _MARKUP.search(str(row.get("text"))))]
    if len(marked) > len(rows) / 10:  # fewer may be pages on such markup
        raise UserError(
            f"{origin}: the texts are chats that a template has filled ({marked[0][0]}): questions would be learned "
            f"too, and the end token twice. Give the messages, which the model's template fills; {anyway}."
        )


def parse_columns(columns: Sequence[str]) -> dict[str, str]:
    """("instruction=task",) -> {"task": "instruction"}: the dataset's column -> the format's, or IGNORE."""
    renames: dict[str, str] = {}
    for item in columns:
        ours, equals, theirs = item.partition("=")
        if not (ours and equals and theirs):
            raise UserError(
                f"columns: {item!r} does not say which column is which. Write the format's name first, then the "
                "dataset's: instruction=task."
            )
        if theirs in renames or (ours in renames.values() and ours != IGNORE):
            name = theirs if theirs in renames else ours
            raise UserError(f"columns: {name!r} occurs twice in {' '.join(columns)}. Name each column once.")
        renames[theirs] = ours
    return renames


# --- advice on rows of no known format ---

# What is in the names of columns that ask, and of those that answer.
_ASKS = re.compile(
    r"^(?!.*id$).*(instruct|question|prompt|query|problem|input|task|request|dialog|article|document|message)", re.I
)
_ANSWERS = re.compile(r"answer|response|output|completion|solution|result|summary|highlight|reply|message|bot", re.I)
_LONG = 40  # characters, of an answer whose column is not called so
_DOCUMENT = 200  # characters, of a text among other columns
_SHOWN = 600  # characters, of a row
# What is in a row, as JSON -> what the rows seem to be.
_SEEM = {
    r'"children": \[': "search trees, which do not say what is the answer",
    r'"replies": \[': "trees of messages",
    r'"(functions?|tools)": \[': "questions with tools and without answers, as in a benchmark",
    r'"[^"]*(instruction|question|prompt|query|problem)[^"]*": "': "questions without answers, as in a test set",
    "": "no questions with answers, no chats and no texts",
}


def advise(rows: Sequence[Row], works: Callable[[Sequence[str]], bool]) -> str:
    """Advise on rows of no known format: --columns with which it `works`, or else what they seem to be."""
    if found := next(filter(works, _candidates(rows)), None):
        return f"Say which column is which, such as --columns {shlex.join(found)}"
    row = json.dumps(rows[0], ensure_ascii=False, default=str)
    seems = next(what for pattern, what in _SEEM.items() if re.search(pattern, row, re.I))
    return f"The rows seem to be {seems}. The first: {row[:_SHOWN]}{'...' if len(row) > _SHOWN else ''}"


def _candidates(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The best first."""
    yield from ([f"messages={name}"] for name, value in rows[0].items() if isinstance(value, list))
    columns = {name: [str(row[name]) for row in rows if isinstance(row.get(name), str)] for name in rows[0]}
    lengths = {name: sum(map(len, texts)) / len(rows) for name, texts in columns.items() if any(texts)}
    asked = next(filter(_ASKS.search, lengths), None)
    if asked is not None:
        behind = [name for name in lengths if name != asked and _ANSWERS.search(name)]
        behind += [name for name in [*lengths][[*lengths].index(asked) + 1 :] if lengths[name] >= _LONG]
        yield from ([f"instruction={asked}", f"output={name}"] for name in behind[:1])
    elif lengths:
        text, *others = sorted(lengths, key=lambda name: -lengths[name])
        if len(columns) == 1 or lengths[text] > max([_DOCUMENT, *(5 * lengths[name] for name in others)]):
            yield [f"text={text}"]
