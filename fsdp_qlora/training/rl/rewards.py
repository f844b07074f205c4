"""Reward functions: built-in ones and the user's own, loaded before anything else, called for each generation.

Each is called as TRL calls it: with the prompts, completions, completion_ids and columns of all answers. Built-in ones
read the right answer from the first column of ANSWERS that a row has.
"""

import copy
import logging
import math
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fsdp_qlora.distributed.supervision.clock import begun, within
from fsdp_qlora.utils.errors import RolloutError, UserError

log = logging.getLogger("fsdp_qlora")

Batch = Mapping[str, Sequence[Any]]
"""The arguments of a reward function, a value for each answer: prompts, completions, completion_ids, and columns."""
ANSWERS = ("answer", "solution", "target", "label", "output", "response")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_WORD = re.compile(r"(?P<function>.+?)(=(?P<weight>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?))?", re.IGNORECASE)
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
    numbers = _NUMBER.findall(text.rpartition(_MARK)[2]) or _NUMBER.findall(text)
    return float(re.sub(r"[$,]", "", numbers[-1])) if numbers else None


def regex(pattern: str) -> Callable[..., list[float]]:
    """1 if the whole answer is of a form, such as regex:<think>.*</think>.*, else 0."""
    form = re.compile(pattern, re.DOTALL)
    return lambda completions, **_: [float(bool(form.fullmatch(text_of(said).strip()))) for said in completions]


def length(tokens: str) -> Callable[..., list[float]]:
    """0 up to so many tokens, and then falling to -1 at twice as many (in the manner of Yu et al. 2025, eq. 13)."""
    if (most := int(tokens)) < 1:
        raise ValueError("it is below 1")
    return lambda completion_ids, **_: [max(-1.0, min(0.0, 1 - len(ids) / most)) for ids in completion_ids]


REWARDS: dict[str, Callable[..., Any]] = {"exact_match": exact_match, "number": number}
REWARD_FACTORIES: dict[str, Callable[[str], Callable[..., Any]]] = {"regex": regex, "length": length}
"""Each makes a function from the text after its name and a colon."""


class Reward(NamedTuple):
    """A function that scores answers. name: in metrics. weight: of its values in the sum."""

    name: str
    weight: float
    function: Callable[..., Any]


def load_rewards(words: Sequence[str]) -> list[Reward]:
    """Load the functions of --rewards: FILE.py:function, or a built-in one, each perhaps with =WEIGHT.

    Raises:
        UserError: a file cannot be run, or has no such function; or two functions have one name.
    """
    modules, rewards = dict[Path, ModuleType](), list[Reward]()
    for word in words:
        match = _WORD.fullmatch(word)
        assert match is not None
        place, _, last = match["function"].rpartition(":")
        if place.endswith(".py"):
            path = Path(place).expanduser()
            if path not in modules:
                modules[path] = _run_file(path)
            name, function = last, getattr(modules[path], last, None)
            if not callable(function):
                names = [key for key, value in vars(modules[path]).items() if callable(value) and key[0] != "_"]
                raise UserError(f"--rewards {word}: {path} has no function {last!r}. It has: {', '.join(names)}.")
        else:
            name, function = _builtin(match["function"])
        rewards.append(Reward(name, float(match["weight"] or 1), function))
    names = [reward.name for reward in rewards]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"--rewards: two functions are called {min(twice)}, and so would be their metrics. Rename one.")
    return rewards


def _builtin(text: str) -> tuple[str, Callable[..., Any]]:
    name, colon, argument = text.partition(":")
    if colon and name in REWARD_FACTORIES:
        try:
            return name, REWARD_FACTORIES[name](argument)
        except (ValueError, re.error) as error:
            raise UserError(f"--rewards {text}: {argument} cannot be used: {error}.") from error
    if colon or name not in REWARDS:
        names = ", ".join([*REWARDS, *(f"{made}:..." for made in REWARD_FACTORIES)])
        raise UserError(f"--rewards {text}: there is no such function. Give FILE.py:function, or of {names}.")
    return name, REWARDS[name]


def _run_file(path: Path) -> ModuleType:
    """Import the user's file. Raises UserError if it is missing, or raises something itself."""
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except OSError as error:
        raise UserError(f"--rewards: {error.filename} cannot be read: {error.strerror}.") from error
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = getattr(error, "lineno", None) or [0, *lines][-1]
        raise UserError(f"--rewards: {path}:{line} cannot be run: {type(error).__name__}: {error}") from error
    return module


class Scorer:
    """Calls the reward functions on all answers of a generation.

    Args:
        zero_on_error: count a failing function's values as 0, with a warning, instead of ending the run. seconds: for
            each function and generation.
    """

    def __init__(self, rewards: Sequence[Reward], *, zero_on_error: bool, seconds: float) -> None:
        self.rewards, self._zero_on_error, self._seconds = rewards, zero_on_error, seconds

    def score(self, batch: Batch, rows: Sequence[int]) -> dict[str, list[float | None]]:
        """The values of each function, None where it does not apply. rows: numbers of the prompts' rows, for messages.

        Raises:
            RolloutError: a function fails, takes too long, or gives something else than a number for each answer.
        """
        return {reward.name: self._values(reward, batch, rows) for reward in self.rewards}

    def _values(self, reward: Reward, batch: Batch, rows: Sequence[int]) -> list[float | None]:
        ends, scores = time.monotonic() + self._seconds, list[float | None]()
        try:
            return _call(reward.function, batch, self._seconds)
        except _TooLong:
            failures = {f"it did not return within {self._seconds:g} s (--hang_minutes)": list(rows)}
            scores = [0.0] * len(rows)
        except Exception:  # which row is it?
            failures = {}
            for place, row in enumerate(rows):
                one = {name: values[place : place + 1] for name, values in batch.items()}
                try:
                    scores += _call(reward.function, one, max(0.5, ends - time.monotonic()))
                except Exception as error:
                    failures.setdefault(f"{type(error).__name__}: {error}", []).append(row)
                    scores.append(0.0)
        for reason, numbers in failures.items():
            named = ", ".join(map(str, dict.fromkeys(numbers[:32])))
            message = f"The reward function {reward.name} failed at row {named} of the dataset: {reason}"
            if not self._zero_on_error:
                raise RolloutError(
                    f"{message}. No weight was updated. --on_reward_error zero counts such answers as 0."
                )
            log.warning("%s. %d answers count as 0.", message, len(numbers))
        if not failures:
            log.warning("The reward function %s failed for all answers together, and for none alone.", reward.name)
        return scores


class _TooLong(Exception):
    """A call takes too long; a TimeoutError may be the function's own."""


def _call(function: Callable[..., Any], batch: Batch, seconds: float) -> list[float | None]:
    """The values of a function for a copy of the batch. Raises ValueError if one is not a finite number or None."""
    task = begun(lambda: [*function(**copy.deepcopy(batch))])
    try:
        within(seconds, lambda: wait([task]))
    except TimeoutError as error:
        raise _TooLong(str(error)) from error
    values = task.result()
    if len(values) != (num_answers := len(batch["completions"])):
        raise ValueError(f"it returned {len(values)} values for {num_answers} answers")
    scores = [None if value is None else float(value) for value in values]
    if bad := [score for score in scores if score is not None and not math.isfinite(score)]:
        raise ValueError(f"it returned {bad[0]}")
    return scores
