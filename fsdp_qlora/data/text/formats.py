"""Formats: the meaning of a dataset's rows, recognized by their columns.

A new format is a row of FORMATS.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fsdp_qlora.config.objectives import LABELS, PAIRS, TEXTS, RowKind
from fsdp_qlora.data.columns import COLUMNS, OTHER_NAMES, SYNONYMS
from fsdp_qlora.data.content import (
    BadRow,
    Chat,
    Content,
    Fields,
    PromptContent,
    Rendered,
    Row,
    Segment,
    refuse_media,
    text_of,
    texts_of,
    without_answer,
)
from fsdp_qlora.data.text import chats, preferences
from fsdp_qlora.data.text import templates as prompts
from fsdp_qlora.data.text.logs.atif import is_trajectory, read_trajectory
from fsdp_qlora.data.text.logs.episodes import is_episode, read_episode
from fsdp_qlora.data.text.logs.exchanges import is_exchange, read_exchange
from fsdp_qlora.data.text.logs.responses import is_items, is_response, read_items, read_response

# of timdettmers/openassistant-guanaco
HUMAN = "### Human:"
ASSISTANT = "### Assistant:"


@dataclass(frozen=True)
class Format:
    """How one kind of dataset is recognized and read."""

    columns: tuple[str, ...]
    """Columns that a dataset must have. One that has them all is of this format."""
    optional_columns: tuple[str, ...]
    """Columns that are used where they are present."""
    read: Callable[..., Content]
    """Reads a row's content; the reader of ratings takes --rating_threshold too. Raises BadRow."""
    content: type = Rendered
    """The class of all rows' content, if it is Fields, for a prompt template, or Chat, for a chat
    template.
    """
    asks: tuple[str, ...] = ()
    """The columns that a prompt needs; the others of `columns` hold its answer. None where rows are
    no prompts.
    """
    template: prompts.PromptTemplate = prompts.TEMPLATES["alpaca"]
    """For `Fields`, unless --prompt_template names another."""
    recognizes: Callable[[Row], bool] | None = None
    """Tests the first rows, one of which must pass, where the columns alone do not
    tell the format.
    """
    row_kind: RowKind = TEXTS
    """The kind of rows for objectives."""

    @property
    def may_be_chat(self) -> bool:
        """Whether rows may be for a chat template, whatever --prompt_template is."""
        return self.content is Chat or "tools" in self.optional_columns

    def prompt(self, row: Row) -> tuple[PromptContent, str | None]:
        """Read the prompt of a row, which may lack the answer, and the assistant's turn behind it.

        Raises BadRow.
        """
        # Readers refuse an empty answer, so it gets a text, which `without_answer` takes off again.
        answer = dict.fromkeys(set(self.columns) - set(self.asks), "?")
        content = self.read(dict(row) | answer)
        prompt = without_answer(content)
        if answer or not isinstance(content, Chat):
            return prompt, None
        last = content.messages[-1]
        return prompt, "".join(texts_of(last)) if last["role"] == "assistant" else None

    def renames(self, columns: Collection[str], *, is_answered: bool = True) -> dict[str, str]:
        """The columns that are used: their name -> the format's.

        Upper and lower case count as the same. There are none if a needed column is missing.

        Args:
            is_answered: whether columns of the answer are needed, too.
        """
        needed = self.columns if is_answered else self.asks
        chosen = {
            name: column for name, column in _matches(needed, columns).items() if column is not None
        }
        if not needed or len(chosen) < len(needed):
            return {}
        for name in self.optional_columns:
            others = [column for column in columns if column not in chosen.values()]
            matches = _matches((name, *SYNONYMS.get(name, ())), others)
            # The first of the synonyms that the dataset has.
            found = [column for column in matches.values() if column]
            if found:
                chosen[name] = found[0]
        return {column: name for name, column in chosen.items()}


def _matches(names: Sequence[str], columns: Collection[str]) -> dict[str, str | None]:
    """Wanted column -> the dataset's of that name, or the only one with other case or blanks."""
    matches: dict[str, str | None] = {}
    for name in names:
        close = [column for column in columns if column.strip().lower() == name]
        if name in columns:
            matches[name] = name
        else:
            # Of two, such as Answer and ANSWER, it is unknown which one is meant.
            matches[name] = close[0] if len(close) == 1 else None
    return matches


# --- instructions, for a prompt template ---


def read_fields(row: Row, instruction: str, response: str, context: str = "context") -> Fields:
    """The columns of these names. A context that is absent, null or blank counts as none.

    `history` is LLaMA-Factory's list of pairs.
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
    return fields


def _history(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list):
        value = [value] if value else []
    pairs = []
    for pair_number, pair in enumerate(value, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRow(f"history {pair_number} is not a pair of instruction and response")
        names = (f"history {pair_number} instruction", f"history {pair_number} response")
        named = dict(zip(names, pair, strict=True))
        instruction, response = (text_of(named, name) for name in names)
        pairs.append((instruction, response))
    return tuple(pairs)


def read_question(row: Row) -> Fields:
    """The answer may be the first of several, as in SQuAD's `answers.text`."""
    answer = row.get("answer")
    answers = answer.get("text") if isinstance(answer, Mapping) else answer
    if isinstance(answers, list) and answers:
        row = dict(row) | {"answer": answers[0]}
    return read_fields(row, "question", "answer")


# --- text ---


def read_text(row: Row) -> Rendered:
    return Rendered([Segment(text_of(row, "text"), learned=True)], "document")


def read_guanaco(row: Row) -> Rendered:
    """Read turns after ### Human: and ### Assistant:.

    The assistant's are learned, each from the blank before it.
    """
    text = text_of(row, "text")
    segments: list[Segment] = []
    rest = text
    while ASSISTANT in rest:
        prompt, _, rest = rest.partition(ASSISTANT)
        end = rest.find(HUMAN)
        answer = rest if end < 0 else rest[:end].rstrip()
        segments += [Segment(prompt + ASSISTANT, learned=False), Segment(answer, learned=True)]
        rest = rest[len(answer) :]
    if not segments:
        raise BadRow(f"no {ASSISTANT} in the text")
    if rest.strip():
        segments.append(Segment(rest, learned=False))
    return Rendered(segments, "text")


def is_guanaco(row: Row) -> bool:
    text = row.get("text")
    return isinstance(text, str) and text.lstrip().startswith(HUMAN) and ASSISTANT in text


# --- tokens ---


def read_tokens(row: Row) -> Rendered:
    """Token ids; learned is what `labels` or a mask says, else all of them."""
    ids = _integers(row, "input_ids")
    labels = _integers(row, "labels", required=False)
    # All masks that a row has must agree to learn a token: libraries write several beside each
    # other.
    all_masks = [_integers(row, name, required=False) for name in COLUMNS["mask"]]
    masks = [mask for mask in all_masks if mask is not None]
    if ids is None or any(
        len(other) != len(ids) for other in (labels, *masks) if other is not None
    ):
        raise BadRow("labels or mask have another length than input_ids")
    if labels is not None and any(
        label not in (-100, token) for label, token in zip(labels, ids, strict=True)
    ):
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
        raise BadRow(
            f"empty {column}" if values in (None, []) else f"{column} is not a list of numbers"
        )
    if not all(isinstance(value, int) for value in values):  # bool is one
        raise BadRow(f"{column} is not a list of whole numbers")
    return [int(value) for value in values]


_ASKED = ("context", "system", "history", "images")
_BESIDE = ("tools", "system", "images")
_PROMPTED = (*COLUMNS["prompt"], "system", "tools", "images")
_ANSWERED = ("completion", "messages", *_PROMPTED)
_IN_PROMPT = ("system", "tools", "images")
_IN_RESPONSE = ("instructions", "tools", "images", "status", "error", "previous_response_id")
_QUESTION = prompts.TEMPLATES["question_answer"]
_read_alpaca = partial(read_fields, instruction="instruction", response="output", context="input")
_read_dolly = partial(read_fields, instruction="instruction", response="response")

# With dataset_format auto the first that fits is used, so a format precedes those that need only
# some of its columns. Raise cache.CACHE_VERSION when the order or the text of a format changes:
# cached rows hold the old one.
FORMATS: dict[str, Format] = {
    "alpaca": Format(
        ("instruction", "output"),
        ("input", "system", "history", "images"),
        _read_alpaca,
        Fields,
        ("instruction",),
    ),
    "pretokenized": Format(
        ("input_ids",), ("labels", *COLUMNS["mask"], "attention_mask"), read_tokens
    ),
    "preference": Format(("chosen", "rejected"), _PROMPTED, preferences.read_pair, row_kind=PAIRS),
    "messages_rejected": Format(
        ("messages", "rejected_response"),
        ("chosen_response", *_BESIDE, "rejected_images"),
        preferences.read_beside_messages,
        recognizes=lambda row: bool(row.get("rejected_response")),
        row_kind=PAIRS,
    ),
    "json_pair": Format(
        ("text",),
        ("images",),
        preferences.read_json_pair,
        recognizes=preferences.is_json_pair,
        row_kind=PAIRS,
    ),
    # These are told by the objective and its threshold: a text may have a label or a rating too.
    "ratings": Format(
        ("completions",),
        _PROMPTED,
        preferences.read_ratings,
        recognizes=lambda row: False,
        row_kind=PAIRS,
    ),
    "label": Format(
        ("label",),
        _ANSWERED,
        preferences.read_labeled,
        recognizes=lambda row: False,
        row_kind=LABELS,
    ),
    "rating": Format(
        ("rating",),
        _ANSWERED,
        preferences.read_rating,
        recognizes=lambda row: False,
        row_kind=LABELS,
    ),
    "messages": Format(
        ("messages",), _BESIDE, partial(chats.read_turns, column="messages"), Chat, ("messages",)
    ),
    "sharegpt": Format(
        ("conversations",),
        _BESIDE,
        partial(chats.read_turns, column="conversations"),
        Chat,
        ("conversations",),
    ),
    "dolly": Format(("instruction", "response"), _ASKED, _read_dolly, Fields, ("instruction",)),
    "question_answer": Format(
        ("question", "answer"), _ASKED, read_question, Fields, ("question",), _QUESTION
    ),
    "prompt_completion": Format(
        ("prompt", "completion"), _IN_PROMPT, preferences.read_prompt_completion, asks=("prompt",)
    ),
    "guanaco": Format(("text",), (), read_guanaco, asks=("text",), recognizes=is_guanaco),
    "text": Format(("text",), (), read_text, asks=("text",)),
    # Agents' logs, which are tried behind the other names of the formats above.
    "responses": Format(
        ("input", "output"), _IN_RESPONSE, read_response, Chat, ("input",), recognizes=is_response
    ),
    "items": Format(("items",), _IN_RESPONSE, read_items, Chat, ("items",), recognizes=is_items),
    "request_response": Format(
        ("request", "response"), (), read_exchange, Chat, ("request",), recognizes=is_exchange
    ),
    "atif": Format(
        ("schema_version", "steps"), ("agent",), read_trajectory, Chat, recognizes=is_trajectory
    ),
    "verifiers": Format(("traces",), ("errors", "ok"), read_episode, Chat, recognizes=is_episode),
}


Alias = tuple[str, dict[str, str]]
"""A format, and other names of its columns -> its own."""


def _own_names(dataset_format: str, names: Sequence[str]) -> dict[str, str]:
    return dict(zip(names, FORMATS[dataset_format].columns, strict=True)) if names else {}


TRIED_LAST = {name for name, names in OTHER_NAMES if not names}
"""Formats that are tried among `ALIASES`, not before them."""
ALIASES: tuple[Alias, ...] = tuple((name, _own_names(name, names)) for name, names in OTHER_NAMES)
# The same for prompts, some of which need no answer.
PROMPT_ALIASES: tuple[Alias, ...] = tuple(
    (
        name,
        {column: ours for column, ours in alias.items() if column in COLUMNS["asks alone"]}
        or alias,
    )
    for name, alias in ALIASES
    if FORMATS[name].asks and name != "text"
)
