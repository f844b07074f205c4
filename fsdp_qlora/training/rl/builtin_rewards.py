"""Built-in reward functions for --rewards, which read the right answer from the first column of ANSWERS that a row has.

Each is called as TRL calls a reward function: with the prompts, completions, completion_ids and columns of all answers.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ANSWERS = ("answer", "solution", "target", "label", "output", "response")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_MARK = "####"  # in front of the result in GSM8K's answers


def text_of(completion: Any) -> str:
    """The text of an answer, which is a text or a list of messages."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def _pairs(completions: Sequence[Any], columns: dict[str, Sequence[Any]]) -> Iterator[tuple[str, str | None]]:
    """Each answer with the right one; None where its row has none."""
    names = [name for name in ANSWERS if name in columns]
    for place, completion in enumerate(completions):
        right = next((columns[name][place] for name in names if columns[name][place] is not None), None)
        yield text_of(completion), None if right is None else str(right)


def exact_match(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 for the right answer, without blanks around it, else 0."""
    return [
        None if right is None else float(said.strip() == right.strip()) for said, right in _pairs(completions, columns)
    ]


def number(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 if the last number of the answer is that of the right one, as in GSM8K, where it is behind ####; else 0."""
    pairs = ((_last_number(said), _last_number(right or "")) for said, right in _pairs(completions, columns))
    return [None if right is None else float(said == right) for said, right in pairs]


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text.rpartition(_MARK)[2]) or _NUMBER.findall(text)
    return float(re.sub(r"[$,]", "", found[-1])) if found else None


def regex(pattern: str) -> Callable[..., list[float]]:
    """1 if the whole answer is of a form, such as regex:<think>.*</think>.*, else 0."""
    form = re.compile(pattern, re.DOTALL)
    return lambda completions, **_: [float(bool(form.fullmatch(text_of(each).strip()))) for each in completions]


def length(tokens: str) -> Callable[..., list[float]]:
    """0 up to so many tokens, and then falling to -1 at twice as many (in the manner of Yu et al. 2025, eq. 13)."""
    if (most := int(tokens)) < 1:
        raise ValueError("it is below 1")
    return lambda completion_ids, **_: [max(-1.0, min(0.0, 1 - len(ids) / most)) for ids in completion_ids]


REWARDS: dict[str, Callable[..., Any]] = {"exact_match": exact_match, "number": number}
REWARD_FACTORIES: dict[str, Callable[[str], Callable[..., Any]]] = {"regex": regex, "length": length}
"""Each makes a function from the text after its name and a colon."""
