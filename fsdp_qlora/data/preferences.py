"""Preference rows: a prompt, a chosen and a rejected answer, as text, chats or conversations."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fsdp_qlora.data import chats
from fsdp_qlora.data.rows import BadRow, Pair, Rendered, Segment, text_of

SAME, OTHER_PROMPTS = "chosen and rejected are the same", "chosen and rejected begin with different prompts"
IN_PARTS = "an answer of several turns, which the chat template renders differently when others follow"

RATINGS = ("rating", "score", "overall_score")  # what the number of a rated answer may be called
PROMPTS = ("conversations", "prompt", "question", "instruction", "input")  # the first that is filled counts

Row = Mapping[str, object]


def read_pair(row: Row) -> Pair:
    """Two answers: text, messages, or whole conversations or texts whose common beginning is the prompt.

    Raises:
        BadRow: an answer is missing, or they are the same, or answer different prompts.
    """
    name = next((name for name in PROMPTS if row.get(name)), "prompt")
    asked, answers = row.get(name), [row.get("chosen"), row.get("rejected")]
    if name == "instruction" and (more := text_of(row, "input", required=False)):
        asked = f"{asked}\n{more}"
    if not row.get("system") and all(isinstance(text, str | None) for text in (asked, *answers)):
        return _of_texts(text_of({name: asked}, name, required=False), text_of(row, "chosen"), text_of(row, "rejected"))
    sides = [chats.said_by("assistant", row.get(side), side) for side in ("chosen", "rejected")]
    if sides[0] == sides[1]:
        raise BadRow(SAME)
    before = chats.said_by("user", asked, name) if asked else []
    if not before or any(_is_prompt(side[0]) for side in sides):  # the whole conversations, and perhaps the prompt too
        before = sides[0][: _num_common(*sides)]
    if not before:
        raise BadRow(OTHER_PROMPTS)
    if sides[0][: len(before)] == before == sides[1][: len(before)]:
        sides = [side[len(before) :] for side in sides]
    if not all(sides) or any(_is_prompt(side[0]) for side in sides):
        raise BadRow(OTHER_PROMPTS if all(sides) else f"empty {'rejected' if sides[0] else 'chosen'}")
    others = {name: row.get(name) for name in ("tools", "system")}
    return Pair(*(chats.read_prompted({"prompt": before, "completion": side, **others}) for side in sides))


def read_ratings(row: Row, threshold: float) -> Pair:
    """The best rated of `completions` and the worst, of equals the first; the threshold is between. Raises BadRow."""
    answers = chats.turns(row.get("completions"), "completions")
    best, worst = max(answers, key=rating_of), min(answers, key=rating_of)
    if rating_of(best) == rating_of(worst):
        raise BadRow("no two answers have different ratings")
    if not rating_of(worst) < threshold <= rating_of(best):
        raise BadRow(f"all answers are rated {'below' if rating_of(best) < threshold else 'at least'} {threshold:g}")
    return read_pair({**row, "chosen": best.get("response"), "rejected": worst.get("response")})


def rating_of(row: Row) -> float:
    """The number by which an answer is rated. Raises BadRow."""
    found = next((row[name] for name in RATINGS if row.get(name) is not None), None)
    with contextlib.suppress(ValueError):
        if math.isfinite(rating := float(str(found))):
            return rating
    raise BadRow(f"rating is {found!r}, and can be a number")


def _of_texts(prompt: str, chosen: str, rejected: str) -> Pair:
    if chosen == rejected:
        raise BadRow(SAME)
    if not prompt:
        prompt = chosen[: _num_common(chosen, rejected)]
        prompt = prompt.rstrip() or prompt  # an answer begins with its blank, as in a text
        if not prompt:
            raise BadRow(OTHER_PROMPTS)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    asked = Segment(prompt, learned=False)
    answers = ([asked, Segment(answer, learned=True)] for answer in (chosen, rejected))
    return Pair(*(Rendered(segments, is_joint=True) for segments in answers))


def _is_prompt(turn: Mapping[str, Any]) -> bool:
    return chats.ROLES.get(str(turn.get("role") or turn.get("from")).lower()) in ("system", "developer", "user")


def _num_common(a: Sequence[object], b: Sequence[object]) -> int:
    """How many characters or turns are the same at the beginning of both."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def as_row(sides: Sequence[list[Rendered]]) -> list[Rendered]:
    """The answers of a row as they were rendered. Raises BadRow."""
    if any(len(side) != 1 for side in sides):
        raise BadRow(IN_PARTS)
    return [rendered for side in sides for rendered in side]


def join_sides(ids: Sequence[np.ndarray], learned: Sequence[np.ndarray]) -> dict[str, Any]:
    """The ids, the mask and the split of a row of two documents, whose first tokens have nothing to predict them."""
    masks = [mask & (np.arange(len(mask)) > 0) for mask in learned]
    return {"ids": np.concatenate(ids), "learned": np.concatenate(masks), "split": len(ids[0])}


def with_other_answers(
    ids: Sequence[np.ndarray], learned: Sequence[np.ndarray], context_length: int
) -> list[dict[str, Any]]:
    """Each row and its prompt with the answer of the row before it, a second document, as from `join_sides`."""
    starts = [int(mask.argmax()) for mask in learned]
    found = []
    for i, start in enumerate(starts):  # the row before the first is the last
        other = [np.concatenate([of[i][:start], of[i - 1][starts[i - 1] :]])[:context_length] for of in (ids, learned)]
        found.append(join_sides((ids[i], other[0]), (learned[i], other[1])))
    return found
