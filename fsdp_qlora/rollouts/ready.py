"""Ready reward functions for --rewards, which read the right answer from the first column of ANSWERS that a row has.

Each is called as TRL calls a reward function: with the prompts, completions, completion_ids and columns of all answers.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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


def regex(pattern: re.Pattern[str], completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 if the whole answer is of a form, such as regex:<think>.*</think>.*, else 0."""
    return [float(pattern.fullmatch(text_of(completion).strip()) is not None) for completion in completions]


def length(most: int, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """0 up to so many tokens, and then falling to -1 at twice as many (in the manner of Yu et al. 2025, eq. 13)."""
    return [max(-1.0, min(0.0, (most - len(ids)) / most)) for ids in completion_ids]


class Ready(NamedTuple):
    """argument: reads what is behind the function's name and a colon; None if it takes nothing. shown: in messages."""

    function: Callable[..., Any]
    argument: Callable[[str], Any] | None = None
    shown: str = ""


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError("it is below 1")
    return value


READY = {
    "exact_match": Ready(exact_match),
    "number": Ready(number),
    "regex": Ready(regex, lambda text: re.compile(text, re.DOTALL), "PATTERN"),
    "length": Ready(length, _positive, "TOKENS"),
}
