"""Annotations of an option's type: the limit of its value, and marks for its properties."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """A property of an option. is_of_result: commands read the option from the files of a result.

    Such a file may be a stranger's. It says what the run was; which code may run, and what is read,
    written or sent where on this machine, is said by the user alone.
    """

    meaning: str
    is_of_result: bool = False


MAY_DIFFER = Mark("may differ when a run is continued")
"""Options about place, speed, logging and saving. Options without this mark identify a run. The
model and the rows are compared by content and not by name, the batch by its global size.
"""
PER_NODE = Mark("may differ between the nodes of a run")
"""Paths, and how each node was started."""
OF_RESULT = Mark("describes the model or its rows", is_of_result=True)
OF_ADAPTER = Mark("is for train types with an adapter", is_of_result=True)


def of_quantizer(name: str | None) -> Mark:
    """A mark for options that the layers of one quantizer take, under the same name."""
    return Mark(f"is for the quantizer {name}", is_of_result=True)


class Limit(NamedTuple):
    """accepts: whether a value is allowed. allowed: completes the sentence `--option must be`.

    choices: the allowed values, if they are names.
    """

    accepts: Callable[[Any], bool]
    allowed: str
    choices: tuple[str, ...] = ()


def at_least(low: int) -> Limit:
    return Limit(
        lambda value: value is None or isinstance(value, str) or value >= low, f"{low} or more"
    )


def all_or_at_least_1(what: str) -> Limit:
    return Limit(lambda value: value == -1 or value >= 1, f"-1 {what}")


def between(low: int, high: int) -> Limit:
    return Limit(lambda value: low <= value <= high, f"between {low} and {high}")


def one_of_names(names: Iterable[str]) -> Limit:
    choices = tuple(names)
    return Limit(lambda value: value in choices, f"one of {', '.join(choices)}", choices)


# A limit sees the converted value: None where the option may be left out, a text where it may be a
# word such as auto. NaN passes no comparison, so each of these refuses it.
NOT_EMPTY = Limit(bool, "given")
POSITIVE = Limit(lambda value: value is None or 0 < value < math.inf, "a finite number above 0")
PLANNABLE = Limit(lambda value: value is None or 0 < value <= 1e9, "above 0 and at most 1e9")
FINITE = Limit(lambda value: value is None or abs(value) < math.inf, "a finite number")
NOT_NEGATIVE = Limit(
    lambda value: value is None or 0 <= value < math.inf, "a finite number, 0 or more"
)
COUNT_OR_WORD = Limit(
    lambda value: isinstance(value, str) or value >= 0, "0 or more if it is a number"
)
SIZE_OR_WORD = Limit(
    lambda value: isinstance(value, str) or value >= 1, "1 or more if it is a number"
)
SWITCH_OR_COUNT = Limit(
    lambda value: isinstance(value, (str, bool)) or value > 1, "above 1 if it is a number"
)
SHARE = between(0, 1)
# 1 is one step and 1.0 all of them, so the type decides and not the size
SHARE_OR_STEPS = Limit(
    lambda value: value >= 0 if isinstance(value, int) else 0 <= value <= 1,
    "a share from 0.0 to 1.0, or a number of steps",
)
SHARE_BELOW_1 = Limit(lambda value: 0 <= value < 1, "0 or more and below 1")
ONE_OR_TWO = Limit(
    lambda values: len(values) in (1, 2) and all(0 <= value < math.inf for value in values),
    "one or two finite numbers, 0 or more",
)
AT_MOST_TWO = Limit(
    lambda values: not values or ONE_OR_TWO.accepts(values),
    ONE_OR_TWO.allowed,
)
SAMPLES = Limit(
    lambda value: (
        isinstance(value, bool) or re.fullmatch(r"samples(=[1-9]\d*)?", value) is not None
    ),
    "true, false, samples or samples=NUMBER",
)
_SAVE_TIME = re.compile(r"(?P<steps>\d+)|(?P<minutes>\d+(\.\d+)?)m")
SAVE_TIMES = Limit(
    lambda words: all(map(_SAVE_TIME.fullmatch, words)) and len(words) <= 2,
    "minutes such as 15m, steps such as 500, both, or none",
)
REPLACE = ":replace"  # behind a value of --resume


def save_times(save_every: Sequence[str]) -> tuple[int, float]:
    """Read --save_every: optimizer steps and minutes between two checkpoints, 0 for never."""
    steps = 0
    minutes = 0.0
    for word in save_every:
        match = _SAVE_TIME.fullmatch(word)
        if match:
            steps += int(match["steps"] or 0)
            minutes += float(match["minutes"] or 0)
    return steps, minutes
