"""Rows of a prompt and given answers.

They are a chosen and a rejected answer, or one or several with labels or ratings.
"""

import contextlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fsdp_qlora.data.columns import COLUMNS, INSTRUCTIONS, SYNONYMS
from fsdp_qlora.data.content import (
    FOLDER,
    BadRow,
    Chat,
    Fields,
    PreferenceRow,
    Rendered,
    Row,
    Segment,
    num_common,
    refuse_media,
    text_of,
)
from fsdp_qlora.data.text import chats

_JSON_PAIR = ("question", "chosen", "rejected")
OTHER_IMAGES = "images: the teacher's prompt shows others than the student's"
# Two letters, digits or apostrophes of scripts that have blanks between words, or what changes the
# sign before it.
_LETTER = r"[^\W\u0e00-\U0010ffff]|['’]"
_MARKS = r"[\u0300-\u036f\u200d\ufe0f\U0001f3fb-\U0001f3ff]"
_WITHIN_WORD = re.compile(rf"(?:{_LETTER}|{_MARKS})(?:{_LETTER})|.{_MARKS}", re.DOTALL)


def read_prompt_completion(row: Row) -> Chat | Rendered:
    """Text; or messages, in one of the columns or beside a system prompt.

    The completion's are learned.
    """
    values = (row.get("prompt"), row.get("completion"))
    if chats.needs_template(row) or any(isinstance(value, list | Mapping) for value in values):
        return chats.read_prompted(row)
    prompt = Segment(text_of(row, "prompt", required=False), learned=False)
    refuse_media(prompt.text, "prompt")
    return Rendered([prompt, Segment(text_of(row, "completion"), learned=True)], "text")


def read_pair(row: Row) -> PreferenceRow:
    """Two answers: text, messages, or whole conversations or texts that begin with the prompt.

    Raises BadRow.
    """
    name = _prompt_name(row)
    is_text = (
        all(isinstance(row.get(column), str | None) for column in (name, *COLUMNS["sides"]))
        and name not in COLUMNS["turns"]
    )
    if is_text and (name in INSTRUCTIONS or not chats.needs_template(row)):
        prompt: Any = text_of(row, name, required=False)
        sides: list[Any] = [text_of(row, side) for side in COLUMNS["sides"]]
        if not prompt and sides[0] != sides[1]:
            return _continued(*sides)
    else:
        prompt = _asked(row, name)
        sides = [chats.said_by("assistant", row.get(side), side) for side in COLUMNS["sides"]]
    if sides[0] == sides[1]:
        raise BadRow("chosen and rejected are the same")
    # Each side may be the whole conversation, beside the prompt or without it: then what both begin
    # with is the prompt.
    if not prompt or any(_is_prompt(side[0]) for side in sides):
        prompt = sides[0][: num_common(*sides)]
        sides = [side[len(prompt) :] for side in sides]
    if not all(sides):
        raise BadRow(f"empty {'rejected' if sides[0] else 'chosen'}")
    if not prompt or any(_is_prompt(side[0]) for side in sides):
        raise BadRow("chosen and rejected begin with different prompts")
    return PreferenceRow([_answer(row, name, prompt, side) for side in sides])


def read_beside_messages(row: Row) -> PreferenceRow:
    """Read ms-swift's pair: messages, and a text to reject in place of their last answer.

    With a `chosen_response` beside it, that one is the chosen answer. Raises BadRow.
    """
    if row.get("rejected_images"):
        raise BadRow("rejected_images is filled, and both answers of a pair see the same images")
    said = chats.turns(row.get("messages"), "messages")
    chosen: object = row.get("chosen_response")
    if not chosen:
        if not _is_answer(said[-1]):
            raise BadRow("messages end without an answer")
        chosen = [said.pop()]
    pair = {"messages": said, "chosen": chosen, "rejected": row.get("rejected_response")}
    return read_pair(dict(row) | pair)


def read_json_pair(row: Row) -> PreferenceRow:
    """Read RLHF-V's pair: JSON with question, chosen and rejected in a text. Raises BadRow."""
    pair = _pair_in(row)
    if pair is None:
        raise BadRow(f"text is no JSON of {', '.join(_JSON_PAIR)}")
    return read_pair(dict(row) | pair)


def is_json_pair(row: Row) -> bool:
    """Whether a row is of `read_json_pair`."""
    return _pair_in(row) is not None


def _pair_in(row: Row) -> dict[str, Any] | None:
    """The pair in a row's text; None if it is another text."""
    text = row.get("text")
    # A text may be long, and most are documents.
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return None
    with contextlib.suppress(ValueError, RecursionError):
        pair = json.loads(text)
        if isinstance(pair, dict) and pair.keys() >= {*_JSON_PAIR}:
            return {name: pair[name] for name in _JSON_PAIR}
    return None


def read_with_teacher(row: Row, asked: str, read: Callable[[Row], Any]) -> PreferenceRow:
    """A row as the student sees it, and `for_teacher`, with the same images. Raises BadRow."""
    sides = [read(row), read(for_teacher(row, asked))]
    shown = [side.images if isinstance(side, Chat) else () for side in sides]
    if shown[0] != shown[1]:
        raise BadRow(OTHER_IMAGES)
    return PreferenceRow(sides)


def for_teacher(row: Row, asked: str) -> Row:
    """A row with the teacher's prompt and system prompt. Raises BadRow.

    Args:
        asked: the column of the prompt, or of the turns, of whose last question the teacher's takes
            the place.
    """
    prompt, system = (text_of(row, name, required=False) for name in COLUMNS["teacher"])
    if not (prompt or system):
        raise BadRow(f"neither {' nor '.join(COLUMNS['teacher'])} is filled")
    other = dict(row)
    if system:
        other["system"] = system
    if not isinstance(row.get(asked), str) or asked in COLUMNS["turns"]:
        said = chats.turns(row.get(asked), asked)
        roles = [
            chats.ROLES.get(str(turn.get("role") or turn.get("from")).lower()) for turn in said
        ]
        if prompt and "user" in roles:
            last = len(roles) - 1 - roles[::-1].index("user")
            # ShareGPT's turns have their text in value.
            said[last] |= {"value" if "value" in said[last] else "content": prompt}
        # A system prompt among the turns would come before the teacher's, and take its place.
        is_kept = [not (system and role in ("system", "developer")) for role in roles]
        other[asked] = list(itertools.compress(said, is_kept))
    elif prompt:
        other[asked] = prompt
    return other


def chosen_alone(row: Row, names: Mapping[str, str]) -> tuple[list[str], str]:
    """--columns and --dataset_format that may train on a pair's chosen answer alone.

    Args:
        names: as in `Reading`.
    """
    column_of = {ours: column for column, ours in names.items()}
    if "rejected_response" in column_of:
        return [f"ignore={column_of['rejected_response']}"], "messages"
    chosen = column_of["chosen"]
    name = _prompt_name({ours: row.get(column) for ours, column in column_of.items()})
    turns = row[chosen]
    if isinstance(turns, list) and any(map(_is_prompt, turns[:1])):
        return [f"messages={chosen}"], "messages"
    prompt = "prompt"
    answer = "completion"
    dataset_format = "prompt_completion"
    if name in INSTRUCTIONS:
        prompt = "instruction"
        answer = "output"
        dataset_format = "alpaca"
    columns = []
    if column_of.get(name, prompt) != prompt:
        columns.append(f"{prompt}={column_of[name]}")
    columns.append(f"{answer}={chosen}")
    return columns, dataset_format


def read_ratings(row: Row, threshold: float) -> PreferenceRow:
    """The best rated of `completions` and the worst, with the threshold between them.

    Among equals, the first. Raises BadRow.
    """
    answers = chats.turns(row.get("completions"), "completions")
    best = max(answers, key=rating_of)
    worst = min(answers, key=rating_of)
    if rating_of(best) == rating_of(worst):
        raise BadRow("no two answers have different ratings")
    if not rating_of(worst) < threshold <= rating_of(best):
        side = "below" if rating_of(best) < threshold else "at least"
        raise BadRow(f"all answers are rated {side} {threshold:g}")
    pair = {"chosen": best.get("response"), "rejected": worst.get("response")}
    return read_pair(dict(row) | pair)


def read_labeled(row: Row) -> PreferenceRow:
    """A completion of a prompt, or `messages` with an answer at the end; with `label`.

    Raises BadRow.
    """
    # CSV has texts, and a column of numbers with gaps becomes floats in pandas: 1.0.
    labels = {"true": True, "1": True, "false": False, "0": False}
    label = labels.get(str(row.get("label")).lower().removesuffix(".0"))
    if label is None:
        raise BadRow(f"label is {row.get('label')!r}, and can be true or false")
    if row.get("messages") is not None:
        *prompt, answer = chats.turns(row["messages"], "messages")
        if _is_answer(answer) or not row.get("completion"):
            return PreferenceRow([_answer(row, "messages", prompt, [answer])], [label])
    name = _prompt_name(row)
    return PreferenceRow([_answer(row, name, _asked(row, name), row.get("completion"))], [label])


def read_rating(row: Row, threshold: float) -> PreferenceRow:
    """Read a rated answer, or a list of them: the label of one is rating >= threshold.

    Raises BadRow.
    """
    if not isinstance(row["rating"], list):
        return read_labeled(dict(row) | {"label": rating_of(row) >= threshold})
    name = _prompt_name(row)
    answers = chats.turns(row["rating"], "completions")
    contents = [_answer(row, name, _asked(row, name), answer.get("response")) for answer in answers]
    return PreferenceRow(contents, [rating_of(answer) >= threshold for answer in answers])


def rating_of(row: Row) -> float:
    """The number by which an answer is rated. Raises BadRow."""
    values = [row[name] for name in COLUMNS["rating"] if row.get(name) is not None]
    value = values[0] if values else None
    with contextlib.suppress(ValueError):
        rating = float(str(value))
        if math.isfinite(rating):
            return rating
    raise BadRow(f"rating is {value!r}, and can be a number")


def middle_rating(rows: Sequence[Row]) -> float:
    """A threshold for advice, which about half of the answers reach; 7 where none is found."""
    # In JSON, because ratings may be at any depth of a row.
    names = "|".join(COLUMNS["rating"])
    pattern = rf'"(?:{names})": "?(-?\d+\.?\d*)'
    ratings = re.findall(pattern, json.dumps(rows, default=str))
    if not ratings:
        return 7
    return sorted(map(float, ratings))[len(ratings) // 2]


def _answer(row: Row, name: str, prompt: object, answer: object) -> Chat | Rendered | Fields:
    """An answer to the prompt, which is in the column `name`."""
    is_chat = name not in INSTRUCTIONS or not isinstance(answer, str)
    # A prompt template has no place for tools, and a chat none for an input.
    unused = "input" if is_chat else "tools"
    if unused != name and str(row.get(unused) or "").strip() not in ("", "[]"):
        raise BadRow(
            f"{unused} (or {SYNONYMS[unused][0]}) is filled, but not used with {name}; "
            f"--columns ignore={unused} trains without it"
        )
    if is_chat:
        others = {other: row.get(other) for other in ("system", "tools", "images", FOLDER)}
        return read_prompt_completion({"prompt": prompt, "completion": answer} | others)
    instruction = text_of({name: prompt}, name)
    shows = row if row.get("images") else None
    if shows is None:
        refuse_media(instruction, name)
    context, system = (text_of(row, other, required=False) for other in ("input", "system"))
    return Fields(
        instruction,
        text_of({"answer": answer}, "answer"),
        context if name != "input" else "",
        system,
        shows=shows,
    )


def _prompt_name(row: Row) -> str:
    for name in COLUMNS["prompt"]:
        if row.get(name):
            return name
    return "prompt"


def _is_prompt(turn: object) -> bool:
    role = (turn.get("role") or turn.get("from")) if isinstance(turn, Mapping) else None
    return chats.ROLES.get(str(role).lower()) in ("system", "developer", "user")


def _is_answer(turn: Mapping[str, Any]) -> bool:
    return chats.ROLES.get(str(turn.get("role") or turn.get("from")).lower()) == "assistant"


def _asked(row: Row, name: str) -> Any:
    """The prompt in a column: text, or turns."""
    if name not in COLUMNS["turns"]:
        return row.get(name)
    said = chats.turns(row[name], name)
    while said and _is_answer(said[-1]):
        said.pop()
    return said


def _continued(chosen: str, rejected: str) -> PreferenceRow:
    """Two texts that begin with their prompt.

    It ends with the last word that both have; one of them may end there, too.
    """
    num = num_common(chosen, rejected)
    # Back to between two words: answers that begin with the same letters have them all.
    while any(
        _WITHIN_WORD.fullmatch(text[max(num - 1, 0) : num + 1]) for text in (chosen, rejected)
    ):
        num -= 1
    prompt = chosen[:num].rstrip() or chosen[:num]  # an answer begins with its blank
    sides = [text[len(prompt) :] for text in (chosen, rejected)]
    if not prompt:
        raise BadRow("chosen and rejected begin with different prompts")
    if not any(side.strip() for side in sides):
        raise BadRow("chosen and rejected are the same")
    refuse_media(prompt, "chosen")
    begins = Segment(prompt, learned=False)
    return PreferenceRow(
        [Rendered([begins, Segment(side, learned=True, ends=True)], "text") for side in sides]
    )


def join_sides(ids: Sequence[np.ndarray], learned: Sequence[np.ndarray]) -> dict[str, Any]:
    """The ids, the mask and the split of a row of two documents."""
    # Nothing predicts the first token of a document.
    masks = [(mask != 0) & (np.arange(len(mask)) > 0) for mask in learned]
    return {"ids": np.concatenate(ids), "learned": np.concatenate(masks), "split": len(ids[0])}


def with_mismatched_answers(rows: Sequence[Any], context_length: int) -> list[Any]:
    """Pair each answer with a second document: its prompt with an earlier row's answer.

    KTO measures the divergence from the reference on these (Ethayarajh et al. 2024).
    """
    starts = [int(row.learned.argmax()) if row.start is None else row.start for row in rows]
    # A row may have several answers, which are beside each other: as far back as no two of a row
    # are.
    back = max(Counter(row.row_number for row in rows).values(), default=1)
    pairs = []
    for i, row in enumerate(rows):  # the row before the first is the last
        prompt_part = slice(starts[i])
        answer_part = slice(starts[i - back], None)
        before = rows[i - back]
        ids = np.concatenate([row.ids[prompt_part], before.ids[answer_part]])[:context_length]
        learned = np.concatenate([row.learned[prompt_part], before.learned[answer_part]])[
            :context_length
        ]
        pairs.append(row._replace(**join_sides((row.ids, ids), (row.learned, learned))))
    return pairs
